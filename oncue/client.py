"""Clients of the API: `Client`, and `AsyncClient` with the same methods to await.

    with Client() as oncue:
        job = oncue.submit("send-invoice", {"order": 1001})
        print(oncue.wait(job, timeout=60).result)

Both find the server by ONCUE_URL and the key by ONCUE_API_KEY when they are not told. Both
repeat what failed for the moment; a submission keeps its clientRequestId, so it stays one job.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, Unpack, cast
from urllib.parse import urlsplit

import httpx

from oncue._talk import PAGE_SIZE, Heard, Pages, Pause, Talk, Talks
from oncue.errors import ApiError
from oncue.results import (
    Backfill,
    CronPreview,
    Execution,
    Item,
    Job,
    OfferedHandler,
    Skipped,
    Worker,
)
from oncue.retries import Retries
from oncue.submission import CronOptions, JobFilter, JobOptions, NewJob
from oncue.version import __version__

DEFAULT_URL: Final = "http://127.0.0.1:8080"
DEFAULT_TIMEOUT_SECONDS: Final = 15.0

POOL: Final = httpx.Limits(max_connections=None, max_keepalive_connections=100)
"""A wait holds a connection for as long as it lasts, so the callers alone bound their number."""

Value = TypeVar("Value")


class Client:
    """A client that blocks; threads may share one. Close it, or use it in a `with` statement.

    `timeout` is how many seconds one request may wait for the server, a long poll's own time
    apart. `retries` bounds how often a request is repeated. `transport` is httpx's, for tests.

    Its methods raise, beside what they name:
        ApiError: the server refused; its kinds are in `oncue.errors`.
        Unavailable: there was no usable answer, although the request was repeated.

    Raises:
        ValueError: the address is not an http or https URL, or the key cannot be sent.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        retries: Retries | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        url = _address(base_url)
        self._talks = Talks(url, retries or Retries())
        self._http = httpx.Client(
            base_url=url,
            headers=_headers(api_key),
            timeout=timeout,
            limits=POOL,
            transport=transport,
        )

    def submit(self, handler: str, params: Any = None, /, **options: Unpack[JobOptions]) -> Job:
        """Store a job and return it at once; `NewJob` says what the options mean.

        Raises:
            Conflict: the request_id belongs to another request.
            Invalid: a value is refused; nothing was stored.
            Unavailable: whether it was stored is unknown; submit again with its `request_id`.
        """
        return self._run(self._talks.submit(NewJob(handler, params, **options)))

    def submit_many(self, jobs: Iterable[NewJob]) -> Sequence[Job | ApiError]:
        """Store many jobs; return the job or the refusal of each, in order.

        When this raises, some may be stored: call it again with the same NewJobs.
        """
        return self._run(self._talks.submit_many(jobs))

    def get(self, job: int | Job) -> Job:
        """Return the job as it is now.

        Raises:
            NotFound: there is no such job.
        """
        return self._run(self._talks.get(_id(job)))

    def wait(self, job: int | Job, *, timeout: float | None = None, check: bool = False) -> Job:
        """Return the job once it has ended, however it did.

        Raises:
            WaitTimeout: it had not ended after `timeout` seconds.
            JobFailed: with `check`, it ended as FAILED or CANCELLED.
            NotFound: there is no such job.
        """
        return self._run(self._talks.wait(_id(job), timeout, check=check))

    def list(self, *, page_size: int = PAGE_SIZE, **narrowed: Unpack[JobFilter]) -> Iterator[Job]:
        """Iterate over jobs, newest first, `page_size` (up to 200) a request."""
        return self._items(self._talks.jobs(narrowed, page_size))

    def executions(self, job: int | Job, *, page_size: int = PAGE_SIZE) -> Iterator[Execution]:
        """Iterate over the attempts to run a job, newest first."""
        return self._items(self._talks.executions(_id(job), page_size))

    def cancel(self, job: int | Job) -> Job:
        """Cancel a job that has not ended; a running one is told to stop.

        Raises:
            Conflict: in its state it cannot be cancelled. So for all four verbs.
        """
        return self._run(self._talks.change(_id(job), "cancel"))

    def pause(self, job: int | Job) -> Job:
        """Keep a waiting job or a schedule from running until it is resumed."""
        return self._run(self._talks.change(_id(job), "pause"))

    def resume(self, job: int | Job, *, missed: Literal["skip", "catchUp"] | None = None) -> Job:
        """Let a paused job go on; `missed` says what becomes of the fires a schedule missed."""
        return self._run(self._talks.resume(_id(job), missed))

    def backfill(
        self,
        schedule: int | Job,
        first: datetime,
        last: datetime,
        *,
        dry_run: bool = False,
        max_concurrent: int = 1,
    ) -> Backfill:
        """Run the fires of a schedule in a past range (both ends included) that have no job.

        `dry_run` only tells which these are. Both moments need a time zone.

        Raises:
            Invalid: the range is too long, or the job has no fires.
        """
        return self._run(
            self._talks.backfill(
                _id(schedule), first, last, dry_run=dry_run, max_concurrent=max_concurrent
            )
        )

    def skips(self, schedule: int | Job, *, page_size: int = PAGE_SIZE) -> Iterator[Skipped]:
        """Iterate over the fires of a schedule that did not run, latest first."""
        return self._items(self._talks.skips(_id(schedule), page_size))

    def retry(self, job: int | Job) -> Job:
        """Open a FAILED or CANCELLED job again, with all its attempts anew."""
        return self._run(self._talks.change(_id(job), "retry"))

    def cron_preview(self, expr: str, **options: Unpack[CronOptions]) -> CronPreview:
        """Return when a cron expression fires next, and what it means.

        Options: `dialect`, `timezone`, `after`, `count`, `dst_gap` and `dst_fold`.

        Raises:
            Invalid: the expression is refused; its `problem` names the field at fault.
        """
        return self._run(self._talks.cron_preview(expr, options))

    def handlers(self, *, page_size: int = PAGE_SIZE) -> Iterator[OfferedHandler]:
        """Iterate over the handlers that live workers offer, by name."""
        return self._items(self._talks.handlers(page_size))

    def workers(self, *, page_size: int = PAGE_SIZE) -> Iterator[Worker]:
        """Iterate over the workers and their load."""
        return self._items(self._talks.workers(page_size))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _items(self, pages: Pages[Item]) -> Iterator[Item]:
        cursor = None
        while True:
            page = self._run(pages(cursor))
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return

    def _run(self, talk: Talk[Value]) -> Value:
        heard: Heard = None
        while True:
            try:
                step = talk.send(heard)
            except StopIteration as end:
                return cast("Value", end.value)
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                heard = None
            else:
                try:
                    heard = self._http.send(step.request(self._http))
                except httpx.RequestError as error:
                    heard = error


class AsyncClient:
    """`Client` for asyncio: the same arguments, methods and errors, to be awaited.

    Tasks may share one. Close it with `aclose`, or use it in an `async with` statement.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        retries: Retries | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        url = _address(base_url)
        self._talks = Talks(url, retries or Retries())
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=_headers(api_key),
            timeout=timeout,
            limits=POOL,
            transport=transport,
        )

    async def submit(
        self, handler: str, params: Any = None, /, **options: Unpack[JobOptions]
    ) -> Job:
        """Store a job and return it at once: see `Client.submit`."""
        return await self._run(self._talks.submit(NewJob(handler, params, **options)))

    async def submit_many(self, jobs: Iterable[NewJob]) -> Sequence[Job | ApiError]:
        """Store many jobs: see `Client.submit_many`."""
        return await self._run(self._talks.submit_many(jobs))

    async def get(self, job: int | Job) -> Job:
        """Return the job as it is now: see `Client.get`."""
        return await self._run(self._talks.get(_id(job)))

    async def wait(
        self, job: int | Job, *, timeout: float | None = None, check: bool = False
    ) -> Job:
        """Return the job once it has ended: see `Client.wait`."""
        return await self._run(self._talks.wait(_id(job), timeout, check=check))

    def list(
        self, *, page_size: int = PAGE_SIZE, **narrowed: Unpack[JobFilter]
    ) -> AsyncIterator[Job]:
        """Iterate over jobs, newest first: see `Client.list`."""
        return self._items(self._talks.jobs(narrowed, page_size))

    def executions(self, job: int | Job, *, page_size: int = PAGE_SIZE) -> AsyncIterator[Execution]:
        """Iterate over the attempts to run a job, newest first."""
        return self._items(self._talks.executions(_id(job), page_size))

    async def cancel(self, job: int | Job) -> Job:
        """Cancel a job that has not ended: see `Client.cancel`."""
        return await self._run(self._talks.change(_id(job), "cancel"))

    async def pause(self, job: int | Job) -> Job:
        """Keep a waiting job or a schedule from running until it is resumed."""
        return await self._run(self._talks.change(_id(job), "pause"))

    async def resume(
        self, job: int | Job, *, missed: Literal["skip", "catchUp"] | None = None
    ) -> Job:
        """Let a paused job go on; `missed` says what becomes of the fires a schedule missed."""
        return await self._run(self._talks.resume(_id(job), missed))

    async def backfill(
        self,
        schedule: int | Job,
        first: datetime,
        last: datetime,
        *,
        dry_run: bool = False,
        max_concurrent: int = 1,
    ) -> Backfill:
        """Run past fires of a schedule that have no job: see `Client.backfill`."""
        return await self._run(
            self._talks.backfill(
                _id(schedule), first, last, dry_run=dry_run, max_concurrent=max_concurrent
            )
        )

    def skips(self, schedule: int | Job, *, page_size: int = PAGE_SIZE) -> AsyncIterator[Skipped]:
        """Iterate over the fires of a schedule that did not run, latest first."""
        return self._items(self._talks.skips(_id(schedule), page_size))

    async def retry(self, job: int | Job) -> Job:
        """Open a FAILED or CANCELLED job again, with all its attempts anew."""
        return await self._run(self._talks.change(_id(job), "retry"))

    async def cron_preview(self, expr: str, **options: Unpack[CronOptions]) -> CronPreview:
        """Return when a cron expression fires next: see `Client.cron_preview`."""
        return await self._run(self._talks.cron_preview(expr, options))

    def handlers(self, *, page_size: int = PAGE_SIZE) -> AsyncIterator[OfferedHandler]:
        """Iterate over the handlers that live workers offer, by name."""
        return self._items(self._talks.handlers(page_size))

    def workers(self, *, page_size: int = PAGE_SIZE) -> AsyncIterator[Worker]:
        """Iterate over the workers and their load."""
        return self._items(self._talks.workers(page_size))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _items(self, pages: Pages[Item]) -> AsyncIterator[Item]:
        cursor = None
        while True:
            page = await self._run(pages(cursor))
            for item in page.items:
                yield item
            if (cursor := page.next_cursor) is None:
                return

    async def _run(self, talk: Talk[Value]) -> Value:
        heard: Heard = None
        while True:
            try:
                step = talk.send(heard)
            except StopIteration as end:
                return cast("Value", end.value)
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                heard = None
            else:
                try:
                    heard = await self._http.send(step.request(self._http))
                except httpx.RequestError as error:
                    heard = error


def _id(job: int | Job) -> int:
    return job if isinstance(job, int) else job.job_id


def _address(given: str | None) -> str:
    url = (given or os.environ.get("ONCUE_URL") or DEFAULT_URL).rstrip("/")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        valid = False
    if not valid:
        raise ValueError(f"the address of the server must be an http or https URL, not {url!r}")
    return url


def _headers(given: str | None) -> dict[str, str]:
    key = os.environ.get("ONCUE_API_KEY") if given is None else given
    headers = {"Accept": "application/json", "User-Agent": f"oncue-python/{__version__}"}
    if key:
        if not (key.isascii() and key.isprintable()):
            raise ValueError("the API key must be printable ASCII")
        headers["Authorization"] = f"Bearer {key}"
    return headers
