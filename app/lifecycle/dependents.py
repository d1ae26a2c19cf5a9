"""What belongs to a job and leaves with it: a new table of such rows is one line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import CursorResult, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.plumbing.database import Database

KEYS_AT_ONCE: Final = 1000
JOBS: Final = "job_info"
Keys = Sequence[int] | Sequence[str]


class Dependent(NamedTuple):
    """A table whose rows name, in `column`, the `key` of a row of `owner`, by an index of it."""

    table: str
    column: str
    by: str
    owner: str = JOBS
    key: str = "id"


DEPENDENTS: Final = (
    Dependent("job_log", "job_id", "ix_job_log_job_id_id"),
    Dependent("execution_log", "log_id", "PRIMARY", owner="job_log"),
    Dependent("log_chunk", "log_id", "PRIMARY", owner="job_log"),
    Dependent("job_payload", "job_id", "PRIMARY"),
    Dependent("job_label", "job_id", "PRIMARY"),
    Dependent("callback_delivery", "job_id", "ix_callback_delivery_job_id"),
    Dependent("callback_try", "job_id", "PRIMARY"),
    Dependent("schedule_skip", "schedule_id", "uq_schedule_skip_schedule_id_from_time"),
    Dependent("schedule_live", "schedule_id", "PRIMARY"),
    Dependent("schedule_backfill", "schedule_id", "ix_schedule_backfill_of"),
)
"""Each after its owner."""
_OF_SCHEDULES: Final = frozenset({"schedule_skip", "schedule_live", "schedule_backfill"})
"""Of these no other job has rows: they are not looked for."""


def forced(index: str, *, sqlite: bool) -> str:
    """Write that an index is to be used: MySQL takes another now and then, and locks by it."""
    if sqlite:
        # There keys have no name; SQLite is told where it might take another index.
        return f"INDEXED BY {index}" if index.startswith("ix_") else ""
    return f"FORCE INDEX ({index})"


def select_of(one: Dependent, columns: str, *, sqlite: bool) -> str:
    """Write the statement that reads what belongs to `:keys`."""
    hint = forced(one.by, sqlite=sqlite)
    return f"SELECT {columns} FROM {one.table} {hint} WHERE {one.column} IN :keys"


def delete_of(one: Dependent, *, sqlite: bool) -> str:
    """Write the statement that deletes what belongs to `:keys`."""
    if sqlite:
        return f"DELETE FROM {one.table} WHERE {one.column} IN :keys"
    # MySQL takes a hint only in the form for several tables.
    hint = forced(one.by, sqlite=False)
    return f"DELETE d FROM {one.table} AS d {hint} WHERE d.{one.column} IN :keys"


def tables_of(*, schedules: bool) -> list[Dependent]:
    """Return what has rows of jobs, each after its owner; those of schedules only if asked for."""
    return [one for one in DEPENDENTS if schedules or one.table not in _OF_SCHEDULES]


async def keys_of(
    connection: AsyncConnection, database: Database, job_ids: Sequence[int], *, schedules: bool
) -> dict[str, Keys]:
    """Return, by table, by which keys its rows of these jobs are found, in order."""
    tables = tables_of(schedules=schedules)
    by_name = {one.table: one for one in tables}
    owned: dict[tuple[str, str], Keys] = {(JOBS, "id"): sorted(job_ids)}
    found: dict[str, Keys] = {}
    for one in tables:
        if (one.owner, one.key) not in owned:
            statement = select_of(by_name[one.owner], one.key, sqlite=database.is_sqlite)
            rows = await in_chunks(connection, statement, found[one.owner])
            owned[one.owner, one.key] = sorted(row[one.key] for row in rows)
        found[one.table] = owned[one.owner, one.key]
    return found


async def delete_dependents(
    connection: AsyncConnection, database: Database, job_ids: Sequence[int], *, schedules: bool
) -> None:
    """Delete all that belongs to these jobs, each before its owner."""
    keys = await keys_of(connection, database, job_ids, schedules=schedules)
    for one in reversed(tables_of(schedules=schedules)):
        statement = delete_of(one, sqlite=database.is_sqlite)
        for chunk in _chunks(keys[one.table]):
            await with_keys(connection, statement, chunk)


async def in_chunks(
    connection: AsyncConnection, statement: str, keys: Keys
) -> list[dict[str, Any]]:
    """Return all rows for `:keys`, so many keys a statement."""
    rows: list[dict[str, Any]] = []
    for chunk in _chunks(keys):
        found = await with_keys(connection, statement, chunk)
        rows += [dict(row) for row in found.mappings()]
    return rows


async def with_keys(
    connection: AsyncConnection, statement: str, keys: Sequence[Any]
) -> CursorResult[Any]:
    """Run a statement with these in place of `:keys`."""
    if isinstance(keys[0], int):
        # Numbers as text: to bind hundreds one by one costs more than the statement.
        numbers = ", ".join(str(int(key)) for key in keys)
        return await connection.exec_driver_sql(statement.replace(":keys", f"({numbers})"))
    bound = text(statement).bindparams(bindparam("keys", expanding=True))
    return await connection.execute(bound, {"keys": list(keys)})


def _chunks(keys: Keys) -> list[list[Any]]:
    return [list(keys[start : start + KEYS_AT_ONCE]) for start in range(0, len(keys), KEYS_AT_ONCE)]
