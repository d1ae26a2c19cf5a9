"""The client of the API for asyncio: all that `oncue.client` says of `Client` holds for it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Sequence,
)
from datetime import datetime
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
        url = address_of(base_url)
        self._url, self._retries = url, retries or Retries()
        self._talks = Talks(url, self._retries)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers_of(api_key),
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
        return await self._run(self._talks.get(id_of(job)))

    async def find(self, request_id: str) -> Job | None:
        """Return the job of a request (`request_id`), or None when there is none."""
        return await self._run(self._talks.find(request_id))

    async def explain(self, job: int | Job) -> Explanation:
        """Return why the job is not running, who ran it, and why it ended so.

        Raises:
            NotFound: there is no such job.
        """
        return await self._run(self._talks.explain(id_of(job)))

    async def wait(
        self, job: int | Job, *, timeout: float | None = None, check: bool = False
    ) -> Job:
        """Return the job once it has ended: see `Client.wait`."""
        return await self._run(self._talks.wait(id_of(job), timeout, check=check))

    def list(
        self, *, page_size: int = PAGE_SIZE, **narrowed: Unpack[JobFilter]
    ) -> AsyncIterator[Job]:
        """Iterate over jobs, newest first: see `Client.list`."""
        return self._items(self._talks.jobs(narrowed, page_size))

    def executions(self, job: int | Job, *, page_size: int = PAGE_SIZE) -> AsyncIterator[Execution]:
        """Iterate over the attempts to run a job, newest first."""
        return self._items(self._talks.executions(id_of(job), page_size))

    def children(self, job: int | Job, *, page_size: int = PAGE_SIZE) -> AsyncIterator[Job]:
        """Iterate over the jobs that a schedule or a group made, latest first."""
        return self._items(self._talks.children(id_of(job), page_size))

    def callbacks(self, job: int | Job, *, page_size: int = PAGE_SIZE) -> AsyncIterator[Callback]:
        """Iterate over the callbacks that the ends of a job owe or owed, newest first."""
        return self._items(self._talks.callbacks(id_of(job), page_size))

    async def redeliver(self, callback: str | Callback) -> Callback:
        """Deliver a callback (or its delivery id) again now, under the same `webhook-id`.

        Raises:
            NotFound: there is no such callback.
        """
        return await self._run(self._talks.redeliver(delivery_id_of(callback)))

    async def redeliver_failed(self, job: int | Job) -> int:
        """Deliver all callbacks of a job that have failed again now; return how many.

        Those that were given up, and those that wait for their next try after a failed one.
        """
        found = await self._run(self._talks.redeliver_failed(id_of(job)))
        return found.redelivered

    async def webhook_secret(self) -> WebhookSecrets:
        """Return what signs the callbacks of this client's tenant, masked."""
        return await self._run(self._talks.webhook_secret())

    async def set_webhook_secret(
        self, secret: str | None = None, *, kind: SecretKind | None = None
    ) -> WebhookSecrets:
        """Let one secret alone sign from now on: this one, or one that is drawn and shown once."""
        return await self._run(self._talks.set_webhook_secret({"secret": secret, "kind": kind}))

    async def rotate_webhook_secret(
        self,
        secret: str | None = None,
        *,
        kind: SecretKind | None = None,
        overlap_seconds: int | None = None,
    ) -> WebhookSecrets:
        """Sign with a new secret beside the one before: see `Client.rotate_webhook_secret`."""
        fields = {"secret": secret, "kind": kind, "overlapSeconds": overlap_seconds}
        return await self._run(self._talks.rotate_webhook_secret(fields))

    async def forget_webhook_secret(self) -> WebhookSecrets:
        """Let the secret that the operator has set for all sign again, alone and at once."""
        return await self._run(self._talks.forget_webhook_secret())

    async def egress_allow(self) -> EgressAllow:
        """Return the networks that callbacks may reach besides public addresses."""
        return await self._run(self._talks.egress_allow())

    async def set_egress_allow(self, networks: Sequence[str] | None) -> EgressAllow:
        """Narrow what the workers' ONCUE_EGRESS_ALLOW lets callbacks reach; None: do not."""
        return await self._run(self._talks.set_egress_allow(networks))

    async def logs(
        self, of: int | Job | str, *, page_size: int = PAGE_SIZE
    ) -> AsyncIterator[LogLine]:
        """Iterate over what a run has said so far: see `Client.logs`."""
        execution_id = of if isinstance(of, str) else await self._newest(of)
        if execution_id is not None:
            async for line in self._items(self._talks.lines(execution_id, page_size)):
                yield line

    async def follow_logs(self, of: int | Job | str) -> AsyncIterator[LogLine]:
        """Iterate over what a run says, as it comes: see `Client.follow_logs`."""
        if isinstance(of, str):
            async for line in self._lines(of):
                yield line
            return
        attempts = Attempts(as_known(of) or await self.get(of))
        while True:
            job = await self.get(of)
            begun = await self._begun(of, attempts)
            for execution in begun:
                async for line in self._lines(execution.execution_id):
                    yield line
            if not begun and job.ended:
                return
            if not begun:
                await self._news(of, attempts)

    async def events(
        self, job: int | Job, *, after: str | None = None
    ) -> AsyncGenerator[JobEvent, None]:
        """Iterate over what happens to a job: see `Client.events`."""
        async for event in self._stream(events_of(id_of(job), self._url, self._retries, after)):
            yield (found := read_job_event(event))
            if found.name == "ended":
                return

    async def cancel(self, job: int | Job, *, children: bool = False) -> Job:
        """Cancel a job that has not ended: see `Client.cancel`."""
        return await self._run(self._talks.cancel(id_of(job), children=children))

    async def pause(self, job: int | Job) -> Job:
        """Keep a waiting job or a schedule from running until it is resumed."""
        return await self._run(self._talks.change(id_of(job), "pause"))

    async def resume(
        self, job: int | Job, *, missed: Literal["skip", "catchUp"] | None = None
    ) -> Job:
        """Let a paused job go on; `missed` says what becomes of the fires a schedule missed."""
        return await self._run(self._talks.resume(id_of(job), missed))

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
                id_of(schedule), first, last, dry_run=dry_run, max_concurrent=max_concurrent
            )
        )

    def skips(self, schedule: int | Job, *, page_size: int = PAGE_SIZE) -> AsyncIterator[Skipped]:
        """Iterate over the fires of a schedule that did not run, latest first."""
        return self._items(self._talks.skips(id_of(schedule), page_size))

    async def trigger(self, job: int | Job, **options: Unpack[TriggerOptions]) -> Job:
        """Run a job that waits, for its time or its retry, now; `params` replace its own.

        With `revision`, only if it still has that one. One that has begun is a `Conflict`. Of a
        schedule this makes a job, and one `request_id` is one job, however often it is triggered.
        """
        return await self._run(self._talks.trigger(id_of(job), options))

    async def revise(
        self, job: int | Job, *, revision: int | None = None, **changes: Unpack[JobChanges]
    ) -> Job:
        """Change a waiting or paused job, if it is still as the caller saw it.

        That is the revision of the `Job`, or the one that is given.

        Raises:
            Conflict: it has changed, or its state does not allow it.
            TypeError: `job` is an id and no revision is given.
            ValueError: nothing is changed.
        """
        return await self._run(self._talks.revise(id_of(job), revision_of(job, revision), changes))

    async def retry(self, job: int | Job) -> Job:
        """Open a FAILED or CANCELLED job again, with all its attempts anew."""
        return await self._run(self._talks.change(id_of(job), "retry"))

    async def bulk(
        self,
        action: BulkAction,
        *,
        rate: float | None = None,
        request_id: str | None = None,
        **narrowed: Unpack[BulkFilter],
    ) -> BulkOperation:
        """Change all jobs that match: see `Client.bulk`."""
        request_id = request_id or uuid.uuid4().hex
        body = bulk_body(action, narrowed, rate=rate, request_id=request_id)
        return await self._run(self._talks.bulk(body, request_id))

    async def bulk_count(self, action: BulkAction, **narrowed: Unpack[BulkFilter]) -> BulkCount:
        """Count the jobs that `bulk` would change, and change none."""
        body = bulk_body(action, narrowed, dry_run=True)
        return await self._run(self._talks.bulk_count(body))

    async def bulk_operation(self, operation: str | BulkOperation) -> BulkOperation:
        """Return a bulk operation as it is now: see `Client.bulk_operation`."""
        return await self._run(self._talks.bulk_operation(operation_id_of(operation)))

    def bulk_operations(self, *, page_size: int = PAGE_SIZE) -> AsyncIterator[BulkOperation]:
        """Iterate over bulk operations, newest first."""
        return self._items(self._talks.bulk_operations(page_size))

    async def cancel_bulk(self, operation: str | BulkOperation) -> BulkOperation:
        """End a bulk operation; what it has changed stays so: see `Client.cancel_bulk`."""
        return await self._run(self._talks.cancel_bulk(operation_id_of(operation)))

    async def wait_bulk(
        self,
        operation: str | BulkOperation,
        *,
        timeout: float | None = None,
        progress: Callable[[BulkOperation], object] | None = None,
    ) -> BulkOperation:
        """Return a bulk operation once it has ended: see `Client.wait_bulk`."""
        talk = self._talks.wait_bulk(operation_id_of(operation), timeout, progress)
        return await self._run(talk)

    async def counts(self, *, up_to: int | None = None) -> Counts:
        """Return how many jobs are in each state; each is counted up to `up_to` (10,000)."""
        return await self._run(self._talks.counts(up_to))

    async def cron_preview(self, expr: str, **options: Unpack[CronOptions]) -> CronPreview:
        """Return when a cron expression fires next: see `Client.cron_preview`."""
        return await self._run(self._talks.cron_preview(expr, options))

    def handlers(self, *, page_size: int = PAGE_SIZE) -> AsyncIterator[OfferedHandler]:
        """Iterate over the handlers that live workers offer, by name."""
        return self._items(self._talks.handlers(page_size))

    def workers(self, *, page_size: int = PAGE_SIZE) -> AsyncIterator[Worker]:
        """Iterate over the workers and their load."""
        return self._items(self._talks.workers(page_size))

    async def drain(self, worker: str | Worker) -> Draining:
        """Let a worker take no more runs: see `Client.drain`."""
        return await self._run(self._talks.ask(Draining, _access.drain(worker)))

    async def create_key(self, name: str, **options: Unpack[KeyOptions]) -> NewApiKey:
        """Make a key: see `Client.create_key`."""
        return await self._run(self._talks.ask(NewApiKey, _access.create_key(name, options)))

    async def key(self, key: int | ApiKey) -> ApiKey:
        """Return a key (or one by its id) as it is now, without its secret: see `Client.key`."""
        return await self._run(self._talks.ask(ApiKey, _access.look_at_key(key)))

    def keys(
        self,
        *,
        prefix: str | None = None,
        tenant_id: int | None = None,
        page_size: int = PAGE_SIZE,
    ) -> AsyncIterator[ApiKey]:
        """Iterate over keys, newest first: see `Client.keys`."""
        query = _access.keys_query(prefix, tenant_id)
        return self._items(self._talks.listed(Page[ApiKey], _access.KEYS, page_size, query))

    async def rotate_key(
        self, key: int | ApiKey, *, overlap_seconds: int | None = None
    ) -> NewApiKey:
        """Give a key a new secret: see `Client.rotate_key`."""
        request = _access.rotate_key(key, overlap_seconds)
        return await self._run(self._talks.ask(NewApiKey, request))

    async def revoke_key(self, key: int | ApiKey) -> ApiKey:
        """End a key for good: see `Client.revoke_key`."""
        return await self._run(self._talks.ask(ApiKey, _access.revoke_key(key)))

    async def create_tenant(self, name: str) -> Tenant:
        """Make a tenant, for admins of the tenant 0: see `Client.create_tenant`."""
        return await self._run(self._talks.ask(Tenant, _access.create_tenant(name)))

    def tenants(self, *, page_size: int = PAGE_SIZE) -> AsyncIterator[Tenant]:
        """Iterate over tenants, by id: see `Client.tenants`."""
        return self._items(self._talks.listed(Page[Tenant], _access.TENANTS, page_size, {}))

    async def change_tenant(
        self,
        tenant: int | Tenant,
        *,
        name: str | None = None,
        disabled: bool | None = None,
        limits: LimitChanges | None = None,
    ) -> Tenant:
        """Rename, disable or limit a tenant: see `Client.change_tenant`."""
        request = _access.change_tenant(tenant, name, disabled, limits)
        return await self._run(self._talks.ask(Tenant, request))

    def audit(
        self, *, page_size: int = PAGE_SIZE, **narrowed: Unpack[AuditFilter]
    ) -> AsyncIterator[AuditEntry]:
        """Iterate over who changed what, newest first: see `Client.audit`."""
        query = _access.audit_query(narrowed)
        return self._items(self._talks.listed(Page[AuditEntry], _access.AUDIT, page_size, query))

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

    async def _newest(self, job: int | Job) -> str | None:
        executions = (await self.get(job)).executions
        return executions[0].execution_id if executions else None

    async def _begun(self, of: int | Job, attempts: Attempts) -> Sequence[Execution]:
        newest_first: list[Execution] = []
        async for one in self.executions(of):
            if not attempts.is_new(one):
                break
            newest_first.append(one)
        return attempts.take(newest_first)

    async def _news(self, of: int | Job, attempts: Attempts) -> None:
        events = self.events(of)
        try:
            async for one in events:
                if attempts.is_news(one.job):
                    return
        finally:
            await events.aclose()

    async def _lines(self, execution_id: str) -> AsyncIterator[LogLine]:
        async for event in self._stream(lines_of(execution_id, self._url, self._retries)):
            if event.name == "end":
                return
            if (line := read_line(event)) is not None:
                yield line

    async def _stream(self, resume: Resume) -> AsyncIterator[Event]:
        while True:
            heard: Heard = None
            try:
                response = await self._http.send(resume.request(self._http), stream=True)
            except httpx.RequestError as error:
                heard = error
            else:
                try:
                    if response.status_code == NOTHING_MORE:
                        return
                    if response.status_code == OPEN:
                        resume.opened(response)
                        reader = EventReader()
                        async for data in response.aiter_bytes():
                            for event in reader.feed(data):
                                resume.took(event)
                                yield event
                    else:
                        await response.aread()
                        heard = response
                except httpx.RequestError:
                    heard = None  # cut off in the middle
                finally:
                    await response.aclose()
            await asyncio.sleep(resume.pause_after(heard))

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
