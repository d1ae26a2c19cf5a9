"""The move `claim`: WAITING tasks become RUNNING executions of chosen workers, each exactly once.

The guard is in the UPDATE (status, version, the holder's term), and the row count tells whether
all of it was won; if not, exactly what was won is read back by the claim token. Two dispatchers
that try the same row cannot both win it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Final, NamedTuple

from sqlalchemy import RowMapping, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import ColumnType, RowsInsert, rows_json, update_from_rows
from app.lifecycle.moves.follow import Claimable
from app.lifecycle.moves.within_keys import keep_within
from app.lifecycle.reads import read_payloads
from app.lifecycle.states import ExecutionStatus, JobKind, JobStatus, in_list, sources
from app.plumbing.database import NOW_MS, Database

_CLAIMABLE: Final = in_list(sources("claim", JobKind.TASK))


class Probe(NamedTuple):
    """One indexed range to read: a queue's tasks of one priority after the last claimed one."""

    queue_id: int
    priority: int
    after_due_ms: int
    after_id: int
    limit: int


class Candidate(NamedTuple):
    """A waiting task as a plain read saw it; only the claim decides."""

    job_id: int
    version: int
    queue_id: int
    priority: int
    due_ms: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a read of the ranges saw, in order of priority and time: what is due, what will be."""

    due: list[Candidate]
    later: list[Candidate]
    now_ms: int = 0
    """The database's time of the read, 0 if nothing was found."""


def probe_sql(database: Database, probes: Sequence[Probe]) -> tuple[str, tuple[int, ...]]:
    """Build the read of all ranges as one statement, and its values.

    SQLite takes a millisecond to compile it: there its text is the same for as many ranges.
    """
    if database.is_sqlite:
        return _marked(len(probes)), tuple(chain.from_iterable(map(_values, probes)))
    # Every value in the text is an integer.
    return _union([_arm(_values(probe), sqlite=False) for probe in probes]), ()


@cache
def _marked(count: int) -> str:
    return _union([_arm("??????", sqlite=True)] * count)


def _values(probe: Probe) -> tuple[int, ...]:
    queue_id, priority, after_due_ms, after_id, limit = map(int, probe)
    return queue_id, priority, after_due_ms, after_due_ms, after_id, limit


def _arm(values: Iterable[object], *, sqlite: bool) -> str:
    queue_id, priority, from_due_ms, after_due_ms, after_id, limit = values
    hint = "" if sqlite else "FORCE INDEX (ix_job_info_claim) "
    return (
        "SELECT id, version, queue_id, priority, next_trigger_time, "
        f"{NOW_MS[sqlite]} AS now_ms FROM job_info {hint}"
        f"WHERE status = {_CLAIMABLE} AND queue_id = {queue_id} "
        f"AND priority = {priority} "
        f"AND next_trigger_time >= {from_due_ms} "
        f"AND (next_trigger_time > {after_due_ms} OR id > {after_id}) "
        "AND stopping_execution_id IS NULL "
        f"AND (expires_at IS NULL OR expires_at > {NOW_MS[sqlite]} OR attempt > 0) "
        f"ORDER BY next_trigger_time, id LIMIT {limit}"
    )


def _union(arms: Sequence[str]) -> str:
    if len(arms) == 1:
        return arms[0]
    return " UNION ALL ".join(
        f"SELECT * FROM ({arm}) AS range{number}" for number, arm in enumerate(arms)
    )


async def find_due(
    connection: AsyncConnection, database: Database, probes: Sequence[Probe]
) -> Found:
    """Read the ranges without locks. What is not due yet may be claimed later without a read."""
    due: list[Candidate] = []
    later: list[Candidate] = []
    now = 0
    for row in await connection.exec_driver_sql(*probe_sql(database, probes)):
        task = Candidate(row.id, row.version, row.queue_id, row.priority, row.next_trigger_time)
        (due if task.due_ms <= row.now_ms else later).append(task)
        now = row.now_ms
    for tasks in (due, later):
        tasks.sort(key=lambda task: (-task.priority, task.due_ms, task.job_id))
    return Found(due, later, now)


class Assignment(NamedTuple):
    """A candidate dealt to a worker, with the id its execution will have."""

    job_id: int
    version: int
    worker_id: str
    execution_id: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """A committed execution of this dispatcher, now to be sent. `params` is JSON text or sealed."""

    job_id: int
    execution_id: str
    worker_id: str
    trigger_ts: int
    attempt: int
    max_retry: int
    job_name: str
    job_handler: str
    client_request_id: str | None
    timeout_ms: int | None
    shard_index: int
    shard_total: int
    queue_id: int
    due_ms: int
    params: str | None
    claimed_at: int
    callback_events: str | None = None
    tenant_id: int = 0
    secret: int = 0
    nominal_time: int | None = None


TASK_COLUMNS: Final = (
    "id, execution_id, owner_worker_id, trigger_ts, attempt, max_retry, job_name, job_handler, "
    "client_request_id, timeout_ms, shard_index, shard_total, queue_id, next_trigger_time, "
    "callback_events, tenant_id, secret, nominal_time, "
    "params, params_in_payload, updated_at"
)
# SQLite's write lock covers all rows; elsewhere rows that others hold are skipped.
_FREE: Final = {
    sqlite: text(
        f"SELECT {TASK_COLUMNS}, tenant_id, priority, version, concurrency_key, "
        "concurrency_limit, rate_key, rate_per_second, rate_due, "
        "(SELECT term FROM dispatch_term WHERE partition_no = :partition) AS term, "
        f"{NOW_MS[sqlite]} AS now_ms FROM job_info {hint}"
        f"WHERE id IN :ids AND status = {_CLAIMABLE} ORDER BY id{lock}"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint, lock in (
        (True, "", ""),
        (False, "FORCE INDEX (PRIMARY) ", " FOR UPDATE SKIP LOCKED"),
    )
}

_ASSIGNMENT_COLUMNS: Final[dict[str, ColumnType]] = {
    "id": "BIGINT",
    "version": "BIGINT",
    "worker": "TEXT",
    "execution": "TEXT",
}
_CLAIM: Final = {
    sqlite: update_from_rows(
        sqlite=sqlite,
        table="job_info",
        key="id",
        columns=_ASSIGNMENT_COLUMNS,
        assignments=(
            f"status = {int(JobStatus.RUNNING)}, version = j.version + 1, claim_token = :token, "
            "owner_worker_id = v.v_worker, execution_id = v.v_execution, attempt = j.attempt + 1, "
            "trigger_ts = CASE WHEN j.next_trigger_time > j.trigger_ts "
            "THEN j.next_trigger_time ELSE j.trigger_ts + 1 END, updated_at = :now"
        ),
        guard=(
            f"j.status = {_CLAIMABLE} AND j.version = v.v_version "
            f"AND j.next_trigger_time <= {NOW_MS[sqlite]} + :ahead "
            "AND j.stopping_execution_id IS NULL AND (j.expires_at IS NULL OR j.attempt > 0 "
            "OR (j.expires_at > :now AND j.expires_at > j.next_trigger_time)) "
            "AND EXISTS (SELECT 1 FROM dispatch_term "
            "WHERE partition_no = :partition AND term = :term)"
        ),
    )
    for sqlite in (True, False)
}


_READ_BACK: Final = {
    sqlite: text(
        f"SELECT {TASK_COLUMNS} FROM job_info {hint}WHERE id IN :ids "
        f"AND claim_token = :token AND status = {int(JobStatus.RUNNING)} ORDER BY id"
    ).bindparams(bindparam("ids", expanding=True))
    for sqlite, hint in ((True, ""), (False, "FORCE INDEX (PRIMARY) "))
}
_EXECUTION_COLUMNS: Final[dict[str, ColumnType]] = {
    "execution_id": "TEXT",
    "id": "BIGINT",
    "attempt": "BIGINT",
    "trigger_ts": "BIGINT",
    "owner_worker_id": "TEXT",
    "updated_at": "BIGINT",
}
_LOG_INSERT: Final = RowsInsert(
    table="job_log",
    columns=_EXECUTION_COLUMNS,
    values=lambda _sqlite: {
        "execution_id": "v.v_execution_id",
        "job_id": "v.v_id",
        "attempt": "v.v_attempt",
        "trigger_ts": "v.v_trigger_ts",
        "worker_id": "v.v_owner_worker_id",
        "term": ":term",
        "status": str(int(ExecutionStatus.CLAIMED)),
        "claimed_at": "v.v_updated_at",
    },
    keep_first="claimed_at",
)


async def claim(
    connection: AsyncConnection,
    database: Database,
    assignments: Sequence[Assignment],
    *,
    token: str,
    term: int,
    partition: int = 0,
    ahead_ms: int = 0,
    later: list[Claimable] | None = None,
) -> list[Claimed]:
    """Claim what is still free of `assignments`, and return exactly what this call won.

    All of them are of the partition whose lock has the `term`.

    Rows that another transaction holds are skipped, not waited for. Safe to repeat with the
    same token: what an earlier, unacknowledged commit won is returned again. What is due within
    `ahead_ms` may be claimed too: whoever runs it must wait for its time. What its rate key gave
    a later time is put into `later`.
    """
    wanted = {row.job_id: row for row in sorted(assignments)}
    found = await connection.execute(
        _FREE[database.is_sqlite], {"ids": list(wanted), "partition": partition}
    )
    free: Sequence[RowMapping] = found.mappings().all()
    now = free[0]["now_ms"] if free else 0
    keyed = [row for row in free if row["concurrency_key"] or row["rate_key"]]
    if keyed:
        free = await _within_keys(
            connection, database, free, keyed, wanted, term=term, now=now, later=later
        )
    won = 0
    if free:
        update = await connection.execute(
            _CLAIM[database.is_sqlite],
            {
                "rows": rows_json(
                    _ASSIGNMENT_COLUMNS, [_assignment_row(wanted[row["id"]]) for row in free]
                ),
                "token": token,
                "term": term,
                "partition": partition,
                "now": now,
                "ahead": ahead_ms,
            },
        )
        won = update.rowcount
    own: Sequence[Mapping[str, Any]]
    if won == len(wanted):
        own = [_after_claim(row, wanted[row["id"]], now) for row in free]
    else:
        # Some were taken, changed or fenced off, or an earlier try of this claim was committed.
        back = await connection.execute(
            _READ_BACK[database.is_sqlite], {"ids": list(wanted), "token": token}
        )
        own = [dict(row) for row in back.mappings()]
    if not own:
        return []
    await insert_executions(connection, database, own, term=term)
    long = await read_payloads(
        connection, [(row["id"], "params") for row in own if row["params_in_payload"]]
    )
    return [claimed_row(row, long, row["updated_at"]) for row in own]


async def _within_keys(
    connection: AsyncConnection,
    database: Database,
    free: Sequence[RowMapping],
    keyed: Sequence[RowMapping],
    wanted: Mapping[int, Assignment],
    *,
    term: int,
    now: int,
    later: list[Claimable] | None,
) -> list[RowMapping]:
    """Return what is free without those that their keys do not let begin."""
    # What the claim would not win anyway must not use up what the keys allow.
    current = [row for row in keyed if row["version"] == wanted[row["id"]].version]
    kept: set[int] = set()
    if current and current[0]["term"] == term:
        within = await keep_within(connection, database, [dict(row) for row in current], now=now)
        kept = {row["id"] for row in within.kept}
        if later is not None:
            later[:] = within.later
    left_out = {row["id"] for row in keyed} - kept
    return [row for row in free if row["id"] not in left_out]


def _assignment_row(assignment: Assignment) -> dict[str, Any]:
    return {
        "id": assignment.job_id,
        "version": assignment.version,
        "worker": assignment.worker_id,
        "execution": assignment.execution_id,
    }


def _after_claim(row: RowMapping, assignment: Assignment, now: int) -> dict[str, Any]:
    """Return a row that was locked, and then claimed, as the UPDATE has left it."""
    return {
        **row,
        "execution_id": assignment.execution_id,
        "owner_worker_id": assignment.worker_id,
        "attempt": row["attempt"] + 1,
        "trigger_ts": max(row["trigger_ts"] + 1, row["next_trigger_time"]),
        "updated_at": now,
    }


async def insert_executions(
    connection: AsyncConnection,
    database: Database,
    rows: Sequence[Mapping[str, Any]],
    *,
    term: int,
) -> None:
    """Insert a row of `job_log` for each claimed row; one of an earlier try stays as it is."""
    await _LOG_INSERT.run(connection, rows, term=term)


def claimed_row(
    row: Mapping[str, Any], long_params: dict[tuple[int, str], str], claimed_at: int
) -> Claimed:
    """Make the execution to be sent from a row of `job_info` and the long params."""
    return Claimed(
        job_id=row["id"],
        execution_id=row["execution_id"],
        worker_id=row["owner_worker_id"],
        trigger_ts=row["trigger_ts"],
        attempt=row["attempt"],
        max_retry=row["max_retry"],
        job_name=row["job_name"],
        job_handler=row["job_handler"],
        client_request_id=row["client_request_id"],
        timeout_ms=row["timeout_ms"],
        shard_index=row["shard_index"],
        shard_total=row["shard_total"],
        queue_id=row["queue_id"],
        due_ms=row["next_trigger_time"],
        params=long_params.get((row["id"], "params"), row["params"]),
        claimed_at=claimed_at,
        callback_events=row["callback_events"],
        tenant_id=row["tenant_id"],
        secret=row["secret"],
        nominal_time=row["nominal_time"],
    )
