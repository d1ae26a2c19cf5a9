"""Schedules: what their rows carry, their live children, and backfills."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_TABLE = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def upgrade() -> None:
    for name, kind, comment in (
        ("child_queue_id", sa.BigInteger(), "the queue of what a schedule spawns"),
        ("anchor_at", sa.BigInteger(), "from when a fixed rate is counted"),
        ("misfire_cap", sa.Integer(), None),
        ("misfire_spacing_ms", sa.BigInteger(), None),
        ("skip_from", sa.BigInteger(), "the ledger row that the last fire lies in"),
        ("skip_reason", sa.String(length=32), None),
    ):
        op.add_column("job_info", sa.Column(name, kind, nullable=True, comment=comment))
    op.create_table(
        "schedule_live",
        sa.Column("schedule_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("child_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("waits", sa.SmallInteger(), nullable=False, comment="1 while BLOCKED"),
        sa.Column("backfill_id", sa.BigInteger(), nullable=False, comment="0 for its own fires"),
        sa.PrimaryKeyConstraint("schedule_id", "child_id", name=op.f("pk_schedule_live")),
        **_TABLE,
    )
    op.create_index("ix_schedule_live_waits", "schedule_live", ["waits", "schedule_id"])
    op.create_table(
        "schedule_backfill",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("schedule_id", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.String(length=32), nullable=False),
        sa.Column("status", sa.SmallInteger(), nullable=False, comment="0 open, 1 done, 2 stopped"),
        sa.Column("cursor_time", sa.BigInteger(), nullable=False, comment="done up to here"),
        sa.Column("from_time", sa.BigInteger(), nullable=False),
        sa.Column("to_time", sa.BigInteger(), nullable=False),
        sa.Column("max_concurrent", sa.Integer(), nullable=False),
        sa.Column("spawned", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_schedule_backfill")),
        sa.UniqueConstraint("token", name=op.f("uq_schedule_backfill_token")),
        **_TABLE,
        sqlite_autoincrement=True,
    )
    op.create_index("ix_schedule_backfill_open", "schedule_backfill", ["status", "id"])
    op.create_index("ix_schedule_backfill_of", "schedule_backfill", ["schedule_id", "id"])
    op.execute("UPDATE schema_revision SET revision = 6 WHERE id = 1")
