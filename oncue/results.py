"""What the server tells, as frozen objects. Fields of a newer server are ignored."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Generic, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer
from pydantic.alias_generators import to_camel

ENDED: Final = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
Item = TypeVar("Item")


def rfc3339(moment: datetime) -> str:
    """Write a moment as the API does: UTC, with milliseconds."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Moment = Annotated[AwareDatetime, PlainSerializer(rfc3339, when_used="json")]


class Result(BaseModel):
    """A frozen answer with Python's names; `model_dump(mode="json", by_alias=True)` undoes it."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore"
    )


class JobError(Result):
    """Why a job or an execution did not succeed: a stable code and a sentence."""

    code: str
    message: str = ""


class JobWarning(JobError):
    """Something that keeps an accepted job from running now."""


class Execution(Result):
    """One attempt to run a job on one worker, with the time of each step.

    `reason` tells why the platform, not the handler, ended it.
    """

    execution_id: str
    attempt: int
    status: str
    worker_id: str | None = None
    trigger_time: Moment | None = None
    claimed_at: Moment | None = None
    accepted_at: Moment | None = None
    started_at: Moment | None = None
    finished_at: Moment | None = None
    result: Any = None
    error: JobError | None = None
    reason: str | None = None


class Job(Result):
    """A job as it was when the server answered.

    `status` is WAITING, RUNNING, SUCCEEDED, FAILED, PAUSED, CANCELLED, BLOCKED or SCHEDULED;
    `attempt` counts the attempts begun so far; `executions` are the newest few, newest first.
    In a list there are none, and `omitted` names what is None because it is long (`get` has it).
    """

    job_id: int
    client_request_id: str | None = None
    job_name: str
    job_handler: str
    params: Any = None
    status: str
    attempt: int = 0
    max_retry: int = 0
    priority: int = 5
    next_trigger_time: Moment | None = None
    result: Any = None
    error: JobError | None = None
    progress: Any = None
    revision: int = 0
    created_at: Moment | None = None
    updated_at: Moment | None = None
    finished_at: Moment | None = None
    executions: tuple[Execution, ...] = ()
    warnings: tuple[JobWarning, ...] = ()
    omitted: tuple[str, ...] = Field(default=(), exclude_if=lambda names: not names)

    @property
    def ended(self) -> bool:
        """Whether the job is SUCCEEDED, FAILED or CANCELLED."""
        return self.status in ENDED

    @property
    def succeeded(self) -> bool:
        """Whether the job is SUCCEEDED, so that `result` is what its handler returned."""
        return self.status == "SUCCEEDED"


class Worker(Result):
    """A worker as its last heartbeat described it; `state` is UP, DRAINING or DOWN."""

    worker_id: str
    name: str = ""
    url: str = ""
    state: str
    version: str = ""
    handlers: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    capacity: int
    weight: float = 1.0
    active: int
    queued: int = 0
    avg_cost_ms: float = 0.0
    cpu_idle_percent: float | None = None
    delivers: bool = False
    last_heartbeat: Moment | None = None


class OfferedHandler(Result):
    """A handler that at least one live worker offers; `workers` is how many do."""

    name: str
    description: str = ""
    isolation: str = "none"
    workers: int = 0


class BulkCount(Result):
    """How many jobs a bulk action would change; `matched_is_minimum`: at least so many."""

    action: str
    filter: dict[str, str] = Field(default_factory=dict)
    matched: int
    matched_is_minimum: bool = False


class BulkOperation(Result):
    """A bulk action as it was when the server answered.

    `status` is QUEUED, RUNNING, SUCCEEDED, CANCELLED or FAILED. Of `matched` jobs (at least so
    many, if `matched_is_minimum`) `examined` have had their turn: `changed` of them did change,
    and `refused` counts the others by the code that says why.
    """

    operation_id: str
    client_request_id: str | None = None
    action: str
    filter: dict[str, str] = Field(default_factory=dict)
    status: str
    rate_per_second: float = 0.0
    matched: int = 0
    matched_is_minimum: bool = False
    examined: int = 0
    changed: int = 0
    refused: dict[str, int] = Field(default_factory=dict)
    error: JobError | None = None
    created_at: Moment | None = None
    updated_at: Moment | None = None
    started_at: Moment | None = None
    finished_at: Moment | None = None

    @property
    def ended(self) -> bool:
        """Whether the operation is SUCCEEDED, CANCELLED or FAILED."""
        return self.status in ENDED


class Page(Result, Generic[Item]):
    """One page of a list; the next is at `next_cursor`, if there is one."""

    items: tuple[Item, ...]
    next_cursor: str | None = None
