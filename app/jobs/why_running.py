"""Where a RUNNING job is: on its way, at its worker, or with one that is silent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from app.dispatch.standing import Standings
from app.jobs.reason_codes import Reason, ReasonCode
from app.jobs.stories import clipped, span, worker_name
from app.jobs.why_workers import SILENT_MS, is_live, is_suspect
from app.lifecycle.evidence import Evidence
from app.lifecycle.nodes import Node
from app.lifecycle.states import ExecutionStatus, JobStatus
from app.plumbing.times import rfc3339
from oncue.protocol import WorkerState


def why_running(found: Evidence, told: Standings) -> list[Reason]:
    """Tell where the current execution of a RUNNING job is, and whether its worker is silent."""
    job = found.job
    run = next(
        (row for row in found.executions if row["execution_id"] == job["execution_id"]), None
    )
    node = next((one for one in found.nodes if one.worker_id == job["owner_worker_id"]), None)
    if run is None:
        return [Reason(ReasonCode.CLAIMED_NOT_SENT, "It has just been claimed.")]
    held = node is not None and run["execution_id"] in node.held
    leased = told.lease is not None and told.lease.execution_id == run["execution_id"]
    known = run["status"] == ExecutionStatus.RUNNING or held or leased
    reason = _runs(found, run, node, told) if known else _on_the_way(found, run, node, told)
    gone = node is None or not is_live(node, job["now_ms"])
    if gone or (node is not None and is_suspect(node, told)):
        return [reason, _owner_unreachable(found, run, node)]
    return [reason]


def _runs(found: Evidence, run: Any, node: Node | None, told: Standings) -> Reason:
    now = found.job["now_ms"]
    since = run["started_at"] or run["accepted_at"] or run["claimed_at"]
    beat_age = None if node is None else max(0, now - node.last_heartbeat)
    beat = "" if beat_age is None else f" Its worker's last beat is {span(beat_age)} old."
    progress = _progress(run)
    if told.lease is not None and told.lease.ended:
        beat = " It has ended, and its report is on the way."
    return Reason(
        ReasonCode.RUNNING,
        f"Attempt {run['attempt']} runs on {worker_name(run['worker_id'])}, "
        f"for {span(now - since)} now.{progress}{beat}",
        {
            "workerId": run["worker_id"],
            "executionId": run["execution_id"],
            "attempt": run["attempt"],
            "progress": run["progress"],
            "lastBeatAgeMs": beat_age,
            "leaseMs": None if told.lease is None else told.lease.left_ms,
            "hasEnded": told.lease is not None and told.lease.ended,
            "timeoutMs": found.job["timeout_ms"],
        },
        since,
    )


def _progress(run: Any) -> str:
    if run["progress_at"] is None:
        return ""
    text = f" ({clipped(run['progress_text']).rstrip('.')})" if run["progress_text"] else ""
    return f" It is {run['progress']:.0%} done{text}."


def _on_the_way(found: Evidence, run: Any, node: Node | None, told: Standings) -> Reason:
    job = found.job
    name, waited = worker_name(run["worker_id"]), job["now_ms"] - run["claimed_at"]
    details = {
        "workerId": run["worker_id"],
        "executionId": run["execution_id"],
        "attempt": run["attempt"],
        "term": run["term"],
        "currentTerm": job["term"],
    }
    if node is not None and is_suspect(node, told):
        return Reason(
            ReasonCode.SENT_NOT_ANSWERED,
            f"It was claimed for {name} {span(waited)} ago, which has not answered. It may have "
            "it, so it is sent again to that worker only, until it answers or is proven dead.",
            details,
            run["claimed_at"],
        )
    lost = told.reachable and not told.lock_held
    holder = " No dispatcher holds the lock, so that it would be sent." if lost else ""
    return Reason(
        ReasonCode.CLAIMED_NOT_SENT,
        f"It was claimed for {name} {span(waited)} ago; that it was sent is not known yet.{holder}",
        details,
        run["claimed_at"],
    )


def _owner_unreachable(found: Evidence, run: Any, node: Node | None) -> Reason:
    name = worker_name(run["worker_id"])
    quiet = "is not known any more"
    details: dict[str, Any] = {"workers": [{"workerId": run["worker_id"]}], "more": 0}
    if node is not None:
        age = found.job["now_ms"] - node.last_heartbeat
        quiet = (
            f"was declared dead after its beat of {rfc3339(node.last_heartbeat)}"
            if node.state is WorkerState.DOWN
            else f"has not beaten for {span(age)}"
            if age > SILENT_MS
            else "beats, but does not answer at its address"
        )
        details["workers"] = [
            {
                "workerId": node.worker_id,
                "url": node.url,
                "lastHeartbeat": rfc3339(node.last_heartbeat),
                "beats": age <= SILENT_MS and node.state is not WorkerState.DOWN,
            }
        ]
    return Reason(
        ReasonCode.WORKER_UNREACHABLE,
        f"{name} {quiet}. The job is run again only when that worker is proven dead: no beat, no "
        "answer, and its lease gone.",
        details,
        None if node is None else node.last_heartbeat,
    )


def why_still_stopping(found: Evidence, told: Standings) -> Iterator[Reason]:
    """Tell of an earlier run whose end is stored while it may go on."""
    job = found.job
    if job["stopping_execution_id"] is None:
        return
    worker_id = job["stopping_worker_id"]
    details = {"executionId": job["stopping_execution_id"], "workerId": worker_id}
    where = "a worker" if worker_id is None else worker_name(worker_id)
    since = next(
        (
            row["finished_at"]
            for row in found.executions
            if row["execution_id"] == job["stopping_execution_id"]
        ),
        None,
    )
    silent = _silence(found.nodes, worker_id, told, job["now_ms"])
    if job["status"] == JobStatus.CANCELLED:
        yield Reason(
            ReasonCode.CANCELLING,
            f"{where} was asked to stop the run, and has not said that it is over{silent}.",
            details,
            since,
        )
    else:
        yield Reason(
            ReasonCode.STOPPING_EXECUTION,
            f"An earlier run still goes on in a thread of {where}, which cannot be stopped; the "
            f"next attempt waits until it has ended, or its worker is proven dead{silent}.",
            details,
            since,
        )


def _silence(nodes: Sequence[Node], worker_id: str | None, told: Standings, now: int) -> str:
    node = next((one for one in nodes if one.worker_id == worker_id), None)
    if node is None:
        return ""
    if node.state is WorkerState.DOWN:
        return "; that worker is DOWN"
    if now - node.last_heartbeat > SILENT_MS:
        return f"; it has been silent for {span(now - node.last_heartbeat)}"
    view = told.workers.get(node.worker_id)
    return "; it does not answer" if view is not None and view.suspect else ""
