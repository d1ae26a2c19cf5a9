"""What is said to the server and how its answers are read, without sending anything.

Each conversation is a generator: it yields what to do next (`Send` a request, `Pause`) and is
told what came of it. The two clients only do what they are told.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeVar
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from oncue.errors import (
    ApiError,
    BulkTimeout,
    Invalid,
    JobFailed,
    NotFound,
    Unavailable,
    WaitTimeout,
    api_error,
)
from oncue.results import (
    Backfill,
    BulkCount,
    BulkOperation,
    Callback,
    Counts,
    CronPreview,
    EgressAllow,
    Execution,
    Explanation,
    Item,
    Job,
    LogLine,
    OfferedHandler,
    Page,
    Redelivered,
    Result,
    Skipped,
    WebhookSecrets,
    Worker,
    given_moment,
)
from oncue.retries import Retries
from oncue.submission import (
    CronOptions,
    JobChanges,
    JobFilter,
    NewJob,
    TriggerOptions,
    changes_body,
    cron_query_of,
    json_body,
    query_of,
)

TRANSIENT: Final = frozenset({429, 502, 503, 504})
SURELY_NOT_DONE: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
REFUSED_BEFORE_ANYTHING: Final = frozenset({"overloaded", "not_ready"})
OWN_MISTAKES: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)

POLL_SECONDS: Final = 20.0
"""How long one request of a wait lasts; proxies cut what is silent for much longer."""
SHORTEST_POLL_SECONDS: Final = 1.0
"""What every server allows, and the pause after an answer that came at once."""
MAX_BATCH_JOBS: Final = 500
MAX_BATCH_BYTES: Final = 1024 * 1024
PAGE_SIZE: Final = 100
SECRET_PATH: Final = "/openapi/webhook-secret"  # noqa: S105 - a path
EGRESS_PATH: Final = "/openapi/egress-allow"
BULK_LOOK_SECONDS: Final = 0.5
"""How often a wait for a bulk operation looks at it."""

Value = TypeVar("Value")
AnyResult = TypeVar("AnyResult", bound=Result)


@dataclass(frozen=True, slots=True)
class Send:
    """Send this request, and tell the response or the error.

    `seconds` is how long the server may stay silent on purpose. One that is not `repeatable` is
    sent again only when the try before surely had no effect. `if_match` is a job's revision.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    seconds: float = 0.0
    repeatable: bool = True
    if_match: int | None = None

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Build it with the address, headers and timeouts of a client."""
        timeout = http.timeout
        return http.build_request(
            self.method,
            self.path,
            params=dict(self.query) or None,
            content=self.body,
            headers=self._headers(),
            timeout=httpx.Timeout(
                connect=timeout.connect,
                read=None if timeout.read is None else timeout.read + self.seconds,
                write=timeout.write,
                pool=timeout.pool,
            ),
        )

    def _headers(self) -> dict[str, str]:
        headers = {} if self.body is None else {"Content-Type": "application/json"}
        if self.if_match is not None:
            headers["If-Match"] = f'"{self.if_match}"'
        return headers


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for so many seconds."""

    seconds: float


Heard = httpx.Response | httpx.RequestError | None
Talk = Generator[Send | Pause, Heard, Value]
Pages = Callable[[str | None], Talk[Page[Item]]]
"""The conversation about one page of a list, given the cursor of the page before."""


class Talks:
    """All conversations with one server, which `url` names in messages."""

    def __init__(
        self,
        url: str,
        retries: Retries,
        *,
        clock: Callable[[], float] = time.monotonic,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._url = url
        self._retries = retries
        self._clock = clock
        self._dice = dice

    def submit(self, job: NewJob) -> Talk[Job]:
        """Submit one job; its request id is the same in every try."""
        request = Send("POST", "/openapi/jobs", body=job.body())
        return _read(Job, (yield from self._exchange(request, request_id=job.request_id)))

    def submit_many(self, jobs: Iterable[NewJob]) -> Talk[Sequence[Job | ApiError]]:
        """Submit jobs in as few requests as are allowed; one outcome a job, in order."""
        outcomes: list[Job | ApiError] = []
        for bodies in _batches(job.body() for job in jobs):
            outcomes += yield from self._submit_batch(bodies)
        return outcomes

    def _submit_batch(self, bodies: Sequence[bytes]) -> Talk[list[Job | ApiError]]:
        outcomes: dict[int, Job | ApiError] = {}
        open_ones = list(range(len(bodies)))
        began, tried = self._clock(), 0
        while True:
            tried += 1
            body = b'{"jobs":[' + b",".join(bodies[number] for number in open_ones) + b"]}"
            answer = yield from self._exchange(Send("POST", "/openapi/jobs/batch", body=body))
            outcomes |= zip(open_ones, _read_batch(answer, len(open_ones)), strict=True)
            open_ones = [number for number in open_ones if _is_transient(outcomes[number])]
            pause = self._retries.pause(tried, jitter=self._dice())
            if (
                not open_ones
                or tried >= self._retries.attempts
                or self._clock() + pause > began + self._retries.seconds
            ):
                return [outcomes[number] for number in range(len(bodies))]
            yield Pause(pause)

    def get(self, job_id: int) -> Talk[Job]:
        """Look at a job."""
        return _read(Job, (yield from self._exchange(Send("GET", _job_path(job_id)))))

    def find(self, request_id: str) -> Talk[Job | None]:
        """Look at the job of a request: a list finds its id, and then it is read whole."""
        query = {"clientRequestId": request_id, "limit": "1"}
        answer = yield from self._exchange(Send("GET", "/openapi/jobs", query=query))
        page = _read(Page[Job], answer)
        if not page.items:
            return None
        try:
            return (yield from self.get(page.items[0].job_id))
        except NotFound:
            return None  # its retention ended meanwhile

    def explain(self, job_id: int) -> Talk[Explanation]:
        """Ask why a job is where it is."""
        path = f"{_job_path(job_id)}/explain"
        return _read(Explanation, (yield from self._exchange(Send("GET", path))))

    def wait(self, job_id: int, timeout: float | None, *, check: bool) -> Talk[Job]:
        """Ask again and again until the job has ended."""
        deadline = math.inf if timeout is None else self._clock() + timeout
        longest = POLL_SECONDS
        while True:
            began = self._clock()
            seconds = max(0.0, min(longest, deadline - began))
            request = Send(
                "GET", _job_path(job_id), query={"wait": f"{seconds:.3f}"}, seconds=seconds
            )
            try:
                answer = yield from self._exchange(request, deadline=deadline)
            except Invalid:
                if longest == SHORTEST_POLL_SECONDS:
                    raise
                longest = SHORTEST_POLL_SECONDS  # this server allows no longer waits
                continue
            job = _read(Job, answer)
            if job.ended:
                if check and not job.succeeded:
                    raise JobFailed(job)
                return job
            now = self._clock()
            if now >= deadline:
                raise WaitTimeout(job, timeout or 0.0)
            # A server that is about to stop answers at once: that must not become a busy loop.
            if (early := SHORTEST_POLL_SECONDS - (now - began)) > 0:
                yield Pause(min(early, deadline - now))

    def jobs(self, narrowed: JobFilter, limit: int) -> Pages[Job]:
        """The pages of the jobs, newest first."""
        return self._pages(Page[Job], "/openapi/jobs", limit, query_of(narrowed))

    def executions(self, job_id: int, limit: int) -> Pages[Execution]:
        """The pages of a job's executions, newest first."""
        return self._pages(Page[Execution], f"{_job_path(job_id)}/executions", limit)

    def children(self, job_id: int, limit: int) -> Pages[Job]:
        """The pages of the jobs that a schedule or a group made, latest first."""
        return self._pages(Page[Job], f"{_job_path(job_id)}/children", limit)

    def callbacks(self, job_id: int, limit: int) -> Pages[Callback]:
        """The pages of a job's callbacks, newest first."""
        return self._pages(Page[Callback], f"{_job_path(job_id)}/callbacks", limit)

    def redeliver(self, delivery_id: str) -> Talk[Callback]:
        """Make a callback due now; to ask twice is to ask once."""
        path = f"/openapi/callbacks/{quote(delivery_id, safe='')}/redeliver"
        return _read(Callback, (yield from self._exchange(Send("POST", path))))

    def redeliver_failed(self, job_id: int) -> Talk[Redelivered]:
        """Make the callbacks of a job that have failed due now."""
        request = Send("POST", f"{_job_path(job_id)}/callbacks/redeliver")
        return _read(Redelivered, (yield from self._exchange(request)))

    def webhook_secret(self) -> Talk[WebhookSecrets]:
        """Look at what signs callbacks."""
        return _read(WebhookSecrets, (yield from self._exchange(Send("GET", SECRET_PATH))))

    def set_webhook_secret(self, fields: Mapping[str, Any]) -> Talk[WebhookSecrets]:
        """Let one secret alone sign; what is drawn twice is that of the last answer."""
        request = Send("PUT", SECRET_PATH, body=json_body(_given(fields)))
        return _read(WebhookSecrets, (yield from self._exchange(request)))

    def rotate_webhook_secret(self, fields: Mapping[str, Any]) -> Talk[WebhookSecrets]:
        """Add a secret; a second time would end the overlap of the one before."""
        request = Send(
            "POST", f"{SECRET_PATH}/rotate", body=json_body(_given(fields)), repeatable=False
        )
        return _read(WebhookSecrets, (yield from self._exchange(request)))

    def forget_webhook_secret(self) -> Talk[WebhookSecrets]:
        """Let the operator's secret alone sign."""
        return _read(WebhookSecrets, (yield from self._exchange(Send("DELETE", SECRET_PATH))))

    def egress_allow(self) -> Talk[EgressAllow]:
        """Look at the networks that callbacks may reach."""
        return _read(EgressAllow, (yield from self._exchange(Send("GET", EGRESS_PATH))))

    def set_egress_allow(self, networks: Sequence[str] | None) -> Talk[EgressAllow]:
        """Set the networks that callbacks may reach."""
        body = json_body({"networks": None if networks is None else list(networks)})
        return _read(EgressAllow, (yield from self._exchange(Send("PUT", EGRESS_PATH, body=body))))

    def lines(self, execution_id: str, limit: int) -> Pages[LogLine]:
        """The pages of an execution's lines, oldest first."""
        return self._pages(Page[LogLine], logs_path(execution_id), limit)

    def workers(self, limit: int) -> Pages[Worker]:
        """The pages of the workers."""
        return self._pages(Page[Worker], "/openapi/workers", limit)

    def handlers(self, limit: int) -> Pages[OfferedHandler]:
        """The pages of the handlers, by name."""
        return self._pages(Page[OfferedHandler], "/openapi/handlers", limit)

    def counts(self, up_to: int | None) -> Talk[Counts]:
        """Count jobs by state."""
        query = {} if up_to is None else {"upTo": str(up_to)}
        request = Send("GET", "/openapi/counts", query=query)
        return _read(Counts, (yield from self._exchange(request)))

    def cron_preview(self, expr: str, options: CronOptions) -> Talk[CronPreview]:
        """Look at a cron expression."""
        request = Send("GET", "/openapi/cron/preview", query=cron_query_of(expr, options))
        return _read(CronPreview, (yield from self._exchange(request)))

    def cancel(self, job_id: int, *, children: bool) -> Talk[Job]:
        """Cancel a job, and what a schedule has made; to do so twice is to do so once."""
        query = {"children": "true"} if children else {}
        request = Send("POST", f"{_job_path(job_id)}/cancel", query=query)
        return _read(Job, (yield from self._exchange(request)))

    def change(self, job_id: int, verb: str) -> Talk[Job]:
        """Pause, resume or retry a job.

        They are repeated only when the try before surely had no effect: a second one would be
        refused, or undo what came between.
        """
        request = Send("POST", f"{_job_path(job_id)}/{verb}", repeatable=False)
        return _read(Job, (yield from self._exchange(request)))

    def resume(self, job_id: int, missed: str | None) -> Talk[Job]:
        """Let a paused job go on; for a schedule, say what becomes of the fires it missed."""
        if missed is None:
            return (yield from self.change(job_id, "resume"))
        body = json_body({"missed": missed})
        request = Send("POST", f"{_job_path(job_id)}/resume", body=body, repeatable=False)
        return _read(Job, (yield from self._exchange(request)))

    def backfill(
        self, job_id: int, first: datetime, last: datetime, *, dry_run: bool, max_concurrent: int
    ) -> Talk[Backfill]:
        """Have past fires run; a second try of it would find them done, or on their way."""
        asked = {
            "from": given_moment("first", first),
            "to": given_moment("last", last),
            "dryRun": dry_run,
            "maxConcurrent": max_concurrent,
        }
        path = f"{_job_path(job_id)}/backfill"
        request = Send("POST", path, body=json_body(asked), repeatable=dry_run)
        return _read(Backfill, (yield from self._exchange(request)))

    def skips(self, job_id: int, limit: int) -> Pages[Skipped]:
        """The pages of the fires of a schedule that did not run, latest first."""
        return self._pages(Page[Skipped], f"{_job_path(job_id)}/skips", limit)

    def trigger(self, job_id: int, options: TriggerOptions) -> Talk[Job]:
        """Make a waiting job due now.

        It is repeated like a verb: the job may have begun, and wait for its retry, in between. A
        `request_id` names the job that a schedule makes, so that any repeat is that job.
        """
        if unknown := options.keys() - TriggerOptions.__annotations__.keys():
            raise TypeError(f"trigger() has no option {min(unknown)!r}")
        asked = {"params": options["params"]} if "params" in options else {}
        if "request_id" in options:
            asked["clientRequestId"] = options["request_id"]
        request = Send(
            "POST",
            f"{_job_path(job_id)}/trigger",
            body=json_body(asked) if asked else None,
            if_match=options.get("revision"),
            repeatable="request_id" in options,
        )
        return _read(Job, (yield from self._exchange(request)))

    def revise(self, job_id: int, revision: int, changes: JobChanges) -> Talk[Job]:
        """Change a waiting job that still has this revision.

        A repeat of one that was done would be refused for its revision, so there is none.
        """
        request = Send(
            "PATCH",
            _job_path(job_id),
            body=changes_body(changes),
            if_match=revision,
            repeatable=False,
        )
        return _read(Job, (yield from self._exchange(request)))

    def bulk(self, body: bytes, request_id: str) -> Talk[BulkOperation]:
        """Ask for a bulk operation; its request id is the same in every try."""
        request = Send("POST", "/openapi/bulk", body=body)
        return _read(BulkOperation, (yield from self._exchange(request, request_id=request_id)))

    def bulk_count(self, body: bytes) -> Talk[BulkCount]:
        """Count what a bulk action would change."""
        return _read(
            BulkCount, (yield from self._exchange(Send("POST", "/openapi/bulk", body=body)))
        )

    def bulk_operation(self, operation_id: str) -> Talk[BulkOperation]:
        """Look at a bulk operation."""
        request = Send("GET", _bulk_path(operation_id))
        return _read(BulkOperation, (yield from self._exchange(request)))

    def bulk_operations(self, limit: int) -> Pages[BulkOperation]:
        """The pages of the bulk operations, newest first."""
        return self._pages(Page[BulkOperation], "/openapi/bulk", limit)

    def cancel_bulk(self, operation_id: str) -> Talk[BulkOperation]:
        """End a bulk operation; to do so twice is to do so once."""
        request = Send("POST", f"{_bulk_path(operation_id)}/cancel")
        return _read(BulkOperation, (yield from self._exchange(request)))

    def wait_bulk(
        self,
        operation_id: str,
        timeout: float | None,
        progress: Callable[[BulkOperation], object] | None,
    ) -> Talk[BulkOperation]:
        """Look again and again until the operation has ended."""
        deadline = math.inf if timeout is None else self._clock() + timeout
        while True:
            operation = yield from self.bulk_operation(operation_id)
            if progress is not None:
                progress(operation)
            if operation.ended:
                return operation
            left = deadline - self._clock()
            if left <= 0:
                raise BulkTimeout(operation, timeout or 0.0)
            yield Pause(min(BULK_LOOK_SECONDS, left))

    def ask(self, kind: type[AnyResult], request: Send) -> Talk[AnyResult]:
        """Send one request and read its answer."""
        return _read(kind, (yield from self._exchange(request)))

    def listed(
        self, kind: type[Page[Item]], path: str, limit: int, query: Mapping[str, str]
    ) -> Pages[Item]:
        """The pages of a list at this path."""
        return self._pages(kind, path, limit, query)

    def _pages(
        self,
        kind: type[Page[Item]],
        path: str,
        limit: int,
        query: Mapping[str, str] | None = None,
    ) -> Pages[Item]:
        def page(cursor: str | None) -> Talk[Page[Item]]:
            asked = {**(query or {}), "limit": str(limit)}
            if cursor is not None:
                asked["cursor"] = cursor
            return _read(kind, (yield from self._exchange(Send("GET", path, query=asked))))

        return page

    def _exchange(
        self, request: Send, *, request_id: str | None = None, deadline: float = math.inf
    ) -> Talk[Any]:
        """Send, and send again while that may help; return the JSON of the answer.

        Raises:
            ApiError: the server refused.
            Unavailable: no usable answer came in time.
        """
        # A long poll may be silent for its own time before it needs another try.
        give_up_at = min(deadline, self._clock() + request.seconds + self._retries.seconds)
        tried = 0
        while True:
            tried += 1
            heard = yield request
            assert heard is not None, "a request was answered by a pause"
            if isinstance(heard, httpx.Response) and heard.status_code not in TRANSIENT:
                return _json_of(heard)
            pause = self._retries.pause(tried, retry_after=_retry_after(heard), jitter=self._dice())
            if (
                tried >= self._retries.attempts
                or self._clock() + pause > give_up_at
                or isinstance(heard, OWN_MISTAKES)
                or not (request.repeatable or _had_no_effect(heard))
            ):
                raise self._gave_up(request, heard, tried, request_id)
            yield Pause(pause)
            if "wait" in request.query:
                request = self._for_the_rest(request, deadline)

    def _for_the_rest(self, poll: Send, deadline: float) -> Send:
        """Return a long poll that does not last beyond the deadline of whoever waits."""
        seconds = max(0.0, min(poll.seconds, deadline - self._clock()))
        return replace(poll, seconds=seconds, query={**poll.query, "wait": f"{seconds:.3f}"})

    def _gave_up(
        self,
        request: Send,
        heard: httpx.Response | httpx.RequestError,
        tried: int,
        request_id: str | None,
    ) -> Unavailable:
        tries = "" if tried == 1 else f", tried {tried} times"
        doubt = "" if request.repeatable else "; look at the job: it may have been done"
        if isinstance(heard, httpx.Response):
            last = _refusal(heard)
            return Unavailable(
                f"{self._url} has no answer now: {last}{tries}{doubt}",
                request_id=request_id,
                last=last,
            )
        why = str(heard) or type(heard).__name__
        if _had_no_effect(heard):
            doubt = ""
        error = Unavailable(
            f"{self._url} cannot be reached: {why}{tries}{doubt}", request_id=request_id
        )
        error.__cause__ = heard
        return error


def _job_path(job_id: int) -> str:
    return f"/openapi/jobs/{quote(str(job_id), safe='')}"


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _bulk_path(operation_id: str) -> str:
    return f"/openapi/bulk/{quote(operation_id, safe='')}"


def logs_path(execution_id: str) -> str:
    """Where the lines of an execution are."""
    return f"/openapi/executions/{quote(execution_id, safe='')}/logs"


def events_path(job_id: int) -> str:
    """Where the events of a job are."""
    return f"{_job_path(job_id)}/events"


def _batches(bodies: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for body in bodies:
        if batch and (len(batch) == MAX_BATCH_JOBS or size + len(body) > MAX_BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(body)
        size += len(body) + 1
    if batch:
        yield batch


def _read_batch(answer: Any, expected: int) -> list[Job | ApiError]:
    items = answer.get("items") if isinstance(answer, dict) else None
    if not isinstance(items, list) or len(items) != expected:
        raise _unexpected(200, "one outcome a job was expected")
    return [_read_item(item) for item in items]


def _read_item(item: Any) -> Job | ApiError:
    status = item.get("httpStatus") if isinstance(item, dict) else None
    if not isinstance(status, int):
        raise _unexpected(200, "an outcome has no httpStatus")
    return _read(Job, item) if status < 300 else api_error(status, item)


def _is_transient(outcome: Job | ApiError) -> bool:
    return isinstance(outcome, ApiError) and outcome.status in TRANSIENT


def _had_no_effect(heard: httpx.Response | httpx.RequestError) -> bool:
    """Whether the request surely was not carried out, so that it may be sent again."""
    if isinstance(heard, httpx.Response):
        return heard.status_code == 429 or _refusal(heard).code in REFUSED_BEFORE_ANYTHING
    return isinstance(heard, SURELY_NOT_DONE)


def _json_of(response: httpx.Response) -> Any:
    if not response.is_success:
        raise _refusal(response)
    try:
        return response.json()
    except ValueError:
        raise _unexpected(response.status_code, "the answer is not JSON") from None


def _refusal(response: httpx.Response) -> ApiError:
    try:
        problem = response.json()
    except ValueError:
        problem = None
    return api_error(response.status_code, problem)


def _read(kind: type[AnyResult], document: Any) -> AnyResult:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _unexpected(200, f"{where}: {first['msg']}") from None


def _unexpected(status: int, why: str) -> ApiError:
    return ApiError("unexpected_answer", status, f"this is not the answer of an Oncue API: {why}")


def _retry_after(heard: httpx.Response | httpx.RequestError) -> float:
    """Seconds that the server asks to wait: RFC 9110, a number or a date."""
    text = heard.headers.get("Retry-After", "") if isinstance(heard, httpx.Response) else ""
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
