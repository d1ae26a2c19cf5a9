"""Limits of tenants, and of keys that callers choose."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_TABLE = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def upgrade() -> None:
    for column in (
        sa.Column("concurrency_key", sa.String(length=128), nullable=True),
        sa.Column("concurrency_limit", sa.Integer(), nullable=True),
        sa.Column("rate_key", sa.String(length=128), nullable=True),
        sa.Column("rate_per_second", sa.Double(), nullable=True),
        sa.Column(
            "rate_due", sa.BigInteger(), nullable=True, comment="the time that its rate key gave it"
        ),
    ):
        op.add_column("job_info", column)
    op.create_table(
        "tenant_limits",
        sa.Column("tenant_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("weight", sa.Double(), nullable=False, server_default="1"),
        sa.Column("submissions_per_second", sa.Double(), nullable=True),
        sa.Column("waiting_jobs", sa.Integer(), nullable=True),
        sa.Column("running_jobs", sa.Integer(), nullable=True),
        sa.Column(
            "may_borrow",
            sa.Boolean(),
            nullable=False,
            server_default="1",
            comment="more runs than running_jobs, while nobody else wants the slots",
        ),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenant_limits")),
        **_TABLE,
    )
    op.create_table(
        "limit_key",
        sa.Column("tenant_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("next_at", sa.BigInteger(), nullable=False, comment="microseconds, of a rate"),
        sa.PrimaryKeyConstraint("tenant_id", "kind", "name", name=op.f("pk_limit_key")),
        **_TABLE,
    )
    op.create_table(
        "concurrency_slot",
        sa.Column("tenant_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("waits", sa.SmallInteger(), nullable=False, comment="1 while BLOCKED"),
        sa.Column("turn", sa.SmallInteger(), nullable=False, comment="9 less the priority"),
        sa.Column("due", sa.BigInteger(), nullable=False),
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant_id", "name", "waits", "turn", "due", "job_id", name=op.f("pk_concurrency_slot")
        ),
        **_TABLE,
    )
    op.execute("UPDATE schema_revision SET revision = 9 WHERE id = 1")
