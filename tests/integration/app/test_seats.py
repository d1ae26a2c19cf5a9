"""Partitions: each has one holder, they are shared evenly, and none is left without one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NoReturn

import pytest

from app.dispatch.lock import lock_key
from app.dispatch.seats import Seats, members_key
from app.ground import Ground, lay_ground
from app.lifecycle.term import open_partitions, read_partitions
from app.plumbing.database import DatabaseUnavailable
from tests.integration.app.rig import opened, rows_of, settings_of
from tests.support.engines import Engine, migrated
from tests.support.wait import until_async

LIFE = 1.5
EIGHT = set(range(8))


class Member:
    """A dispatcher, as far as the sharing of partitions can tell."""

    def __init__(self, engine: Engine, partitions: int, *, life: float = LIFE) -> None:
        settings = settings_of(engine, lock_seconds=life, dispatch_partitions=partitions)
        self.ground: Ground = lay_ground(settings, internal_token="")
        self.seats = Seats(self.ground)

    async def start(self) -> None:
        await self.ground.clock.measure()
        self.ground.bus.start()
        self.seats.start()

    async def leave(self) -> None:
        """End as SIGTERM does."""
        await self.seats.stop()
        await self.ground.bus.stop()

    async def die(self) -> None:
        """Do nothing any more, and release nothing."""
        await self.seats._loop.stop()
        for lock in self.seats._locks.values():
            await lock._loop.stop()
        await self.ground.bus.stop()


@asynccontextmanager
async def members(
    engine: Engine, count: int, *, partitions: int = 8
) -> AsyncIterator[list[Member]]:
    """Let some dispatchers share partitions."""
    async with AsyncExitStack() as ends:
        found = []
        for _ in range(count):
            found.append(await joined(ends, engine, partitions))
        yield found


async def joined(
    ends: AsyncExitStack, engine: Engine, partitions: int, *, life: float = LIFE
) -> Member:
    one = Member(engine, partitions, life=life)
    ends.push_async_callback(one.ground.close)
    ends.push_async_callback(one.leave)
    await one.start()
    return one


def shares(of: Sequence[Member]) -> list[int]:
    """How many partitions each has, the most first; asserts that none has two holders."""
    held = Counter(partition for one in of for partition in one.seats.terms)
    assert all(count == 1 for count in held.values()), held
    return sorted((len(one.seats.terms) for one in of), reverse=True)


async def shared(of: Sequence[Member], expected: list[int], timeout: float = 60) -> None:
    await until_async(lambda: shares(of) == expected, timeout, what=f"shares of {expected}")


async def test_partitions_are_shared_evenly_as_dispatchers_come_and_go(
    migrated_engine: Engine,
) -> None:
    async with AsyncExitStack() as ends:
        first = await joined(ends, migrated_engine, 8)
        await shared([first], [8])
        second = await joined(ends, migrated_engine, 8)
        await shared([first, second], [4, 4])
        third = await joined(ends, migrated_engine, 8)
        await shared([first, second, third], [3, 3, 2])
        await second.leave()
        await shared([first, third], [4, 4])
        await third.die()
        await until_async(lambda: set(first.seats.terms) == EIGHT, what="all for the last one")


async def test_shares_differ_by_one_at_most(migrated_engine: Engine) -> None:
    async with members(migrated_engine, 4, partitions=10) as four:
        await shared(four, [3, 3, 2, 2])


async def test_of_more_dispatchers_than_partitions_some_wait_and_take_over(
    sqlite_engine: Engine,
) -> None:
    async with members(migrated(sqlite_engine), 3, partitions=2) as three:
        await shared(three, [1, 1, 0])
        (gone, *_rest) = [one for one in three if one.seats.terms]
        await gone.die()
        left = [one for one in three if one is not gone]
        await shared(left, [1, 1])


async def test_a_new_holder_has_a_higher_term(migrated_engine: Engine) -> None:
    async with members(migrated_engine, 2) as (one, other):
        await shared([one, other], [4, 4])
        before = dict(other.seats.terms)
        await other.leave()
        await until_async(lambda: set(one.seats.terms) == EIGHT, what="all partitions")
        for partition, term in before.items():
            assert one.seats.terms[partition] > term


async def test_with_one_partition_nothing_is_announced(migrated_engine: Engine) -> None:
    async with members(migrated_engine, 2, partitions=1) as two:
        await until_async(lambda: any(one.seats.terms for one in two), what="the lock")
        assert shares(two) == [1, 0]
        redis, prefix = two[0].ground.redis, migrated_engine.redis_prefix
        assert await redis.exists(members_key(prefix)) == 0
        assert await redis.keys(f"{prefix}:dispatch:*") == [lock_key(prefix)]
        assert lock_key(prefix) == f"{prefix}:dispatch:lock:0"
        assert all(one.seats.portion is None for one in two)
        assert not any(one.seats.are_many for one in two)


async def test_partitions_that_were_used_are_held_whatever_the_setting_says(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        await database.write(lambda connection: open_partitions(connection, database, range(8)))
    async with members(migrated_engine, 2, partitions=1) as two:
        await shared(two, [4, 4])
    async with members(migrated_engine, 2, partitions=3) as two:
        await shared(two, [4, 4])
    async with members(migrated_engine, 1, partitions=16) as (one,):
        await shared([one], [16])
        assert await one.ground.database.read(read_partitions) == list(range(16))


async def test_one_that_cannot_reach_the_database_leaves_no_partition_without_a_holder(
    migrated_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with members(migrated_engine, 2) as (one, other):
        await shared([one, other], [4, 4])

        async def refuse(*_: object) -> NoReturn:
            raise DatabaseUnavailable("cut off")

        with monkeypatch.context() as cut:
            cut.setattr(other.ground.database, "read", refuse)
            cut.setattr(other.ground.database, "write", refuse)
            await until_async(lambda: set(one.seats.terms) == EIGHT, what="all partitions")
        await shared([one, other], [4, 4])


async def test_with_one_partition_its_lock_is_taken_again_when_the_database_is_back(
    migrated_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with members(migrated_engine, 1, partitions=1) as (one,):
        await shared([one], [1])

        async def refuse(*_: object) -> NoReturn:
            raise DatabaseUnavailable("cut off")

        with monkeypatch.context() as cut:
            cut.setattr(one.ground.database, "read", refuse)
            cut.setattr(one.ground.database, "write", refuse)
            one.seats._look.set()
            await shared([one], [0])
        await shared([one], [1])


async def test_a_partition_is_not_let_go_of_in_the_middle_of_a_claim(
    migrated_engine: Engine,
) -> None:
    async with AsyncExitStack() as ends:
        one = await joined(ends, migrated_engine, 2, life=30)
        await shared([one], [2])
        async with one.seats.rounds:
            other = await joined(ends, migrated_engine, 2, life=30)
            await until_async(lambda: len(one.seats.terms) == 1, what="no more claims for it")
            (left,) = {0, 1} - set(one.seats.terms)
            assert one.seats.term_of(left) is not None
            assert other.seats.terms == {}
        await shared([one, other], [1, 1])


async def test_two_never_hold_a_partition_at_once_while_dispatchers_come_and_go(
    migrated_engine: Engine,
) -> None:
    async with AsyncExitStack() as ends:
        live = [await joined(ends, migrated_engine, 5) for _ in range(3)]
        over = asyncio.Event()

        async def watch() -> int:
            looks = 0
            while not over.is_set():
                shares(live)
                looks += 1
                await asyncio.sleep(0.002)
            return looks

        watching = asyncio.create_task(watch())
        await shared(live, [2, 2, 1])
        for _ in range(2):
            gone = live.pop(0)
            await gone.leave()
            live.append(await joined(ends, migrated_engine, 5))
            await shared(live, [2, 2, 1])
        over.set()
        assert await watching > 100

        async def as_in_the_rows() -> bool:
            terms = await rows_of(
                live[0].ground.database, "SELECT partition_no, term FROM dispatch_term"
            )
            held = {p: term for one in live for p, term in one.seats.terms.items()}
            return {row["partition_no"]: row["term"] for row in terms} == held

        await until_async(as_in_the_rows, what="the terms to be those of the rows")
