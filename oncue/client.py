"""The client of the API that blocks; `oncue.async_client` has the same methods to await.

    with Client() as oncue:
        job = oncue.submit("send-invoice", {"order": 1001})
        print(oncue.wait(job, timeout=60).result)

Both find the server by ONCUE_URL and the key by ONCUE_API_KEY when they are not told. Both
repeat what failed for the moment; a submission keeps its clientRequestId, so it stays one job.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from datetime import datetime
from itertools import takewhile
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, cast

import httpx

from oncue import _access
from oncue._access import AuditFilter, KeyOptions, LimitChanges
from oncue._given import (
    DEFAULT_TIMEOUT_SECONDS,
    NOTHING_MORE,
    OPEN,
    POOL,
    address_of,
    delivery_id_of,
    headers_of,
    id_of,
    operation_id_of,
    revision_of,
)
from oncue._stream import (
    Attempts,
    Event,
    EventReader,
    Resume,
    as_known,
    events_of,
    lines_of,
    read_job_event,
    read_line,
)
from oncue._talk import PAGE_SIZE, Heard, Pages, Pause, Talk, Talks
from oncue.errors import ApiError
from oncue.results import (
    ApiKey,
    AuditEntry,
    Backfill,
    BulkCount,
    BulkOperation,
    Callback,
    Counts,
    CronPreview,
    Draining,
    EgressAllow,
    Execution,
    Explanation,
    Item,
    Job,
    JobEvent,
    LogLine,
    NewApiKey,
    OfferedHandler,
    Page,
    Skipped,
    Tenant,
    WebhookSecrets,
    Worker,
)
from oncue.retries import Retries
from oncue.submission import (
    BulkAction,
    BulkFilter,
    CronOptions,
    JobChanges,
    JobFilter,
    JobOptions,
    NewJob,
    SecretKind,
    TriggerOptions,
    bulk_body,
)

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
        url = address_of(base_url)
        self._url, self._retries = url, retries or Retries()
        self._talks = Talks(url, self._retries)
        self._http = httpx.Client(
            base_url=url,
            headers=headers_of(api_key),
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
        return self._run(self._talks.get(id_of(job)))

    def find(self, request_id: str) -> Job | None:
        """Return the job of a request (`request_id`), or None when there is none."""
        return self._run(self._talks.find(request_id))

    def explain(self, job: int | Job) -> Explanation:
        """Return why the job is not running, who ran it, and why it ended so.

        Raises:
            NotFound: there is no such job.
        """
        return self._run(self._talks.explain(id_of(job)))

    def wait(self, job: int | Job, *, timeout: float | None = None, check: bool = False) -> Job:
        """Return the job once it has ended, however it did.

        Raises:
            WaitTimeout: it had not ended after `timeout` seconds.
            JobFailed: with `check`, it ended as FAILED or CANCELLED.
            NotFound: there is no such job.
        """
        return self._run(self._talks.wait(id_of(job), timeout, check=check))

    def list(self, *, page_size: int = PAGE_SIZE, **narrowed: Unpack[JobFilter]) -> Iterator[Job]:
        """Iterate over jobs, newest first, `page_size` (up to 200) a request."""
        return self._items(self._talks.jobs(narrowed, page_size))

    def executions(self, job: int | Job, *, page_size: int = PAGE_SIZE) -> Iterator[Execution]:
        """Iterate over the attempts to run a job, newest first."""
        return self._items(self._talks.executions(id_of(job), page_size))

    def children(self, job: int | Job, *, page_size: int = PAGE_SIZE) -> Iterator[Job]:
        """Iterate over the jobs that a schedule or a group made, latest first."""
        return self._items(self._talks.children(id_of(job), page_size))

    def callbacks(self, job: int | Job, *, page_size: int = PAGE_SIZE) -> Iterator[Callback]:
        """Iterate over the callbacks that the ends of a job owe or owed, newest first."""
        return self._items(self._talks.callbacks(id_of(job), page_size))

    def redeliver(self, callback: str | Callback) -> Callback:
        """Deliver a callback (or its delivery id) again now, under the same `webhook-id`.

        Raises:
            NotFound: there is no such callback.
        """
        return self._run(self._talks.redeliver(delivery_id_of(callback)))

    def redeliver_failed(self, job: int | Job) -> int:
        """Deliver all callbacks of a job that have failed again now; return how many.

        Those that were given up, and those that wait for their next try after a failed one.

        Raises:
            NotFound: there is no such job.
        """
        return self._run(self._talks.redeliver_failed(id_of(job))).redelivered

    def webhook_secret(self) -> WebhookSecrets:
        """Return what signs the callbacks of this client's tenant, masked."""
        return self._run(self._talks.webhook_secret())

    def set_webhook_secret(
        self, secret: str | None = None, *, kind: SecretKind | None = None
    ) -> WebhookSecrets:
        """Let one secret alone sign from now on: this one, or one that is drawn and shown once.

        Raises:
            Invalid: the secret cannot be used, or the server keeps no secrets.
        """
        return self._run(self._talks.set_webhook_secret({"secret": secret, "kind": kind}))

    def rotate_webhook_secret(
        self,
        secret: str | None = None,
        *,
        kind: SecretKind | None = None,
        overlap_seconds: int | None = None,
    ) -> WebhookSecrets:
        """Sign with a new secret, and for the overlap (a day by default) with the one before too.

        Raises:
            Invalid: the secret cannot be used, or the server keeps no secrets.
            Unavailable: whether it is set is unknown; look.
        """
        fields = {"secret": secret, "kind": kind, "overlapSeconds": overlap_seconds}
        return self._run(self._talks.rotate_webhook_secret(fields))

    def forget_webhook_secret(self) -> WebhookSecrets:
        """Let the secret that the operator has set for all sign again, alone and at once."""
        return self._run(self._talks.forget_webhook_secret())

    def egress_allow(self) -> EgressAllow:
        """Return the networks that callbacks may reach besides public addresses."""
        return self._run(self._talks.egress_allow())

    def set_egress_allow(self, networks: Sequence[str] | None) -> EgressAllow:
        """Narrow what the workers' ONCUE_EGRESS_ALLOW lets callbacks reach; None: do not.

        Raises:
            Invalid: one of them is no network.
        """
        return self._run(self._talks.set_egress_allow(networks))

    def logs(self, of: int | Job | str, *, page_size: int = PAGE_SIZE) -> Iterator[LogLine]:
        """Iterate over what a run has said so far, oldest first.

        `of` is an execution's id, or a job (or its id): then its newest execution.
        """
        execution_id = of if isinstance(of, str) else self._newest(of)
        if execution_id is not None:
            yield from self._items(self._talks.lines(execution_id, page_size))

    def follow_logs(self, of: int | Job | str) -> Iterator[LogLine]:
        """Iterate over what a run says, from its first line to its last, as it comes.

        Of a job it begins with the newest execution that `of` shows, with the first one if it
        shows none, as after `submit`; of an id with the newest there is. It waits for one if
        there is none, and goes on with the next ones until the job has ended. A lost connection
        is made again: no line is left out or comes twice.
        """
        if isinstance(of, str):
            yield from self._lines(of)
            return
        attempts = Attempts(as_known(of) or self.get(of))
        while True:
            job = self.get(of)  # before its attempts: of a job that has ended those are all
            begun = attempts.take(list(takewhile(attempts.is_new, self.executions(of))))
            for execution in begun:
                yield from self._lines(execution.execution_id)
            if not begun and job.ended:
                return
            if not begun:
                next((one for one in self.events(of) if attempts.is_news(one.job)), None)

    def events(self, job: int | Job, *, after: str | None = None) -> Iterator[JobEvent]:
        """Iterate over what happens to a job, from how it is now to its end.

        `after` is the `event_id` of an event seen before. States that follow each other quickly
        may be one event; the last is always told, also over lost connections.
        """
        for event in self._stream(events_of(id_of(job), self._url, self._retries, after)):
            yield (found := read_job_event(event))
            if found.name == "ended":
                return

    def cancel(self, job: int | Job, *, children: bool = False) -> Job:
        """Cancel a job that has not ended; a running one is told to stop.

        With `children` also what a schedule has made and has not ended.

        Raises:
            Conflict: in its state it cannot be cancelled. So for all verbs.
        """
        return self._run(self._talks.cancel(id_of(job), children=children))

    def pause(self, job: int | Job) -> Job:
        """Keep a waiting job or a schedule from running until it is resumed."""
        return self._run(self._talks.change(id_of(job), "pause"))

    def resume(self, job: int | Job, *, missed: Literal["skip", "catchUp"] | None = None) -> Job:
        """Let a paused job go on; `missed` says what becomes of the fires a schedule missed."""
        return self._run(self._talks.resume(id_of(job), missed))

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
                id_of(schedule), first, last, dry_run=dry_run, max_concurrent=max_concurrent
            )
        )

    def skips(self, schedule: int | Job, *, page_size: int = PAGE_SIZE) -> Iterator[Skipped]:
        """Iterate over the fires of a schedule that did not run, latest first."""
        return self._items(self._talks.skips(id_of(schedule), page_size))

    def trigger(self, job: int | Job, **options: Unpack[TriggerOptions]) -> Job:
        """Run a job that waits, for its time or its retry, now; `params` replace its own.

        With `revision`, only if it still has that one. One that has begun is a `Conflict`. Of a
        schedule this makes a job, and one `request_id` is one job, however often it is triggered.
        """
        return self._run(self._talks.trigger(id_of(job), options))

    def revise(
        self, job: int | Job, *, revision: int | None = None, **changes: Unpack[JobChanges]
    ) -> Job:
        """Change a waiting or paused job, if it is still as the caller saw it.

        That is the revision of the `Job`, or the one that is given.

        Raises:
            Conflict: it has changed, or its state does not allow it.
            TypeError: `job` is an id and no revision is given.
            ValueError: nothing is changed.
        """
        return self._run(self._talks.revise(id_of(job), revision_of(job, revision), changes))

    def retry(self, job: int | Job) -> Job:
        """Open a FAILED or CANCELLED job again, with all its attempts anew."""
        return self._run(self._talks.change(id_of(job), "retry"))

    def bulk(
        self,
        action: BulkAction,
        *,
        rate: float | None = None,
        request_id: str | None = None,
        **narrowed: Unpack[BulkFilter],
    ) -> BulkOperation:
        """Change all jobs that match, in the background, up to `rate` of them a second.

        Jobs whose state does not allow the action do not match. The `request_id` is drawn when
        none is given; the same one again is the same operation.

        Raises:
            Invalid: the filter is empty or not offered.
            Conflict: the request_id belongs to another request, or too many operations go on.
            Unavailable: whether it goes on is unknown; ask again with its `request_id`.
        """
        request_id = request_id or uuid.uuid4().hex
        body = bulk_body(action, narrowed, rate=rate, request_id=request_id)
        return self._run(self._talks.bulk(body, request_id))

    def bulk_count(self, action: BulkAction, **narrowed: Unpack[BulkFilter]) -> BulkCount:
        """Count the jobs that `bulk` would change, and change none."""
        body = bulk_body(action, narrowed, dry_run=True)
        return self._run(self._talks.bulk_count(body))

    def bulk_operation(self, operation: str | BulkOperation) -> BulkOperation:
        """Return a bulk operation as it is now.

        Raises:
            NotFound: there is none, or it has left.
        """
        return self._run(self._talks.bulk_operation(operation_id_of(operation)))

    def bulk_operations(self, *, page_size: int = PAGE_SIZE) -> Iterator[BulkOperation]:
        """Iterate over bulk operations, newest first."""
        return self._items(self._talks.bulk_operations(page_size))

    def cancel_bulk(self, operation: str | BulkOperation) -> BulkOperation:
        """End a bulk operation; what it has changed stays so.

        Raises:
            Conflict: it has ended otherwise.
        """
        return self._run(self._talks.cancel_bulk(operation_id_of(operation)))

    def wait_bulk(
        self,
        operation: str | BulkOperation,
        *,
        timeout: float | None = None,
        progress: Callable[[BulkOperation], object] | None = None,
    ) -> BulkOperation:
        """Return a bulk operation once it has ended; `progress` is told each look at it.

        Raises:
            BulkTimeout: it had not ended after `timeout` seconds, and goes on.
        """
        talk = self._talks.wait_bulk(operation_id_of(operation), timeout, progress)
        return self._run(talk)

    def counts(self, *, up_to: int | None = None) -> Counts:
        """Return how many jobs are in each state; each is counted up to `up_to` (10,000)."""
        return self._run(self._talks.counts(up_to))

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

    def drain(self, worker: str | Worker) -> Draining:
        """Let a worker (or one by its id) take no more runs; a repeat tells what it still holds.

        Raises:
            NotFound: there is no such worker.
            Conflict: it is DOWN.
        """
        return self._run(self._talks.ask(Draining, _access.drain(worker)))

    def create_key(self, name: str, **options: Unpack[KeyOptions]) -> NewApiKey:
        """Make a key; `key` of the answer is shown this once. `KeyOptions` says what it may be.

        Raises:
            Unauthorized: this is for admins.
            NotFound: there is no such tenant.
        """
        return self._run(self._talks.ask(NewApiKey, _access.create_key(name, options)))

    def key(self, key: int | ApiKey) -> ApiKey:
        """Return a key (or one by its id) as it is now, without its secret.

        Raises:
            NotFound: there is no such key.
        """
        return self._run(self._talks.ask(ApiKey, _access.look_at_key(key)))

    def keys(
        self,
        *,
        prefix: str | None = None,
        tenant_id: int | None = None,
        page_size: int = PAGE_SIZE,
    ) -> Iterator[ApiKey]:
        """Iterate over keys, newest first; `prefix` is how a key begins, as `ock_ab`."""
        query = _access.keys_query(prefix, tenant_id)
        return self._items(self._talks.listed(Page[ApiKey], _access.KEYS, page_size, query))

    def rotate_key(self, key: int | ApiKey, *, overlap_seconds: int | None = None) -> NewApiKey:
        """Give a key a new secret; the one before works for `overlap_seconds` more (a day).

        Raises:
            Conflict: the key was revoked.
            Unavailable: whether it was done is unknown; do it again.
        """
        request = _access.rotate_key(key, overlap_seconds)
        return self._run(self._talks.ask(NewApiKey, request))

    def revoke_key(self, key: int | ApiKey) -> ApiKey:
        """End a key for good.

        Raises:
            NotFound: there is no such key.
        """
        return self._run(self._talks.ask(ApiKey, _access.revoke_key(key)))

    def create_tenant(self, name: str) -> Tenant:
        """Make a tenant, for admins of the tenant 0.

        Raises:
            Conflict: another one has the name.
        """
        return self._run(self._talks.ask(Tenant, _access.create_tenant(name)))

    def tenants(self, *, page_size: int = PAGE_SIZE) -> Iterator[Tenant]:
        """Iterate over tenants, by id."""
        return self._items(self._talks.listed(Page[Tenant], _access.TENANTS, page_size, {}))

    def change_tenant(
        self,
        tenant: int | Tenant,
        *,
        name: str | None = None,
        disabled: bool | None = None,
        limits: LimitChanges | None = None,
    ) -> Tenant:
        """Rename a tenant, refuse its callers (`disabled`), let them in again, or limit it.

        `limits` are those that change; None takes one away.

        Raises:
            Conflict: another one has the name.
            NotFound: there is no such tenant.
        """
        request = _access.change_tenant(tenant, name, disabled, limits)
        return self._run(self._talks.ask(Tenant, request))

    def audit(
        self, *, page_size: int = PAGE_SIZE, **narrowed: Unpack[AuditFilter]
    ) -> Iterator[AuditEntry]:
        """Iterate over the changes that people and keys made, newest first, for admins."""
        query = _access.audit_query(narrowed)
        return self._items(self._talks.listed(Page[AuditEntry], _access.AUDIT, page_size, query))

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

    def _newest(self, job: int | Job) -> str | None:
        executions = self.get(job).executions
        return executions[0].execution_id if executions else None

    def _lines(self, execution_id: str) -> Iterator[LogLine]:
        for event in self._stream(lines_of(execution_id, self._url, self._retries)):
            if event.name == "end":
                return
            if (line := read_line(event)) is not None:
                yield line

    def _stream(self, resume: Resume) -> Iterator[Event]:
        while True:
            heard: Heard = None
            try:
                response = self._http.send(resume.request(self._http), stream=True)
            except httpx.RequestError as error:
                heard = error
            else:
                try:
                    if response.status_code == NOTHING_MORE:
                        return
                    if response.status_code == OPEN:
                        resume.opened(response)
                        reader = EventReader()
                        for data in response.iter_bytes():
                            for event in reader.feed(data):
                                resume.took(event)
                                yield event
                    else:
                        response.read()
                        heard = response
                except httpx.RequestError:
                    heard = None  # cut off in the middle
                finally:
                    response.close()
            time.sleep(resume.pause_after(heard))

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
