"""Callbacks: tried once, signed, and hosts do not wait for each other."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from standardwebhooks import Webhook

from oncue.protocol import Delivery
from tests.integration.worker.conftest import SECRET, OpenWorker
from tests.integration.worker.rig import FakeDispatcher
from tests.support.ports import free_port
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run


class Hook:
    """A receiver that answers what a test says."""

    def __init__(self) -> None:
        self.url = ""
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.status = 200
        self.headers: dict[str, str] = {}
        self.gate: asyncio.Event | None = None
        self.most_at_once = 0
        self._at_once = 0

    async def receive(self, request: web.Request) -> web.Response:
        """Note one callback."""
        body = await request.read()
        self.received.append((dict(request.headers), body))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self._at_once -= 1
        return web.Response(status=self.status, headers=self.headers, body=b"z" * 10_000)


@pytest.fixture
async def hook() -> AsyncIterator[Hook]:
    found = Hook()
    app = web.Application()
    app.router.add_post("/hook", found.receive)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    yield found
    if found.gate is not None:
        found.gate.set()
    await runner.cleanup()


def make_delivery(url: str, try_number: int = 1, delivery_id: str = "") -> Delivery:
    return Delivery(
        delivery_id=delivery_id or str(uuid.uuid4()),
        try_number=try_number,
        url=url,
        body=json.dumps({"type": "job.succeeded", "data": {"jobName": "ü"}}),
    )


async def tried(dispatcher: FakeDispatcher, delivery: Delivery) -> Any:
    name = delivery.delivery_id, delivery.try_number
    return await until_async(lambda: dispatcher.tries().get(name))


async def test_a_callback_is_signed_so_that_an_independent_verifier_accepts_it(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    delivery = make_delivery(hook.url)
    async with open_worker() as parts:
        assert parts.deliverer.take([delivery]).accepted == [delivery.delivery_id]
        result = await tried(dispatcher, delivery)
        await until_async(lambda: not parts.deliverer.backlog)
    assert (result.delivered, result.status_code, result.error) == (True, 200, None)
    [(headers, body)] = hook.received
    assert Webhook(SECRET).verify(body, {k.lower(): v for k, v in headers.items()})
    assert headers["webhook-id"] == delivery.delivery_id
    assert headers["Content-Type"] == "application/json"
    assert headers["User-Agent"].startswith("oncue/")
    assert body == delivery.body.encode()


@pytest.mark.parametrize(
    ("status", "headers", "gone", "after"),
    [
        (410, {}, True, None),
        (302, {"Location": "http://127.0.0.1:9/"}, False, None),
        (500, {"Retry-After": "9"}, False, None),
        (503, {"Retry-After": "9"}, False, 9000),
        (429, {"Retry-After": "99999999"}, False, 24 * 3600 * 1000),
        (429, {"Retry-After": "soon"}, False, None),
    ],
)
async def test_a_refused_callback_is_tried_once_and_told_exactly(
    open_worker: OpenWorker,
    dispatcher: FakeDispatcher,
    hook: Hook,
    status: int,
    headers: dict[str, str],
    gone: bool,
    after: int | None,
) -> None:
    hook.status, hook.headers = status, headers
    delivery = make_delivery(hook.url)
    async with open_worker() as parts:
        parts.deliverer.take([delivery])
        result = await tried(dispatcher, delivery)
    assert not result.delivered
    assert (result.status_code, result.gone, result.retry_after_ms) == (status, gone, after)
    assert len(hook.received) == 1


async def test_a_success_counts_even_if_its_body_never_ends(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    delivery = make_delivery(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    async with open_worker(callback_timeout_seconds=0.5) as parts:
        parts.deliverer.take([delivery])
        result = await tried(dispatcher, delivery)
    server.close()
    assert result.delivered


async def test_a_delivery_in_a_report_answer_is_tried_and_a_repeated_hand_out_is_not(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    delivery = make_delivery(hook.url)
    hook.gate = asyncio.Event()
    dispatcher.deliveries = [delivery.model_dump(by_alias=True)]
    async with open_worker() as parts:
        await parts.intake.take(make_request(make_run("echo")))
        await until_async(lambda: hook.received)
        assert parts.deliverer.take([delivery]).accepted == [delivery.delivery_id]
        assert (
            parts.deliverer.take([make_delivery(hook.url, 2, delivery.delivery_id)]).accepted == []
        )
        hook.gate.set()
        await tried(dispatcher, delivery)
        await until_async(lambda: not parts.deliverer.backlog)
        parts.deliverer.take([delivery])
        await until_async(lambda: sum(len(one.tries) for one in dispatcher.reports) == 2)
        assert len(hook.received) == 1
        second = make_delivery(hook.url, 2, delivery.delivery_id)
        parts.deliverer.take([second])
        await tried(dispatcher, second)
    assert len(hook.received) == 2


async def test_held_deliveries_are_in_the_beats_until_their_try_is_on_record(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    hook.gate = asyncio.Event()
    delivery = make_delivery(hook.url)
    async with open_worker() as parts:
        parts.deliverer.take([delivery])
        parts.beats.beat_now()
        await until_async(lambda: dispatcher.beats[-1].held_deliveries == [delivery.delivery_id])
        hook.gate.set()
        await tried(dispatcher, delivery)
        parts.beats.beat_now()
        await until_async(lambda: dispatcher.beats[-1].held_deliveries == [])


async def test_a_host_that_does_not_answer_delays_only_itself(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    silent = socket.create_server(("127.0.0.1", 0), backlog=1000)
    port = silent.getsockname()[1]
    async with open_worker() as parts:
        parts.deliverer.take([make_delivery(f"http://127.0.0.1:{port}/") for _ in range(1000)])
        quick = [make_delivery(hook.url) for _ in range(50)]
        began = time.monotonic()
        parts.deliverer.take(quick)
        await asyncio.gather(*(tried(dispatcher, one) for one in quick))
        assert time.monotonic() - began < 5
        assert hook.most_at_once <= 16
    silent.close()


async def test_without_a_secret_no_delivery_is_taken(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    async with open_worker(webhook_secret=None) as parts:
        assert parts.deliverer.take([make_delivery(hook.url)]).accepted == []
        assert not dispatcher.beats[-1].delivers


async def test_only_what_fits_is_taken(
    open_worker: OpenWorker, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.deliver.MOST_HELD", 3)
    hook.gate = asyncio.Event()
    async with open_worker() as parts:
        many = [make_delivery(hook.url) for _ in range(5)]
        assert parts.deliverer.take(many).accepted == [one.delivery_id for one in many[:3]]


async def test_ten_thousand_callbacks_of_one_dead_host_leave_room_for_others(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    dead = socket.create_server(("127.0.0.1", 0), backlog=1000)
    url = f"http://127.0.0.1:{dead.getsockname()[1]}/"
    async with open_worker() as parts:
        many = [make_delivery(url) for _ in range(10_000)]
        assert parts.deliverer.take(many).accepted == [one.delivery_id for one in many[:500]]
        other = make_delivery(hook.url)
        assert parts.deliverer.take([*many[500:], other]).accepted == [other.delivery_id]
        assert parts.deliverer.take(many[:1]).accepted == [many[0].delivery_id]
        assert (await tried(dispatcher, other)).delivered
    dead.close()


async def test_a_host_that_gave_no_answer_gets_less_room_until_it_answers(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    url = f"http://127.0.0.1:{free_port()}/"
    first = make_delivery(url)
    async with open_worker(callback_breaker_failures=1000) as parts:
        parts.deliverer.take([first])
        assert not (await tried(dispatcher, first)).delivered
        many = [make_delivery(url) for _ in range(500)]
        assert parts.deliverer.take(many).accepted == [one.delivery_id for one in many[:64]]
        await parts.deliverer.wait_idle()
        [host] = parts.deliverer._hosts.values()
        host.slow = False
        assert len(parts.deliverer.take(many[64:]).accepted) == 436


async def test_a_forbidden_address_is_refused_with_the_one_text(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    delivery = make_delivery(hook.url)
    async with open_worker(egress_allow="") as parts:
        parts.deliverer.take([delivery])
        result = await tried(dispatcher, delivery)
    assert result.error == "egress_refused: this address may not be called"
    assert hook.received == []
