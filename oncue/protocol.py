"""The wire between dispatchers and workers: message shapes, paths and the run key, version 1.

Both services import this module and nothing else of each other. All times are epoch
milliseconds of the database's clock. Field names are camelCase on the wire.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.alias_generators import to_camel

from oncue.output import MAX_PROGRESS_TEXT_LENGTH

PROTOCOL_VERSION: Final = 1

RUN_PATH: Final = "/run"
CANCEL_PATH: Final = "/cancel"
DELIVER_PATH: Final = "/deliver"
DRAIN_PATH: Final = "/drain"
HEARTBEAT_PATH: Final = "/internal/heartbeat"
REPORTS_PATH: Final = "/internal/reports"
LOGS_PATH: Final = "/internal/logs"
DELIVERY_LEASE_SECONDS: Final = 60
"""How long a worker has for one try of a callback; its beats extend it."""

MAX_RESULT_BYTES: Final = 64 * 1024
MAX_NAME_LENGTH: Final = 128
MAX_ERROR_MESSAGE_LENGTH: Final = 2000
MAX_INTERNAL_BODY_BYTES: Final = 8 * 1024 * 1024
MAX_SCHEMA_BYTES: Final = 64 * 1024
"""The longest JSON Schema of a handler's params that is published."""
MAX_SCHEMAS_BYTES: Final = 1024 * 1024
"""The most that all schemas of one worker, and so of one beat, may have together."""
MAX_RUNS_PER_REQUEST: Final = 500
MAX_ANSWER_BYTES: Final = 2048
"""How much of what a receiver answers to a callback is kept."""
MAX_SIGNING_SECRETS: Final = 2
MAX_EGRESS_NETWORKS: Final = 64
MAX_REPORTS_PER_REQUEST: Final = 500
MAX_LOG_PARTS_PER_REQUEST: Final = 500
MAX_LINES_PER_LOG_PART: Final = 2000
LATEST_TIME: Final = 253_402_300_799_999
"""The last millisecond that RFC 3339 can write."""

LEASE_SECONDS: Final = 15.0
"""Life of a run lease, and the age of a heartbeat from which a worker may be doubted."""
LATEST_RUN_SECONDS: Final = 10.0
"""How old a `/run` request may be: its worker may have been frozen, and declared dead meanwhile."""
TOMBSTONE_SECONDS: Final = 600.0
"""How long an outcome stays readable under its run key: longer than any send can be late."""


def run_key(prefix: str, job_id: int, trigger_ts: int) -> str:
    """Name the Redis key that holds the run lease, later the outcome, of one attempt."""
    return f"{prefix}:run:{job_id}:{trigger_ts}"


def stopping_key(key: str) -> str:
    """Name the lease of a run that goes on while its end is stored under its run key."""
    return f"{key}:stopping"


GIVEN_UP: Final = "given-up"
"""Stands for boot and execution under the run key of an attempt whose worker was declared dead.

A `/run` that waited in the socket of a frozen process finds the attempt taken when that wakes.
"""


def run_mark(boot_id: str, execution_id: str) -> str:
    """Open the value under a run key: who holds it. The outcome's JSON follows once it ended."""
    return f"{boot_id} {execution_id} "


Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""Integers as they are stored: a larger one is refused where it arrives."""
Count = Annotated[Int32, Field(ge=0)]
Ordinal = Annotated[Int32, Field(ge=1)]
"""A bound of the field itself, as `Int32 = Field(ge=0)`, would be overruled by that of its type."""


class Message(BaseModel):
    """A frozen wire message; unknown fields are ignored: versions N and N-1 work together."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )


class Load(Message):
    """A worker's own count of what it holds; a higher `seq` of the same boot is newer."""

    seq: Annotated[Int64, Field(ge=0)]
    active: Count = Field(description="Runs that hold a slot, stopping ones included.")
    queued: Count = 0


class Run(Message):
    """One attempt to be run: the assignment of a claimed task to a worker."""

    job_id: Int64
    execution_id: str
    trigger_ts: Int64
    attempt: Ordinal
    max_attempts: Ordinal
    job_name: str
    job_handler: str
    client_request_id: str | None = None
    params: Any = Field(None, repr=False)
    timeout_ms: Annotated[Int64, Field(gt=0)]
    shard_index: Int32 = 0
    shard_total: Int32 = 1
    nominal_time: Annotated[Int64, Field(ge=0, le=LATEST_TIME)] | None = Field(
        None,
        description="The time of its schedule that it stands for. Not sent of a job that no "
        "schedule made, nor by an older dispatcher.",
    )
    start_in_ms: float | None = Field(
        None,
        ge=0,
        le=60_000,
        description="Begin so long after this request has come, not before. Only workers whose "
        "answers say `waits` are sent it.",
    )
    due_at: Annotated[Int64, Field(ge=0, le=LATEST_TIME)] | None = Field(
        None,
        description="Sent with `startInMs`: the database's time at which to begin. A worker that "
        "is sure that it has come begins then, though the pause since this request came goes on.",
    )
    secret_params: bool = Field(
        False,
        description="true: what a worker itself says of the run, as in its error, must not repeat "
        "the params.",
    )
    result_key: str | None = Field(
        None,
        repr=False,
        pattern=r"^[A-Za-z0-9_-]{43}=$",
        description="Seal the result with this key (Fernet) wherever it is kept or sent.",
    )
    egress_allow: list[str] | None = Field(
        None,
        description="For the handler `http`: networks of the worker's own list that it may call "
        "besides public ones. null: all of that list.",
    )


class Seat(Message):
    """Which partition's dispatch lock the sender holds, and the term of that lock."""

    partition: Ordinal
    term: Int64 = Field(description="Of this partition; a lower one is refused.")


class RunRequest(Message):
    """`POST /run`: all the runs of a partition that one dispatcher has for this worker now."""

    protocol: Int64 = PROTOCOL_VERSION
    worker_id: str | None = Field(
        None, description="Whom the runs are for: another boot at its address refuses them (421)."
    )
    term: Int64 = Field(description="Term of the sender's dispatch lock; a lower one is refused.")
    seat: Seat | None = Field(
        None,
        description="Of other partitions than 0, and `term` is 0: a worker that knows no "
        "partitions refuses that, and answers without `seats`.",
    )
    sent_at: Int64 | None = Field(
        None, description="When it was sent; one that is older than 10 s begins nothing (503)."
    )
    runs: list[Run] = Field(max_length=MAX_RUNS_PER_REQUEST)


class Answer(StrEnum):
    """What a worker says to one run of a `/run` request."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"


class RejectReason(StrEnum):
    """Why a worker refused a run; it holds nothing of it, and refuses every later copy too."""

    FULL = "full"
    DRAINING = "draining"
    UNKNOWN_HANDLER = "unknown_handler"
    CANCELLED = "cancelled"
    INVALID = "invalid"


class OutcomeStatus(StrEnum):
    """How a run ended on its worker."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    RETURNED = "returned"


class Failure(Message):
    """Why a run did not succeed: a stable code and a sentence."""

    code: str = Field(max_length=64)
    message: str = Field(default="", max_length=MAX_ERROR_MESSAGE_LENGTH)


class Outcome(Message):
    """How one execution ended, as its worker saw it.

    `retryable` false ends the job whatever attempts are left. `stopping` says that the status
    is final but the thread still runs: no next attempt may start until a later report lists
    the execution in `stopped`.
    """

    execution_id: str
    job_id: Int64
    trigger_ts: Int64
    status: OutcomeStatus
    result: Any = Field(None, repr=False)
    result_sealed: bool = Field(
        False, description="`result` is text: the JSON sealed with the `resultKey` of its run."
    )
    error: Failure | None = None
    retryable: bool = True
    retry_after_ms: Int64 | None = Field(default=None, ge=0)
    stopping: bool = False
    accepted_at: Int64 | None = None
    started_at: Int64 | None = None
    finished_at: Int64 | None = None


class RunAnswer(Message):
    """The worker's word on one run; `outcome` is there when a duplicate has already ended."""

    execution_id: str
    answer: Answer
    reason: RejectReason | None = None
    owner_execution_id: str | None = None
    outcome: Outcome | None = None


class RunResponse(Message):
    """The answer to `POST /run`, one entry a run, in order."""

    worker_id: str
    load: Load
    answers: list[RunAnswer]
    waits: bool = Field(False, description="This worker knows `startInMs`.")
    seats: bool = Field(False, description="This worker knows `seat`.")


class CancelRequest(Message):
    """`POST /cancel`: stop these executions, and refuse a later `/run` of them."""

    term: Int64
    execution_ids: list[str] = Field(max_length=MAX_RUNS_PER_REQUEST)
    reason: OutcomeStatus = OutcomeStatus.CANCELLED


class CancelResponse(Message):
    """Which of the executions the worker held; the others are marked as refused."""

    worker_id: str = Field(default="", description="Without it `unknown` proves nothing.")
    stopped: list[str]
    unknown: list[str]


class Delivery(Message):
    """One callback to try once: an unsigned, rendered body for one URL."""

    delivery_id: str = Field(description="The `webhook-id`: the same in every try.")
    try_number: Ordinal
    url: str
    body: str = Field(repr=False)
    headers: dict[str, str] = Field(
        default_factory=dict, repr=False, description="More headers to send with it; some secret."
    )
    signing: list[str] | None = Field(
        default=None,
        repr=False,
        max_length=MAX_SIGNING_SECRETS,
        description="Secrets to sign with, the newest first: `whsec_`, `whsk_`, or empty for the "
        "worker's own. null: the worker's own alone.",
    )
    egress_allow: list[str] | None = Field(
        default=None,
        description="Networks of the worker's own list that this callback may reach besides "
        "public ones. null: all of that list.",
    )


class DeliverRequest(Message):
    """`POST /deliver`: callbacks that need a worker to try them now."""

    term: Int64
    deliveries: list[Delivery] = Field(max_length=MAX_RUNS_PER_REQUEST)


class DeliverResponse(Message):
    """The deliveries that the worker took over; the others stay owed by the dispatcher."""

    worker_id: str
    accepted: list[str]
    paused: dict[str, Int64] = Field(
        default_factory=dict,
        description="Hosts (`host:port`) that it calls no more for so many ms.",
    )


class DeliveryResult(Message):
    """What became of one try. `gone` (410) ends the delivery without another try.

    `notTried` gives it back uncounted: no call was made, and `retryAfterMs` tells when one may be.
    """

    delivery_id: str
    try_number: Int32
    delivered: bool
    gone: bool = False
    status_code: Int32 | None = None
    error: str | None = Field(default=None, max_length=MAX_ERROR_MESSAGE_LENGTH)
    latency_ms: Int32 = 0
    retry_after_ms: Int64 | None = Field(default=None, ge=0)
    not_tried: bool = False
    tried_at: Int64 | None = Field(default=None, ge=0, le=LATEST_TIME, description="Epoch ms.")
    answer: str | None = Field(
        default=None, max_length=MAX_ANSWER_BYTES, description="The first 2 KiB of the body."
    )


class ReportsRequest(Message):
    """`POST /internal/reports`: outcomes and tries, repeated until they are acknowledged."""

    protocol: Int64 = PROTOCOL_VERSION
    worker_id: str
    load: Load
    delivers: bool = Field(
        default=True,
        description="Whether this worker delivers callbacks; if not, the answer has none.",
    )
    outcomes: list[Outcome] = Field(default_factory=list, max_length=MAX_REPORTS_PER_REQUEST)
    stopped: list[str] = Field(
        default_factory=list,
        max_length=MAX_REPORTS_PER_REQUEST,
        description="Executions reported as `stopping` before, whose thread has now ended.",
    )
    tries: list[DeliveryResult] = Field(default_factory=list, max_length=MAX_REPORTS_PER_REQUEST)


class ReportsResponse(Message):
    """What is stored and need not be reported again, and the callbacks to deliver at once."""

    acknowledged: list[str]
    acknowledged_stopped: list[str]
    acknowledged_tries: list[str] = Field(description="Delivery ids of the stored `tries`.")
    deliveries: list[Delivery]


class WorkerState(StrEnum):
    """Whether a worker takes runs; DOWN is set by the dispatcher that proved it dead."""

    UP = "UP"
    DRAINING = "DRAINING"
    DOWN = "DOWN"


class DrainResponse(Message):
    """The answer to `POST /drain`: what is left to do on a worker that takes no more runs."""

    state: WorkerState
    load: Load
    unreported: int = Field(0, description="Outcomes that no dispatcher has acknowledged.")
    deliveries: int = Field(0, description="Callbacks that it is delivering or has to report.")


class OfferedHandler(Message):
    """A handler that a worker offers."""

    name: str = Field(max_length=MAX_NAME_LENGTH)
    isolation: str = "none"
    description: str = ""
    params_digest: str | None = Field(
        default=None,
        max_length=64,
        description="SHA-256 (hex) of the text of its `ParamsSchema`; none: params are not typed.",
    )
    secret_result: bool | None = Field(
        default=None, description="true: its results are secret, whatever the job says."
    )


class ParamsSchema(Message):
    """The JSON Schema (draft 2020-12) of a handler's params, as text, named by its SHA-256."""

    digest: str = Field(max_length=64)
    body: str = Field(max_length=MAX_SCHEMA_BYTES)


class Held(Message):
    """An execution that a worker runs, or has ended and not yet got acknowledged."""

    job_id: Int64
    execution_id: str


class Heartbeat(Message):
    """`POST /internal/heartbeat`: a worker's description of itself, every 5 s."""

    protocol: Int64 = PROTOCOL_VERSION
    worker_id: str = Field(max_length=MAX_NAME_LENGTH, description="name#bootId")
    name: str = Field(max_length=64)
    boot_id: str = Field(max_length=64)
    url: str = Field(max_length=512)
    version: str = Field(default="", max_length=64)
    state: WorkerState = WorkerState.UP
    handlers: list[OfferedHandler]
    capacity: Count
    weight: float = Field(default=1.0, ge=1e-6, le=1e6)
    labels: dict[str, str] = Field(default_factory=dict)
    delivers: bool = False
    load: Load
    avg_cost_ms: float = Field(default=0.0, ge=0, le=1e15)
    cpu_idle_percent: float = Field(default=100.0, ge=0, le=100)
    term_seen: Int64 = 0
    held: list[Held] = Field(default_factory=list)
    held_deliveries: list[str] = Field(default_factory=list)
    egress_allow: list[str] | None = Field(
        default=None,
        max_length=MAX_EGRESS_NETWORKS,
        description="Networks that it may call besides public ones.",
    )
    schemas: list[ParamsSchema] = Field(
        default_factory=list,
        description="Those that the answer to the beat before asked for as `wantedSchemas`.",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        """Refuse what would lead a dispatcher's call elsewhere than to a path below the address."""
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if not usable or not url.isprintable() or set(url) & set(" ?#@\\"):
            raise ValueError("is http or https, a host, a port and at most a path")
        return url


class HeartbeatResponse(Message):
    """Given only after the beat is committed."""

    term: Int64
    now: Int64 = Field(description="The database's time, epoch ms.")
    unwanted: list[str] = Field(description="Held executions that are to be stopped and dropped.")
    wanted_schemas: list[str] = Field(
        default_factory=list,
        description="Digests of this worker's handlers whose schema is not known here yet.",
    )


class WorkerHealth(Message):
    """`GET /healthz` of a worker: the boot id is the proof that it is this process that lives."""

    status: str = "ok"
    worker_id: str
    boot_id: str


class LogLevel(StrEnum):
    """How grave a line is, by the names of Python's logging."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class LogSource(StrEnum):
    """Where a line comes from; `oncue` is the platform's own word about lines that were dropped."""

    LOG = "log"
    STDOUT = "stdout"
    STDERR = "stderr"
    CTX = "ctx"
    ONCUE = "oncue"


class LogLine(Message):
    """One line of an execution. `seq` counts from 1 over all its lines, dropped ones included.

    A line of source `oncue` stands for the `droppedLines` and `droppedBytes` in its fields, of
    which the last had its `seq`.
    """

    seq: int = Field(ge=1, lt=2**53)
    time: int = Field(ge=0, le=LATEST_TIME)
    level: LogLevel
    source: LogSource
    message: str
    fields: dict[str, Any] | None = None


class Progress(Message):
    """How far a run has come, by its handler's word; the newest `at` counts."""

    value: float = Field(ge=0, le=1)
    text: str = Field(default="", max_length=MAX_PROGRESS_TEXT_LENGTH)
    at: int = Field(ge=0, le=LATEST_TIME)


class LogPart(Message):
    """Lines of one execution that follow each other, and its newest progress.

    A part is repeated unchanged until it is acknowledged: `executionId` and the first `seq`
    name it. `complete` says that no more lines of the execution will follow.
    """

    execution_id: str = Field(max_length=64)
    lines: list[LogLine] = Field(default_factory=list, max_length=MAX_LINES_PER_LOG_PART)
    progress: Progress | None = None
    complete: bool = False


class LogsRequest(Message):
    """`POST /internal/logs`: lines and progress of the sender's own executions."""

    protocol: int = PROTOCOL_VERSION
    worker_id: str = Field(max_length=MAX_NAME_LENGTH)
    parts: list[LogPart] = Field(max_length=MAX_LOG_PARTS_PER_REQUEST)


class LogsResponse(Message):
    """Given after the commit. Everything was stored but what is of these executions."""

    refused: list[str] = Field(
        description="Unknown, another worker's, or past retention: send no more of them."
    )


def call_token(key_digest: str) -> str:
    """Return what a dispatcher sends to a worker that beats with a key, in place of the token.

    It is HMAC-SHA256, in hex, of a fixed text under the key's SHA-256 (`key_digest`, in hex):
    both sides can derive it, it says nothing of the key, and no dispatcher takes it for one.
    """
    return hmac.new(bytes.fromhex(key_digest), _CALLS, hashlib.sha256).hexdigest()


_CALLS: Final = b"oncue: a dispatcher calls a worker"
