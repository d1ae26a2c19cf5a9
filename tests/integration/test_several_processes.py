"""`oncue dispatcher --processes N`: several behind one port, kept running by another process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from structlog.testing import capture_logs

from app import supervise
from tests.support.child import Child, is_running
from tests.support.engines import Engine
from tests.support.ports import free_port, free_ports_in_a_row
from tests.support.processes import NewPlatform, Platform, Service
from tests.support.wait import until, until_async

PROCESSES = 3
pytestmark = pytest.mark.timeout(400)


def children_of(service: Service) -> set[int]:
    """The dispatchers of a supervisor that runs."""
    return {one.pid for one in psutil.Process(service.child.pid).children()}


def instance_at(url: str) -> str:
    """Which process answers on a new connection; raises OSError if none is ready."""
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=5)) as connection:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = json.loads(answer.read())
        if answer.status != 200:
            raise ConnectionError(body)
        return str(body["instance"])


def answering(url: str, pids: Callable[[], set[int]]) -> set[int]:
    """Return the processes that answer, once each of `pids` has."""
    seen: set[int] = set()

    def all_answer() -> bool:
        seen.add(int(instance_at(url).rpartition(":")[2]))
        return seen >= pids()

    until(all_answer, 120, what="every process to answer")
    return seen


def several(platform: Platform, *flags: str, **environment: str) -> Service:
    return platform.dispatcher(
        1, "--processes", str(PROCESSES), *flags, environment=environment or None
    )


def test_all_answer_one_that_is_killed_is_replaced_and_sigterm_drains_all(
    engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(engine)
    service = several(platform)
    first = children_of(service)
    assert len(first) == PROCESSES
    assert answering(platform.url, lambda: children_of(service)) == first
    platform.worker()
    platform.wait_for_workers(1)
    assert platform.ended(platform.submit("record", {"ms": 5}))["status"] == "SUCCEEDED"

    killed = min(first)
    os.kill(killed, signal.SIGKILL)
    until(
        lambda: len(children_of(service) - {killed}) == PROCESSES,
        60,
        what="another in the place of the one that was killed",
    )
    assert killed not in children_of(service)
    answering(platform.url, lambda: children_of(service))
    assert platform.ended(platform.submit("record", {"ms": 5}))["status"] == "SUCCEEDED"

    running = platform.submit("record", {"ms": 300})
    last = children_of(service)
    assert service.terminate() == 0
    assert not [pid for pid in last if is_running(pid)]
    service.start()
    assert platform.ended(running)["status"] == "SUCCEEDED"
    starts = [line for line in platform.record(running) if line.event == "start"]
    assert len(starts) == 1


def test_they_share_the_partitions_and_each_is_asked_at_a_port_of_its_own(
    sqlite_platform: Platform,
) -> None:
    own = free_ports_in_a_row(PROCESSES)
    service = several(sqlite_platform, ONCUE_DISPATCH_PARTITIONS="6", ONCUE_PROCESS_PORTS=str(own))
    urls = [f"http://127.0.0.1:{own + number}" for number in range(PROCESSES)]

    def held(url: str) -> int:
        with closing(HTTPConnection(urlsplit(url).netloc, timeout=5)) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        (line,) = [
            one for one in text.splitlines() if one.startswith("oncue_dispatch_partitions_held{")
        ]
        assert f'instance="{instance_at(url)}"' in line
        return int(float(line.split()[1]))

    until(lambda: [held(url) for url in urls] == [2, 2, 2], 120, what="even shares")
    assert len({instance_at(url) for url in urls}) == PROCESSES
    assert service.terminate() == 0


def test_they_end_when_the_process_that_keeps_them_is_killed(sqlite_platform: Platform) -> None:
    service = several(sqlite_platform)
    left = children_of(service)
    service.child.kill_alone()
    until(
        lambda: not [pid for pid in left if is_running(pid)],
        60,
        what="the others to end",
    )


@pytest.mark.parametrize("why", ["port", "schema"])
def test_it_ends_with_an_error_when_they_cannot_start(
    servers: object, sqlite_engine: Engine, tmp_path: Path, why: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if why == "port" else free_port()
        child = Child(
            "dispatcher",
            [
                Path(sys.executable).parent / "oncue",
                *("dispatcher", "--processes", "2", "--host", "127.0.0.1", "--port", str(port)),
            ],
            log=tmp_path / "log",
            environment={**os.environ, **sqlite_engine.environment},
            directory=tmp_path,
        )
        child.start()
        try:
            assert child.wait(150) == 2
        finally:
            child.kill()
    said = child.log_tail()
    assert ("is the port in use?" if why == "port" else "run `oncue migrate`") in said


async def test_processes_that_refuse_late_have_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(supervise, "STANDS_SECONDS", 0.05)
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nsleep 0.3\nexit 2\n")
    program.chmod(0o755)
    supervisor = supervise.Supervisor([str(program)], dict(os.environ), [[], []], grace_seconds=5)
    async with asyncio.timeout(30):
        assert await supervisor.run() == supervise.REFUSED


async def test_a_process_that_cannot_be_made_is_tried_again_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(supervise, "MOST_FALSE_STARTS", 1000)
    program, began = tmp_path / "program", tmp_path / "began"
    supervisor = supervise.Supervisor([str(program)], dict(os.environ), [[], []], grace_seconds=5)
    running = asyncio.create_task(supervisor.run())
    with capture_logs() as said:
        await until_async(
            lambda: any(one["event"] == "dispatcher_not_started" for one in said),
            10,
            what="a failure to start",
        )
    assert not running.done()
    script = f"#!/bin/sh\necho $$ >> {began}\nexec sleep 60\n"
    (tmp_path / "written").write_text(script)
    (tmp_path / "written").chmod(0o700)
    (tmp_path / "written").rename(program)
    await until_async(
        lambda: began.exists() and len(began.read_text().split()) == 2,
        10,
        what="both to have begun",
    )
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_it_ends_with_an_error_where_no_process_can_ever_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "FIRST_PAUSE_SECONDS", 0.01)
    command = [str(tmp_path / "missing")]
    assert await supervise.Supervisor(command, {}, [[], []], grace_seconds=5).run() == 1
