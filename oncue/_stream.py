"""Streams of events: how they are read, and how a reader goes on after a lost connection.

`Resume` says what to send and how long to pause; the two clients do what they are told.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from oncue._talk import (
    TRANSIENT,
    _read,
    _refusal,
    _retry_after,
    _unexpected,
    events_path,
    logs_path,
)
from oncue.errors import Unavailable
from oncue.results import Execution, Job, JobEvent, LogLine
from oncue.retries import Retries

SILENCE_SECONDS: Final = 45.0
"""A server says that it is there every 15 s: silence for so long is a lost connection."""
STEADY_SECONDS: Final = 5.0
"""A connection that lasted so long was a good one, whatever came through it."""
LONGEST_LINE_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; `data` is its JSON."""

    event_id: str
    name: str
    data: Any


class EventReader:
    """Cuts bytes into events; an event that did not arrive whole is not told."""

    def __init__(self) -> None:
        self._rest = b""
        self._fields: dict[str, str] = {}

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events that are whole now.

        Raises:
            ApiError: this is not the answer of an Oncue API.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            raise _unexpected(200, "a line of the stream does not end")
        for line in lines:
            text = line.removesuffix(b"\r").decode(errors="replace")
            if not text:
                if self._fields.get("data"):
                    yield self._event()
                self._fields = {}
            elif not text.startswith(":"):
                name, _, value = text.partition(":")
                self._fields[name] = value.removeprefix(" ")

    def _event(self) -> Event:
        fields = self._fields
        try:
            data = json.loads(fields["data"])
        except ValueError:
            raise _unexpected(200, "the data of an event is not JSON") from None
        return Event(fields.get("id", ""), fields.get("event", "message"), data)


@dataclass(slots=True)
class Resume:
    """One stream that is read across connections: where it stands, and how often it failed."""

    path: str
    url: str
    retries: Retries
    query: Mapping[str, str] = field(default_factory=dict)
    last_id: str | None = None
    clock: Callable[[], float] = time.monotonic
    dice: Callable[[], float] = random.random
    _tried: int = 0
    _failing_since: float | None = None
    _opened_at: float | None = None

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Build the request that goes on behind the last event."""
        headers = {"Accept": "text/event-stream"}
        if self.last_id:
            headers["Last-Event-ID"] = self.last_id
        timeout = http.timeout
        return http.build_request(
            "GET",
            self.path,
            params=dict(self.query) or None,
            headers=headers,
            timeout=httpx.Timeout(
                connect=timeout.connect,
                read=SILENCE_SECONDS,
                write=timeout.write,
                pool=timeout.pool,
            ),
        )

    def opened(self, response: httpx.Response) -> None:
        """Note that a connection is open.

        Raises:
            ApiError: it is no stream of events.
        """
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise _unexpected(
                response.status_code, f"a stream of events was expected, not {kind!r}"
            )
        self._opened_at = self.clock()

    def took(self, event: Event) -> None:
        """Note an event: a new connection goes on behind it."""
        self.last_id = event.event_id or self.last_id
        self._tried, self._failing_since = 0, None

    def pause_after(self, heard: httpx.Response | httpx.RequestError | None) -> float:
        """Seconds to pause before the next connection; None heard: the stream was cut.

        Raises:
            ApiError: the server refused.
            Unavailable: it failed too often, or for too long, without an event in between.
        """
        if isinstance(heard, httpx.Response) and heard.status_code not in TRANSIENT:
            raise _refusal(heard)
        now = self.clock()
        if self._opened_at is not None and now - self._opened_at > STEADY_SECONDS:
            self._tried, self._failing_since = 0, None
        self._opened_at = None
        self._tried += 1
        if self._failing_since is None:
            self._failing_since = now
        asked = 0.0 if heard is None else _retry_after(heard)
        pause = self.retries.pause(self._tried, retry_after=asked, jitter=self.dice())
        out_of_time = now + pause > self._failing_since + self.retries.seconds
        if self._tried >= self.retries.attempts or out_of_time:
            why = "the stream is cut off again and again"
            if isinstance(heard, httpx.Response):
                why = str(_refusal(heard))
            elif heard is not None:
                why = str(heard) or type(heard).__name__
            raise Unavailable(f"{self.url} cannot be followed: {why}, tried {self._tried} times")
        return pause


def lines_of(execution_id: str, url: str, retries: Retries) -> Resume:
    """The stream of an execution's lines."""
    return Resume(logs_path(execution_id), url, retries)


def events_of(job_id: int, url: str, retries: Retries, after: str | None) -> Resume:
    """The stream of a job's events, behind the one with the id `after`."""
    return Resume(events_path(job_id), url, retries, last_id=after)


def read_line(event: Event) -> LogLine | None:
    """Return the line that an event has, None for the end; others are of a newer server."""
    return _read(LogLine, event.data) if event.name == "line" else None


def read_job_event(event: Event) -> JobEvent:
    """Return what happened to a job."""
    job = _read(Job, event.data)
    return JobEvent(event_id=event.event_id, name=event.name, job=job)


class Attempts:
    """Which attempts of a job are to be followed: from the newest the caller knew of, to the last.

    `job` is as the caller knew it. Where it showed no attempt, that is from the first.
    """

    def __init__(self, job: Job) -> None:
        self._last = job.executions[1].execution_id if len(job.executions) > 1 else None

    def is_new(self, execution: Execution) -> bool:
        """Whether it began after the last one that was taken; so those before it in a list."""
        return execution.execution_id != self._last

    def take(self, newest_first: Sequence[Execution]) -> Sequence[Execution]:
        """Return new ones in the order in which they began, and count them as taken."""
        if newest_first:
            self._last = newest_first[0].execution_id
        return newest_first[::-1]

    def is_news(self, job: Job) -> bool:
        """Whether there is an attempt to follow, or nothing more to wait for."""
        return job.ended or any(self.is_new(one) for one in job.executions[:1])


def as_known(of: int | Job) -> Job | None:
    """Return the job if it tells which attempts its caller knew of; one from a list does not."""
    return of if isinstance(of, Job) and (of.executions or of.attempt == 0) else None
