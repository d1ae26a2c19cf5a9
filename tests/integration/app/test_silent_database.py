"""A database that accepts and says nothing is away, in time; one that stays locked is given up."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from typing import cast

import httpx
import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.pool import QueuePool

from app.main import create_app
from app.plumbing import database as database_module
from app.plumbing.database import Database, DatabaseAway, DatabaseUnavailable
from tests.integration.app.rig import body_of, door, settings_of, value_of
from tests.support.engines import Engine, migrated
from tests.support.wait import until_async

ADD = "UPDATE dispatch_term SET term = term + 1"
SOON = 30.0
"""Far above what is waited for an answer, far below what TCP waits."""


@contextmanager
def frozen(engine: Engine) -> Iterator[None]:
    """Let the engine's MariaDB accept and say nothing."""
    engine.servers.mariadb.freeze()
    try:
        yield
    finally:
        engine.servers.mariadb.thaw()


@pytest.fixture(params=["aiomysql", "asyncmy"])
def driver(request: pytest.FixtureRequest) -> str:
    """Each of the drivers that may be named in a URL."""
    return str(request.param)


@asynccontextmanager
async def impatient(engine: Engine, driver: str) -> AsyncIterator[Database]:
    """Open the engine's database; it is away when it says nothing for a second."""
    url = make_url(engine.database_url).set(drivername=f"mysql+{driver}")
    database = Database(url.render_as_string(hide_password=False), answer_seconds=1)
    try:
        yield database
    finally:
        await database.close()


@asynccontextmanager
async def silent_server() -> AsyncIterator[int]:
    """Listen on a port, and never say a word."""
    over = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def say_nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await over.wait()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        over.set()
        server.close()
        await server.wait_closed()
        for writer in writers:
            writer.transport.abort()
        for writer in writers:
            with suppress(OSError):
                await writer.wait_closed()


async def add(connection: AsyncConnection) -> None:
    await connection.execute(text(ADD))


async def answers(database: Database) -> bool:
    try:
        await database.now()
    except DatabaseUnavailable:
        return False
    return True


async def test_a_server_that_says_nothing_is_away_for_all_and_comes_back(
    mariadb_engine: Engine, driver: str
) -> None:
    migrated(mariadb_engine)
    writing, go_on = asyncio.Event(), asyncio.Event()

    async def stop_half_way(connection: AsyncConnection) -> None:
        await connection.execute(text(ADD))
        writing.set()
        await go_on.wait()

    async with impatient(mariadb_engine, driver) as database:
        await asyncio.gather(*(database.now() for _ in range(4)))
        # Its commit is what gets no answer.
        caught = asyncio.create_task(database.write(stop_half_way))
        await writing.wait()
        with frozen(mariadb_engine):
            go_on.set()
            async with asyncio.timeout(SOON):
                # Of so many some have a connection, others make one, and others wait for theirs.
                found = await asyncio.gather(
                    caught, *(database.now() for _ in range(40)), return_exceptions=True
                )
        assert {type(one) for one in found} == {DatabaseAway}
        await until_async(lambda: answers(database), what="the database to be back")
        pools = [cast(QueuePool, one.pool) for one in (database._writers, database._readers)]
        assert [pool.checkedout() for pool in pools] == [0, 0]
        await database.write(add)
        # Whether the commit without an answer took place was known to nobody.
        assert await value_of(database, "SELECT term FROM dispatch_term") in (1, 2)


async def test_a_statement_that_takes_its_time_is_not_cut(
    mariadb_engine: Engine, driver: str
) -> None:
    """Slow is each answer, not the transaction."""
    migrated(mariadb_engine)

    async def slow(connection: AsyncConnection) -> None:
        for _ in range(4):
            await connection.execute(text("SELECT SLEEP(0.4)"))
        await add(connection)

    async with impatient(mariadb_engine, driver) as database:
        await database.write(slow)
        assert await value_of(database, "SELECT term FROM dispatch_term") == 1


async def test_a_greeting_that_does_not_come_is_waited_for_as_any_answer(driver: str) -> None:
    async with silent_server() as port:
        database = Database(f"mysql+{driver}://u:p@127.0.0.1:{port}/x", answer_seconds=1)
        async with asyncio.timeout(SOON):
            with pytest.raises(DatabaseAway):
                await database.now()
            await database.close()


async def test_the_door_answers_503_and_the_same_request_is_stored_once_afterwards(
    mariadb_engine: Engine,
) -> None:
    async with door(migrated(mariadb_engine), database_seconds=3) as api:
        known = await api.submitted()
        with frozen(mariadb_engine):
            async with asyncio.timeout(SOON):
                refused = await asyncio.gather(
                    api.submit("again"),
                    api.client.get(f"/openapi/jobs/{known}"),
                    api.client.get("/openapi/jobs"),
                    api.submit("another"),
                )
        for answer in refused:
            assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
            assert int(answer.headers["Retry-After"]) >= 1
        await until_async(lambda: answers(api.database), what="the database to be back")
        first, second = [await api.submit("again") for _ in range(2)]
        assert first.status_code in (200, 202)
        assert (second.status_code, second.json()["jobId"]) == (200, first.json()["jobId"])
        stored = "SELECT COUNT(*) FROM job_info WHERE client_request_id = 'again'"
        assert await value_of(api.database, stored) == 1


async def test_the_door_opens_though_the_database_says_nothing_at_the_start(
    sqlite_engine: Engine,
) -> None:
    async with silent_server() as port:
        url = f"mysql+aiomysql://u:p@127.0.0.1:{port}/x"
        app = create_app(settings_of(sqlite_engine, database_url=url))
        transport = httpx.ASGITransport(app=app)
        async with (
            asyncio.timeout(SOON),
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://oncue") as client,
        ):
            assert (await client.get("/healthz")).status_code == 200
            ready = await client.get("/readyz")
            assert ready.status_code == 503
            assert "database" in ready.json()["parts"]["database"]
            refused = await client.post("/openapi/jobs", json=body_of())
            assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
            assert int(refused.headers["Retry-After"]) >= 1


async def test_writers_give_a_locked_file_up_together(
    sqlite_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in its turn would wait as long again."""
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.5)
    monkeypatch.setattr(database_module, "CONFLICT_SECONDS", 1.0)
    migrated(sqlite_engine)
    path = sqlite_engine.database_url.removeprefix("sqlite+aiosqlite:///")
    tries: list[str] = []
    database = Database(sqlite_engine.database_url, retried=tries.append)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        found = await asyncio.gather(
            *(database.write(add) for _ in range(20)), return_exceptions=True
        )
        other.execute("ROLLBACK")
    assert {type(one) for one in found} == {DatabaseUnavailable}
    assert len(tries) < database_module.CONFLICT_TRIES
    await database.write(add)
    assert await value_of(database, "SELECT term FROM dispatch_term") == 1
    await database.close()
