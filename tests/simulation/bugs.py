"""Bugs planted into the product, one named function each, to prove that they would be found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

import app.fleet.settler
import app.lifecycle.moves.owe
import app.lifecycle.moves.settle
from app.lifecycle.moves.ending import Ending, Settlement
from app.plumbing.database import Database
from worker.held import Execution
from worker.liveness import Liveness
from worker.store import OutcomeStore

_CURRENT: Final = text(
    "SELECT id, execution_id FROM job_info WHERE id IN :ids AND execution_id IS NOT NULL"
).bindparams(bindparam("ids", expanding=True))


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Have the bug of that name within the block, or none."""
    if name is None:
        yield
        return
    place, function, bug = BUGS[name]
    with mock.patch.object(place, function, bug):
        yield


_settle = app.lifecycle.moves.settle.settle


async def _settle_unfenced(
    connection: AsyncConnection, database: Database, endings: Sequence[Ending], *rest: Any
) -> list[Settlement]:
    """Take every report for one of the job's current execution, whoever sends it."""
    found = await connection.execute(_CURRENT, {"ids": sorted({one.job_id for one in endings})})
    current = {row.id: row.execution_id for row in found}
    return await _settle(
        connection,
        database,
        [
            replace(one, execution_id=current.get(one.job_id, one.execution_id), in_term=None)
            for one in endings
        ],
        *rest,
    )


def _never_stop(_liveness: Liveness) -> bool:
    """Go on with all runs, however long nobody has been heard."""
    return False


async def _report_first(store: OutcomeStore, executions: list[Execution]) -> None:
    """Store an outcome only once it is acknowledged: the report goes out before."""
    acknowledged = [one for one in executions if one.acknowledged]
    if acknowledged:
        await _store(store, acknowledged)


_store = OutcomeStore._store


async def _insert_later(connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
    """Write the callbacks that are owed a moment after the end, in another transaction."""
    if rows:
        _ = asyncio.get_running_loop().create_task(_insert_alone(connection, list(rows)))


async def _insert_alone(connection: AsyncConnection, rows: list[dict[str, Any]]) -> None:
    engine = connection.engine
    await asyncio.sleep(0.01)
    async with engine.begin() as other:
        await _insert(other, rows)


_insert = app.lifecycle.moves.owe.insert_callbacks

BUGS: Final[dict[str, tuple[Any, str, Callable[..., Any]]]] = {
    "reports are not fenced": (app.fleet.settler, "settle", _settle_unfenced),
    "a worker cut off goes on": (Liveness, "must_stop", _never_stop),
    "reported before it is stored": (OutcomeStore, "_store", _report_first),
    "the callback outside the end's transaction": (
        app.lifecycle.moves.settle,
        "insert_callbacks",
        _insert_later,
    ),
}
