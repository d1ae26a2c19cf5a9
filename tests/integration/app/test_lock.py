"""The dispatch lock: one holder at a time, passed on when it dies or stops, fenced by a term."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NoReturn

import pytest

from app.dispatch import lock
from app.dispatch.lock import DispatchLock
from app.ground import Ground, lay_ground
from app.plumbing.bus import LOCK
from app.plumbing.database import DatabaseUnavailable
from tests.integration.app.rig import change, claimed, insert, settings_of, value_of
from tests.support.engines import Engine
from tests.support.wait import until_async

LIFE = 1.5


class Holder:
    """A process that competes for the lock, as far as the lock can tell."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.lock = DispatchLock(ground)

    async def start(self) -> None:
        await self.ground.clock.measure()
        self.ground.bus.start()
        self.lock.start()

    async def die(self) -> None:
        """Do nothing any more, and release nothing."""
        await self.lock._loop.stop()

    async def won(self, timeout: float = 45) -> int:
        return await until_async(lambda: self.lock.term, timeout, what="the lock")


@asynccontextmanager
async def competing(
    engine: Engine, count: int, *, life: float = LIFE
) -> AsyncIterator[list[Holder]]:
    """Let some processes compete for the lock."""
    async with AsyncExitStack() as ends:
        holders = []
        for _ in range(count):
            ground = lay_ground(settings_of(engine, lock_seconds=life), internal_token="")
            ends.push_async_callback(ground.close)
            holder = Holder(ground)
            ends.push_async_callback(ground.bus.stop)
            ends.push_async_callback(holder.lock.stop)
            await holder.start()
            holders.append(holder)
        yield holders


async def all_listen(engine: Engine, holders: list[Holder]) -> None:
    """Wait until each of them hears what the others say."""
    channel = f"{engine.redis_prefix}:bus"
    redis = holders[0].ground.lock_redis

    async def enough() -> bool:
        ((_, count),) = await redis.pubsub_numsub(channel)
        return int(count) >= len(holders)

    await until_async(enough, what="all to listen")


def holding(holders: list[Holder]) -> list[Holder]:
    return [one for one in holders if one.lock.term is not None]


async def test_two_never_hold_the_lock_at_once(migrated_engine: Engine) -> None:
    life = 4.0
    async with competing(migrated_engine, 3, life=life) as holders:
        seen = 0
        # One that is not extended has passed on by then: the others try each second.
        end = time.monotonic() + life + 1.5 * lock.TRY_SECONDS
        while time.monotonic() < end:
            assert len(holding(holders)) <= 1
            seen += len(holding(holders))
            await asyncio.sleep(0.002)
        assert seen > 100
        # Nobody else got it while its holder extended it.
        assert await value_of(holders[0].ground.database, "SELECT term FROM dispatch_term") == 1


async def test_a_dead_holders_lock_passes_on_with_a_higher_term_and_not_before_it_ran_out(
    migrated_engine: Engine,
) -> None:
    async with competing(migrated_engine, 2) as holders:
        await until_async(lambda: holding(holders))
        (dead,) = holding(holders)
        (other,) = [one for one in holders if one is not dead]
        term = await dead.won()
        await dead.die()
        while dead.lock.is_valid:
            assert other.lock.term is None
            await asyncio.sleep(0.005)
        assert await other.won() > term
        assert dead.lock.term is None


async def test_a_holder_that_stops_passes_the_lock_on_at_once(
    migrated_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither the next try nor the end of the lock's life comes before the test gives up.
    monkeypatch.setattr(lock, "TRY_SECONDS", 120)
    async with competing(migrated_engine, 2, life=60) as holders:
        await until_async(lambda: holding(holders))
        (first,) = holding(holders)
        (other,) = [one for one in holders if one is not first]
        await all_listen(migrated_engine, holders)
        await first.lock.stop()
        assert await other.won() == 2


async def test_a_release_that_is_heard_before_the_refusal_arrives_is_not_forgotten(
    migrated_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "TRY_SECONDS", 120)
    async with competing(migrated_engine, 2, life=60) as holders:
        await until_async(lambda: holding(holders))
        (first,) = holding(holders)
        (other,) = [one for one in holders if one is not first]
        await all_listen(migrated_engine, holders)
        heard = asyncio.Event()
        other.ground.bus.subscribe(LOCK, lambda _signal: heard.set())
        ask = other.lock._redis.eval
        answers: list[int] = []

        async def late(*given: Any) -> Any:
            answer = await ask(*given)
            answers.append(answer)
            if not answer:
                await first.lock.stop()
                await heard.wait()
            return answer

        monkeypatch.setattr(other.lock._redis, "eval", late)
        other.lock.want(False)
        other.lock.want(True)
        assert await other.won() == 2
        assert answers == [0, 1]


async def test_after_a_flush_the_old_holder_claims_nothing_and_somebody_holds_the_lock(
    migrated_engine: Engine,
) -> None:
    async with competing(migrated_engine, 2) as holders:
        await until_async(lambda: holding(holders))
        old = await holding(holders)[0].won()
        database = holders[0].ground.database
        job_ids = await insert(database, 3)
        migrated_engine.redis.flushall()

        async def raised() -> bool:
            return int(await value_of(database, "SELECT term FROM dispatch_term")) > old

        await until_async(raised)
        assert await claimed(database, job_ids, term=old) == []

        async def claims() -> bool:
            """What is claimed by a term that has run out meanwhile is nothing."""
            terms = [one.lock.term or 0 for one in holders]
            return max(terms) > old and len(
                await claimed(database, job_ids, term=max(terms))
            ) == len(job_ids)

        await until_async(claims, what="a new holder")


async def test_a_holder_that_gives_up_comes_back_with_a_higher_term(
    migrated_engine: Engine,
) -> None:
    async with competing(migrated_engine, 1) as (one,):
        first = await one.won()
        one.lock.give_up("a test says so")
        assert one.lock.term is None
        assert await one.won() > first


async def test_nobody_dispatches_while_the_row_of_terms_is_missing(
    migrated_engine: Engine,
) -> None:
    async with competing(migrated_engine, 1) as (one,):
        await one.won()
        await change(one.ground.database, "DELETE FROM dispatch_term")
        one.lock.give_up("a test says so")
        await asyncio.sleep(0.5)
        assert one.lock.term is None


@pytest.mark.parametrize("skew_ms", [-6000, 6000])
async def test_a_process_whose_clock_is_off_does_not_become_the_holder(
    migrated_engine: Engine, skew_ms: int
) -> None:
    async with competing(migrated_engine, 1) as (one,):
        first = await one.won()
        one.ground.clock.skew_ms = skew_ms
        await until_async(lambda: one.lock.term is None)
        one.ground.clock.skew_ms = 0
        assert await one.won() > first


async def test_a_holder_without_its_database_lets_another_take_over(
    migrated_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_work: object) -> NoReturn:
        raise DatabaseUnavailable("away")

    async with competing(migrated_engine, 2) as holders:
        await until_async(lambda: holding(holders), what="a holder")
        (cut_off,) = holding(holders)
        (other,) = [one for one in holders if one is not cut_off]
        monkeypatch.setattr(cut_off.ground.database, "read", away)
        monkeypatch.setattr(cut_off.ground.database, "write", away)
        await other.won()
        assert cut_off.lock.term is None
