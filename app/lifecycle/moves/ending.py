"""How an execution ended, and what settling it changed: the values of `settle`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from app.lifecycle.moves.follow import NOTHING, Followed
from app.lifecycle.states import ExecutionStatus, JobStatus

MAX_REASON_LENGTH: Final = 255
"""Characters of a reason that its column takes."""


# These three are not frozen, though nobody changes one: a batch makes hundreds of them, and a
# frozen one takes six times as long.
@dataclass(slots=True)
class Ending:
    """How one execution ended: reported by its worker, or found by recovery.

    `result` is JSON text in clear; a `secret` one is stored sealed.
    `deliver_by` names the worker that will deliver the callback at once.
    `in_term` is set where a dispatcher, not the worker, gives a run back: it counts only in that
    term of `in_partition` and while no worker is known to have the run, since a later holder may
    have sent it. What does not `count` may be given back any number of times.
    Step times are epoch ms of the database's clock as the worker estimates it.
    """

    execution_id: str
    job_id: int
    status: ExecutionStatus
    result: str | None = field(default=None, repr=False)
    error_code: str | None = None
    error_message: str | None = None
    retryable: bool = True
    retry_after_ms: int | None = None
    stopping: bool = False
    accepted_at: int | None = None
    started_at: int | None = None
    finished_at: int | None = None
    reason: str | None = None
    deliver_by: str | None = None
    in_term: int | None = None
    in_partition: int = 0
    counts: bool = True
    secret: bool = False


class Settled(Enum):
    """What an ending changed."""

    ENDED = "ended"
    RETRIED = "retried"
    REPEATED = "repeated"
    STALE = "stale"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class OwedDelivery:
    """A callback that the named worker is to try now; what is secret of it is sealed."""

    delivery_id: str
    try_number: int
    url: str
    body: str = field(repr=False)
    tenant_id: int = 0
    headers: str | None = None


@dataclass(slots=True)
class Settlement:
    """The outcome of settling one ending; `job_status` is the job's status afterwards.

    `run_ms` is how long its handler ran, `late_ms` how long after the due time it had begun.

    `followed`, of the first of a batch, is what the ends of all its children brought about.
    """

    kind: Settled
    job_id: int
    job_status: JobStatus | None = None
    queue_id: int | None = None
    priority: int = 0
    next_due_ms: int | None = None
    handler: str = ""
    run_ms: int | None = None
    late_ms: int | None = None
    delivery: OwedDelivery | None = None
    followed: Followed = NOTHING
