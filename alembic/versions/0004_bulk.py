"""Bulk operations, and the index by which jobs are found by the time they finished."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "bulk_operation",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("operation_id", sa.String(length=36), nullable=False),
        sa.Column("tenant_id", sa.Integer(), nullable=False),
        sa.Column("client_request_id", sa.String(length=128), nullable=True),
        sa.Column("request_digest", sa.String(length=1024), nullable=False),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("filter", sa.Text(), nullable=False, comment="JSON, as the caller sent it"),
        sa.Column("rate", sa.Float(), nullable=False, comment="most changes a second"),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column(
            "until_id", sa.BigInteger(), nullable=False, comment="later jobs are not touched"
        ),
        sa.Column(
            "after_id", sa.BigInteger(), nullable=False, comment="the last job that had its turn"
        ),
        sa.Column(
            "after_finished", sa.BigInteger(), nullable=False, comment="when that had finished"
        ),
        sa.Column(
            "resume_at", sa.BigInteger(), nullable=False, comment="the rate allows no change before"
        ),
        sa.Column("matched", sa.BigInteger(), nullable=False),
        sa.Column("matched_is_minimum", sa.Boolean(), nullable=False),
        sa.Column("changed", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("refused", sa.Text(), nullable=False, comment="JSON: how many by code"),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("error_message", sa.String(length=2000), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "length(client_request_id) <= 128",
            name=op.f("ck_bulk_operation_client_request_id_length"),
        ).ddl_if(dialect="sqlite"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_bulk_operation")),
        sa.UniqueConstraint("operation_id", name=op.f("uq_bulk_operation_operation_id")),
        sa.UniqueConstraint(
            "tenant_id",
            "client_request_id",
            name=op.f("uq_bulk_operation_tenant_id_client_request_id"),
        ),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=True,
    )
    op.create_index("ix_bulk_operation_status_id", "bulk_operation", ["status", "id"])
    op.create_index("ix_bulk_operation_tenant_id_id", "bulk_operation", ["tenant_id", "id"])
    op.create_index(
        "ix_job_info_finished",
        "job_info",
        ["tenant_id", "finished_at", "id"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NOT NULL"),
    )
    # Code of the revisions before works on: it neither reads nor writes what is new.
    op.execute("UPDATE schema_revision SET revision = 4 WHERE id = 1")


def downgrade() -> None:
    raise NotImplementedError("restore a backup: a downgrade would lose jobs")
