"""Whatever is done to a schedule and its children in whatever order, no illegal state is reached.

Each rule does what a caller, a worker or the holder of the lock may do; then every row may only
have gone along the edges of the moves that this may bring about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from app.lifecycle.moves.fire import Fenced
from app.lifecycle.states import JOB_MOVES, TERMINAL_JOBS, ExecutionStatus, JobKind, JobStatus
from tests.integration.app.every_state import (
    ask,
    end,
    finish,
    fire_past,
    patch,
    schedule_body,
    try_to_claim,
)
from tests.integration.app.rig import Door, change, door, new_term, rows_of
from tests.support.engines import Engine

T = TypeVar("T")
TABLES = (
    *("job_info", "job_log", "stopping_execution", "callback_delivery"),
    *("schedule_live", "schedule_skip"),
)
VERBS = (*("pause", "resume", "resume", "trigger") * 3, "cancel")
"""Its end comes seldom: after it nothing is left to happen."""
ENDS = (ExecutionStatus.SUCCEEDED, ExecutionStatus.FAILED, ExecutionStatus.LOST)


class Schedules(RuleBasedStateMachine):
    """One schedule and its children, what is done to them, and what must hold after each."""

    api: Door
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        for table in TABLES:
            self._run(change(self.api.database, f"DELETE FROM {table}"))
        self.rows: dict[int, dict[str, Any]] = {}

    def _run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result()

    def _compare(self, of_schedule: set[str], of_children: set[str]) -> None:
        """Fail unless all changes since the last look lie on the edges of these moves."""
        found = self._run(rows_of(self.api.database, "SELECT * FROM job_info ORDER BY id"))
        for row in found:
            kind = JobKind(row["kind"])
            names = of_schedule if kind is JobKind.SCHEDULE else of_children
            before = self.rows.get(row["id"])
            if before is not None and before["version"] == row["version"]:
                assert before["status"] == row["status"]
                continue
            source = None if before is None else JobStatus(before["status"])
            edge = (source, JobStatus(row["status"]))
            if before is not None and source == edge[1] and source in TERMINAL_JOBS:
                assert before["stopping_execution_id"] != row["stopping_execution_id"]
                continue
            edges = {(m.source, m.target) for m in JOB_MOVES if m.kind is kind and m.name in names}
            steps = edges | {(a, d) for a, b in edges for c, d in edges if b is c}
            assert edge in steps, (kind.name, edge, names)
        self.rows = {row["id"]: row for row in found}

    @initialize(overlap=st.sampled_from(["allow", "skip", "queue", "replace"]))
    def submit(self, overlap: str) -> None:
        body = {**schedule_body("s"), "overlapPolicy": overlap}
        self.schedule = self._run(self.api.submitted(**body, retryIntervalSeconds=0))
        self._compare({"submit"}, set())

    @rule(hours=st.integers(1, 3))
    def hours_pass(self, hours: int) -> None:
        for _ in range(hours):
            self._run(fire_past(self.api, self.schedule))
            self._compare({"fire", "finish"}, {"submit", "cancel", "unblock"})

    @rule()
    def a_fenced_holder_fires(self) -> None:
        old = self._run(new_term(self.api.database))
        self._run(new_term(self.api.database))
        due = "UPDATE job_info SET next_trigger_time = 1 WHERE id = :id AND status = 7"
        self._run(change(self.api.database, due, id=self.schedule))
        with suppress(Fenced):
            self._run(self.api.parts.spawner.fire_due(old))
        self._compare(set(), set())

    @rule(verb=st.sampled_from(VERBS))
    def a_caller_asks(self, verb: str) -> None:
        self._run(ask(self.api, verb, self.schedule))
        self._compare({verb}, {"submit"})

    @rule()
    def a_caller_changes_it(self) -> None:
        self._run(patch(self.api, self.schedule))
        self._compare({"change"}, set())

    @rule(now=st.sampled_from([False, False, False, True]))
    def no_fire_is_left(self, *, now: bool) -> None:
        if now:
            self._run(finish(self.api, self.schedule))
        self._compare({"fire", "finish"}, {"submit", "cancel", "unblock"})

    @rule(data=st.data(), status=st.sampled_from(ENDS))
    def a_child_runs(self, data: st.DataObject, status: ExecutionStatus) -> None:
        children = [one for one in self.rows if one != self.schedule]
        if children:
            child = children[-1 - data.draw(st.integers(0, 2)) % len(children)]
            self._run(try_to_claim(self.api, child))
            self._compare(set(), {"claim"})
            if data.draw(st.booleans()):
                self._run(end(self.api, child, status))
                self._compare(set(), {"succeed", "fail", "retry", "unblock"})

    @rule(data=st.data(), verb=st.sampled_from(["cancel", "pause", "resume", "retry"]))
    def a_caller_asks_for_a_child(self, data: st.DataObject, verb: str) -> None:
        children = [one for one in self.rows if one != self.schedule]
        if children:
            child = children[-1 - data.draw(st.integers(0, 2)) % len(children)]
            self._run(ask(self.api, verb, child))
            self._compare(set(), {"reopen" if verb == "retry" else verb, "unblock"})

    @invariant()
    def rows_fit(self) -> None:
        for row in self.rows.values():
            ended = row["status"] in TERMINAL_JOBS
            assert (row["finished_at"] is not None) == ended
            assert (row["owner_worker_id"] is not None) == (row["status"] == JobStatus.RUNNING)
            assert (row["parent_id"] is None) == (row["id"] == self.schedule)
        nominal = [
            (row["nominal_time"], row["child_key"])
            for row in self.rows.values()
            if row["id"] != self.schedule
        ]
        assert len(set(nominal)) == len(nominal)


async def test_no_order_of_what_happens_to_a_schedule_reaches_an_illegal_state(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as opened:

        class OnThisEngine(Schedules):
            api = opened
            loop = asyncio.get_running_loop()

        await asyncio.to_thread(
            run_state_machine_as_test,
            OnThisEngine,
            settings=settings(
                max_examples=12,
                stateful_step_count=20,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
