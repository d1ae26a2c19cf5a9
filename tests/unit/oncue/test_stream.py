"""Streams of events as the client reads them, however they are cut."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncue import ApiError, AsyncClient, Client, NotFound, Retries, Unavailable
from oncue._stream import Event, EventReader, Resume

TEXT = "a\u2028b\x85c\x0bd ü \\n"
STREAM = (
    ": keep-alive\n\n"
    f"id: 1\nevent: line\ndata: {json.dumps(TEXT, ensure_ascii=False)}\n\n"
    "id:2\r\nevent:end\r\ndata:{}\r\n\r\n"
    "event: without data\n\n"
    'id: 3\ndata: "half'
).encode()
EVENTS = [Event("1", "line", TEXT), Event("2", "end", {})]
QUICK = Retries(attempts=3, seconds=5, first_pause=0.001, longest_pause=0.002)


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_events_are_the_same_however_their_bytes_come(cuts: list[int]) -> None:
    found: list[Event] = []
    reader, start = EventReader(), 0
    for end in [*sorted(cuts), len(STREAM)]:
        found += reader.feed(STREAM[start:end])
        start = end
    assert found == EVENTS


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(ApiError, match="not JSON"):
        list(EventReader().feed(b"data: {\n\n"))


def line(seq: int) -> bytes:
    data = json.dumps({"seq": seq, "message": f"line {seq}"})
    return f"id: {seq}\nevent: line\ndata: {data}\n\n".encode()


class Server:
    """Sends so many lines a connection, then cuts it; the last one ends the stream."""

    def __init__(self, each: int, total: int) -> None:
        self.each, self.total = each, total
        self.asked: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.headers.get("last-event-id"))
        if len(self.asked) % 3 == 2:
            return httpx.Response(503, json={"code": "not_ready", "detail": "about to end"})
        after = int(self.asked[-1] or 0)
        body = b"".join(
            line(seq) for seq in range(after + 1, min(after + self.each, self.total) + 1)
        )
        if after + self.each >= self.total:
            body += f"id: {self.total}\nevent: end\ndata: {{}}\n\n".encode()
        else:
            body += line(after + self.each + 1)[:20]  # cut off in the middle
        return httpx.Response(200, content=body, headers={"content-type": "text/event-stream"})


def test_a_stream_goes_on_behind_its_last_event() -> None:
    server = Server(each=4, total=30)
    with Client(transport=httpx.MockTransport(server), retries=QUICK) as client:
        assert [one.seq for one in client.follow_logs("e")] == list(range(1, 31))
    assert server.asked[:4] == [None, "4", "4", "8"]


async def test_the_async_client_goes_on_too() -> None:
    server = Server(each=4, total=30)
    async with AsyncClient(transport=httpx.MockTransport(server), retries=QUICK) as client:
        assert [one.seq async for one in client.follow_logs("e")] == list(range(1, 31))


def test_a_stream_that_brings_nothing_is_given_up() -> None:
    def empty(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"})

    with (
        Client(transport=httpx.MockTransport(empty), retries=QUICK) as client,
        pytest.raises(Unavailable, match="cut off again and again, tried 3 times"),
    ):
        list(client.follow_logs("e"))


def test_a_refusal_and_a_page_of_something_else_are_told_at_once() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        return httpx.Response(404, json={"code": "execution_not_found", "detail": "none"})

    def page(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={})

    with Client(transport=httpx.MockTransport(refuse)) as client, pytest.raises(NotFound):
        list(client.follow_logs("e"))
    with (
        Client(transport=httpx.MockTransport(page)) as client,
        pytest.raises(ApiError, match="stream of events was expected"),
    ):
        list(client.follow_logs("e"))


def test_a_connection_that_lasted_is_no_failure() -> None:
    now = [0.0]
    resume = Resume("/x", "http://x", QUICK, clock=lambda: now[0], dice=lambda: 0.5)
    stream = httpx.Response(200, headers={"content-type": "text/event-stream"})
    for _ in range(50):
        resume.opened(stream)
        now[0] += 60  # keep-alives only, then a proxy's limit
        assert resume.pause_after(None) < 1
