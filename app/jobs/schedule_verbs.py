"""What the verbs of callers do to a schedule, in the transaction that has locked its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import structlog
from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from app.edge.problems import Problem
from app.ground import Ground
from app.jobs.digest import differing_fields, kept_digest
from app.jobs.requests import ChangeJob
from app.jobs.schedule_fields import (
    OF_FIXED_TIMES,
    ONLY_SCHEDULES,
    ONLY_TASKS,
    at_field,
    check_together,
    columns_of,
    never_fires,
    read_cron,
    too_short,
)
from app.lifecycle.audit import job_target, record_deed
from app.lifecycle.moves.backfill import has_open_backfill
from app.lifecycle.moves.fire import (
    Fired,
    child_row,
    read_plan_row,
    spawn_children,
    write_ledger,
)
from app.lifecycle.moves.follow import Claimable, Followed, free_all
from app.lifecycle.moves.guard import Asked, Changed, NotPossible, Unknown, lock_job, move_job
from app.lifecycle.moves.revise import NewValues, kept_params, store_params
from app.lifecycle.moves.submit import find_by_request
from app.lifecycle.secret_marks import SECRET_PARAMS
from app.lifecycle.states import JobStatus
from app.lifecycle.token import new_token
from app.plumbing.sealed import Sealer
from app.schedules.decide import FIXED_DELAY, first_fire, has_undecided, passed_over, spread_ms_of
from app.schedules.spawn import announce, fire_locked, skip_of, wake
from app.schedules.zone import UnknownZone

log = structlog.get_logger(__name__)

TIMING: Final = frozenset(ONLY_SCHEDULES) - frozenset(OF_FIXED_TIMES) - {"max_fires"} | {
    "jitter_ms"
}
"""The fields by which the times of a schedule change."""
GRID: Final = frozenset(
    {"cron_expr", "cron_dialect", "timezone", "dst_gap", "dst_fold", "interval_ms", "start_at"}
)
"""Those by which a backfill walks."""


_NO_KEYS: Final = Sealer("")


@dataclass(frozen=True, slots=True)
class ManualFire:
    """A run that a caller asks for now: everything that makes a repeat the same run."""

    key: str
    nominal_ms: int
    token: str
    request_id: str | None
    digest: str
    own_params: bool
    params: str | None = field(repr=False)
    sealer: Sealer = _NO_KEYS

    def kept_digest(self, job: RowMapping) -> str:
        """Return the digest as it is stored: keyed where the params are secret."""
        if not job["secret"] & SECRET_PARAMS:
            return self.digest
        return kept_digest(self.digest, ["params"], self.owner(job), self.sealer)

    def owner(self, job: RowMapping | Mapping[str, Any]) -> str:
        """Name whose digest it is."""
        return f"{job['tenant_id']}:{self.request_id}"


@dataclass(slots=True)
class Outcome:
    """What a verb has done beside changing the row: to be told once it is committed."""

    fired: list[Fired] = field(default_factory=list)
    child_id: int | None = None
    is_new: bool = False
    claimable: tuple[Claimable, ...] = ()


class ScheduleVerbs:
    """Resumes, changes, triggers and closes schedules; each method runs inside a transaction."""

    def __init__(self, ground: Ground) -> None:
        self._database = ground.database
        self._bus = ground.bus
        self._grace_ms = round(ground.settings.misfire_grace_seconds * 1000)
        self._min_interval_ms = ground.settings.min_interval_ms

    def tell(self, outcome: Outcome) -> None:
        """Announce what a committed verb has done."""
        for fired in outcome.fired:
            announce(self._bus, fired)
        wake(self._bus, outcome.claimable)

    async def resume(
        self,
        connection: AsyncConnection,
        job: RowMapping,
        asked: Asked,
        missed: Literal["skip", "catchUp"],
        outcome: Outcome,
    ) -> Changed:
        """Let a paused schedule fire again; what it missed is put on record, or made up for."""
        changes: dict[str, Any] = {}
        if missed == "skip":
            changes = await self._pass_over(connection, job, until_ms=job["now_ms"])
        await move_job(connection, job, asked, JobStatus.SCHEDULED, changes)
        if missed == "catchUp":
            await self._catch_up(connection, job["id"], outcome)
        return Changed(job["queue_id"], job["priority"])

    async def _catch_up(
        self, connection: AsyncConnection, schedule_id: int, outcome: Outcome
    ) -> None:
        """Decide by the misfire policy what a pause has missed, however short it was.

        Nobody was there on purpose, so there is no grace: left to the spawner, what is late by
        less would all run.
        """
        row = await read_plan_row(connection, self._database, schedule_id)
        if not _may_have_undecided(row, now_ms=row["now_ms"]):
            return
        done = await fire_locked(
            connection, self._database, [row], grace_ms=0, token=new_token(), term=None
        )
        outcome.fired.append(done.fired)

    async def close(self, connection: AsyncConnection, job: RowMapping) -> dict[str, Any]:
        """Put on record the fires of a cancelled schedule that nobody has decided.

        Return the columns that change. What is put off past now is no fire that will run either.
        """
        row = await read_plan_row(connection, self._database, job["id"])
        try:
            changes = await self._pass_over(
                connection,
                job,
                until_ms=job["now_ms"] + spread_ms_of(row),
                reason="paused" if job["status"] == JobStatus.PAUSED else "cancelled",
            )
        except Problem:
            # Its zone is gone: what it missed cannot be told, and must not keep it from its end.
            log.warning("missed_fires_unknown", job_id=job["id"], timezone=row["timezone"])
            return {}
        del changes["next_trigger_time"]
        return changes

    async def _pass_over(
        self,
        connection: AsyncConnection,
        job: RowMapping,
        *,
        until_ms: int,
        reason: Literal["paused", "cancelled"] = "paused",
    ) -> dict[str, Any]:
        """Put on record that the fires due by then did not run; return the columns that change."""
        row = await read_plan_row(connection, self._database, job["id"])
        try:
            decision = passed_over(row, now_ms=until_ms, reason=reason)
        except UnknownZone as error:
            raise at_field("timezone", f"{error}; PATCH it first") from None
        skips = [(job["id"], skip_of(entry)) for entry in decision.ledger]
        await write_ledger(connection, self._database, skips)
        last = decision.last
        return {
            "trigger_ts": decision.cursor_ms,
            # Where no fire is left, the next look ends the schedule.
            "next_trigger_time": job["now_ms"] if decision.ended else decision.next_ms,
            "skip_from": None if last is None else last.from_ms,
            "skip_reason": None if last is None else last.reason,
        }

    async def revise(
        self,
        connection: AsyncConnection,
        job: RowMapping,
        asked: Asked,
        request: ChangeJob,
        values: NewValues,
        outcome: Outcome,
    ) -> Changed | NotPossible | Unknown:
        """Change a schedule: what is due first happens as it was told, then the new rule holds.

        Raises:
            Problem: `validation_failed`, `cron_invalid` or `schedule_never_fires`.
        """
        sent = {name: getattr(request, name) for name in request.model_fields_set}
        for name, wire_name in ONLY_TASKS.items():
            if name in sent:
                raise at_field(wire_name, "is for jobs that run once, not for schedules")
        own = {name: value for name, value in sent.items() if name in ONLY_SCHEDULES}
        row = await read_plan_row(connection, self._database, job["id"])
        columns = self._checked(row, own)
        if GRID & own.keys() and await has_open_backfill(connection, job["id"]):
            raise Problem(
                "verb_not_possible",
                f"A backfill of schedule {job['id']} goes on by the times as they are "
                f"(GET /openapi/jobs/{job['id']}/backfills): change them when it is DONE.",
                jobId=job["id"],
                jobStatus=JobStatus(job["status"]).name,
                possible=[],
            )
        if TIMING & own.keys():
            current = await self._settle_the_past(connection, job, asked, row, outcome)
            if not isinstance(current, RowMapping):
                return current
            job = current
            decided_ms = row["now_ms"]
            row = await read_plan_row(connection, self._database, job["id"])
            columns |= _new_times(row, columns, own, decided_ms=decided_ms)
        most = columns.get("max_fires", row["max_fires"])
        if most is not None and row["fires"] >= most and row["next_trigger_time"] is not None:
            columns["next_trigger_time"] = job["now_ms"]  # the next look ends it
        changes = {**values.columns, **columns}
        if values.new_params:
            params = kept_params(job, values.params, values.sealer)
            changes |= await store_params(connection, self._database, job["id"], params)
        await move_job(connection, job, asked, JobStatus(job["status"]), changes)
        freed: tuple[Claimable, ...] = ()
        if columns.get("overlap_policy") == "allow":
            freed = await free_all(connection, job["id"])
        return Changed(
            job["queue_id"],
            values.columns.get("priority", job["priority"]),
            followed=Followed(freed),
        )

    def _checked(self, row: RowMapping, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that change, once they fit what the schedule is."""
        if "cron_expr" in own and row["cron_expr"] is None:
            raise at_field("cronExpr", "this schedule has an interval; submit another one")
        if "interval_ms" in own and row["interval_ms"] is None:
            raise at_field("intervalMs", "this schedule has an expression; submit another one")
        columns = columns_of(own)
        if own.get("misfire_policy", "all") != "all":
            columns = {"misfire_cap": None, "misfire_spacing_ms": None} | columns
        if own.get("misfire_policy") == "skip":
            columns = {"catch_up_ms": None} | columns
        after = {**row, **columns}
        told = {
            **{name: after[name] for name in ONLY_SCHEDULES if name in after},
            "catch_up_window_ms": after["catch_up_ms"],
        }
        if row["interval_mode"] == FIXED_DELAY and "overlap_policy" not in own:
            told["overlap_policy"] = None
        check_together(told)
        refusal = too_short(columns, self._min_interval_ms)
        if refusal is not None:
            raise refusal
        if own.keys() & {"cron_expr", "cron_dialect", "timezone"}:
            # A new expression is not bound by the dialect of the one before.
            dialect = own.get("cron_dialect") if "cron_expr" in own else after["cron_dialect"]
            read = read_cron({**after, "cron_dialect": dialect})
            columns |= {name: read[name] for name in ("cron_expr", "cron_dialect")}
        return columns

    async def _settle_the_past(
        self,
        connection: AsyncConnection,
        job: RowMapping,
        asked: Asked,
        row: RowMapping,
        outcome: Outcome,
    ) -> RowMapping | Changed | NotPossible | Unknown:
        """Decide, by the rule as it is, every nominal time until the moment of `row`.

        Return the job after that.
        """
        if row["interval_mode"] == FIXED_DELAY and job["status"] == JobStatus.PAUSED:
            return job  # whoever resumes it says what becomes of a run that is due
        now, spread = row["now_ms"], spread_ms_of(row)
        if job["status"] == JobStatus.PAUSED:
            changes: dict[str, Any] = {}
            try:
                # The cursor will stand at now: what is put off past it has no other record.
                changes = await self._pass_over(connection, job, until_ms=now + spread)
            except Problem:
                # Its zone is gone: what it missed cannot be told, and must not forbid the cure.
                log.warning("missed_fires_unknown", job_id=job["id"], timezone=row["timezone"])
            # The caller's own change follows, and is what goes on record.
            silently = replace(asked, deed=None)
            await move_job(connection, job, silently, JobStatus.PAUSED, changes)
        elif not _may_have_undecided(row, now_ms=now):
            return job
        else:
            done = await fire_locked(
                connection,
                self._database,
                [row],
                grace_ms=self._grace_ms,
                token=new_token(),
                term=None,
                ahead_ms=spread,
            )
            outcome.fired.append(done.fired)
        again = replace(asked, token=new_token())
        return await lock_job(connection, self._database, again, "change")

    async def trigger(
        self,
        connection: AsyncConnection,
        job: RowMapping,
        asked: Asked,
        manual: ManualFire,
        outcome: Outcome,
    ) -> None:
        """Spawn a run now, whatever else goes on; a repeat with its clientRequestId is that run.

        Raises:
            Problem: `request_conflict`.
        """
        if await self.is_repeat(connection, job, manual, outcome):
            return
        own = None
        if manual.own_params:
            own = kept_params(job, manual.params, manual.sealer)
        born = await spawn_children(
            connection,
            self._database,
            [
                child_row(
                    job["id"],
                    manual.nominal_ms,
                    manual.nominal_ms,
                    key=manual.key,
                    request_id=manual.request_id,
                    digest=manual.kept_digest(job),
                    own_params=manual.own_params,
                    params=own,
                )
            ],
            token=manual.token,
            now_ms=job["now_ms"],
        )
        if not born.ids:
            # Somebody submitted a job with this clientRequestId meanwhile.
            if not await self.is_repeat(connection, job, manual, outcome):
                raise RuntimeError("a manual fire was neither inserted nor there before")
            return
        outcome.child_id, outcome.is_new, outcome.claimable = born.ids[0], True, born.claimable
        if asked.deed is not None:
            await record_deed(
                connection,
                asked.deed,
                job_target(job["id"]),
                tenant_id=job["tenant_id"],
                now_ms=job["now_ms"],
                new={"childJobId": outcome.child_id},
            )

    async def is_repeat(
        self,
        connection: AsyncConnection,
        job: RowMapping | Mapping[str, Any],
        manual: ManualFire,
        outcome: Outcome,
    ) -> bool:
        """Tell whether the run is there already, and put it into `outcome`.

        Raises:
            Problem: `request_conflict`.
        """
        if manual.request_id is None:
            return False
        key = (job["tenant_id"], manual.request_id)
        known = (await find_by_request(connection, [key])).get(key)
        if known is None:
            return False
        if known["submit_token"] == manual.token:
            outcome.is_new = True  # by an earlier try of this transaction
        elif known["parent_id"] != job["id"]:
            raise _taken(known["id"], "jobId")
        elif fields := differing_fields(
            known["request_digest"],
            manual.digest,
            owner=manual.owner(job),
            sealer=manual.sealer,
        ):
            raise _taken(known["id"], *fields)
        outcome.child_id = known["id"]
        return True


def _may_have_undecided(row: RowMapping, *, now_ms: int) -> bool:
    """Tell whether times until now are to be decided; where nobody knows, firing puts it off."""
    try:
        # Its next time may be later: that of one that could not be planned is put off.
        return has_undecided(row, now_ms=now_ms)
    except UnknownZone:
        return True


def _new_times(
    row: RowMapping, columns: Mapping[str, Any], own: Mapping[str, Any], *, decided_ms: int
) -> dict[str, Any]:
    """Return the columns by which a changed schedule goes on from where the old rule has ended.

    That is not now: settling the past has taken time, in which there may have been a fire.
    """
    # A clock that was set back must not have the same times decided again.
    now_ms = max(decided_ms, row["trigger_ts"])
    after: dict[str, Any] = {**row, **columns}
    found: dict[str, Any] = {}
    if row["interval_ms"] is not None and own.keys() & {"interval_ms", "start_at"}:
        start = after["start_at"]
        after["anchor_at"] = found["anchor_at"] = (
            now_ms + after["interval_ms"] if start is None else start
        )
    if row["interval_mode"] == FIXED_DELAY:
        if row["next_trigger_time"] is None:
            return found  # a run goes on: its end sets the time
        first = _next_of_delay(row, after, own, now_ms=now_ms)
    else:
        found |= {"trigger_ts": now_ms, "skip_from": None, "skip_reason": None}
        first = first_fire(after, after_ms=now_ms)
    if first is None:
        raise never_fires()
    return found | {"next_trigger_time": first}


def _next_of_delay(
    row: RowMapping, after: Mapping[str, Any], own: Mapping[str, Any], *, now_ms: int
) -> int | None:
    """Return when a changed fixed delay is next: as before, unless its start or delay is new."""
    due = int(row["next_trigger_time"])
    if own.keys() & {"interval_ms", "start_at"} and due > now_ms:
        return first_fire(after, after_ms=now_ms)
    return None if after["end_at"] is not None and due > after["end_at"] else due


def _taken(job_id: int, *fields: str) -> Problem:
    return Problem(
        "request_conflict",
        f"This clientRequestId belongs to job {job_id}, which was asked for with other values "
        f"of: {', '.join(fields)}. Use a new clientRequestId for a new run.",
        jobId=job_id,
        fields=list(fields),
    )
