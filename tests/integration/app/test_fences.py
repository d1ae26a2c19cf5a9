"""What only the holder of the current term may do, and errors that must not end a run."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
from sqlalchemy.exc import DataError, DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.dispatch.queues import QueueBook
from app.lifecycle.moves.assign import Reassignment, reassign
from app.lifecycle.moves.ending import Settled
from app.lifecycle.reads import QueueRow, ensure_queue, read_queues
from app.lifecycle.states import ExecutionStatus
from app.lifecycle.token import new_token
from app.plumbing.database import DatabaseUnavailable
from app.plumbing.http import Reply
from tests.integration.app.rig import (
    claimed,
    door,
    ending,
    insert,
    new_term,
    opened,
    running_job,
    settled,
    value_of,
)
from tests.support.engines import Engine, migrated

READ_ONLY = 1290
TOO_LONG = 1406


async def test_an_old_holder_gives_nothing_back_and_reassigns_nothing(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        run = await running_job(database)
        old = int(await value_of(database, "SELECT term FROM dispatch_term"))
        await new_term(database)
        (given_back,) = await settled(database, ending(run, ExecutionStatus.RETURNED, in_term=old))
        assert given_back.kind is Settled.STALE
        move = Reassignment(run.job_id, run.execution_id, "other#boot", "another", "refused")
        moved = await database.write(
            lambda connection: reassign(connection, database, [move], token=new_token(), term=old)
        )
        assert moved == []
        current = await value_of(
            database, "SELECT execution_id FROM job_info WHERE id = :id", id=run.job_id
        )
        assert current == run.execution_id


async def test_a_new_holder_knows_the_queues_of_the_runs_that_it_sends_again(
    migrated_engine: Engine,
) -> None:
    """It gives what a worker refuses to another one: by the labels that the queue asks for."""
    async with door(migrated_engine) as api:
        loop = api.parts.loop
        await loop._begin({0: await new_term(api.database)})
        # Another holder claims from a queue that was not there before; its wake-up was lost.
        queue_id = await api.database.write(
            lambda connection: ensure_queue(
                connection, api.database, tenant_id=0, job_handler="echo", requirement="gpu=yes"
            )
        )
        term = await new_term(api.database)
        ids = await insert(api.database, queue_id=queue_id)
        (run,) = await claimed(api.database, ids, term=term)
        await loop._begin({0: term})
        assert loop._queues.requirement(run.queue_id) == "gpu=yes"


async def test_what_was_on_its_way_in_an_earlier_term_takes_no_slot_for_ever(
    migrated_engine: Engine,
) -> None:
    """Its answer was lost, and its report came before the term that began anew."""
    async with door(migrated_engine) as api:
        loop = api.parts.loop
        await api.beat("w")
        await loop._begin({0: await new_term(api.database)})
        (worker,) = loop._roster.workers()
        loop._roster.sent(worker.node.worker_id, "e1")
        assert worker.live_active == 1
        await loop._begin({0: await new_term(api.database)})
        assert worker.live_active == 0


@pytest.mark.parametrize(
    ("partition", "seats", "code", "ends"),
    [
        (0, False, "stale_term", True),
        (1, True, "stale_term", True),
        (1, False, "stale_term", False),  # it takes a term of any other partition for a low one
        (0, False, "conflict", False),
    ],
)
async def test_a_worker_that_knows_a_higher_term_ends_a_term(
    sqlite_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    partition: int,
    seats: bool,
    code: str,
    ends: bool,
) -> None:
    async with door(migrated(sqlite_engine)) as api:
        loop = api.parts.loop
        await api.beat("w")
        await loop._refresh()
        (worker,) = loop._roster.workers()
        loop._roster.note_seats(worker.node.worker_id, seats)
        given_up: list[tuple[int, int]] = []

        async def refused(*_: Any, **__: Any) -> Reply:
            return Reply(409, {"code": code})

        monkeypatch.setattr(loop._prober._client, "post", refused)
        monkeypatch.setattr(loop._prober._seats, "give_up", lambda *what: given_up.append(what[:2]))
        await loop._prober._clear(worker.node, partition, 7)
        assert given_up == [(partition, 7)] * ends


@pytest.mark.parametrize(
    ("kind", "code", "raised"),
    [(OperationalError, READ_ONLY, DatabaseUnavailable), (DataError, TOO_LONG, DataError)],
)
async def test_only_an_error_about_the_values_is_taken_for_one(
    migrated_engine: Engine, kind: type[DBAPIError], code: int, raised: type[Exception]
) -> None:
    async def refuse(_connection: AsyncConnection) -> NoReturn:
        raise kind("UPDATE ...", {}, Exception(code, "refused"))

    async with opened(migrated_engine) as database:
        with pytest.raises(raised):
            await database.write(refuse)


async def test_a_queue_whose_wake_up_was_lost_is_found_though_its_id_came_late(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        ids = []
        for handler in ("first", "second"):

            async def create(connection: AsyncConnection, name: str = handler) -> int:
                return await ensure_queue(
                    connection, database, tenant_id=0, job_handler=name, requirement=""
                )

            ids.append(await database.write(create))
        book = QueueBook()
        assert book.read_after(now_seconds=0) == 0
        # The later id was visible first.
        book.load([QueueRow(ids[1], 0, "second", "")])
        after_id = book.read_after(now_seconds=1)
        book.load(
            await database.read(lambda connection: read_queues(connection, after_id=after_id))
        )
        assert book.get(ids[0]).row.job_handler == "first"
        assert book.read_after(now_seconds=61) == 0
