"""Digests of requests with every field, and rates as exact as they were sent."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    # SQLite bounds no text and knows one kind of float.
    if op.get_context().dialect.name != "sqlite":
        op.alter_column(
            "job_info",
            "request_digest",
            type_=sa.String(length=2048),
            existing_type=sa.String(length=1024),
            existing_nullable=True,
        )
        op.alter_column(
            "bulk_operation",
            "rate",
            type_=sa.Double(),
            existing_type=sa.Float(),
            existing_nullable=False,
            existing_comment="most changes a second",
        )
    op.execute("UPDATE schema_revision SET revision = 13 WHERE id = 1")
