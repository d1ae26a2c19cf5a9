"""A quota of stored bytes, and what it is measured by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("tenant_limits", sa.Column("stored_bytes", sa.BigInteger(), nullable=True))
    op.add_column(
        "job_payload",
        sa.Column(
            "byte_count",
            sa.Integer(),
            nullable=True,
            comment="of the body; NULL: by older code, which did not tell",
        ),
    )
    op.create_table(
        "tenant_stored",
        sa.Column("tenant_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("counted_from", sa.BigInteger(), nullable=False, comment="when the count began"),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenant_stored")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
    )
    op.add_column(
        "limit_key",
        sa.Column(
            "begins_at",
            sa.BigInteger(),
            nullable=False,
            server_default="0",
            comment="microseconds: when the begun runs would all have had their time",
        ),
    )
    op.execute("UPDATE schema_revision SET revision = 12 WHERE id = 1")
