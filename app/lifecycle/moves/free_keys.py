"""The move `unblock`: what waits for a concurrency key may run where there is room now.

A batch of ends costs the same statements whatever the number of its keys; only jobs with a key
come here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

from sqlalchemy import RowMapping, TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, rows_json, update_from_rows
from app.lifecycle.moves.follow import Claimable
from app.lifecycle.moves.limit_keys import (
    CONCURRENCY,
    SLOT_COLUMNS,
    Key,
    drop_keys,
    forget_slots,
    lock_keys,
    read_holders,
)
from app.lifecycle.states import JobKind, JobStatus, in_list, sources

LOOKED_AT: Final = 20
"""So many of each line are read at a time."""
LINES_AT_ONCE: Final = 100
"""So many lines are read by one statement."""
_ID: Final[dict[str, ColumnType]] = {"id": "BIGINT"}
_UNBLOCK: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_info",
        key="id",
        columns=_ID,
        assignments=f"status = {int(JobStatus.WAITING)}, version = j.version + 1",
        guard=f"j.status IN ({in_list(sources('unblock', JobKind.TASK))})",
    )
    for sqlite in (True, False)
}


async def free_keys(connection: AsyncConnection, keys: Iterable[Key]) -> list[Claimable]:
    """Let those that wait for these keys run where there is room now, in their order."""
    wanted = sorted(set(keys))
    if not wanted:
        return []
    await lock_keys(connection, wanted, CONCURRENCY)
    held = await read_holders(connection, wanted)
    await forget_slots(connection, held.gone)
    freed: list[RowMapping] = []
    lines = [key for key in wanted if key in held.waited_for]
    while lines:
        passed: list[RowMapping] = []
        heads = await _read_lines(connection, lines)
        long: list[Key] = []
        for key in lines:
            first = _first_to_pass(heads[key], held.count[key])
            held.count[key] += sum(map(_waits, first))
            passed += first
            if len(first) == LOOKED_AT:
                long.append(key)
        let_go = [row for row in passed if _waits(row)]
        await _unblock(connection, let_go)
        await forget_slots(connection, passed)
        freed += let_go
        lines = long
    await drop_keys(connection, [key for key in wanted if not held.count[key]])
    return [Claimable(row["queue_id"], row["priority"], row["next_trigger_time"]) for row in freed]


def _first_to_pass(line: Sequence[RowMapping], holders: int) -> list[RowMapping]:
    """Return those of a line that need to wait no more: there is room, or they do not wait."""
    found = []
    for row in line:
        if _waits(row):
            if holders >= row["concurrency_limit"]:
                break
            holders += 1
        found.append(row)
    return found


def _waits(row: RowMapping) -> bool:
    return bool(row["status"] == JobStatus.BLOCKED)


async def _unblock(connection: AsyncConnection, jobs: Sequence[RowMapping]) -> None:
    if jobs:
        ids = sorted(row["job_id"] for row in jobs)
        await connection.execute(
            _UNBLOCK[connection.dialect.name == "sqlite"],
            {"rows": rows_json(_ID, [{"id": job_id} for job_id in ids])},
        )


async def _read_lines(
    connection: AsyncConnection, keys: Sequence[Key]
) -> dict[Key, list[RowMapping]]:
    """Read the first ones of the line of each key, in the order of their turns."""
    found: dict[Key, list[RowMapping]] = defaultdict(list)
    for start in range(0, len(keys), LINES_AT_ONCE):
        some = keys[start : start + LINES_AT_ONCE]
        given = {
            f"{name}{number}": value
            for number, key in enumerate(some)
            for name, value in key._asdict().items()
        }
        for row in (await connection.execute(_lines(len(some)), given)).mappings():
            found[Key(row["tenant_id"], row["name"])].append(row)
    for line in found.values():
        line.sort(key=lambda row: (row["turn"], row["due"], row["job_id"]))
    return found


@cache
def _lines(count: int) -> TextClause:
    """Build the read of so many lines, each a range of the primary key from its start."""
    columns = ", ".join(SLOT_COLUMNS)
    arms = (
        f"SELECT * FROM (SELECT {columns} FROM concurrency_slot WHERE tenant_id = :tenant_id{one} "
        f"AND name = :name{one} AND waits = 1 ORDER BY turn, due, job_id LIMIT {LOOKED_AT}) "
        f"AS line{one}"
        for one in range(count)
    )
    return text(
        "SELECT s.tenant_id, s.name, s.waits, s.turn, s.due, s.job_id, j.status, j.queue_id, "
        "j.priority, j.next_trigger_time, j.concurrency_limit "
        f"FROM ({' UNION ALL '.join(arms)}) AS s LEFT JOIN job_info AS j ON j.id = s.job_id"
    )
