"""The states of jobs and executions and every legal move between them, as data.

The guards of the SQL, the diagram in `docs/states.md` and the matrix test come from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class JobStatus(IntEnum):
    """Stored as the number, shown as the word."""

    WAITING = 0
    RUNNING = 1
    SUCCEEDED = 2
    FAILED = 3
    PAUSED = 4
    CANCELLED = 5
    BLOCKED = 6
    SCHEDULED = 7


class JobKind(IntEnum):
    """What a row of `job_info` is: only tasks run."""

    TASK = 0
    SCHEDULE = 1
    GROUP = 2


class ExecutionStatus(IntEnum):
    """One attempt to run one trigger on one worker."""

    CLAIMED = 0
    RUNNING = 1
    SUCCEEDED = 2
    FAILED = 3
    TIMED_OUT = 4
    LOST = 5
    CANCELLED = 6
    RETURNED = 7


class DeliveryStatus(IntEnum):
    """What became of a callback."""

    PENDING = 0
    DELIVERED = 1
    EXHAUSTED = 2
    GONE = 3


@dataclass(frozen=True, slots=True)
class Move:
    """A legal move of a job; no `source` means that the row is new."""

    name: str
    kind: JobKind
    source: JobStatus | None
    target: JobStatus


_TASK, _SCHEDULE, _GROUP = JobKind.TASK, JobKind.SCHEDULE, JobKind.GROUP
_S = JobStatus

JOB_MOVES: Final[tuple[Move, ...]] = (
    Move("submit", _TASK, None, _S.WAITING),
    Move("submit", _TASK, None, _S.BLOCKED),
    Move("unblock", _TASK, _S.BLOCKED, _S.WAITING),
    Move("block", _TASK, _S.WAITING, _S.BLOCKED),
    Move("claim", _TASK, _S.WAITING, _S.RUNNING),
    Move("reassign", _TASK, _S.RUNNING, _S.RUNNING),
    Move("succeed", _TASK, _S.RUNNING, _S.SUCCEEDED),
    Move("fail", _TASK, _S.RUNNING, _S.FAILED),
    Move("retry", _TASK, _S.RUNNING, _S.WAITING),
    Move("give_back", _TASK, _S.RUNNING, _S.WAITING),
    Move("cancel", _TASK, _S.BLOCKED, _S.CANCELLED),
    Move("cancel", _TASK, _S.WAITING, _S.CANCELLED),
    Move("cancel", _TASK, _S.PAUSED, _S.CANCELLED),
    Move("cancel", _TASK, _S.RUNNING, _S.CANCELLED),
    Move("expire", _TASK, _S.BLOCKED, _S.FAILED),
    Move("expire", _TASK, _S.WAITING, _S.FAILED),
    Move("expire", _TASK, _S.PAUSED, _S.FAILED),
    Move("pause", _TASK, _S.WAITING, _S.PAUSED),
    Move("resume", _TASK, _S.PAUSED, _S.WAITING),
    Move("trigger", _TASK, _S.WAITING, _S.WAITING),
    Move("change", _TASK, _S.WAITING, _S.WAITING),
    Move("change", _TASK, _S.PAUSED, _S.PAUSED),
    Move("reopen", _TASK, _S.FAILED, _S.WAITING),
    Move("reopen", _TASK, _S.CANCELLED, _S.WAITING),
    Move("submit", _SCHEDULE, None, _S.SCHEDULED),
    Move("fire", _SCHEDULE, _S.SCHEDULED, _S.SCHEDULED),
    Move("change", _SCHEDULE, _S.SCHEDULED, _S.SCHEDULED),
    Move("change", _SCHEDULE, _S.PAUSED, _S.PAUSED),
    Move("trigger", _SCHEDULE, _S.SCHEDULED, _S.SCHEDULED),
    Move("trigger", _SCHEDULE, _S.PAUSED, _S.PAUSED),
    Move("pause", _SCHEDULE, _S.SCHEDULED, _S.PAUSED),
    Move("resume", _SCHEDULE, _S.PAUSED, _S.SCHEDULED),
    Move("cancel", _SCHEDULE, _S.SCHEDULED, _S.CANCELLED),
    Move("cancel", _SCHEDULE, _S.PAUSED, _S.CANCELLED),
    Move("finish", _SCHEDULE, _S.SCHEDULED, _S.SUCCEEDED),
    Move("submit", _GROUP, None, _S.RUNNING),
    Move("succeed", _GROUP, _S.RUNNING, _S.SUCCEEDED),
    Move("fail", _GROUP, _S.RUNNING, _S.FAILED),
    Move("cancel", _GROUP, _S.RUNNING, _S.CANCELLED),
)

VERBS: Final = {
    "cancel": "cancel",
    "pause": "pause",
    "resume": "resume",
    "trigger": "trigger",
    "retry": "reopen",
    "change": "change",
}
"""The verbs of callers, and the move that each asks for (`change` is PATCH)."""
_VERB_KINDS: Final = frozenset({_TASK, _SCHEDULE})
"""A group ends by its children: until groups can be submitted no verb is offered for one."""

TERMINAL_JOBS: Final = frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCELLED})

EXECUTION_MOVES: Final[frozenset[tuple[ExecutionStatus, ExecutionStatus]]] = frozenset(
    {(ExecutionStatus.CLAIMED, ExecutionStatus.RUNNING)}
    | {
        (source, target)
        for source in (ExecutionStatus.CLAIMED, ExecutionStatus.RUNNING)
        for target in ExecutionStatus
        if target > ExecutionStatus.RUNNING
    }
)
OPEN_EXECUTIONS: Final = frozenset({ExecutionStatus.CLAIMED, ExecutionStatus.RUNNING})


def sources(name: str, kind: JobKind) -> frozenset[JobStatus]:
    """Return the states from which `name` may start: the guard of its UPDATE."""
    found = frozenset(
        move.source
        for move in JOB_MOVES
        if move.name == name and move.kind == kind and move.source is not None
    )
    if not found:
        raise KeyError(f"{kind.name} has no move {name!r}")
    return found


def verb_target(verb: str, kind: JobKind, status: JobStatus) -> JobStatus | None:
    """Return where a caller's verb would lead, or None where it is not possible."""
    for move in JOB_MOVES:
        if move.name == VERBS[verb] and move.kind is kind and move.source is status:
            return move.target if kind in _VERB_KINDS else None
    return None


def verb_sources(verb: str) -> frozenset[JobStatus]:
    """Return the states from which a caller's verb is possible, for some kind of job."""
    return frozenset(
        status
        for status in JobStatus
        if any(verb_target(verb, kind, status) is not None for kind in JobKind)
    )


def possible_verbs(kind: JobKind, status: JobStatus) -> tuple[str, ...]:
    """Name the verbs that are possible for a job in this state."""
    return tuple(verb for verb in VERBS if verb_target(verb, kind, status) is not None)


def verb_table() -> str:
    """Draw where each verb leads from each state, as a table; a dash is 409."""
    lines = ["| job | state | " + " | ".join(VERBS) + " |", "|---" * (len(VERBS) + 2) + "|"]
    for kind in (_TASK, _SCHEDULE):
        statuses = {move.target for move in JOB_MOVES if move.kind is kind}
        for status in sorted(statuses):
            cells = []
            for verb in VERBS:
                target = verb_target(verb, kind, status)
                again = verb == "cancel" and status is _S.CANCELLED
                cells.append("as it is" if again else "-" if target is None else target.name)
            lines.append(f"| {kind.name.lower()} | {status.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def in_list(statuses: frozenset[JobStatus] | frozenset[ExecutionStatus]) -> str:
    """Write statuses as the inside of an SQL IN list."""
    return ", ".join(str(int(status)) for status in sorted(statuses))


def diagram() -> str:
    """Draw the moves as Mermaid state diagrams, one a kind."""
    parts = []
    for kind in JobKind:
        lines = ["```mermaid", "stateDiagram-v2"]
        for move in JOB_MOVES:
            if move.kind is kind:
                source = "[*]" if move.source is None else move.source.name
                lines.append(f"    {source} --> {move.target.name}: {move.name}")
        ends = sorted({move.target for move in JOB_MOVES if move.kind is kind} & TERMINAL_JOBS)
        lines += [f"    {status.name} --> [*]" for status in ends]
        parts.append(f"## {kind.name.lower()}\n\n" + "\n".join([*lines, "```"]))
    return "\n\n".join(parts)
