"""Callbacks by host, their tries, and what tenants say of them: secrets, and what may be called."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_TABLE = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def upgrade() -> None:
    for name, kind, comment in (
        ("callback_events", sa.String(length=64), "a comma list; NULL: how it ends"),
        ("callback_headers", sa.Text(), "JSON; secret values are sealed"),
    ):
        op.add_column("job_info", sa.Column(name, kind, nullable=True, comment=comment))
    op.add_column(
        "callback_delivery",
        sa.Column(
            "host", sa.String(length=255), nullable=False, server_default="", comment="host:port"
        ),
    )
    op.add_column(
        "callback_delivery",
        sa.Column("headers", sa.Text(), nullable=True, comment="as the job had them then"),
    )
    op.add_column(
        "callback_delivery",
        sa.Column(
            "owed_since",
            sa.BigInteger(),
            nullable=False,
            server_default="0",
            comment="its end, or when it was last sent again; 0: created_at",
        ),
    )
    op.add_column(
        "worker_node",
        sa.Column(
            "egress_allow", sa.Text(), nullable=True, comment="JSON; NULL: it does not say so"
        ),
    )
    # Code of the revisions before finds what is due by the first column of the new index.
    op.create_index(
        "ix_callback_delivery_host", "callback_delivery", ["status", "host", "next_try_at", "id"]
    )
    op.drop_index("ix_callback_delivery_due", "callback_delivery")
    op.create_table(
        "callback_try",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("delivery_key", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("try_number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tried_at", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.String(length=128), nullable=False),
        sa.Column("delivered", sa.Boolean(), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("latency_ms", sa.Integer(), nullable=False),
        sa.Column("error", sa.String(length=2000), nullable=True),
        sa.Column("answer", sa.Text(), nullable=True, comment="its first 2 KiB"),
        sa.PrimaryKeyConstraint(
            "job_id", "delivery_key", "try_number", name=op.f("pk_callback_try")
        ),
        **_TABLE,
    )
    op.create_table(
        "webhook_secret",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("tenant_id", sa.Integer(), nullable=False),
        sa.Column(
            "sealed", sa.Text(), nullable=False, comment="empty: the one that workers are set to"
        ),
        sa.Column("shown", sa.String(length=128), nullable=False, comment="masked, or public"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True, comment="of one that was rotated"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_secret")),
        **_TABLE,
        sqlite_autoincrement=True,
    )
    op.create_index("ix_webhook_secret_tenant_id", "webhook_secret", ["tenant_id"])
    op.create_table(
        "egress_allow",
        sa.Column("tenant_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("networks", sa.Text(), nullable=False, comment="JSON"),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_egress_allow")),
        **_TABLE,
    )
    op.execute("UPDATE schema_revision SET revision = 8 WHERE id = 1")
