"""The route that previews a cron expression."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BeforeValidator, Field

from app.access.caller import Caller
from app.access.keys import Gate
from app.edge.problems import Problem, problem_answers
from app.edge.wire import Wire
from app.plumbing.times import epoch_ms, read_moment, rfc3339
from app.schedules.cron import ClockChange, DstFold, DstGap
from app.schedules.grammar import CronError, Dialect
from app.schedules.preview import DEFAULT_COUNT, MAX_COUNT, Preview, preview
from app.schedules.preview import Fire as PreviewedFire
from app.schedules.zone import UnknownZone

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
MOMENT = "must be RFC 3339 with an offset, of the years 1970 to 2200, as 2026-03-07T12:00:00Z"


def _moment(value: object) -> datetime:
    text = str(value).upper()
    # In a URL a plus sign that was not escaped arrives as a space.
    try:
        return read_moment(text.replace(" ", "+") if "T" in text else text)
    except ValueError:
        raise ValueError(MOMENT) from None


class PreviewQuery(Wire):
    """What to look at."""

    expr: str = Field(max_length=1024, description="The expression, up to 128 characters.")
    dialect: Dialect | None = Field(
        None,
        description="Left out: 5 fields are unix, 7 are quartz; 6 are quartz with a mark that "
        "only Quartz has (`?`, `L`, `#`, `15W`), else unix.",
    )
    timezone: str = Field("UTC", max_length=64, description="An IANA name, as `Europe/Berlin`.")
    after: Annotated[datetime, BeforeValidator(_moment)] | None = Field(
        None, description="Fires strictly after this; now if left out. RFC 3339."
    )
    count: int = Field(DEFAULT_COUNT, ge=1, le=MAX_COUNT, description="How many fires.")
    dst_gap: DstGap = Field(
        "shift", description="A fixed time that a clock change skips: run at once after it, or not."
    )
    dst_fold: DstFold = Field(
        "first", description="Which pass of a fixed time that a clock change repeats runs."
    )


class Fire(Wire):
    """A moment at which the expression fires."""

    local: str = Field(description="As the zone's clock shows it, with the offset then in force.")
    utc: Timestamp
    clock_change: ClockChange | None = Field(
        description="`shifted`: its own time was skipped by the clock; `first_pass`, "
        "`second_pass`: the clock shows this time twice."
    )


class ClockChangeAhead(Wire):
    """The zone's next clock change."""

    utc: Timestamp
    before: str = Field(description="What the clock would show at that instant, unchanged.")
    after: str = Field(description="What it does show.")
    kind: Literal["gap", "fold"] = Field(description="Times are skipped, or repeated.")
    fires: list[Fire] = Field(
        description="What the expression does there, however far ahead it is: the last fire "
        "before that instant, and the first two from it on."
    )


class CronPreview(Wire):
    """When an expression fires next, and what it means."""

    expr: str
    dialect: Dialect
    timezone: str
    description: str = Field(description="What the expression means, as a sentence.")
    follows_real_time: bool = Field(
        description="Its minute or hour is a wildcard: clock changes neither skip nor repeat a "
        "fire of it, and `dstGap` and `dstFold` do not matter."
    )
    dst_gap: DstGap
    dst_fold: DstFold
    after: Timestamp
    items: list[Fire] = Field(description="Fewer than `count` when there are no more.")
    next_clock_change: ClockChangeAhead | None


def schedule_routes(*, keys: Gate) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["schedules"])

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    # Not a coroutine: a zone seen for the first time takes some milliseconds of work.
    @router.get(
        "/cron/preview",
        response_model=CronPreview,
        summary="Preview a cron expression",
        responses=problem_answers("unauthorized", "cron_invalid"),
        dependencies=[Depends(identify)],
    )
    def preview_cron(query: Annotated[PreviewQuery, Query()]) -> Response:
        """Return the next moments at which an expression fires, in its zone and in UTC."""
        try:
            seen = preview(
                query.expr,
                after=query.after or datetime.now(UTC),
                dialect=query.dialect,
                zone=query.timezone,
                count=query.count,
                dst_gap=query.dst_gap,
                dst_fold=query.dst_fold,
            )
        except CronError as error:
            raise cron_problem(error, "/expr") from None
        except UnknownZone as error:
            raise _at("validation_failed", str(error), "/timezone") from None
        return Response(orjson.dumps(_document(seen)), media_type="application/json")

    return router


def cron_problem(error: CronError, pointer: str) -> Problem:
    """Return the problem of a refused expression: it names the field at fault."""
    place = {"field": error.field, "position": error.position, "allowed": error.allowed}
    given = {name: value for name, value in place.items() if value is not None}
    return _at("cron_invalid", str(error), pointer, **given)


def _at(code: str, detail: str, pointer: str, **extras: Any) -> Problem:
    return Problem(code, detail, errors=[{"pointer": pointer, "detail": detail}], **extras)


def _document(seen: Preview) -> dict[str, Any]:
    change = seen.next_change
    return {
        "expr": seen.cron.expression,
        "dialect": seen.cron.dialect,
        "timezone": seen.zone,
        "description": seen.description,
        "followsRealTime": seen.cron.real_time,
        "dstGap": seen.dst_gap,
        "dstFold": seen.dst_fold,
        "after": rfc3339(epoch_ms(seen.after)),
        "items": _fires(seen.fires),
        "nextClockChange": None
        if change is None
        else {
            "utc": rfc3339(epoch_ms(change.utc)),
            "before": change.before,
            "after": change.after,
            "kind": change.kind,
            "fires": _fires(change.fires),
        },
    }


def _fires(fires: Iterable[PreviewedFire]) -> list[dict[str, Any]]:
    return [
        {
            "local": fire.local,
            "utc": rfc3339(epoch_ms(fire.utc)),
            "clockChange": fire.clock_change,
        }
        for fire in fires
    ]
