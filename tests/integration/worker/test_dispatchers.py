"""Reports go to the dispatcher that works, whatever the others of the list answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from tests.support.ports import free_port
from worker.dispatchers import PROBLEM, REQUEST_TIMEOUT_SECONDS, Dispatchers, NoDispatcher, Reply


class Door:
    """One address of a dispatcher, which answers each request with its status and its name."""

    def __init__(self, name: str, status: int) -> None:
        self.name = name
        self.status = status
        self.media_type = PROBLEM if status >= 400 else "text/plain"
        self.calls = 0
        self.url = ""
        self.called = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def answer(self, _: web.Request) -> web.Response:
        """Count a call."""
        self.calls += 1
        self.called.set()
        await self.may_answer.wait()
        return web.Response(status=self.status, text=self.name, content_type=self.media_type)


@asynccontextmanager
async def doors(*statuses: int) -> AsyncIterator[tuple[Dispatchers, list[Door]]]:
    """Listen on an address for each status; a status of 0 is an address where nobody listens."""
    made = [Door(str(number), status) for number, status in enumerate(statuses)]
    async with AsyncExitStack() as stack:
        for door in made:
            door.url = f"http://127.0.0.1:{free_port()}"
            if door.status:
                app = web.Application()
                app.router.add_post("/path", door.answer)
                runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                door.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        dispatchers = Dispatchers(tuple(door.url for door in made), None)
        stack.push_async_callback(dispatchers.close)
        yield dispatchers, made


@pytest.mark.parametrize("status", [0, 204, 302, 401, 404, 409, 429, 500, 502, 503, 504])
async def test_an_address_that_does_not_work_is_passed_over_from_then_on(status: int) -> None:
    async with doors(status, 200) as (dispatchers, [bad, _]):
        assert await dispatchers.post("/path", b"{}") == Reply(200, b"1")
        calls = bad.calls
        assert await dispatchers.post("/path", b"{}") == Reply(200, b"1")
        assert bad.calls == calls


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_proxy_that_refuses_a_request_is_passed_over(status: int) -> None:
    async with doors(status, 200) as (dispatchers, [proxy, _]):
        proxy.media_type = "text/html"
        assert await dispatchers.post("/path", b"{}") == Reply(200, b"1")


@pytest.mark.parametrize("status", [200, 400, 413, 422])
async def test_a_dispatcher_that_read_the_request_is_stayed_with(status: int) -> None:
    async with doors(status, 200) as (dispatchers, [_, other]):
        for _ in range(2):
            assert await dispatchers.post("/path", b"{}") == Reply(status, b"0")
        assert other.calls == 0


@pytest.mark.parametrize(
    ("statuses", "status"), [((401, 503, 500), 500), ((503, 401, 0), 401), ((404,), 404)]
)
async def test_when_none_works_the_last_reply_counts(
    statuses: tuple[int, ...], status: int
) -> None:
    async with doors(*statuses) as (dispatchers, made):
        assert (await dispatchers.post("/path", b"{}")).status == status
        assert [door.calls for door in made] == [int(one > 0) for one in statuses]


async def test_the_one_that_worked_last_is_first_after_all_have_failed() -> None:
    async with doors(503, 200, 503) as (dispatchers, [first, second, _]):
        await dispatchers.post("/path", b"{}")
        second.status = 503
        await dispatchers.post("/path", b"{}")
        second.status = 200
        calls = first.calls
        assert await dispatchers.post("/path", b"{}") == Reply(200, b"1")
        assert first.calls == calls


async def test_no_reply_at_all_is_told_as_such() -> None:
    async with doors(0, 0) as (dispatchers, _):
        with pytest.raises(NoDispatcher, match="failed with"):
            await dispatchers.post("/path", b"{}")


async def test_a_paused_dispatcher_holds_up_no_report() -> None:
    async with doors(200, 200) as (dispatchers, [paused, other]):
        paused.may_answer.clear()
        async with asyncio.timeout(REQUEST_TIMEOUT_SECONDS / 2):
            assert await dispatchers.post("/path", b"{}") == Reply(200, b"1")
            # And it is passed over from then on, without any wait.
            assert await dispatchers.post("/path", b"{}") == Reply(200, b"1")
        assert (paused.calls, other.calls) == (1, 2)
        paused.may_answer.set()


async def test_a_slow_dispatcher_is_heard_while_the_next_one_is_asked() -> None:
    async with doors(200, 503) as (dispatchers, [slow, other]):
        slow.may_answer.clear()
        asked = asyncio.ensure_future(dispatchers.post("/path", b"{}"))
        await other.called.wait()
        slow.may_answer.set()
        assert await asked == Reply(200, b"0")
