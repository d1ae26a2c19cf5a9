"""Transactions outlive the callers that leave, and connections are closed when all is over."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.plumbing.database import (
    IDLE_CONNECTION_SECONDS,
    IDLE_TRANSACTION_SECONDS,
    LOCK_WAIT_SECONDS,
)
from tests.integration.app.rig import opened, value_of
from tests.support.engines import Engine, migrated


async def test_closing_waits_for_a_write_whose_caller_has_left(migrated_engine: Engine) -> None:
    half_way = asyncio.Event()

    async def slow(connection: AsyncConnection) -> None:
        await connection.execute(text("UPDATE dispatch_term SET term = 7"))
        half_way.set()
        await asyncio.sleep(0.2)

    async with opened(migrated_engine) as database:
        caller = asyncio.create_task(database.write(slow))
        await half_way.wait()
        caller.cancel()
        await asyncio.wait([caller])
    async with opened(migrated_engine) as again:
        assert await value_of(again, "SELECT term FROM dispatch_term") == 7


async def test_a_connection_that_closed_a_moment_before_is_lost_and_the_work_repeated(
    migrated_engine: Engine,
) -> None:
    faults = [
        RuntimeError("Transport does not expose socket instance"),
        RuntimeError(
            "unable to perform operation on <TCPTransport closed=True>; the handler is closed"
        ),
    ]

    async def stumble(connection: AsyncConnection) -> int:
        if faults:
            raise faults.pop()
        return int((await connection.execute(text("SELECT term FROM dispatch_term"))).scalar_one())

    async def fail(_connection: AsyncConnection) -> None:
        raise RuntimeError("a fault of the work itself")

    async with opened(migrated_engine) as database:
        assert await database.write(stumble) == 0
        assert faults == []
        with pytest.raises(RuntimeError, match="of the work itself"):
            await database.write(fail)


AS_ON_MYSQL = (
    f"SET SESSION idle_write_transaction_timeout=0, wait_timeout={IDLE_TRANSACTION_SECONDS}"
)
"""What bounds a connection there: it may not be idle, in a transaction or outside of it."""


@pytest.mark.parametrize("first", ["SELECT 1", AS_ON_MYSQL], ids=["mariadb", "mysql"])
async def test_a_transaction_that_stands_still_lets_go_of_its_locks(
    mariadb_engine: Engine, first: str
) -> None:
    migrated(mariadb_engine)
    async with opened(mariadb_engine) as vanished, opened(mariadb_engine) as other:
        locked, over = asyncio.Event(), asyncio.Event()

        async def stand_still(connection: AsyncConnection) -> None:
            await connection.execute(text(first))
            await connection.execute(text("UPDATE dispatch_term SET term = 7"))
            locked.set()
            await over.wait()

        async def go_on(connection: AsyncConnection) -> None:
            await connection.execute(text("UPDATE dispatch_term SET term = 8"))

        stopped = asyncio.create_task(vanished.write(stand_still))
        await locked.wait()
        async with asyncio.timeout(IDLE_TRANSACTION_SECONDS + 2 * LOCK_WAIT_SECONDS + 20):
            await other.write(go_on)
        assert await value_of(other, "SELECT term FROM dispatch_term") == 8
        over.set()
        await stopped  # it finds its connection gone, and its work is repeated as a whole
        assert await value_of(other, "SELECT term FROM dispatch_term") == 7


@pytest.mark.parametrize(
    "value", ["\\", "\\'", "it''s", "' OR 1=1 -- ", '\\\\"\n\t\r\x1a', "%s %(a)s :a", "\u2028😀"]
)
async def test_text_comes_back_as_it_was_sent(migrated_engine: Engine, value: str) -> None:
    async with opened(migrated_engine) as database:

        async def ask(connection: AsyncConnection) -> str:
            return str((await connection.execute(text("SELECT :v"), {"v": value})).scalar_one())

        assert await database.read(ask) == await database.write(ask) == value


async def test_connections_that_the_server_has_ended_cost_no_transaction(
    mariadb_engine: Engine,
) -> None:
    migrated(mariadb_engine)
    all_here, arrived = asyncio.Event(), 0

    async def add(connection: AsyncConnection) -> None:
        await connection.execute(text("UPDATE dispatch_term SET term = term + 1"))

    async def shorten(connection: AsyncConnection) -> None:
        nonlocal arrived
        arrived += 1
        if arrived >= 8:
            all_here.set()
        await all_here.wait()  # so that each has a connection of its own
        await connection.execute(text("SET SESSION wait_timeout=1"))

    async with opened(mariadb_engine) as database:
        await asyncio.gather(*(database.write(shorten) for _ in range(8)))
        count = (
            "SELECT COUNT(*) FROM information_schema.processlist "
            "WHERE user = SUBSTRING_INDEX(CURRENT_USER(), '@', 1)"
        )
        async with asyncio.timeout(30):
            while await value_of(database, count) > 1:
                await asyncio.sleep(0.1)
        await asyncio.gather(*(database.write(add) for _ in range(8)))
        assert await value_of(database, "SELECT term FROM dispatch_term") == 8


async def test_writers_and_readers_have_the_idle_times_that_they_are_meant_to_have(
    mariadb_engine: Engine,
) -> None:
    async def ask(connection: AsyncConnection) -> tuple[int, ...]:
        asked = (
            "SELECT @@wait_timeout, @@idle_write_transaction_timeout, @@innodb_lock_wait_timeout"
        )
        return tuple((await connection.execute(text(asked))).one())

    meant = (IDLE_CONNECTION_SECONDS, IDLE_TRANSACTION_SECONDS, LOCK_WAIT_SECONDS)
    async with opened(mariadb_engine) as database:
        assert await database.write(ask) == meant
        assert await database.read(ask) == meant
