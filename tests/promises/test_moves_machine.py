"""Whatever moves come in whatever order, no illegal state is reached.

Each rule runs one move of `lifecycle/` as its use case would, then everything in the database is
compared with what was there before: a job may only have gone along the edges of that move, an
execution may end once, and the rows that belong together must fit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
import uuid_utils
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.moves.assign import Reassignment, note_running, reassign
from app.lifecycle.moves.cancel import cancel_job
from app.lifecycle.moves.claim import Assignment, claim
from app.lifecycle.moves.ending import Ending
from app.lifecycle.moves.expire import expire_jobs
from app.lifecycle.moves.free_keys import free_keys
from app.lifecycle.moves.guard import Asked
from app.lifecycle.moves.hold import hold_job
from app.lifecycle.moves.limit_keys import Key
from app.lifecycle.moves.release import release_stopped
from app.lifecycle.moves.reopen import reopen_job
from app.lifecycle.moves.revise import NewValues, revise_job
from app.lifecycle.moves.settle import settle
from app.lifecycle.moves.trigger import trigger_job
from app.lifecycle.retry import MAX_RETURNS
from app.lifecycle.states import (
    EXECUTION_MOVES,
    JOB_MOVES,
    OPEN_EXECUTIONS,
    TERMINAL_JOBS,
    ExecutionStatus,
    JobKind,
    JobStatus,
)
from app.lifecycle.token import new_token
from app.plumbing.database import Database
from tests.integration.app.rig import change, insert, new_term, rows_of
from tests.support.engines import Engine

T = TypeVar("T")
Rows = dict[Any, dict[str, Any]]
PAST = 1_700_000_000_000
FAR = 4_000_000_000_000
EDGES = {
    name: {
        (move.source, move.target)
        for move in JOB_MOVES
        if move.name == name and move.kind is JobKind.TASK
    }
    for name in {move.name for move in JOB_MOVES}
}
RARELY = st.sampled_from([False, False, False, True])
ENDS = [*sorted(set(ExecutionStatus) - OPEN_EXECUTIONS), *[ExecutionStatus.FAILED] * 3]
TABLES = (
    *("job_info", "job_log", "job_expiry", "stopping_execution", "callback_delivery"),
    *("concurrency_slot", "limit_key"),
)
KEY = Key(0, "k")
ONE_AT_ONCE = {"concurrency_key": KEY.name, "concurrency_limit": 1}
OTHER_KEYS = st.sampled_from(
    [{}, {}, ONE_AT_ONCE, {"concurrency_key": None, "concurrency_limit": None}]
)
MOST_JOBS = 3
"""Few, so that the moves meet each other."""
CALLER_MOVES = {"cancel": "cancel", "pause": "pause", "resume": "resume", "retry": "reopen"}


class Moves(RuleBasedStateMachine):
    """A database, the moves on it, and what must hold after each."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._database = Database(self.engine.database_url)
        for table in TABLES:
            self._run(change(self._database, f"DELETE FROM {table}"))
        self.term = self._run(new_term(self._database))
        self.old_terms = [self.term - 1]
        self.sent: list[tuple[int, str]] = []
        self.jobs, self.logs = self._look()
        self.mine: list[int] = []
        self.ends: Counter[int] = Counter()

    def teardown(self) -> None:
        """Leave nothing open."""
        self._run(self._database.close())
        self._runner.close()

    def _run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self._runner.run(wait())

    def _write(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        return self._run(self._database.write(work))

    def _look(self) -> tuple[Rows, Rows]:
        jobs = self._run(rows_of(self._database, "SELECT * FROM job_info ORDER BY id"))
        logs = self._run(rows_of(self._database, "SELECT * FROM job_log ORDER BY id"))
        return {row["id"]: row for row in jobs}, {row["execution_id"]: row for row in logs}

    def _compare(self, *moves: str) -> None:
        """Fail unless all changes since the last look lie on the edges of these moves."""
        edges = set().union(*(EDGES[name] for name in moves)) if moves else set()
        jobs, logs = self._look()
        for job_id, before in self.jobs.items():
            self._compare_job(before, jobs[job_id], edges)
        for execution_id, log in self.logs.items():
            source, target = ExecutionStatus(log["status"]), logs[execution_id]["status"]
            assert source == target or (source, ExecutionStatus(target)) in EXECUTION_MOVES
            if source not in OPEN_EXECUTIONS:
                now = logs[execution_id]
                late = {"stale_at", "stale_status"}
                assert {k: v for k, v in now.items() if k not in late} == {
                    k: v for k, v in log.items() if k not in late
                }
        self.jobs, self.logs = jobs, logs

    def _compare_job(self, before: dict[str, Any], after: dict[str, Any], edges: set[Any]) -> None:
        if before == after:
            return
        edge = (JobStatus(before["status"]), JobStatus(after["status"]))
        released = before | {
            "stopping_execution_id": None,
            "version": before["version"] + 1,
        }
        if after == released:
            return
        assert edge in edges, (edge, edges)
        assert after["version"] > before["version"]
        if edge[0] in TERMINAL_JOBS:
            assert edge in EDGES["reopen"]
        if edge[1] in TERMINAL_JOBS:
            self.ends[after["id"]] += 1

    @staticmethod
    def _pick(data: st.DataObject, among: list[T]) -> T:
        """Draw one of the newest by its place: ids differ between runs, a failure must replay."""
        return among[-1 - data.draw(st.integers(0, 3)) % len(among)]

    @initialize(count=st.integers(1, 2))
    def start(self, count: int) -> None:
        self.submit(count, 1, expires=False, keyed=False)

    @precondition(lambda self: len(self.mine) < MOST_JOBS)
    @rule(
        count=st.integers(1, 2),
        max_retry=st.integers(0, 2),
        expires=st.booleans(),
        keyed=st.booleans(),
    )
    def submit(self, count: int, max_retry: int, *, expires: bool, keyed: bool) -> None:
        new = self._run(
            insert(
                self._database,
                count,
                max_retry=max_retry,
                retry_interval_ms=0,
                due_ms=1,
                callback_url="http://203.0.113.9/hook",
                expires_at=PAST if expires else None,
                **(ONE_AT_ONCE if keyed else {}),
            )
        )
        self.mine += new
        self._compare()

    @rule()
    def change_of_hands(self) -> None:
        self.old_terms.append(self.term)
        self.term = self._run(new_term(self._database))
        self._compare()

    @rule(data=st.data(), old=RARELY, stale=RARELY)
    def claim(self, data: st.DataObject, *, old: bool, stale: bool) -> None:
        """A claim of any jobs at all, also by a fenced holder or with versions long gone."""
        chosen = {self._pick(data, self.mine) for _ in range(data.draw(st.integers(0, 4)))}
        assignments = [
            Assignment(
                job_id,
                self.jobs[job_id]["version"] - int(stale),
                data.draw(st.sampled_from(["a#1", "b#1"])),
                str(uuid_utils.uuid7()),
            )
            for job_id in sorted(chosen)
        ]
        term = self._pick(data, self.old_terms) if old else self.term
        token = new_token()
        won = []
        for _ in range(data.draw(st.integers(1, 2))):  # the second time: an unknown commit
            won = self._write(
                lambda connection: claim(
                    connection, self._database, assignments, token=token, term=term
                )
            )
        assert not won or not (old or stale)
        for run in won:
            before = self.jobs[run.job_id]
            assert before["stopping_execution_id"] is None
            assert before["expires_at"] is None or before["attempt"] > 0
            assert run.trigger_ts > before["trigger_ts"]
        self.sent += [(run.job_id, run.execution_id) for run in won]
        self._compare("claim", "block")

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def note_that_it_runs(self, data: st.DataObject) -> None:
        _job_id, execution_id = self._pick(data, self.sent)
        self._write(
            lambda connection: note_running(connection, self._database, [(execution_id, PAST)])
        )
        self._compare()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), old=RARELY)
    def reassign(self, data: st.DataObject, *, old: bool) -> None:
        job_id, execution_id = self._pick(data, self.sent)
        move = Reassignment(job_id, execution_id, "c#1", str(uuid_utils.uuid7()), "full")
        term = self._pick(data, self.old_terms) if old else self.term
        again = self._write(
            lambda connection: reassign(
                connection, self._database, [move], token=new_token(), term=term
            )
        )
        assert not again or not old
        self.sent += [(run.job_id, run.execution_id) for run in again]
        self._compare("reassign")

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), twice=st.booleans())
    def settle(self, data: st.DataObject, *, twice: bool) -> None:
        """Reports of any executions ever sent: current ones, late ones, repeated ones."""
        chosen = [self._pick(data, self.sent) for _ in range(data.draw(st.integers(1, 4)))]
        endings = []
        for job_id, execution_id in chosen:
            status = data.draw(st.sampled_from(ENDS))
            by_dispatcher = status is ExecutionStatus.RETURNED and data.draw(st.booleans())
            endings.append(
                Ending(
                    execution_id=execution_id,
                    job_id=job_id,
                    status=status,
                    error_code=None if status is ExecutionStatus.SUCCEEDED else "x",
                    retryable=not data.draw(RARELY),
                    stopping=not by_dispatcher and data.draw(st.booleans()),
                    in_term=self.term - data.draw(st.integers(0, 1)) if by_dispatcher else None,
                )
            )
        for _ in range(1 + twice):
            self._write(lambda connection: settle(connection, self._database, endings))
        self._compare("succeed", "fail", "retry", "give_back", "cancel", "unblock")

    @rule(data=st.data(), verb=st.sampled_from(sorted(CALLER_MOVES)))
    def ask(self, data: st.DataObject, verb: str) -> None:
        job_id = self._pick(data, self.mine)
        asked = Asked(job_id, 0, new_token())
        database = self._database

        async def move(connection: AsyncConnection) -> None:
            if verb == "cancel":
                await cancel_job(connection, database, asked)
            elif verb == "retry":
                await reopen_job(connection, database, asked)
            else:
                await hold_job(
                    connection, database, asked, "pause" if verb == "pause" else "resume"
                )

        for _ in range(data.draw(st.integers(1, 2))):
            self._write(move)
        self._compare(CALLER_MOVES[verb], "unblock")

    @rule(data=st.data())
    def trigger(self, data: st.DataObject) -> None:
        job_id = self._pick(data, self.mine)
        asked = Asked(job_id, 0, new_token())
        for _ in range(data.draw(st.integers(1, 2))):
            self._write(
                lambda connection: trigger_job(
                    connection, self._database, asked, None, revisions=None
                )
            )
        self._compare("trigger")
        if self.jobs[job_id]["status"] == JobStatus.WAITING:
            assert self.jobs[job_id]["next_trigger_time"] < FAR

    @rule()
    def look_through_the_key(self) -> None:
        self._write(lambda connection: free_keys(connection, [KEY]))
        self._compare("unblock")

    @rule(data=st.data(), expires=st.booleans(), far=RARELY, keys=OTHER_KEYS)
    def revise(
        self, data: st.DataObject, *, expires: bool, far: bool, keys: dict[str, Any]
    ) -> None:
        job_id = self._pick(data, self.mine)
        columns = {"priority": 7, **keys} | ({"expires_at": PAST} if expires else {})
        self._write(
            lambda connection: revise_job(
                connection,
                self._database,
                Asked(job_id, 0, new_token()),
                NewValues(columns, due_ms=FAR if far else 1),
                revisions=None,
            )
        )
        self._compare("change", "unblock")

    @rule()
    def expire(self) -> None:
        # What is looked at again in some seconds is looked at now.
        self._run(change(self._database, "UPDATE job_expiry SET look_at = 1"))
        expired = self._write(
            lambda connection: expire_jobs(connection, self._database, limit=50)
        ).job_ids
        assert all(self.jobs[job_id]["attempt"] == 0 for job_id in expired)
        self._compare("expire", "unblock")
        assert not [
            job
            for job in self.jobs.values()
            if job["expires_at"] is not None
            and job["attempt"] == 0
            and job["status"] in {JobStatus.WAITING, JobStatus.PAUSED, JobStatus.BLOCKED}
        ]

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def a_thread_ends(self, data: st.DataObject) -> None:
        _job_id, execution_id = self._pick(data, self.sent)
        self._write(lambda connection: release_stopped(connection, [execution_id]))
        self._compare("unblock")

    @invariant()
    def rows_fit(self) -> None:
        open_logs: dict[int, list[str]] = {}
        for execution_id, log in self.logs.items():
            if log["status"] in OPEN_EXECUTIONS:
                open_logs.setdefault(log["job_id"], []).append(execution_id)
        stopping = {
            row["execution_id"]: row["job_id"]
            for row in self._run(rows_of(self._database, "SELECT * FROM stopping_execution"))
        }
        owed = Counter(
            row["job_id"]
            for row in self._run(rows_of(self._database, "SELECT job_id FROM callback_delivery"))
        )
        for job_id in self.mine:
            job = self.jobs[job_id]
            running = job["status"] == JobStatus.RUNNING
            assert open_logs.get(job_id, []) == ([job["execution_id"]] if running else [])
            assert (job["owner_worker_id"] is not None) == running
            assert (job["finished_at"] is not None) == (job["status"] in TERMINAL_JOBS)
            assert 0 <= job["attempt"] <= job["max_retry"] + 1
            assert job["returned"] <= MAX_RETURNS
            if job["stopping_execution_id"] is not None:
                assert not running
                assert stopping[job["stopping_execution_id"]] == job_id
            assert owed[job_id] == self.ends[job_id]

    @invariant()
    def blocked_is_only_who_waits_for_a_key(self) -> None:
        waits = {
            row["job_id"]
            for row in self._run(
                rows_of(self._database, "SELECT job_id FROM concurrency_slot WHERE waits = 1")
            )
        }
        assert all(
            job["concurrency_key"] is not None and job["id"] in waits
            for job in self.jobs.values()
            if job["status"] == JobStatus.BLOCKED
        )


@pytest.mark.parametrize("examples", [25])
def test_no_order_of_moves_reaches_an_illegal_state(migrated_engine: Engine, examples: int) -> None:
    class OnThisEngine(Moves):
        engine = migrated_engine

    run_state_machine_as_test(
        OnThisEngine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
