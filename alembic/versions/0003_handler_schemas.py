"""The JSON Schemas that workers publish for the params of their handlers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "handler_schema",
        sa.Column("digest", sa.String(length=64), nullable=False, comment="SHA-256 of the body"),
        sa.Column(
            "body",
            sa.Text()
            .with_variant(mysql.MEDIUMTEXT(), "mariadb")
            .with_variant(mysql.MEDIUMTEXT(), "mysql"),
            nullable=False,
        ),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_handler_schema")),
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
        mysql_engine="InnoDB",
        sqlite_autoincrement=False,
    )
    # Code of revision 1 knows no such table and needs none.
    op.execute("UPDATE schema_revision SET revision = 3, oldest_code = 1 WHERE id = 1")


def downgrade() -> None:
    raise NotImplementedError("restore a backup: a downgrade would lose jobs")
