"""How long each tenant keeps its finished jobs, and the index by which its queues are found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "retention_policy",
        sa.Column("tenant_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("status", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("keep_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "status", name=op.f("pk_retention_policy")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
    )
    op.create_index("ix_queue_tenant_id_id", "queue", ["tenant_id", "id"])
    # Code of the revisions before works on: it keeps all jobs for as long as its settings say.
    op.execute("UPDATE schema_revision SET revision = 10 WHERE id = 1")


def downgrade() -> None:
    raise NotImplementedError("restore a backup: a downgrade would lose jobs")
