"""Makes one history for the judge of what was recorded, and of the rows that are left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from app.lifecycle.states import ExecutionStatus, JobStatus
from tests.faults.cluster import Cluster, worker_id
from tests.faults.handlers import Note
from tests.support.checker import (
    Began,
    Died,
    Ended,
    Event,
    ExecutionRow,
    Healed,
    JobRow,
    Webhook,
)

EARLIER: Final = 1e-6


def history(
    cluster: Cluster, told: Iterable[Event], *, healed_at: float | None = None
) -> list[Event]:
    """Return all events in the order of their times.

    `told` is what callers noted. Wall times become those of the monotonic clock.
    """
    offset = time.monotonic() - time.time()
    now = time.monotonic()
    events: list[Event] = [*told, *_deaths(cluster), *_runs(cluster), *_webhooks(cluster, offset)]
    events += [*cluster.frozen, *cluster.redis_troubles]
    if healed_at is not None:
        events.append(Healed(healed_at))
    events += _job_rows(cluster, offset, now)
    events += _execution_rows(cluster, offset, now)
    return sorted(events, key=lambda event: event.at)


def held_by_two(cluster: Cluster) -> list[str]:
    """Tell which runs began while a process that was not frozen still held their job's lock."""
    found: list[str] = []
    for job_id, notes in _by_job(cluster.notes()).items():
        starts = [note for note in notes if note.event == "start"]
        for note in starts:
            others = {one.worker for one in starts if one.at < note.at}
            slept = any(
                freeze.worker.partition("#")[0] in others
                and freeze.since <= note.at <= freeze.at + 2.5
                for freeze in cluster.frozen
            )
            if note.held and not slept:
                found.append(f"P4: job {job_id} began at {note.at:.3f}, its lock was held")
    return found


def _deaths(cluster: Cluster) -> list[Event]:
    return [
        Died(life.until, worker_id(life, cluster.watch.lives))
        for life in cluster.watch.lives
        if life.until is not None and life.name in cluster.workers
    ]


def _runs(cluster: Cluster) -> list[Event]:
    """Begins and ends; a run without a noted end ended with its process.

    That was before the job's next begin, if that one found the job's lock free.
    """
    events: list[Event] = []
    for notes in _by_job(cluster.notes()).values():
        ended = {note.execution_id for note in notes if note.event != "start"}
        workers: dict[str, str] = {}
        for note in notes:
            if note.event == "start":
                life = cluster.watch.life_of(note)
                workers[note.execution_id] = worker = worker_id(life, cluster.watch.lives)
                events.append(
                    Began(note.at, worker, note.job_id, note.execution_id, note.trigger_ts)
                )
                if note.execution_id in ended:
                    continue
                ends = [life.until, cluster.watch.children_ended.get(note.execution_id)]
                after = [one for one in notes if one.event == "start" and one.at > note.at]
                ends += [after[0].at - EARLIER] if after and not after[0].held else []
                known = [one for one in ends if one is not None]
                if known and min(known) != life.until:
                    events.append(Ended(min(known), worker, note.execution_id, "died"))
            else:
                worker = workers[note.execution_id]
                events.append(Ended(note.at, worker, note.execution_id, note.event))
    return events


def _webhooks(cluster: Cluster, offset: float) -> list[Event]:
    events: list[Event] = []
    for one in cluster.receiver.received():
        body = json.loads(one.body)
        data = body["data"]
        events.append(
            Webhook(
                one.at + offset,
                one.webhook_id,
                data["jobId"],
                body["type"].removeprefix("job.").upper(),
                data["executionId"] or "",
                200,
            )
        )
    return events


def _job_rows(cluster: Cluster, offset: float, now: float) -> list[Event]:
    rows = cluster.rows(
        "SELECT id, client_request_id, status, execution_id, finished_at, error_code FROM job_info"
    )
    return [
        JobRow(
            now,
            row["id"],
            row["client_request_id"],
            JobStatus(row["status"]).name,
            row["execution_id"] or "",
            _moment(row["finished_at"], offset),
            row["error_code"] or "",
        )
        for row in rows
    ]


def _execution_rows(cluster: Cluster, offset: float, now: float) -> list[Event]:
    rows = cluster.rows(
        "SELECT execution_id, job_id, trigger_ts, worker_id, status, result, stale_at, finished_at "
        "FROM job_log ORDER BY id"
    )
    return [
        ExecutionRow(
            now,
            row["execution_id"],
            row["job_id"],
            row["trigger_ts"],
            row["worker_id"],
            ExecutionStatus(row["status"]).name,
            _author(row["result"]),
            row["stale_at"] is not None,
            _moment(row["finished_at"], offset),
        )
        for row in rows
    ]


def _author(result: str | None) -> str:
    """The execution that returned a result, as the result says."""
    return "" if result is None else str(json.loads(result)["by"])


def _moment(epoch_ms: int | None, offset: float) -> float | None:
    return None if epoch_ms is None else epoch_ms / 1000 + offset


def _by_job(notes: Iterable[Note], key: Callable[[Any], int] = lambda note: note.job_id) -> Any:
    found: dict[int, list[Note]] = {}
    for note in sorted(notes, key=lambda one: one.at):
        found.setdefault(key(note), []).append(note)
    return found
