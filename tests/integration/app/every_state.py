"""Jobs of every kind in every state: by their own moves, or by hand where none leads there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from app.lifecycle.states import ExecutionStatus, JobKind, JobStatus
from tests.integration.app.rig import (
    Door,
    change,
    claimed,
    ending,
    new_term,
    rows_of,
    settled,
)

HOUR: Final = 3_600_000
Build = Callable[[Door, str], Awaitable[int]]
_S = JobStatus


def task_body(name: str) -> dict[str, Any]:
    """Return what makes a task; as many of one name run at once as one."""
    return {"jobName": name, "concurrencyKey": name, "concurrencyLimit": 1}


def schedule_body(name: str) -> dict[str, Any]:
    """Return what makes a schedule that fires each hour."""
    return {"jobName": name, "intervalMs": HOUR, "overlapPolicy": "queue"}


async def row_of(api: Door, job_id: int) -> dict[str, Any]:
    """Return the row of a job, and how many children it has."""
    (row,) = await rows_of(
        api.database,
        "SELECT j.*, (SELECT COUNT(*) FROM job_info AS c WHERE c.parent_id = j.id) AS children "
        "FROM job_info AS j WHERE j.id = :id",
        id=job_id,
    )
    return row


async def try_to_claim(api: Door, job_id: int) -> None:
    """Claim a job as a new holder of the lock would, if its state and its key let it begin."""
    await claimed(api.database, [job_id], term=await new_term(api.database))


async def hold_key(api: Door, name: str) -> None:
    """Let another task of the same key run."""
    await try_to_claim(api, await api.submitted(**task_body(name)))


async def fire_past(api: Door, schedule: int) -> None:
    """Fire what is due once an hour and a bit has passed for a schedule."""
    await change(
        api.database,
        "UPDATE job_info SET trigger_ts = trigger_ts - :by, anchor_at = anchor_at - :by, "
        "next_trigger_time = next_trigger_time - :by WHERE id = :id",
        by=HOUR + 1000,
        id=schedule,
    )
    await fire(api)


async def fire(api: Door) -> None:
    """Fire what is due."""
    await api.parts.spawner.fire_due(await new_term(api.database))


async def finish(api: Door, schedule: int) -> None:
    """Let a schedule have no fire left, and look at it."""
    await change(
        api.database,
        "UPDATE job_info SET max_fires = fires, next_trigger_time = 1 WHERE id = :id",
        id=schedule,
    )
    await fire(api)


async def ask(api: Door, verb: str, job_id: int) -> None:
    """Ask for a caller's verb, which is done or refused."""
    answer = await api.client.post(f"/openapi/jobs/{job_id}/{verb}")
    assert answer.status_code in (200, 202, 409), answer.text


async def patch(api: Door, job_id: int) -> None:
    """Change a job, which is done or refused."""
    path, header = f"/openapi/jobs/{job_id}", {"If-Match": "*"}
    answer = await api.client.patch(path, json={"priority": 7}, headers=header)
    assert answer.status_code in (200, 409), answer.text


async def end(api: Door, job_id: int, status: ExecutionStatus, **fields: Any) -> None:
    """Report an end of the run that a job has, or had."""
    row = await row_of(api, job_id)
    rows = await rows_of(
        api.database,
        "SELECT job_id, execution_id, worker_id FROM job_log WHERE execution_id = :id",
        id=row["execution_id"],
    )
    for run in rows:
        await settled(api.database, ending(_Run(**run), status, **fields))  # type: ignore[arg-type]


class _Run:
    """What of a claimed run an ending names."""

    def __init__(self, job_id: int, execution_id: str, worker_id: str) -> None:
        self.job_id, self.execution_id, self.worker_id = job_id, execution_id, worker_id


def _by(
    body: Callable[[str], dict[str, Any]], *steps: Callable[[Door, int], Awaitable[None]]
) -> Build:
    async def build(api: Door, name: str) -> int:
        job_id = await api.submitted(request_id=name, **body(name))
        for step in steps:
            await step(api, job_id)
        return job_id

    return build


async def _blocked(api: Door, name: str) -> int:
    job_id = await api.submitted(request_id=name, **task_body(name))
    await hold_key(api, name)
    await try_to_claim(api, job_id)
    return job_id


def _verb(verb: str) -> Callable[[Door, int], Awaitable[None]]:
    return lambda api, job_id: ask(api, verb, job_id)


def _end(status: ExecutionStatus, **fields: Any) -> Callable[[Door, int], Awaitable[None]]:
    return lambda api, job_id: end(api, job_id, status, **fields)


BUILDS: Final[dict[JobKind, dict[JobStatus, Build]]] = {
    JobKind.TASK: {
        _S.WAITING: _by(task_body),
        _S.BLOCKED: _blocked,
        _S.PAUSED: _by(task_body, _verb("pause")),
        _S.RUNNING: _by(task_body, try_to_claim),
        _S.SUCCEEDED: _by(task_body, try_to_claim, _end(ExecutionStatus.SUCCEEDED, result="1")),
        _S.FAILED: _by(
            task_body,
            try_to_claim,
            _end(ExecutionStatus.FAILED, error_code="no", error_message="No.", retryable=False),
        ),
        _S.CANCELLED: _by(task_body, _verb("cancel")),
    },
    JobKind.SCHEDULE: {
        _S.SCHEDULED: _by(schedule_body),
        _S.PAUSED: _by(schedule_body, _verb("pause")),
        _S.CANCELLED: _by(schedule_body, _verb("cancel")),
        _S.SUCCEEDED: _by(schedule_body, finish),
    },
    # No group can be submitted yet: all its states are made by hand.
    JobKind.GROUP: {},
}


async def job_in(api: Door, kind: JobKind, status: JobStatus, name: str) -> int:
    """Make a job of a kind in a state, also where no move of its kind leads to that."""
    build = BUILDS[kind].get(status)
    if build is not None:
        job_id = await build(api, name)
    else:
        body = schedule_body if kind is JobKind.SCHEDULE else task_body
        job_id = await api.submitted(request_id=name, **body(name))
        await change(
            api.database,
            "UPDATE job_info SET kind = :kind, status = :status WHERE id = :id",
            kind=int(kind),
            status=int(status),
            id=job_id,
        )
    row = await row_of(api, job_id)
    assert (row["kind"], row["status"]) == (kind, status)
    return job_id
