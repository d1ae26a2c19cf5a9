"""How a job goes, as a stream of events: each has the whole job as it is then."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator
from typing import Final, NamedTuple

from app.access.caller import Caller
from app.edge.problems import Problem, invalid
from app.edge.sse import KEEP_ALIVE, KEEP_ALIVE_SECONDS, finished, news_or_silence, sse_event
from app.jobs.look import find_job
from app.jobs.views import job_view
from app.jobs.watch import LetsOn, Streams
from app.lifecycle.reads import JobRecord
from app.lifecycle.states import TERMINAL_JOBS, ExecutionStatus, JobStatus
from app.plumbing.database import Database, DatabaseUnavailable

_ID: Final = re.compile(r"(\d{1,9})\.([01])\.(\d{1,16})")


class Stamp(NamedTuple):
    """What of a job's state an event stands for: its moves, its run's start, its progress."""

    version: int
    started: int
    progress_at: int

    @property
    def event_id(self) -> str:
        """The stamp as an event's id."""
        return ".".join(map(str, self))


def read_stamp(last_event_id: str | None) -> Stamp | None:
    """Read the id of the last event that a reader got.

    Raises:
        Problem: `validation_failed`, it is none of ours.
    """
    if not last_event_id:
        return None
    found = _ID.fullmatch(last_event_id) if last_event_id.isascii() else None
    if found is None:
        raise invalid("send the id of an event of this stream, unchanged", "/Last-Event-ID")
    return Stamp(*map(int, found.groups()))


def stamp_of(record: JobRecord) -> Stamp:
    """Return the stamp of a job as it is.

    Its executions are read after it: a newer one than the job's own belongs to its next state.
    """
    own = record.job["execution_id"]
    run = next((one for one in record.executions if one["execution_id"] == own), None)
    started = run is not None and run["status"] != ExecutionStatus.CLAIMED
    return Stamp(record.job["version"], int(started), (run["progress_at"] or 0) if run else 0)


def event_name(before: Stamp | None, now: Stamp, record: JobRecord) -> str:
    """Name what happened last; what happened in between may have no event of its own."""
    status = JobStatus(record.job["status"])
    if status in TERMINAL_JOBS:
        return "ended"
    if status is JobStatus.WAITING:
        return "retrying" if record.executions else "waiting"
    if status is not JobStatus.RUNNING:
        return status.name.lower()
    if now.progress_at and (before is None or before.progress_at != now.progress_at):
        return "progress"
    return "started" if now.started else "claimed"


def is_seen_to_the_end(seen: Stamp | None, record: JobRecord) -> bool:
    """Tell whether a reader has got the last event already: it need not come again."""
    ended = record.job["status"] in TERMINAL_JOBS
    return ended and seen is not None and seen.version == record.job["version"]


async def follow_job(
    database: Database,
    streams: Streams,
    caller: Caller,
    job_id: int,
    *,
    seen: Stamp | None,
    lets_on: LetsOn,
) -> AsyncGenerator[bytes, None]:
    """Yield an event for each state that is seen to differ from the one before, up to the end.

    The stream ends without `ended` when this process is about to, or the reader may read no more;
    one that comes back gets the state then, if it differs from the one it has seen. Make sure that
    the job is there.
    """
    with streams.jobs.waiting(job_id) as news:
        silent_since = time.monotonic()
        while not streams.closed and await lets_on():
            news.clear()
            try:
                record = await finished(_look(database, caller, job_id))
            except Problem:
                return  # retention has taken the job meanwhile
            now = seen if record is None else stamp_of(record)
            if record is not None and now is not None and now != seen:
                name, seen = event_name(seen, now, record), now
                yield sse_event(name, job_view(record), event_id=now.event_id)
                silent_since = time.monotonic()
                if name == "ended":
                    return
            left = silent_since + KEEP_ALIVE_SECONDS - time.monotonic()
            if not await news_or_silence(news, left):
                silent_since = time.monotonic()
                yield KEEP_ALIVE


async def _look(database: Database, caller: Caller, job_id: int) -> JobRecord | None:
    try:
        return await find_job(database, caller, job_id)
    except DatabaseUnavailable:
        return None
