"""An upgrade from the last release, one process at a time and under load: nobody notices."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymysql
import pytest

from oncue import Client
from tests.faults.handlers import read_notes
from tests.faults.signs import metric
from tests.support.engines import ENGINE_NAMES, Engine, EngineName
from tests.support.processes import NewPlatform, Platform
from tests.support.receiver import Receiver
from tests.support.release import Release, ReleasedServers, run_migrate
from tests.support.wait import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
CALLERS = 4
HANDLERS = "tests.faults.handlers"
STEP_JOBS = 30


@dataclass
class Load:
    """Callers who submit by the client, each to one dispatcher, until told to end."""

    urls: list[str]
    callback_url: str
    accepted: list[int] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin."""
        self.threads = [
            threading.Thread(target=self._call, args=(number,)) for number in range(CALLERS)
        ]
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        """Submit no more."""
        self.over.set()
        for thread in self.threads:
            thread.join()

    def _call(self, number: int) -> None:
        dice = random.Random(number)
        with Client(self.urls[number % len(self.urls)]) as client:
            while not self.over.wait(dice.uniform(0, 0.2)):
                try:
                    job = client.submit(
                        dice.choice(("fault_async", "fault_thread", "fault_process")),
                        {"ms": dice.choice((0, 50, 1_000))},
                        max_retry=0,
                        callback_url=self.callback_url,
                    )
                except Exception as error:  # noqa: BLE001 (any is a failure, told at the end)
                    self.errors.append(error)
                else:
                    self.accepted.append(job.job_id)


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return Release(tmp_path)


@pytest.fixture(params=ENGINE_NAMES)
def released_engine(request: pytest.FixtureRequest, release: Release) -> Iterator[Engine]:
    """An engine that `new_platform` gives the release's schema."""
    servers = ReleasedServers(release)
    try:
        name: EngineName = request.param
        yield servers.engine(name)
    finally:
        servers.remove()


def test_an_upgrade_process_by_process_loses_and_doubles_nothing(
    released_engine: Engine, release: Release, new_platform: NewPlatform, receiver: Receiver
) -> None:
    print(f"from the last release, {release.commit}, over {released_engine.name}")
    platform = new_platform(
        released_engine, dispatchers=2, environment={"ONCUE_GRACE_SECONDS": "10"}
    )
    old = release.environment
    for number in (1, 2):
        platform.dispatcher(number, environment=old)
    for name in ("worker-1", "worker-2"):
        platform.worker(name, handlers=HANDLERS, environment=old)
    platform.wait_for_workers(2)
    load = Load(platform.dispatcher_urls, receiver.url())
    load.start()
    try:
        goes_on(load, platform, "the release alone")
        run_migrate(released_engine)
        goes_on(load, platform, "the release on the new schema")
        platform.worker("worker-3", handlers=HANDLERS)
        platform.wait_for_workers(3)
        goes_on(load, platform, "a new worker beside it", by="worker-3")
        for number in (1, 2):
            assert platform.services[f"dispatcher-{number}"].terminate() == 0
            platform.dispatcher(number)
            goes_on(load, platform, f"dispatcher-{number} is new", by="worker-1")
        assert any(metric(url, "oncue_dispatch_lock_held") for url in platform.dispatcher_urls)
        for name in ("worker-1", "worker-2"):
            assert platform.services[name].terminate() == 0
            platform.worker(name, handlers=HANDLERS)
            goes_on(load, platform, f"{name} is new", by=name)
    finally:
        load.end()
    assert load.errors == []
    until(
        lambda: not counts(released_engine, "job_info WHERE status <> 2"), 60, what="all to succeed"
    )
    until(lambda: not counts(released_engine, "callback_delivery WHERE status = 0"), 60)
    starts = Counter(
        note.job_id for note in read_notes(platform.record_file)[0] if note.event == "start"
    )
    assert starts == dict.fromkeys(load.accepted, 1)
    assert counts(released_engine, "job_info WHERE attempt <> 1") == 0
    told = Counter(
        one.verified(platform.webhook_secret)["data"]["jobId"] for one in received(receiver)
    )
    assert told.keys() == starts.keys()
    print(f"{len(starts)} jobs, each run once; {sum(told.values()) - len(told)} callbacks twice")


def goes_on(load: Load, platform: Platform, step: str, *, by: str = "") -> None:
    """Wait until jobs that were accepted from now on have ended, one of them by this worker."""
    before = len(load.accepted)
    until(lambda: len(load.accepted) >= before + STEP_JOBS, 60, what=f"submissions: {step}")

    def ended() -> bool:
        notes = read_notes(platform.record_file)[0]
        by_worker = {one.job_id: one.worker for one in notes if one.event == "returned"}
        since = load.accepted[before:]
        workers = {by_worker.get(job_id) for job_id in since}
        return by_worker.keys() >= set(since[:STEP_JOBS]) and (not by or by in workers)

    until(ended, 60, what=f"ends: {step}")


def received(receiver: Receiver) -> list[Any]:
    return list(receiver.received())


def counts(engine: Engine, where: str) -> int:
    """Count rows past the platform."""
    statement = f"SELECT COUNT(*) FROM {where}"
    if engine.name == "sqlite+valkey":
        path = engine.database_url.removeprefix("sqlite+aiosqlite:///")
        with closing(sqlite3.connect(path, timeout=10)) as file:
            return int(file.execute(statement).fetchone()[0])
    name = engine.database_url.rsplit("/", 1)[1]
    connection: pymysql.connections.Connection[Any] = engine.servers.mariadb.connect(name)
    with closing(connection), connection.cursor() as cursor:
        cursor.execute(statement)
        return int(cursor.fetchone()[0])
