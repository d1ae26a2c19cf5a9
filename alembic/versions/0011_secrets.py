"""What of a job is secret: its params, its result."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column(
        "job_info",
        sa.Column(
            "secret",
            sa.SmallInteger(),
            nullable=False,
            server_default="0",
            comment="1 params, 2 result",
        ),
    )
    op.execute("UPDATE schema_revision SET revision = 11 WHERE id = 1")
