"""Explaining a job: why it is not running, who ran it, and what a caller may do next."""

from __future__ import annotations

from typing import Any

from app.access.caller import Caller
from app.dispatch.standing import Standing, read_standings
from app.ground import Ground
from app.jobs.look import no_such_job
from app.jobs.reason_codes import Reason
from app.jobs.reasons import reasons_of
from app.jobs.stories import attempt_view, stories_of
from app.lifecycle.evidence import Evidence, read_evidence
from app.lifecycle.states import TERMINAL_JOBS, JobKind, JobStatus, possible_verbs
from app.plumbing.times import rfc3339


class Explainer:
    """Explains jobs from any dispatcher, holder of the dispatch lock or not."""

    def __init__(self, ground: Ground, standing: Standing) -> None:
        self._ground = ground
        self._standing = standing

    async def explain(self, caller: Caller, job_id: int) -> dict[str, Any]:
        """Return why the job is where it is: at most six statements and one call of Redis.

        Raises:
            Problem: `job_not_found`.
        """
        database = self._ground.database
        found = await database.read(
            lambda connection: read_evidence(
                connection, database, job_id, tenant_id=caller.tenant_id
            )
        )
        if found is None:
            raise no_such_job(job_id)
        job = found.job
        run = None
        if job["status"] == JobStatus.RUNNING and job["execution_id"] is not None:
            run = (job_id, job["trigger_ts"])
        told = await read_standings(self._ground, job["now_ms"], run, partition=job["partition_no"])
        return _document(found, reasons_of(found, told, self._standing.note()))


def _document(found: Evidence, reasons: list[Reason]) -> dict[str, Any]:
    job = found.job
    status = JobStatus(job["status"])
    stories = stories_of(job, found.executions)
    return {
        "jobId": job["id"],
        "status": status.name,
        "at": rfc3339(job["now_ms"]),
        "summary": reasons[0].message,
        "reasons": [
            {
                "code": str(reason.code),
                "message": reason.message,
                "details": dict(reason.details),
                "since": None if reason.since_ms is None else rfc3339(reason.since_ms),
            }
            for reason in reasons
        ],
        "attempts": [
            attempt_view(row, story) for row, story in zip(found.executions, stories, strict=True)
        ],
        "moreAttempts": found.more_executions,
        "nextActions": _possible(found, status),
    }


def _possible(found: Evidence, status: JobStatus) -> list[str]:
    """Name the verbs that would not be refused now."""
    verbs = list(possible_verbs(JobKind(found.job["kind"]), status))
    parent = found.job["parent_kind"], found.job["parent_status"]
    if parent[0] == JobKind.GROUP and parent[1] in TERMINAL_JOBS and "retry" in verbs:
        verbs.remove("retry")
    return verbs
