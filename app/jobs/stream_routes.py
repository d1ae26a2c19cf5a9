"""The routes of callers that tell what runs say and how jobs go, as pages and as streams."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from app.access.caller import Caller
from app.access.keys import Gate
from app.edge.problems import problem_answers
from app.edge.sse import EventStream, sse_content, wants_stream
from app.jobs.answers import Cursor, JobId, Limit, json_answer
from app.jobs.documents import LogPage
from app.jobs.events import follow_job, is_seen_to_the_end, read_stamp
from app.jobs.logs import LINES_AT_ONCE, follow_lines, last_seq, list_lines, require_execution
from app.jobs.look import find_job
from app.jobs.watch import Streams
from app.plumbing.database import Database

ExecutionId = Annotated[
    str,
    Path(
        min_length=1,
        max_length=64,
        alias="executionId",
        description="The `executionId` of one of a job's `executions`.",
    ),
]
LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", description="Goes on behind this event of an earlier stream."),
]


def stream_routes(*, database: Database, keys: Gate, streams: Streams) -> APIRouter:
    """Return the routes, bound to the parts that serve them."""
    router = APIRouter(prefix="/openapi", tags=["jobs"])

    async def identify(request: Request) -> Caller:
        return await keys.caller(request)

    Identified = Annotated[Caller, Depends(identify)]  # noqa: N806 - a type

    @router.get(
        "/executions/{executionId}/logs",
        response_model=LogPage,
        summary="Read an execution's log",
        responses={
            200: {
                "description": "A page of lines, oldest first, or a stream of them",
                "content": sse_content(),
            },
            **problem_answers(
                "unauthorized", "execution_not_found", "validation_failed", "too_many_streams"
            ),
        },
    )
    async def get_execution_logs(
        *,
        request: Request,
        execution_id: ExecutionId,
        caller: Identified,
        follow: Annotated[
            bool, Query(description="Stream the lines, as with `Accept: text/event-stream`.")
        ] = False,
        limit: Limit = LINES_AT_ONCE,
        cursor: Cursor = None,
        last_event_id: LastEventId = None,
    ) -> Response:
        """Return what a run said, oldest line first; or follow it.

        As server-sent events each line is an event `line` whose id is its `seq`: with
        `Last-Event-ID` a stream goes on exactly behind it. `end` follows when the run has ended
        and its last lines are there.
        """
        if not (follow or wants_stream(request)):
            return json_answer(
                await list_lines(database, caller, execution_id, limit=limit, cursor=cursor)
            )
        after = last_seq(last_event_id)
        await require_execution(database, caller, execution_id)
        streams.admit()
        lets_on = partial(keys.lets_on, request, caller)
        lines = follow_lines(database, streams, caller, execution_id, after=after, lets_on=lets_on)
        return EventStream(lines, closed=streams.leave)

    @router.get(
        "/jobs/{jobId}/events",
        response_class=Response,
        summary="Follow a job",
        responses={
            200: {
                "description": "waiting, claimed, started, progress, retrying, paused, blocked, "
                "scheduled, and ended: each event's data is the job",
                "content": sse_content(),
            },
            204: {"description": "The event `ended` was the last one that the reader got"},
            **problem_answers(
                "unauthorized", "job_not_found", "validation_failed", "too_many_streams"
            ),
        },
    )
    async def get_job_events(
        request: Request, job_id: JobId, caller: Identified, last_event_id: LastEventId = None
    ) -> Response:
        """Return server-sent events about a job, each with the job as it is then, to its end.

        States that follow each other quickly may be told by one event; the last is always told.
        With `Last-Event-ID` the first event comes when the job differs from what that one told.
        """
        seen = read_stamp(last_event_id)
        record = await find_job(database, caller, job_id)
        if is_seen_to_the_end(seen, record):
            return Response(status_code=204)
        streams.admit()
        lets_on = partial(keys.lets_on, request, caller)
        events = follow_job(database, streams, caller, job_id, seen=seen, lets_on=lets_on)
        return EventStream(events, closed=streams.leave)

    return router
