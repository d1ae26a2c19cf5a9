"""Lists of jobs for callers: which filters go together, and where a page goes on."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.edge.paging import (
    decode_cursor,
    decode_end,
    decode_place,
    encode_cursor,
    encode_end,
    encode_place,
)
from app.edge.problems import invalid, pointer_to
from app.edge.wire import RFC3339
from app.jobs.look import no_such_job
from app.jobs.views import listed_job_view
from app.lifecycle.lists import JobFilter, JobPage, Place, list_children, list_jobs
from app.lifecycle.reads import job_exists
from app.lifecycle.states import JobStatus
from app.plumbing.database import Database
from app.plumbing.times import epoch_ms

FILTERS: Final = ("status", "handler", "namePrefix", "label", "clientRequestId")
RANGES: Final = (("createdFrom", "createdTo"), ("finishedFrom", "finishedTo"))
OFFERED: Final = tuple(
    (*one, *ends) for one in ((), *((name,) for name in FILTERS)) for ends in ((), *RANGES)
)
"""What may be sent together: a filter or none, with a range (or one end of it) or none. A test
asks for the plan of each."""
_OTHERS: Final = ("limit", "cursor")
COMBINATIONS: Final = (
    "a list takes at most one of status, handler, namePrefix, label and clientRequestId, with it "
    "one range, by createdFrom, createdTo or both, or by finishedFrom, finishedTo or both, and "
    "limit and cursor"
)


async def list_jobs_page(
    database: Database,
    caller: Caller,
    query: Mapping[str, list[str]],
    *,
    limit: int,
    cursor: str | None,
) -> dict[str, Any]:
    """Return a page of jobs, newest first; with a range of finishing, the latest finished first.

    Raises:
        Problem: `validation_failed`.
    """
    wanted = filter_of(query)
    before: Place | None = decode_end(cursor) if wanted.by_finish else decode_cursor(cursor)
    page = await database.read(
        lambda connection: list_jobs(
            connection,
            database,
            tenant_id=caller.tenant_id,
            wanted=wanted,
            before=before,
            limit=limit,
        )
    )
    return {
        "items": _items(page),
        "nextCursor": _cursor(page.before),
    }


async def list_children_page(
    database: Database, caller: Caller, job_id: int, *, limit: int, cursor: str | None
) -> dict[str, Any]:
    """Return a page of the jobs that a schedule or group made, latest first.

    Raises:
        Problem: `job_not_found`, or `validation_failed` for a foreign cursor.
    """
    before = decode_place(cursor)

    async def read(connection: AsyncConnection) -> dict[str, Any]:
        if not await job_exists(connection, job_id, tenant_id=caller.tenant_id):
            raise no_such_job(job_id)
        page, onward = await list_children(
            connection, job_id, tenant_id=caller.tenant_id, before=before, limit=limit
        )
        return {
            "items": _items(page),
            "nextCursor": None if onward is None else encode_place(*onward),
        }

    return await database.read(read)


def _cursor(place: Place | None) -> str | None:
    if place is None:
        return None
    return encode_end(*place) if isinstance(place, tuple) else encode_cursor(place)


def _items(page: JobPage) -> list[dict[str, Any]]:
    return [
        listed_job_view(
            job, page.results, page.long_results, page.current, page.schedules.get(job["id"])
        )
        for job in page.jobs
    ]


def filter_of(query: Mapping[str, list[str]]) -> JobFilter:
    """Read what a list is narrowed by.

    Raises:
        Problem: `validation_failed`.
    """
    asked = query.keys() - set(_OTHERS)
    if not any(asked <= set(together) for together in OFFERED):
        raise invalid(COMBINATIONS, *map(pointer_to, sorted(asked)))
    given = {name: query[name][0] for name in FILTERS if name in query}
    for name, value in given.items():
        if not 1 <= len(value) <= 256:
            raise invalid("must have 1 to 256 characters", pointer_to(name))
        if "\0" in value:
            raise invalid("must not have a NUL character", pointer_to(name))
    return JobFilter(
        status=_status(given.get("status")),
        handler=given.get("handler"),
        name_prefix=given.get("namePrefix"),
        label=_label(given.get("label")),
        client_request_id=given.get("clientRequestId"),
        created_from=moment_in(query, "createdFrom"),
        created_to=moment_in(query, "createdTo"),
        finished_from=moment_in(query, "finishedFrom"),
        finished_to=moment_in(query, "finishedTo"),
    )


def _status(word: str | None) -> JobStatus | None:
    if word is None:
        return None
    try:
        return JobStatus[word]
    except KeyError:
        words = ", ".join(status.name for status in JobStatus)
        raise invalid(f"must be one of {words}", "/status") from None


def _label(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise invalid("must be name=value", "/label")
    return name, value


def moment_in(query: Mapping[str, list[str]], name: str) -> int | None:
    """Read a time of a query, epoch ms, if it is there.

    Raises:
        Problem: `validation_failed`.
    """
    if name not in query:
        return None
    # In a URL a plus sign that was not escaped arrives as a space.
    text = query[name][0].replace(" ", "+") if "T" in query[name][0] else query[name][0]
    try:
        if not RFC3339.fullmatch(text):
            raise ValueError(text)
        moment = datetime.fromisoformat(text)
        if not 1970 <= moment.astimezone(UTC).year <= 2200:
            raise ValueError(text)
    except (ValueError, OverflowError):
        raise invalid(
            "must be RFC 3339 text with an offset, as 2026-01-31T09:00:00Z", pointer_to(name)
        ) from None
    return epoch_ms(moment)
