"""The attempts of a job as sentences: who, when, how long, why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import RowMapping

from app.lifecycle.moves.expire import CODE as EXPIRED
from app.lifecycle.states import ExecutionStatus, JobStatus
from app.plumbing.times import rfc3339

_UNSTORABLE: Final = frozenset({"result_too_large", "result_unstorable"})
_UNITS: Final = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
_S = ExecutionStatus
_NOTHING_FOLLOWS: Final = frozenset({_S.CLAIMED, _S.RUNNING, _S.SUCCEEDED})


def worker_name(worker_id: str) -> str:
    """Return the name of a worker without its boot."""
    return worker_id.partition("#")[0]


def span(milliseconds: int) -> str:
    """Write how long something takes: `0.25 s`, `5 min 3 s`, `2 h 10 min`, `3 d 4 h`."""
    seconds = max(0, milliseconds) / 1000
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    whole = max(60, round(seconds))
    big, big_word, small, small_word = next(unit for unit in _UNITS if whole >= unit[0])
    rest = whole % big // small
    return f"{whole // big} {big_word}" + (f" {rest} {small_word}" if rest else "")


def clipped(words: str) -> str:
    """End what somebody else wrote like a sentence; it is told whole elsewhere."""
    short = words if len(words) <= 300 else f"{words[:297]}..."
    return short if short.endswith((".", "!", "?")) or not short else f"{short}."


def stories_of(job: RowMapping, executions: Sequence[RowMapping]) -> list[str]:
    """Tell each execution (newest first) in a sentence or two, with what followed it."""
    told = []
    for place, row in enumerate(executions):
        newer = executions[place - 1] if place else None
        parts = (_what(row, job["now_ms"]), _late(row), _then(job, executions, row, newer))
        told.append(" ".join(part for part in parts if part))
    return told


def retry_decision(job: RowMapping, executions: Sequence[RowMapping]) -> tuple[str, str]:
    """Say why a FAILED job was not tried again: a code and a sentence."""
    if job["error_code"] == EXPIRED:
        return "expired", "Nothing begins after that."
    if not executions:
        return "not_known", "Its attempts are past their retention."
    last = executions[0]
    if last["attempt"] > job["max_retry"]:
        number = job["max_retry"] + 1
        used = "The one attempt it had is" if number == 1 else f"All its {number} attempts are"
        return "budget_used_up", f"{used} used up."
    if last["error_code"] in _UNSTORABLE:
        return "not_retryable", "Another attempt would return what cannot be stored either."
    return "not_retryable", "The handler said that no retry will help."


def _what(row: RowMapping, now: int) -> str:
    who, attempt = worker_name(row["worker_id"]), f"Attempt {row['attempt']}"
    match ExecutionStatus(row["status"]):
        case _S.CLAIMED:
            ago = span(now - row["claimed_at"])
            told = f"{attempt} was given to {who} {ago} ago; that it began is not noted yet."
        case _S.RUNNING:
            since = row["started_at"] or row["accepted_at"] or row["claimed_at"]
            told = f"{attempt} has run on {who} for {span(now - since)}."
        case _S.SUCCEEDED:
            told = f"{attempt} ran on {who}{_took(row)} and succeeded."
        case _S.FAILED:
            told = f"{attempt} ran on {who}{_took(row)} and failed{_why(row)}."
        case _S.TIMED_OUT:
            told = f"{attempt} ran on {who}{_took(row)}, until its timeout{_why(row)}."
        case _S.LOST:
            proof = row["reason"] or "its worker was proven dead"
            told = f"{attempt} was lost with {who} ({proof})."
        case _S.CANCELLED:
            told = f"{attempt} was cancelled on {who}{_took(row)}."
        case _:
            told = f"{who} {_returned(row)}; that does not count."
    return told


def _returned(row: RowMapping) -> str:
    opening = f"refused by {row['worker_id']}: "
    if (row["reason"] or "").startswith(opening):
        return f"refused attempt {row['attempt']} ({row['reason'].removeprefix(opening)})"
    return f"gave attempt {row['attempt']} back{_why(row)}"


def _why(row: RowMapping) -> str:
    message, code = row["error_message"], row["error_code"]
    if not message:
        return "" if code is None else f": {code}"
    return f": {clipped(message).rstrip('.')}" + ("" if code is None else f" ({code})")


def _took(row: RowMapping) -> str:
    if row["started_at"] is None or row["finished_at"] is None:
        return ""
    return f" for {span(row['finished_at'] - row['started_at'])}"


def _late(row: RowMapping) -> str:
    if row["stale_at"] is None:
        return ""
    return f"A late report ({row['stale_status']}) of it changed nothing."


def _then(
    job: RowMapping,
    executions: Sequence[RowMapping],
    row: RowMapping,
    newer: RowMapping | None,
) -> str:
    """Tell what followed an end that need not have been the last."""
    if row["status"] in _NOTHING_FOLLOWS or row["finished_at"] is None:
        return ""
    if newer is None:
        return _next(job, executions)
    later = span(newer["claimed_at"] - row["finished_at"])
    if row["status"] == _S.RETURNED or newer["attempt"] > row["attempt"]:
        return f"The next was given to {worker_name(newer['worker_id'])} {later} later."
    return f"A caller opened the job again; it was given to a worker {later} later."


def _next(job: RowMapping, executions: Sequence[RowMapping]) -> str:
    if job["status"] == JobStatus.FAILED:
        return f"It was not tried again. {retry_decision(job, executions)[1]}"
    if job["status"] not in (JobStatus.WAITING, JobStatus.PAUSED):
        return ""
    if job["attempt"] or executions[0]["status"] == _S.RETURNED:
        return f"The next is due at {rfc3339(job['next_trigger_time'])}."
    return "A caller opened the job again."


def attempt_view(row: RowMapping, story: str) -> dict[str, Any]:
    """Show one execution with its story."""
    return {
        "executionId": row["execution_id"],
        "attempt": row["attempt"],
        "workerId": row["worker_id"],
        "status": ExecutionStatus(row["status"]).name,
        **{
            name: None if row[column] is None else rfc3339(row[column])
            for name, column in (
                ("claimedAt", "claimed_at"),
                ("acceptedAt", "accepted_at"),
                ("startedAt", "started_at"),
                ("finishedAt", "finished_at"),
            )
        },
        "error": None
        if row["error_code"] is None
        else {"code": row["error_code"], "message": row["error_message"] or ""},
        "reason": row["reason"],
        "story": story,
    }
