"""Backfills: which past fires are run, and how many of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.backfill import DONE, OPEN, STOPPED, existing_times, go_on, lock_backfill
from app.lifecycle.moves.follow import Claimable
from app.lifecycle.states import JobStatus
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from app.schedules.decide import Row, times_of

MOST_FIRES: Final = 1000
"""Nominal times that one backfill may have."""
MOST_CONCURRENT: Final = 100


def backfill_times(row: Row, *, after_ms: int, until_ms: int) -> Iterator[int]:
    """Yield the nominal times of a schedule after one instant, up to and with the other."""
    times = times_of(dict(row) | {"start_at": None, "end_at": None})
    if times is None:
        raise ValueError("a fixed delay has no nominal times")
    nominal = times.next_after(after_ms)
    while nominal is not None and nominal <= until_ms:
        yield nominal
        nominal = times.next_after(nominal)


def count_times(row: Row, *, after_ms: int, until_ms: int) -> int:
    """Count what `backfill_times` would yield, without walking."""
    times = times_of(dict(row) | {"start_at": None, "end_at": None})
    if times is None:
        raise ValueError("a fixed delay has no nominal times")
    return times.count(after_ms, until_ms)


async def step_backfill(database: Database, backfill_id: int) -> Sequence[Claimable]:
    """Spawn as many fires of a backfill as may go on beside those that do; safe to repeat."""
    token = new_token()

    async def write(connection: AsyncConnection) -> Sequence[Claimable]:
        locked = await lock_backfill(connection, database, backfill_id)
        if locked is None:
            return ()
        backfill, schedule, live = locked
        cursor, now = backfill["cursor_time"], 0 if schedule is None else int(schedule["now_ms"])
        if schedule is None or schedule["status"] == JobStatus.CANCELLED:
            await go_on(
                connection,
                database,
                backfill,
                nominal_times=(),
                cursor_ms=cursor,
                status=STOPPED,
                token=token,
                now_ms=now or int(backfill["created_at"]),
            )
            return ()
        room = backfill["max_concurrent"] - live
        if room <= 0:
            return ()
        times = backfill_times(schedule, after_ms=cursor, until_ms=backfill["to_time"])
        ahead = list(islice(times, MOST_FIRES))
        existing = await existing_times(connection, schedule["id"], ahead)
        open_ones = [nominal for nominal in ahead if nominal not in existing]
        chosen = open_ones[:room]
        is_last = len(open_ones) <= room and len(ahead) < MOST_FIRES
        born = await go_on(
            connection,
            database,
            backfill,
            nominal_times=chosen,
            cursor_ms=backfill["to_time"] if is_last else (chosen or ahead)[-1],
            status=DONE if is_last else OPEN,
            token=token,
            now_ms=now,
        )
        return born.claimable

    return await database.write(write)
