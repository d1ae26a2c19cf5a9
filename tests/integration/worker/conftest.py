"""A real Valkey, a small real dispatcher, and workers in this process or in their own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import uvloop

from tests.integration.worker import handlers_under_test
from tests.integration.worker.rig import HANDLERS, FakeDispatcher
from tests.support.child import Child
from tests.support.ports import free_port
from tests.support.redis import PrivateValkey
from tests.support.wait import until_async
from worker.parts import Parts, open_parts
from worker.settings import WorkerSettings

OpenWorker = Callable[..., AbstractAsyncContextManager[Parts]]
StartWorker = Callable[..., Any]
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


BY_BOTH_LOOPS = ("test_egress", "test_http1", "test_http1_tls")
"""Files about transports, which are not the same in a worker's loop and in Python's own."""


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tell by which event loops a test is run."""
    own = {"asyncio": asyncio.new_event_loop}
    return {**own, "uvloop": uvloop.new_event_loop} if item.path.stem in BY_BOTH_LOOPS else own


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """Keep the tracebacks of failing handlers out of the tests' output."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    yield
    structlog.reset_defaults()


@pytest.fixture
def valkey() -> Iterator[PrivateValkey]:
    """A private Valkey, running."""
    server = PrivateValkey()
    server.start()
    yield server
    server.remove()


@pytest.fixture
async def dispatcher() -> AsyncIterator[FakeDispatcher]:
    """A dispatcher that accepts everything unless told otherwise."""
    fake = FakeDispatcher()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def open_gates() -> Iterator[None]:
    """Let the threads of a test end, however it ended."""
    yield
    for gate in handlers_under_test.GATES.values():
        gate.set()


@pytest.fixture
def settings(
    valkey: PrivateValkey, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., WorkerSettings]:
    """Make settings for this Valkey and this dispatcher."""
    for name in list(os.environ):
        if name.startswith("ONCUE_"):
            monkeypatch.delenv(name)

    def make(**changes: Any) -> WorkerSettings:
        given = {
            "handlers": (HANDLERS,),
            "redis_url": valkey.socket_url,
            "dispatcher_url": (dispatcher.url,),
            "worker_name": "tested",
            "webhook_secret": SECRET,
            "egress_allow": "127.0.0.0/8",
        }
        return WorkerSettings.model_validate({**given, **changes})

    return make


@pytest.fixture
def open_worker(settings: Callable[..., WorkerSettings], open_gates: None) -> OpenWorker:
    """Open a worker's parts in this process; it has beaten once when the block begins."""

    @asynccontextmanager
    async def opened(**changes: Any) -> AsyncIterator[Parts]:
        async with open_parts(settings(**changes)) as parts:
            if changes.get("wait_for_beat", True):
                await until_async(lambda: parts.liveness.beat_age_seconds() is not None)
            yield parts
            for gate in handlers_under_test.GATES.values():
                gate.set()

    return opened


class WorkerProcess:
    """A worker in a process of its own."""

    def __init__(self, child: Child, port: int) -> None:
        self.child = child
        self.url = f"http://127.0.0.1:{port}"

    async def post(self, path: str, body: Any) -> Any:
        """Send JSON and return the answer's JSON."""
        async with httpx.AsyncClient(timeout=20) as client:
            answer = await client.post(self.url + path, json=body)
            answer.raise_for_status()
            return answer.json()


@pytest.fixture
def start_worker(
    valkey: PrivateValkey, dispatcher: FakeDispatcher, tmp_path: Path
) -> Iterator[StartWorker]:
    """Start workers in processes of their own, which end with the test."""
    children: list[Child] = []

    async def start(**environment: str) -> WorkerProcess:
        port = free_port()
        clean = {name: text for name, text in os.environ.items() if not name.startswith("ONCUE_")}
        child = Child(
            f"worker-{len(children)}",
            [sys.executable, "-m", "worker"],
            log=tmp_path / f"worker-{len(children)}.log",
            environment={
                **clean,
                "ONCUE_WORKER_PORT": str(port),
                "ONCUE_WORKER_NAME": f"process-{len(children)}",
                "ONCUE_HANDLERS": HANDLERS,
                "ONCUE_REDIS_URL": valkey.socket_url,
                "ONCUE_DISPATCHER_URL": dispatcher.url,
                **environment,
            },
        )
        children.append(child)
        child.start()
        name = environment.get("ONCUE_WORKER_NAME", f"process-{len(children) - 1}")
        try:
            await until_async(
                lambda: any(beat.name == name for beat in dispatcher.beats), timeout=30
            )
        except TimeoutError as late:
            raise TimeoutError(f"{late}\n{child.log_tail()}") from None
        return WorkerProcess(child, port)

    yield start
    for child in children:
        child.kill()
