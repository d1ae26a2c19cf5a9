"""The dispatcher's parts over a real engine, inside the test's own process."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uuid_utils
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.claim import Assignment, Claimed, claim
from app.lifecycle.moves.ending import Ending, Settlement
from app.lifecycle.moves.prune import drop_jobs, find_finished, fit_together
from app.lifecycle.moves.settle import settle
from app.lifecycle.moves.submit import NewJob, insert_jobs
from app.lifecycle.reads import ensure_queue
from app.lifecycle.states import TERMINAL_JOBS, ExecutionStatus
from app.lifecycle.term import begin_term
from app.lifecycle.token import new_token
from app.main import Parts, create_app
from app.plumbing.database import Database
from app.settings import Settings
from oncue.protocol import HEARTBEAT_PATH, Heartbeat, Load, OfferedHandler
from tests.support.engines import Engine

WORKER = "w#boot"
TOKEN = "internal-token"
PATIENT_SECONDS = 120.0
"""A machine that is busy with other tests is no database that says nothing."""


@asynccontextmanager
async def opened(engine: Engine) -> AsyncIterator[Database]:
    """Open the engine's database."""
    database = Database(engine.database_url, answer_seconds=PATIENT_SECONDS)
    try:
        yield database
    finally:
        await database.close()


def settings_of(engine: Engine, **changes: Any) -> Settings:
    """Settings of a dispatcher over this engine, untouched by the environment's own."""
    given: dict[str, Any] = {
        "database_url": engine.database_url,
        "redis_url": engine.redis_url,
        "redis_prefix": engine.redis_prefix,
        "internal_token": TOKEN,
        "no_dispatch": True,
        "database_seconds": PATIENT_SECONDS,
        **changes,
    }
    return Settings(_env_file=None, **given)


@dataclass(frozen=True)
class Door:
    """A dispatcher that serves its API in this process, and a client of it."""

    parts: Parts
    client: httpx.AsyncClient
    app: FastAPI

    @property
    def database(self) -> Database:
        """The dispatcher's own database."""
        return self.parts.ground.database

    async def submit(self, request_id: str = "", **fields: Any) -> httpx.Response:
        """Submit a job; what is not given is some valid value."""
        return await self.client.post("/openapi/jobs", json=body_of(request_id, **fields))

    async def submitted(self, **fields: Any) -> int:
        """Submit a job that must be accepted and return its id."""
        answer = await self.submit(**fields)
        assert answer.status_code == 202, answer.text
        return int(answer.json()["jobId"])

    async def beat(self, name: str = "w", **fields: Any) -> httpx.Response:
        """Send the beat of a worker."""
        beat = beat_of(name, **fields)
        return await self.client.post(
            HEARTBEAT_PATH,
            content=beat.model_dump_json(by_alias=True),
            headers={"Authorization": f"Bearer {TOKEN}"},
        )

    async def report(self, *outcomes: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Send reports as a worker in another language might: JSON with ASCII escapes."""
        content = {
            "workerId": WORKER,
            "load": {"seq": 1, "active": 0},
            "outcomes": outcomes,
            **fields,
        }
        answer = await self.client.post(
            "/internal/reports",
            content=json.dumps(content),
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
        assert answer.status_code == 200, answer.text
        acknowledged: dict[str, Any] = answer.json()
        return acknowledged


@asynccontextmanager
async def door(engine: Engine, **changes: Any) -> AsyncIterator[Door]:
    """Run a dispatcher that does not dispatch in this process."""
    app = create_app(settings_of(engine, **changes))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://oncue", timeout=30) as client,
    ):
        yield Door(app.state.parts, client, app)


def body_of(request_id: str = "", **fields: Any) -> dict[str, Any]:
    """Return the body of a valid submission."""
    return {
        "clientRequestId": request_id or uuid.uuid4().hex,
        "jobName": "a job",
        "jobHandler": "echo",
        **fields,
    }


def beat_of(name: str, *, handlers: Sequence[str] = ("echo",), **fields: Any) -> Heartbeat:
    """Return the beat of a worker `name#boot`."""
    given: dict[str, Any] = {
        "worker_id": f"{name}#boot",
        "name": name,
        "boot_id": "boot",
        "url": "http://127.0.0.1:9",
        "handlers": [OfferedHandler(name=one) for one in handlers],
        "capacity": 10,
        "load": Load(seq=1, active=0),
        **fields,
    }
    return Heartbeat(**given)


async def new_jobs(database: Database, count: int, **fields: Any) -> list[NewJob]:
    """Return jobs that are not inserted yet; a number is put behind their request id."""

    async def queue(connection: AsyncConnection) -> int:
        return await ensure_queue(
            connection,
            database,
            tenant_id=0,
            job_handler=fields.get("job_handler", "echo"),
            requirement="",
        )

    queue_id = await database.write(queue)
    prefix = uuid.uuid4().hex[:8]
    given: dict[str, Any] = {
        "tenant_id": 0,
        "request_digest": "{}",
        "job_name": "a job",
        "job_handler": "echo",
        "queue_id": queue_id,
        "priority": 5,
        "max_retry": 3,
        "retry_interval_ms": 1000,
        "retry_backoff": "fixed",
        **fields,
    }
    return [
        NewJob(
            **{
                "client_request_id": f"{prefix}-{number:05}",
                "submit_token": new_token(),
                **given,
            }
        )
        for number in range(count)
    ]


async def insert(database: Database, count: int = 1, **fields: Any) -> list[int]:
    """Insert tasks that are due now and return their ids."""
    jobs = await new_jobs(database, count, **fields)
    rows = await database.write(lambda connection: insert_jobs(connection, database, jobs))
    return sorted(row.id for row in rows.values())


async def new_term(database: Database) -> int:
    """Begin a term as a new holder of the dispatch lock would."""
    return await database.write(lambda connection: begin_term(connection, database, "test"))


async def assignments_for(
    database: Database, job_ids: Sequence[int], worker_id: str = WORKER
) -> list[Assignment]:
    """Deal tasks as they are now to one worker."""
    versions = await rows_of(database, "SELECT id, version FROM job_info")
    known = {row["id"]: row["version"] for row in versions}
    return [
        Assignment(job_id, known[job_id], worker_id, str(uuid_utils.uuid7())) for job_id in job_ids
    ]


async def claimed(
    database: Database, job_ids: Sequence[int], *, term: int, token: str = ""
) -> list[Claimed]:
    """Claim tasks in one transaction."""
    assignments = await assignments_for(database, job_ids)
    token = token or new_token()
    return await database.write(
        lambda connection: claim(connection, database, assignments, token=token, term=term)
    )


async def running_job(database: Database, **fields: Any) -> Claimed:
    """Insert one task and claim it."""
    term = await new_term(database)
    (run,) = await claimed(database, await insert(database, **fields), term=term)
    return run


def ending(run: Claimed, status: ExecutionStatus, **fields: Any) -> Ending:
    """Say that a run ended, as its worker would report it."""
    given: dict[str, Any] = {
        "execution_id": run.execution_id,
        "job_id": run.job_id,
        "status": status,
        "deliver_by": run.worker_id,
        **fields,
    }
    return Ending(**given)


async def settled(database: Database, *endings: Ending) -> list[Settlement]:
    """Settle endings in one transaction."""
    return await database.write(lambda connection: settle(connection, database, endings))


def outcome_of(run: Claimed, result: Any = None, **fields: Any) -> dict[str, Any]:
    """Return a worker's report of a run, as it goes over the wire."""
    return {
        "executionId": run.execution_id,
        "jobId": run.job_id,
        "triggerTs": run.trigger_ts,
        "status": "succeeded",
        "result": result,
        **fields,
    }


async def rows_of(database: Database, query: str, **values: Any) -> list[dict[str, Any]]:
    """Return all rows of a query."""

    async def ask(connection: AsyncConnection) -> list[dict[str, Any]]:
        found = await connection.execute(text(query), values)
        return [dict(row) for row in found.mappings()]

    return await database.read(ask)


async def value_of(database: Database, query: str, **values: Any) -> Any:
    """Return the one value of a query."""
    ((value,),) = [tuple(row.values()) for row in await rows_of(database, query, **values)]
    return value


async def change(database: Database, statement: str, **values: Any) -> int:
    """Run one statement in its own transaction and return how many rows it met."""

    async def run(connection: AsyncConnection) -> int:
        return (await connection.execute(text(statement), values)).rowcount

    return await database.write(run)


_FILLED = (
    "tenant_id, kind, job_name, job_handler, queue_id, status, priority, next_trigger_time, "
    "max_retry, retry_interval_ms, retry_backoff, created_at, updated_at, finished_at"
)


def numbers(count: int) -> str:
    """Return a subquery of the numbers from 1 on, `n`, up to a million: any database knows it."""
    digits = " UNION ALL ".join(f"SELECT {one} AS d" for one in range(10))
    places = range(len(str(count)))
    sources = ", ".join(f"({digits}) AS p{place}" for place in places)
    n = " + ".join(f"{10**place} * p{place}.d" for place in places)
    return f"(SELECT n FROM (SELECT {n} AS n FROM {sources}) AS s WHERE n BETWEEN 1 AND {count})"


async def fill(
    database: Database,
    count: int,
    *,
    status: int,
    queue_id: int,
    priority: int,
    handler: str = "echo",
) -> None:
    """Insert many jobs by SQL, due in the past, a millisecond apart."""
    await change(
        database,
        f"INSERT INTO job_info ({_FILLED}) SELECT 0, 0, 'filled', '{handler}', {queue_id}, "
        f"{status}, {priority}, 1700000000000 + n, 3, 60000, 'fixed', 1, 1, 1 "
        f"FROM {numbers(count)} AS numbers ORDER BY n",
    )


async def prune_all(
    database: Database, *, before_ms: int, limit: int = 500, tenant_id: int = 0
) -> list[int]:
    """Delete the tenant's jobs that finished before, as retention does; how many at each step."""
    deleted: list[int] = []
    after = (-1, 0)
    while True:
        walked = await database.read(
            lambda connection, after=after: find_finished(  # type: ignore[misc]
                connection,
                database,
                tenant_id=tenant_id,
                after=after,
                before_ms=before_ms,
                limit=limit,
            )
        )
        jobs = [job for job in walked.rows if job.status in TERMINAL_JOBS]
        while jobs:
            fit = await database.read(
                lambda connection, jobs=jobs: fit_together(  # type: ignore[misc]
                    connection, database, jobs
                )
            )
            left = await database.write(
                lambda connection, fit=fit: drop_jobs(connection, database, fit)  # type: ignore[misc]
            )
            deleted.append(len(left))
            jobs = jobs[len(fit) :]
        if walked.onward is None:
            return deleted
        after = walked.onward
