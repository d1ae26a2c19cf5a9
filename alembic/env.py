"""Runs the migrations on the connection or dialect that `app.migrate` passes in."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from app.lifecycle.tables import metadata


def run() -> None:
    """Migrate the given connection, or print the SQL for the given dialect."""
    connection: Connection | None = context.config.attributes.get("connection")
    if connection is None:
        context.configure(
            dialect_name=context.config.get_main_option("dialect"),
            target_metadata=metadata,
            literal_binds=True,
        )
        with context.begin_transaction():
            context.run_migrations()
        return
    context.configure(
        connection=connection, target_metadata=metadata, render_as_batch=True, compare_type=True
    )
    with context.begin_transaction():
        context.run_migrations()


run()
