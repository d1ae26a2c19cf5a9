"""Callbacks: tried once, signed, and hosts do not wait for each other."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from standardwebhooks import Webhook

from oncue.protocol import Delivery
from oncue.webhooks import WebhookVerificationError, public_key_of, verify_webhook
from tests.integration.worker.conftest import SECRET, OpenWorker
from tests.integration.worker.rig import FakeDispatcher
from tests.support.ports import free_port
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run
from worker.deliver import _PLACES, _Lane
from worker.settings import SettingsError, read_settings


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
    async with open_worker(callback_timeout_seconds=10) as parts:
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


async def test_a_redelivery_that_comes_while_its_earlier_try_is_under_way_goes_back_at_once(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    first = make_delivery(hook.url, 3)
    earlier, later = (make_delivery(hook.url, number, first.delivery_id) for number in (2, 4))
    hook.gate = asyncio.Event()
    async with open_worker() as parts:
        parts.deliverer.take_own([first])
        await until_async(lambda: hook.received)
        # An answer that comes late brings what is over.
        parts.deliverer.take_own([earlier, later])
        back = await tried(dispatcher, later)
        assert (back.not_tried, back.delivered) == (True, False)
        assert parts.deliverer.held_ids() == [first.delivery_id]
        hook.gate.set()
        assert (await tried(dispatcher, first)).delivered
        await until_async(lambda: not parts.deliverer.backlog)
        assert parts.deliverer._held_characters == 0
        assert (earlier.delivery_id, earlier.try_number) not in dispatcher.tries()
        again = make_delivery(hook.url, 5, first.delivery_id)
        parts.deliverer.take_own([again])
        assert (await tried(dispatcher, again)).delivered
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
        assert time.monotonic() - began < 12
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


async def test_hosts_that_answer_late_leave_places_for_others(
    open_worker: OpenWorker,
    dispatcher: FakeDispatcher,
    hook: Hook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.deliver.MOST_IN_FLIGHT", 8)
    monkeypatch.setitem(_PLACES, _Lane.SLOW, 4)
    monkeypatch.setattr("worker.deliver.LATE_MS", -1)
    hook.gate = asyncio.Event()
    async with open_worker() as parts:
        hook.gate.set()
        first = make_delivery(hook.url)
        parts.deliverer.take([first])
        assert (await tried(dispatcher, first)).delivered
        hook.gate.clear()
        # It was late by now, and takes a part of the places alone.
        parts.deliverer.take([make_delivery(hook.url) for _ in range(20)])
        await until_async(lambda: parts.deliverer._flying.total() == 4, what="its places taken")
        monkeypatch.setattr("worker.deliver.LATE_MS", 10_000)
        refusing = make_delivery(f"http://127.0.0.1:{free_port()}/")
        parts.deliverer.take([refusing])
        assert not (await tried(dispatcher, refusing)).delivered
        hook.gate.set()


async def test_hosts_that_were_never_called_delay_none_that_answers(
    open_worker: OpenWorker,
    dispatcher: FakeDispatcher,
    hook: Hook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.deliver.MOST_IN_FLIGHT", 8)
    monkeypatch.setitem(_PLACES, _Lane.NEW, 4)
    monkeypatch.setattr("worker.deliver.MOST_WAITING_FOR_OTHERS", 10)
    monkeypatch.setattr("worker.deliver.LATE_MS", 60_000)
    everywhere = socket.create_server(("0.0.0.0", 0), backlog=1000)
    port = everywhere.getsockname()[1]
    async with open_worker() as parts:
        first = make_delivery(hook.url)
        parts.deliverer.take([first])
        assert (await tried(dispatcher, first)).delivered
        many = [make_delivery(f"http://127.0.1.{one}:{port}/") for one in range(1, 31)]
        # Four are under way, ten wait; the rest leaves no trace.
        assert len(parts.deliverer.take(many[:14]).accepted) == 10
        await until_async(lambda: parts.deliverer._flying.total() == 4, what="their places")
        assert len(parts.deliverer.take(many[14:]).accepted) == 4
        assert len(parts.deliverer._hosts) == 14
        again = [make_delivery(hook.url) for _ in range(20)]
        assert len(parts.deliverer.take(again).accepted) == 20
        for one in again:
            assert (await tried(dispatcher, one)).delivered
    everywhere.close()


async def test_a_host_that_answers_leaves_the_line_of_the_unknown(
    open_worker: OpenWorker,
    dispatcher: FakeDispatcher,
    hook: Hook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(_PLACES, _Lane.NEW, 1)
    hook.gate = asyncio.Event()
    dead = socket.create_server(("127.0.0.1", 0), backlog=1000)
    silent = make_delivery(f"http://127.0.0.1:{dead.getsockname()[1]}/")
    async with open_worker() as parts:
        own = [make_delivery(hook.url) for _ in range(5)]
        parts.deliverer.take([own[0]])
        await until_async(lambda: hook.received, what="the first callback")
        # Both wait for the one place, the silent host before the others of the first.
        parts.deliverer.take([silent, *own[1:]])
        hook.gate.set()
        for one in own:
            assert (await tried(dispatcher, one)).delivered
        assert parts.deliverer._waiting_for_others == 0
    dead.close()


async def test_what_is_held_is_bounded_by_its_length(
    open_worker: OpenWorker,
    dispatcher: FakeDispatcher,
    hook: Hook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.deliver.MOST_HELD_CHARACTERS", 100)
    hook.gate = asyncio.Event()
    async with open_worker() as parts:
        many = [make_delivery(hook.url) for _ in range(5)]
        assert len(parts.deliverer.take(many).accepted) == 2
        hook.gate.set()
        assert (await tried(dispatcher, many[1])).delivered
        await until_async(lambda: not parts.deliverer.backlog)
        assert parts.deliverer._held_characters == 0


async def test_what_is_not_taken_leaves_nothing_behind(
    open_worker: OpenWorker, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.deliver.MOST_HELD", 0)
    async with open_worker() as parts:
        taken = parts.deliverer.take([make_delivery(f"http://h{one}.example/") for one in range(9)])
        assert taken.accepted == []
        assert not parts.deliverer._hosts


async def test_a_forbidden_address_is_refused_with_the_one_text(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    delivery = make_delivery(hook.url)
    async with open_worker(egress_allow="") as parts:
        parts.deliverer.take([delivery])
        result = await tried(dispatcher, delivery)
    assert result.error == "egress_refused: this address may not be called"
    assert hook.received == []


async def test_a_rotated_secret_signs_beside_the_one_before(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    new = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"
    private = f"whsk_{base64.b64encode(bytes(range(32, 64))).decode()}"
    both = make_delivery(hook.url).model_copy(update={"signing": [new, ""]})
    asymmetric = make_delivery(hook.url).model_copy(update={"signing": [private]})
    async with open_worker() as parts:
        parts.deliverer.take([both, asymmetric])
        assert (await tried(dispatcher, both)).delivered
        assert (await tried(dispatcher, asymmetric)).delivered
    came = {headers["webhook-id"]: (headers, body) for headers, body in hook.received}
    headers, body = came[both.delivery_id]
    lowered = {name.lower(): value for name, value in headers.items()}
    assert len(lowered["webhook-signature"].split()) == 2
    for secret in (new, SECRET):
        assert Webhook(secret).verify(body, lowered)
    headers, body = came[asymmetric.delivery_id]
    version, _, signature = headers["webhook-signature"].partition(",")
    assert version == "v1a"
    signed = f"{asymmetric.delivery_id}.{headers['webhook-timestamp']}.".encode() + body
    public = base64.b64decode(public_key_of(private).removeprefix("whpk_"))
    Ed25519PublicKey.from_public_bytes(public).verify(base64.b64decode(signature), signed)
    verify_webhook(public_key_of(private), headers, body)
    with pytest.raises(WebhookVerificationError):
        verify_webhook(public_key_of(private), headers, body + b" ")


@pytest.mark.parametrize("text", ["9" * 400, "9" * 13, "-1", "1e9", "\u0661", "", " 1", "1.5"])
def test_a_timestamp_that_is_no_unix_time_is_a_verification_error(text: str) -> None:
    headers = {"webhook-id": "a", "webhook-timestamp": text, "webhook-signature": "v1,AA=="}
    with pytest.raises(WebhookVerificationError, match="malformed"):
        verify_webhook(SECRET, headers, b"{}")


async def test_a_worker_that_is_told_two_secrets_signs_with_both(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    other = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"
    delivery = make_delivery(hook.url)
    async with open_worker(webhook_secret=f"{other},{SECRET}") as parts:
        parts.deliverer.take([delivery])
        await tried(dispatcher, delivery)
    [(headers, body)] = hook.received
    for secret in (other, SECRET):
        assert Webhook(secret).verify(body, {k.lower(): v for k, v in headers.items()})


async def test_headers_of_a_delivery_are_sent_but_never_instead_of_our_own(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    given = {"Authorization": "Bearer a", "webhook-id": "forged"}
    delivery = make_delivery(hook.url).model_copy(update={"headers": given})
    async with open_worker() as parts:
        parts.deliverer.take([delivery])
        assert (await tried(dispatcher, delivery)).delivered
    [(headers, _)] = hook.received
    assert headers["Authorization"] == "Bearer a"
    assert headers["webhook-id"] == delivery.delivery_id


async def test_a_try_tells_when_it_was_and_the_first_2_kib_of_the_answer(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    delivery = make_delivery(hook.url)
    before = time.time() * 1000
    async with open_worker() as parts:
        parts.deliverer.take([delivery])
        result = await tried(dispatcher, delivery)
    assert before - 1 <= result.tried_at <= time.time() * 1000
    assert result.answer == "z" * 2048


async def test_an_open_breaker_gives_back_what_it_holds_untried_until_a_trial_is_answered(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/hook"
    flags = {"callback_breaker_failures": 2, "callback_breaker_seconds": 60}
    async with open_worker(**flags, callback_host_concurrency=1) as parts:
        many = [make_delivery(url) for _ in range(6)]
        parts.deliverer.take(many)
        results = [await tried(dispatcher, one) for one in many]
        assert [one.not_tried for one in results] == [False, False, True, True, True, True]
        assert all(60_000 * 0.5 < one.retry_after_ms <= 60_000 * 1.2 for one in results[2:])
        await until_async(lambda: not parts.deliverer.backlog)
        assert parts.deliverer.open_breakers == 1
        # What a report brings meanwhile goes back too, and what is offered is refused.
        late = make_delivery(url)
        parts.deliverer.take_own([late])
        assert (await tried(dispatcher, late)).not_tried
        host = f"127.0.0.1:{port}"
        assert 0 < parts.deliverer.take([make_delivery(url)]).paused[host] <= 60_000
        received = Hook()
        app = web.Application()
        app.router.add_post("/hook", received.receive)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        received.gate = asyncio.Event()
        trial = make_delivery(url)
        [paused] = parts.deliverer._hosts.values()
        paused.breaker.open_until = 0.0  # its pause is over
        await until_async(lambda: parts.deliverer.take([trial]).accepted)
        # One trial at a time.
        refused = parts.deliverer.take([make_delivery(url)])
        assert (refused.accepted, refused.paused) == ([], {host: 5000})
        received.gate.set()
        assert (await tried(dispatcher, trial)).delivered
        assert parts.deliverer.open_breakers == 0
        after = make_delivery(url)
        parts.deliverer.take([after])
        assert (await tried(dispatcher, after)).delivered
        await runner.cleanup()


async def test_a_host_that_answers_with_errors_keeps_its_breaker_closed(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    hook.status = 500
    many = [make_delivery(hook.url) for _ in range(10)]
    async with open_worker(callback_breaker_failures=2) as parts:
        parts.deliverer.take(many)
        results = [await tried(dispatcher, one) for one in many]
    assert not any(one.not_tried for one in results)
    assert len(hook.received) == 10


async def test_a_tenants_networks_narrow_what_the_worker_allows(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, hook: Hook
) -> None:
    first = make_delivery(hook.url)
    wide = make_delivery(hook.url).model_copy(update={"egress_allow": ["127.0.0.0/30"]})
    narrow = make_delivery(hook.url).model_copy(update={"egress_allow": []})
    other = make_delivery(hook.url).model_copy(update={"egress_allow": ["10.0.0.0/8"]})
    async with open_worker(egress_allow="127.0.0.0/8") as parts:
        # A connection that another tenant's callback has left open is not used.
        parts.deliverer.take([first])
        assert (await tried(dispatcher, first)).delivered
        parts.deliverer.take([wide, narrow, other])
        assert (await tried(dispatcher, wide)).delivered
        for one in (narrow, other):
            assert (await tried(dispatcher, one)).error == (
                "egress_refused: this address may not be called"
            )
    assert len(hook.received) == 2


@pytest.mark.parametrize("seconds", [41, 60, 0])
async def test_a_try_that_its_lease_does_not_outlast_is_refused_at_the_start(
    seconds: float,
) -> None:
    with pytest.raises(SettingsError, match="ONCUE_CALLBACK_TIMEOUT_SECONDS"):
        read_settings(callback_timeout_seconds=seconds)
