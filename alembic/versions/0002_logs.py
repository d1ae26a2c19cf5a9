"""What runs say: their log lines in chunks, and how far they have come."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("job_log", sa.Column("progress", sa.Double(), nullable=True))
    op.add_column("job_log", sa.Column("progress_text", sa.String(length=200), nullable=True))
    op.add_column("job_log", sa.Column("progress_at", sa.BigInteger(), nullable=True))
    op.create_table(
        "execution_log",
        sa.Column(
            "log_id", sa.BigInteger(), autoincrement=False, nullable=False, comment="job_log.id"
        ),
        sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.Column("head_bytes", sa.Integer(), nullable=False),
        sa.Column("tail_bytes", sa.Integer(), nullable=False),
        sa.Column(
            "tail_first_seq", sa.BigInteger(), nullable=True, comment="NULL until the head is full"
        ),
        sa.Column(
            "dropped_lines", sa.BigInteger(), nullable=False, comment="that slid out of the tail"
        ),
        sa.Column("dropped_bytes", sa.BigInteger(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False, comment="no more lines will come"),
        sa.PrimaryKeyConstraint("log_id", name=op.f("pk_execution_log")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=False,
    )
    op.create_table(
        "log_chunk",
        sa.Column("log_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("first_seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("line_count", sa.Integer(), nullable=False),
        sa.Column("byte_count", sa.Integer(), nullable=False),
        sa.Column(
            "dropped_lines", sa.BigInteger(), nullable=False, comment="that its markers stand for"
        ),
        sa.Column("dropped_bytes", sa.BigInteger(), nullable=False),
        sa.Column(
            "body",
            sa.Text()
            .with_variant(mysql.MEDIUMTEXT(), "mariadb")
            .with_variant(mysql.MEDIUMTEXT(), "mysql"),
            nullable=False,
            comment="JSON: [[seq, time, level, source, ...], ...]",
        ),
        sa.PrimaryKeyConstraint("log_id", "first_seq", name=op.f("pk_log_chunk")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=False,
    )
    op.execute("UPDATE schema_revision SET revision = 2 WHERE id = 1")


def downgrade() -> None:
    raise NotImplementedError("restore a backup: a downgrade would lose logs")
