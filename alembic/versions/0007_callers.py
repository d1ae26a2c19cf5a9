"""Callers: tenants, keys, the audit log; and by which key a worker beats."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_TABLE = {"mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin", "mysql_engine": "InnoDB"}


def upgrade() -> None:
    op.create_table(
        "tenant",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("token", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("disabled_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenant")),
        sa.UniqueConstraint("name", name=op.f("uq_tenant_name")),
        **_TABLE,
    )
    op.create_table(
        "api_key",
        _key(),
        sa.Column("prefix", sa.String(length=16), nullable=False, comment="shown and searched"),
        sa.Column("kind", sa.String(length=8), nullable=False, comment="caller, worker"),
        sa.Column("tenant_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("roles", sa.String(length=64), nullable=False, comment="a comma list"),
        sa.Column("worker_group", sa.String(length=64), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=False, comment="SHA-256"),
        sa.Column("old_digest", sa.String(length=64), nullable=True),
        sa.Column("old_until", sa.BigInteger(), nullable=True, comment="the old one works so long"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("created_by", sa.String(length=128), nullable=False),
        sa.Column("rotated_at", sa.BigInteger(), nullable=True),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.Column("last_used_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_key")),
        sa.UniqueConstraint("prefix", name=op.f("uq_api_key_prefix")),
        **_TABLE,
        sqlite_autoincrement=True,
    )
    op.create_index("ix_api_key_tenant_id_id", "api_key", ["tenant_id", "id"])
    op.create_index("ix_api_key_kind", "api_key", ["kind"])
    op.create_table(
        "audit_log",
        _key(),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.Integer(), nullable=False, comment="whose thing was changed"),
        sa.Column("actor", sa.String(length=128), nullable=False, comment="the key's name"),
        sa.Column("actor_key_id", sa.BigInteger(), nullable=True),
        sa.Column("actor_tenant_id", sa.Integer(), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=160), nullable=False, comment="kind:id"),
        sa.Column("old_values", sa.Text(), nullable=True, comment="JSON, of what changed"),
        sa.Column("new_values", sa.Text(), nullable=True, comment="JSON, of what changed"),
        sa.Column("address", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
        **_TABLE,
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_log_at_id", "audit_log", ["at", "id"])
    op.create_index("ix_audit_log_tenant_id_at_id", "audit_log", ["tenant_id", "at", "id"])
    op.create_index("ix_audit_log_target_at_id", "audit_log", ["target", "at", "id"])
    op.add_column(
        "worker_node",
        sa.Column(
            "worker_group",
            sa.String(length=64),
            nullable=True,
            comment="of the key by which it beats; NULL: the internal token",
        ),
    )
    op.add_column(
        "worker_node",
        sa.Column(
            "key_digest", sa.String(length=64), nullable=True, comment="of the key it beats with"
        ),
    )
    op.execute(
        "INSERT INTO tenant (id, name, token, created_at, disabled_at) "
        "VALUES (0, 'default', '', 0, NULL)"
    )
    # Code of the revisions before works on, but would not ask for these keys: set ONCUE_API_KEYS
    # until every dispatcher is of this one.
    op.execute("UPDATE schema_revision SET revision = 7 WHERE id = 1")


def _key() -> sa.Column[int]:
    return sa.Column(
        "id",
        sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
        autoincrement=True,
        nullable=False,
    )


def downgrade() -> None:
    raise NotImplementedError("restore a backup: a downgrade would lose keys and the audit log")
