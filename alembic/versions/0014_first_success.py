"""The first success of a callback is kept in its own row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    for name, kind, comment in (
        ("success_try", sa.Integer(), "the first success, not in callback_try then"),
        ("success_at", sa.BigInteger(), None),
        ("success_worker_id", sa.String(length=128), None),
        ("success_status_code", sa.Integer(), None),
        ("success_latency_ms", sa.Integer(), None),
        ("success_answer", sa.Text(), "its first 2 KiB"),
    ):
        op.add_column("callback_delivery", sa.Column(name, kind, nullable=True, comment=comment))
    op.execute("UPDATE schema_revision SET revision = 14 WHERE id = 1")
