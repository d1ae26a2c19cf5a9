"""Queue deadlines: jobs that fail unless they have begun by then."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column(
        "job_info",
        sa.Column(
            "expires_at",
            sa.BigInteger(),
            nullable=True,
            comment="fails unless an attempt has begun by then",
        ),
    )
    op.create_table(
        "job_expiry",
        sa.Column("look_at", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("look_at", "job_id", name=op.f("pk_job_expiry")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
    )
    op.execute("UPDATE schema_revision SET revision = 5 WHERE id = 1")
