"""What the edge reads and writes without the framework's objects is what they would give."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Response
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers, MutableHeaders

from app.edge import admission
from app.edge.admission import Arrivals, Stay
from app.edge.heads import header_of
from app.edge.requests import NOTHING, OWN_PAGES, RequestEdge
from app.jobs.answers import json_answer
from app.jobs.callback_fields import Receivers
from oncue.addresses import Network
from tests.support.wait import until_async

names = st.sampled_from(["x-request-id", "content-length", "cache-control", "etag", "x-other"])
values = st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=5)
heads = st.lists(st.tuples(names, values), max_size=6)


def raw(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers]


@given(heads, names)
def test_a_header_is_read_as_the_framework_reads_it(
    headers: list[tuple[str, str]], name: str
) -> None:
    scope = {"headers": raw(headers)}
    assert header_of(scope, name.encode(), "none") == Headers(raw=raw(headers)).get(name, "none")


@pytest.mark.parametrize("path", ["/openapi/jobs", "/internal/reports", "/docs"])
@given(headers=heads)
def test_an_answer_has_the_headers_of_the_edge_once(
    path: str, headers: list[tuple[str, str]]
) -> None:
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": raw(headers)})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    given_id = {"type": "http", "method": "GET", "path": path, "headers": [(b"x-request-id", b"r")]}
    asyncio.run(RequestEdge(app)(given_id, receive, send))
    expected = MutableHeaders(raw=raw(headers))
    expected["X-Request-Id"] = "r"
    expected["Content-Security-Policy"] = OWN_PAGES if path == "/docs" else NOTHING
    if path != "/docs":
        expected["Cache-Control"] = "no-store"
    assert sent[0]["headers"] == expected.raw


@pytest.mark.parametrize("headers", [None, {}, {"ETag": '"0"', "Retry-After": "1"}])
def test_a_document_is_answered_as_the_framework_would(headers: dict[str, str] | None) -> None:
    answer = json_answer({"text": "é"}, 202, headers)
    plain = Response(answer.body, status_code=202, media_type="application/json", headers=headers)
    assert (answer.status_code, answer.raw_headers) == (202, plain.raw_headers)
    answer.headers["X-More"] = "1"
    assert answer.raw_headers[-1] == (b"x-more", b"1")


class Waited:
    """A submission whose body does not come."""

    def __init__(self) -> None:
        self.lapsed_at: float | None = None

    def expect_no_more(self) -> None:
        self.lapsed_at = asyncio.get_running_loop().time()


async def test_each_body_is_expected_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ARRIVAL_SECONDS", 0.05)
    arrivals, clock = Arrivals(), asyncio.get_running_loop().time
    began, stays = [], [Waited() for _ in range(3)]
    for stay in stays:
        began.append(clock())
        arrivals.expect(cast(Stay, stay), clock())
        await asyncio.sleep(0.03)
    await until_async(lambda: stays[-1].lapsed_at is not None, what="the last to lapse")
    for start, stay in zip(began, stays, strict=True):
        assert stay.lapsed_at is not None
        assert stay.lapsed_at - start >= 0.04, "not with those before it"
    again = Waited()
    arrivals.expect(cast(Stay, again), clock())
    await until_async(lambda: again.lapsed_at is not None, what="one that came after a rest")
    arrivals.stop()


async def test_a_receiver_is_looked_at_again_when_the_workers_lists_change() -> None:
    lists: list[Sequence[Sequence[Network]] | None] = [
        [(ipaddress.ip_network("127.0.0.0/8"),)],
        [(ipaddress.ip_network("10.0.0.0/8"),)],
        None,
        [()],
    ]
    now: list[Any] = []

    async def egress_lists() -> Any:
        return now[0]

    async def wishes(_tenant_id: int) -> Any:
        return SimpleNamespace(egress_allow=None)

    receivers = Receivers(
        cast(Any, SimpleNamespace(egress_lists=egress_lists)),
        cast(Any, SimpleNamespace(wishes=wishes)),
    )
    found = []
    for one in lists:
        now[:] = [one]
        for _ in range(2):
            found.append(await receivers.refused(0, "http://127.0.0.1:1/hook") is None)
    assert found == [True, True, False, False, True, True, False, False]
