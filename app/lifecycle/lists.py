"""Lists of jobs, newest first: a page costs the same however many jobs are kept.

Ids grow with the time of creation, so newest first is the primary key backwards. A filter with
an index of its own (label, clientRequestId) is exact. The claim index tells all jobs of a status
or of a queue, as long as they are few. Everything else walks the primary key over a bounded
number of rows, and a page may then end early: its cursor tells where to go on (ADR 10).

With a range of finishing the index of finished times is walked instead, the latest finished
first (ADR 12). Bulk operations read the same ways, but the oldest first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.callbacks import failed_sql
from app.lifecycle.reads import JOB_COLUMNS, read_schedules, results_of
from app.lifecycle.states import TERMINAL_JOBS, JobKind, JobStatus, in_list
from app.plumbing.database import Database

WALK_ROWS: Final = 5000
"""How many rows one page may walk."""
FEW: Final = 2000
"""Up to so many index entries of a status or a handler are read whole."""
MOST_QUEUES: Final = 50
DISORDER_MS: Final = 10_000
"""How much later a job with a lower id may have been created: no INSERT takes longer."""
CLAIM_INDEX: Final = "ix_job_info_claim"
LABEL_INDEX: Final = "ix_job_label_name_value_job_id"
FINISHED_INDEX: Final = "ix_job_info_finished"
NEAR_IDS: Final = 512
HIGHEST_ID: Final = 2**63 - 1
LATEST: Final = 2**62
"""Later than any time."""
_IDS: Final = "id >= :low AND id < :high"
_AT: Final = "finished_at = :at AND id > :first AND id < :last"
_BETWEEN: Final = "finished_at >= :low AND finished_at < :high"

Place = int | tuple[int, int]
"""Where a list goes on: an id or, with a range of finishing, (finished at, id)."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """At most one of the first five, and one range of times (epoch ms, `to` excluded)."""

    status: JobStatus | None = None
    handler: str | None = None
    name_prefix: str | None = None
    label: tuple[str, str] | None = None
    client_request_id: str | None = None
    created_from: int | None = None
    created_to: int | None = None
    finished_from: int | None = None
    finished_to: int | None = None
    failed_callbacks: bool = False
    """Only jobs of which a callback has failed: given up, or waiting for its next try."""

    @property
    def by_finish(self) -> bool:
        """Whether the range is one of finishing."""
        return self.finished_from is not None or self.finished_to is not None


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs, newest first, the results of those that have a short one, and where to go on.

    With a range of finishing, the latest finished first. `current` has the current execution
    of each job that has one, by execution id.
    """

    jobs: Sequence[RowMapping]
    results: dict[str, str]
    long_results: frozenset[str]
    before: Place | None
    current: Mapping[str, RowMapping]
    schedules: Mapping[int, RowMapping]


async def list_jobs(
    connection: AsyncConnection,
    database: Database,
    *,
    tenant_id: int,
    wanted: JobFilter,
    before: Place | None,
    limit: int,
) -> JobPage:
    """Return up to `limit` jobs behind `before` in the list."""
    lister = _Lister(connection, database, tenant_id, wanted, limit)
    jobs: Sequence[RowMapping]
    onward: Place | None
    if wanted.by_finish and wanted.client_request_id is None:
        jobs, onward = await lister.finished(before if isinstance(before, tuple) else None)
    else:
        low, high = await id_range(connection, wanted, before if isinstance(before, int) else None)
        jobs, onward = await lister.by_id(low, high)
    results, long, current = await _current(connection, jobs)
    return JobPage(jobs, results, long, onward, current, await _schedules(connection, jobs))


@dataclass(frozen=True, slots=True)
class Matching:
    """Jobs that match, the oldest first: (finished at, id) of each, the former 0 without a range.

    `onward` is where to go on, None at the end.
    """

    turns: Sequence[tuple[int, int]]
    onward: tuple[int, int] | None


async def next_matching(
    connection: AsyncConnection,
    database: Database,
    *,
    tenant_id: int,
    wanted: JobFilter,
    statuses: frozenset[JobStatus],
    after: tuple[int, int],
    until_id: int,
    limit: int,
) -> Matching:
    """Return up to `limit` jobs in one of `statuses` behind `after`, of ids up to `until_id`.

    A range of creation is compared, but not looked for: give `after` and `until_id` by it.
    """
    lister = _Lister(connection, database, tenant_id, wanted, limit, statuses, oldest_first=True)
    if wanted.by_finish:
        jobs, place = await lister.finished(after, until_id)
        return Matching([(job["finished_at"], job["id"]) for job in jobs], place)
    jobs, last = await lister.by_id(after[1] + 1, until_id + 1)
    return Matching([(0, job["id"]) for job in jobs], None if last is None else (0, last))


class _Lister:
    """Reads one page; `low` is included in every range of ids, `high` is not.

    `statuses` narrow a bulk operation, which needs the ids alone, the oldest first.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        database: Database,
        tenant_id: int,
        wanted: JobFilter,
        limit: int,
        statuses: frozenset[JobStatus] = frozenset(),
        *,
        oldest_first: bool = False,
    ) -> None:
        self._connection = connection
        self._sqlite = sqlite = database.is_sqlite
        forced = "INDEXED BY {}" if sqlite else "FORCE INDEX ({})"
        self._primary = "NOT INDEXED " if sqlite else "FORCE INDEX (PRIMARY) "
        self._claim = f"{forced.format(CLAIM_INDEX)} "
        self._labels = f"{forced.format(LABEL_INDEX)} "
        self._finished = f"{forced.format(FINISHED_INDEX)} "
        self._oldest_first = oldest_first
        self._order = "ASC" if oldest_first else "DESC"
        self._columns = "id, finished_at" if oldest_first else JOB_COLUMNS
        self._wanted = wanted
        self._limit = limit
        own = frozenset[JobStatus]() if wanted.status is None else frozenset({wanted.status})
        self._statuses = statuses or own
        self._values: dict[str, Any] = {"tenant": tenant_id}
        self._conditions = ["tenant_id = :tenant"]
        self._has_handler = self._same("job_handler", "handler")
        if self._statuses:
            self._conditions.append(f"status IN ({in_list(self._statuses)})")
        for condition, name, value in (
            (self._has_handler, "handler", wanted.handler),
            ("created_at >= :created_from", "created_from", wanted.created_from),
            ("created_at < :created_to", "created_to", wanted.created_to),
        ):
            if value is not None:
                self._conditions.append(condition)
                self._values[name] = value
        if wanted.failed_callbacks:
            # A scalar: an EXISTS may be turned round to begin with all callbacks.
            self._conditions.append(
                "(SELECT MAX(d.status) FROM callback_delivery AS d WHERE d.job_id = job_info.id "
                f"AND {failed_sql(database.now_ms, 'd.')}) IS NOT NULL"
            )
        if wanted.name_prefix is not None:
            self._conditions.append("SUBSTR(job_name, 1, :length) = :prefix")
            if not sqlite:
                # As in `_same`.
                self._conditions.append("CHAR_LENGTH(job_name) >= :length")
            self._values |= {"length": len(wanted.name_prefix), "prefix": wanted.name_prefix}
        if wanted.client_request_id is not None:
            self._values["request"] = wanted.client_request_id
            for condition, name, value in (
                ("finished_at >= :finished_from", "finished_from", wanted.finished_from),
                ("finished_at < :finished_to", "finished_to", wanted.finished_to),
            ):
                if value is not None:
                    self._conditions.append(condition)
                    self._values[name] = value

    def _same(self, column: str, value: str) -> str:
        """Compare to the last space; to MySQL 'x' is 'x ' unless their lengths are compared."""
        equal = f"{column} = :{value}"
        if self._sqlite:
            return equal
        return f"{equal} AND CHAR_LENGTH({column}) = CHAR_LENGTH(:{value})"

    async def by_id(self, low: int, high: int) -> tuple[Sequence[RowMapping], int | None]:
        """Read a page in the order of ids by the index that the filter has."""
        if self._wanted.client_request_id is not None:
            request = f"{self._same('client_request_id', 'request')} AND {_IDS}"
            return await self.read(request, low=low, high=high), None
        if self._wanted.label is not None:
            return await self.labelled(low, high)
        ids = await self.few_ids()
        if ids is not None:
            return await self.among(ids, low, high)
        return await self.walk(low, high)

    async def read(
        self, condition: str, *, source: str = "job_info", **values: Any
    ) -> Sequence[RowMapping]:
        """Read matching jobs in order, one more than a page has."""
        conditions = " AND ".join([condition, *self._conditions])
        statement = text(
            f"SELECT {self._columns} FROM {source} WHERE {conditions} "
            f"ORDER BY id {self._order} LIMIT :limit"
        )
        if "ids" in values:
            statement = statement.bindparams(bindparam("ids", expanding=True))
        given = self._values | values | {"limit": self._limit + 1}
        return (await self._connection.execute(statement, given)).mappings().all()

    async def _read_some(self, ids: Sequence[int]) -> Sequence[RowMapping]:
        """Look some ids up by the primary key."""
        if not self._sqlite:
            return await self.read("id IN :ids", source=f"job_info {self._primary}", ids=ids)
        # SQLite may think that a scan in the order that is wanted is nearer than 500 look-ups.
        keys = "(SELECT value AS of_id FROM json_each(:keys)) AS given"
        return await self.read(
            "id = given.of_id",
            source=f"{keys} CROSS JOIN job_info {self._primary}",
            keys=json.dumps(list(ids)),
        )

    async def labelled(self, low: int, high: int) -> tuple[Sequence[RowMapping], int | None]:
        """Follow the index of labels, whose entries of one value are in the order of ids."""
        name, value = self._wanted.label or ("", "")
        rows = await self._connection.execute(
            text(
                f"SELECT job_id FROM job_label {self._labels}WHERE {self._same('name', 'name')} "
                f"AND {self._same('value', 'value')} AND job_id >= :low AND job_id < :high "
                f"ORDER BY job_id {self._order} LIMIT :limit"
            ),
            {"name": name, "value": value, "low": low, "high": high, "limit": FEW},
        )
        ids = [row.job_id for row in rows]
        jobs, onward = await self.among(ids, low, high)
        if onward is None and len(ids) == FEW:
            onward = ids[-1]
        return jobs, onward

    async def few_ids(self) -> list[int] | None:
        """Return the ids of all jobs of the status and handler, or None if they are many."""
        if not self._statuses and self._wanted.handler is None:
            return None
        condition = f"status IN ({in_list(self._statuses or frozenset(JobStatus))})"
        if self._wanted.handler is not None:
            found = await self._connection.execute(
                text(
                    f"SELECT id FROM queue WHERE {self._has_handler} AND tenant_id = :tenant "
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
            # Schedules of all handlers lie in the queue 0; the handler is looked at again.
            condition += f" AND queue_id IN (0, {', '.join(queues)})"
        rows = await self._connection.exec_driver_sql(
            f"SELECT id FROM job_info {self._claim}WHERE {condition} LIMIT {FEW + 1}"
        )
        ids = [row.id for row in rows]
        return None if len(ids) > FEW else sorted(ids, reverse=not self._oldest_first)

    async def among(
        self, ids: Sequence[int], low: int, high: int
    ) -> tuple[Sequence[RowMapping], int | None]:
        """Read those of some ids, in order, that match now."""
        inside = [job_id for job_id in ids if low <= job_id < high]
        jobs: list[RowMapping] = []
        for start in range(0, len(inside), 500):
            jobs += await self._read_some(inside[start : start + 500])
            if len(jobs) > self._limit:
                return jobs[: self._limit], jobs[self._limit - 1]["id"]
        return jobs, None

    async def walk(self, low: int, high: int) -> tuple[Sequence[RowMapping], int | None]:
        """Walk the primary key over at most `WALK_ROWS` jobs."""
        edge = (
            await self._connection.execute(
                text(
                    f"SELECT id FROM job_info {self._primary}WHERE id >= :low AND id < :high "
                    f"ORDER BY id {self._order} LIMIT 1 OFFSET :walked"
                ),
                {"low": low, "high": high, "walked": WALK_ROWS - 1},
            )
        ).scalar_one_or_none()
        if edge is not None:
            low, high = (low, edge + 1) if self._oldest_first else (edge, high)
        source = f"job_info {self._primary}"
        jobs = await self.read(_IDS, source=source, low=low, high=high)
        if len(jobs) > self._limit:
            return jobs[: self._limit], jobs[self._limit - 1]["id"]
        return jobs, edge

    async def finished(
        self, place: tuple[int, int] | None, until_id: int = HIGHEST_ID - 1
    ) -> tuple[Sequence[RowMapping], tuple[int, int] | None]:
        """Walk the index of finished times over about `WALK_ROWS` jobs."""
        if self._statuses and not self._statuses & TERMINAL_JOBS:
            return [], None
        edge = await self._edge(place)
        conditions = [*self._conditions, "id <= :until"]
        values = self._values | {"until": until_id}
        if self._wanted.label is not None:
            # A scalar, since an EXISTS may be turned round to begin with all jobs of the label.
            conditions.append(
                "(SELECT value FROM job_label WHERE job_id = job_info.id "
                f"AND {self._same('name', 'label_name')} AND {self._same('value', 'label_value')}"
                ") IS NOT NULL"
            )
            name, value = self._wanted.label
            values |= {"label_name": name, "label_value": value}
        jobs: list[RowMapping] = []
        for span, ends in self._spans(place, edge):
            if len(jobs) <= self._limit:
                left = {"limit": self._limit + 1 - len(jobs), "offset": 0}
                jobs += await self._by_finish(
                    self._columns, [*conditions, span], values | ends | left
                )
        if len(jobs) > self._limit:
            last = jobs[self._limit - 1]
            return jobs[: self._limit], (last["finished_at"], last["id"])
        return jobs, edge

    async def _edge(self, place: tuple[int, int] | None) -> tuple[int, int] | None:
        """Return where the walk ends, None if so many entries of one range are not left."""
        for span, ends in self._spans(place, None):
            found = await self._by_finish(
                "finished_at, id",
                ["tenant_id = :tenant", span],
                {"tenant": self._values["tenant"], "limit": 1, "offset": WALK_ROWS - 1, **ends},
            )
            if found:
                return found[0]["finished_at"], found[0]["id"]
        return None

    def _spans(
        self, place: tuple[int, int] | None, edge: tuple[int, int] | None
    ) -> list[tuple[str, dict[str, int]]]:
        """Return the ranges of the index behind `place`, up to and with `edge`, in order.

        Each has one lower and one upper bound: of two SQLite would take the first, and of an OR
        no engine takes any.
        """
        up = self._oldest_first
        low = self._wanted.finished_from or 0
        high = LATEST if self._wanted.finished_to is None else self._wanted.finished_to
        first, last = 0, HIGHEST_ID  # the ids, both excluded, at the moment where the walk begins
        spans = []
        if place is not None and low <= place[0] < high:
            at, after = place
            first, last = (after, last) if up else (first, after)
            if edge is not None and edge[0] == at:
                first, last = (first, edge[1] + 1) if up else (edge[1] - 1, last)
                return [(_AT, {"at": at, "first": first, "last": last})]
            spans.append((_AT, {"at": at, "first": first, "last": last}))
        if place is not None:
            low, high = (max(low, place[0] + 1), high) if up else (low, min(high, place[0]))
        if edge is None:
            return [*spans, (_BETWEEN, {"low": low, "high": high})]
        end, job_id = edge
        low, high = (low, end) if up else (end + 1, high)
        first, last = (0, job_id + 1) if up else (job_id - 1, HIGHEST_ID)
        spans.append((_BETWEEN, {"low": low, "high": high}))
        return [*spans, (_AT, {"at": end, "first": first, "last": last})]

    async def _by_finish(
        self, columns: str, conditions: Sequence[str], values: Mapping[str, Any]
    ) -> Sequence[RowMapping]:
        """Read one range of the index of finished times, in its order."""
        found = await self._connection.execute(
            text(
                f"SELECT {columns} FROM job_info {self._finished}"
                f"WHERE {' AND '.join(conditions)} ORDER BY finished_at {self._order}, "
                f"id {self._order} LIMIT :limit OFFSET :offset"
            ),
            values,
        )
        return found.mappings().all()


async def id_range(
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


_CURRENT: Final = text(
    "SELECT job_id, execution_id, result, result_in_payload, progress, progress_text, progress_at "
    "FROM job_log WHERE execution_id IN :executions"
).bindparams(bindparam("executions", expanding=True))


async def _current(
    connection: AsyncConnection, jobs: Sequence[RowMapping]
) -> tuple[dict[str, str], frozenset[str], dict[str, RowMapping]]:
    """Return the short results of succeeded jobs, executions with a long one, and the current."""
    succeeded = {job["execution_id"] for job in jobs if job["status"] == JobStatus.SUCCEEDED}
    executions = sorted(job["execution_id"] for job in jobs if job["execution_id"] is not None)
    if not executions:
        return {}, frozenset(), {}
    rows = (await connection.execute(_CURRENT, {"executions": executions})).mappings().all()
    ended = [row for row in rows if row["execution_id"] in succeeded]
    long = frozenset(row["execution_id"] for row in ended if row["result_in_payload"])
    return results_of(ended, {}), long, {row["execution_id"]: row for row in rows}


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
    results, long, current = await _current(connection, page)
    schedules = await _schedules(connection, page)
    return JobPage(page, results, long, None, current, schedules), onward
