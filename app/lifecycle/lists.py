"""Lists of jobs, newest first: a page costs the same however many jobs are kept.

Ids grow with the time of creation, so newest first is the primary key backwards. A filter with
an index of its own (label, clientRequestId) is exact. The claim index tells all jobs of a status
or of a queue, as long as they are few. Everything else walks the primary key over a bounded
number of rows, and a page may then end early: its cursor tells where to go on (ADR 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.reads import JOB_COLUMNS, read_schedules, results_of
from app.lifecycle.states import JobKind, JobStatus
from app.plumbing.database import Database

WALK_ROWS: Final = 5000
"""How many rows one page may walk."""
FEW: Final = 2000
"""Up to so many index entries of a status or a handler are read whole."""
MOST_QUEUES: Final = 50
DISORDER_MS: Final = 10_000
"""How much later a job with a lower id may have been created: no INSERT takes longer."""
CLAIM_INDEX: Final = {True: "ix_job_info_claim", False: "(ix_job_info_claim)"}
NEAR_IDS: Final = 512
HIGHEST_ID: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class JobFilter:
    """At most one of the first five, and a range of creation (epoch ms, `to` excluded)."""

    status: JobStatus | None = None
    handler: str | None = None
    name_prefix: str | None = None
    label: tuple[str, str] | None = None
    client_request_id: str | None = None
    created_from: int | None = None
    created_to: int | None = None


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs, newest first, the results of those that have a short one, and where to go on."""

    jobs: Sequence[RowMapping]
    results: dict[str, str]
    long_results: frozenset[str]
    before: int | None
    schedules: dict[int, RowMapping]


async def list_jobs(
    connection: AsyncConnection,
    database: Database,
    *,
    tenant_id: int,
    wanted: JobFilter,
    before: int | None,
    limit: int,
) -> JobPage:
    """Return up to `limit` jobs with an id lower than `before`."""
    low, high = await _id_range(connection, wanted, before)
    lister = _Lister(connection, database, tenant_id, wanted, limit)
    if wanted.client_request_id is not None:
        jobs, onward = await lister.read("client_request_id = :request", low, high), None
    elif wanted.label is not None:
        jobs, onward = await lister.labelled(low, high)
    else:
        ids = await lister.few_ids()
        if ids is not None:
            jobs, onward = await lister.among(ids, low, high)
        else:
            jobs, onward = await lister.walk(low, high)
    results, long = await _results(connection, jobs)
    return JobPage(jobs, results, long, onward, await _schedules(connection, jobs))


class _Lister:
    """Reads one page; `low` is included in every range of ids, `high` is not."""

    def __init__(
        self,
        connection: AsyncConnection,
        database: Database,
        tenant_id: int,
        wanted: JobFilter,
        limit: int,
    ) -> None:
        self._connection = connection
        sqlite = database.is_sqlite
        self._primary = "NOT INDEXED " if sqlite else "FORCE INDEX (PRIMARY) "
        self._claim = f"{'INDEXED BY' if sqlite else 'FORCE INDEX'} {CLAIM_INDEX[sqlite]} "
        self._wanted = wanted
        self._limit = limit
        self._values: dict[str, Any] = {"tenant": tenant_id}
        self._conditions = ["tenant_id = :tenant"]
        for condition, name, value in (
            ("status = :status", "status", wanted.status),
            ("job_handler = :handler", "handler", wanted.handler),
            ("created_at >= :created_from", "created_from", wanted.created_from),
            ("created_at < :created_to", "created_to", wanted.created_to),
        ):
            if value is not None:
                self._conditions.append(condition)
                self._values[name] = value
        if wanted.name_prefix is not None:
            self._conditions.append("SUBSTR(job_name, 1, :length) = :prefix")
            self._values |= {"length": len(wanted.name_prefix), "prefix": wanted.name_prefix}
        if wanted.client_request_id is not None:
            self._values["request"] = wanted.client_request_id

    async def read(
        self, condition: str, low: int, high: int, *, hint: str = "", **values: Any
    ) -> Sequence[RowMapping]:
        """Read matching jobs, newest first, one more than a page has."""
        conditions = " AND ".join([condition, "id >= :low", "id < :high", *self._conditions])
        statement = text(
            f"SELECT {JOB_COLUMNS} FROM job_info {hint}WHERE {conditions} "
            "ORDER BY id DESC LIMIT :limit"
        )
        if "ids" in values:
            statement = statement.bindparams(bindparam("ids", expanding=True))
        given = self._values | values | {"low": low, "high": high, "limit": self._limit + 1}
        return (await self._connection.execute(statement, given)).mappings().all()

    async def labelled(self, low: int, high: int) -> tuple[Sequence[RowMapping], int | None]:
        """Follow the index of labels, whose entries of one value are in the order of ids."""
        name, value = self._wanted.label or ("", "")
        rows = await self._connection.execute(
            text(
                "SELECT job_id FROM job_label WHERE name = :name AND value = :value "
                "AND job_id >= :low AND job_id < :high ORDER BY job_id DESC LIMIT :limit"
            ),
            {"name": name, "value": value, "low": low, "high": high, "limit": FEW},
        )
        ids = [row.job_id for row in rows]
        jobs, onward = await self.among(ids, low, high)
        if onward is None and len(ids) == FEW:
            onward = ids[-1]
        return jobs, onward

    async def few_ids(self) -> list[int] | None:
        """Return the ids of all jobs of the status or handler, or None if they are many."""
        if self._wanted.status is not None:
            condition = f"status = {int(self._wanted.status)}"
        elif self._wanted.handler is not None:
            found = await self._connection.execute(
                text(
                    "SELECT id FROM queue WHERE job_handler = :handler AND tenant_id = :tenant "
                    "LIMIT :limit"
                ),
                {
                    "handler": self._wanted.handler,
                    "tenant": self._values["tenant"],
                    "limit": MOST_QUEUES + 1,
                },
            )
            queues = [str(int(row.id)) for row in found]
            if not queues:
                return []
            if len(queues) > MOST_QUEUES:
                return None
            statuses = ", ".join(str(int(status)) for status in JobStatus)
            # Schedules of all handlers lie in the queue 0; the handler is looked at again.
            condition = f"status IN ({statuses}) AND queue_id IN (0, {', '.join(queues)})"
        else:
            return None
        rows = await self._connection.exec_driver_sql(
            f"SELECT id FROM job_info {self._claim}WHERE {condition} LIMIT {FEW + 1}"
        )
        ids = [row.id for row in rows]
        return None if len(ids) > FEW else sorted(ids, reverse=True)

    async def among(
        self, ids: Sequence[int], low: int, high: int
    ) -> tuple[Sequence[RowMapping], int | None]:
        """Read those of some ids, newest first, that match now."""
        inside = [job_id for job_id in ids if low <= job_id < high]
        jobs: list[RowMapping] = []
        for start in range(0, len(inside), 500):
            jobs += await self.read(
                "id IN :ids", low, high, hint=self._primary, ids=inside[start : start + 500]
            )
            if len(jobs) > self._limit:
                return jobs[: self._limit], jobs[self._limit - 1]["id"]
        return jobs, None

    async def walk(self, low: int, high: int) -> tuple[Sequence[RowMapping], int | None]:
        """Walk the primary key backwards over at most `WALK_ROWS` jobs."""
        floor = (
            await self._connection.execute(
                text(
                    f"SELECT id FROM job_info {self._primary}WHERE id >= :low AND id < :high "
                    "ORDER BY id DESC LIMIT 1 OFFSET :walked"
                ),
                {"low": low, "high": high, "walked": WALK_ROWS - 1},
            )
        ).scalar_one_or_none()
        reach = low if floor is None else floor
        jobs = await self.read("1 = 1", reach, high, hint=self._primary)
        if len(jobs) > self._limit:
            return jobs[: self._limit], jobs[self._limit - 1]["id"]
        return jobs, floor


async def _id_range(
    connection: AsyncConnection, wanted: JobFilter, before: int | None
) -> tuple[int, int]:
    """Return the ids (first, behind the last) between which all jobs of the range are."""
    low, high = 0, HIGHEST_ID if before is None else before
    if wanted.created_from is not None:
        low = await _first_id_since(connection, wanted.created_from - DISORDER_MS, later=False)
    if wanted.created_to is not None:
        behind = await _first_id_since(connection, wanted.created_to + DISORDER_MS, later=True)
        high = min(high, behind)
    return low, high


async def _first_id_since(connection: AsyncConnection, moment: int, *, later: bool) -> int:
    """Halve the primary key until it is known, to within a few hundred ids, where a moment is.

    The answer is at most the first id created since `moment`; with `later`, at least that.
    """
    ends = (
        await connection.execute(
            text(
                # Both at once would scan: each end of the key is one step for itself.
                "SELECT (SELECT MIN(id) FROM job_info) AS first, "
                "(SELECT MAX(id) FROM job_info) AS last"
            )
        )
    ).one()
    if ends.first is None:
        return HIGHEST_ID if later else 0
    low, high = int(ends.first), int(ends.last) + 1
    if later and not await _reaches(connection, high - 1, moment):
        return HIGHEST_ID
    while high - low > NEAR_IDS:
        middle = (low + high) // 2
        if await _reaches(connection, middle, moment):
            high = middle
        else:
            low = middle
    return high if later else low


async def _reaches(connection: AsyncConnection, job_id: int, moment: int) -> bool:
    """Tell whether the first job from `job_id` on was created at `moment` or later."""
    created_at = (
        await connection.execute(
            text("SELECT created_at FROM job_info WHERE id >= :id ORDER BY id LIMIT 1"),
            {"id": job_id},
        )
    ).scalar_one_or_none()
    return created_at is None or created_at >= moment


_RESULTS: Final = text(
    "SELECT job_id, execution_id, result, result_in_payload FROM job_log "
    "WHERE execution_id IN :executions"
).bindparams(bindparam("executions", expanding=True))


async def _results(
    connection: AsyncConnection, jobs: Sequence[RowMapping]
) -> tuple[dict[str, str], frozenset[str]]:
    """Return the short results of succeeded jobs, and the executions whose result is long."""
    executions = sorted(
        job["execution_id"]
        for job in jobs
        if job["status"] == JobStatus.SUCCEEDED and job["execution_id"] is not None
    )
    if not executions:
        return {}, frozenset()
    rows = (await connection.execute(_RESULTS, {"executions": executions})).mappings().all()
    long = frozenset(row["execution_id"] for row in rows if row["result_in_payload"])
    return results_of(rows, {}), long


async def _schedules(
    connection: AsyncConnection, jobs: Sequence[RowMapping]
) -> dict[int, RowMapping]:
    """Return what makes those jobs of a page schedules that are: no statement if none is."""
    return await read_schedules(
        connection, [job["id"] for job in jobs if job["kind"] == JobKind.SCHEDULE]
    )


_SKIPS: Final = (
    "SELECT from_time, to_time, count, reason FROM schedule_skip WHERE schedule_id = :schedule "
)


async def list_skips(
    connection: AsyncConnection, schedule_id: int, *, before: int | None, limit: int
) -> Sequence[RowMapping]:
    """Return what did not run of a schedule, latest first, by the unique key."""
    older = "" if before is None else "AND from_time < :before "
    rows = await connection.execute(
        text(f"{_SKIPS}{older}ORDER BY from_time DESC LIMIT :limit"),
        {"schedule": schedule_id, "limit": limit} | ({} if before is None else {"before": before}),
    )
    return rows.mappings().all()


async def list_children(
    connection: AsyncConnection,
    parent_id: int,
    *,
    tenant_id: int,
    before: tuple[int, int, str] | None,
    limit: int,
) -> tuple[JobPage, tuple[int, int, str] | None]:
    """Return children by the unique key, latest (nominal time, shard, key) first."""
    ranges = ["nominal_time IS NOT NULL"]
    values: dict[str, Any] = {"parent": parent_id, "tenant": tenant_id}
    if before is not None:
        # One range of the index each: an OR of them would be walked from the start.
        ranges = [
            "nominal_time = :nominal AND shard_index = :shard AND child_key < :key",
            "nominal_time = :nominal AND shard_index < :shard",
            "nominal_time < :nominal",
        ]
        values |= {"nominal": before[0], "shard": before[1], "key": before[2]}
    rows: list[RowMapping] = []
    for one in ranges:
        if len(rows) <= limit:
            found = await connection.execute(
                text(
                    f"SELECT {JOB_COLUMNS}, shard_index, child_key FROM job_info "
                    f"WHERE parent_id = :parent AND {one} AND tenant_id = :tenant ORDER BY "
                    "nominal_time DESC, shard_index DESC, child_key DESC LIMIT :limit"
                ),
                values | {"limit": limit + 1 - len(rows)},
            )
            rows += found.mappings().all()
    page, onward = rows[:limit], None
    if len(rows) > limit:
        last = page[-1]
        onward = (last["nominal_time"], last["shard_index"], last["child_key"])
    results, long = await _results(connection, page)
    return JobPage(page, results, long, None, await _schedules(connection, page)), onward
