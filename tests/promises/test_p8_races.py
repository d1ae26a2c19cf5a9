"""P8: whatever is done to a schedule, in whatever order and at once, each fire is decided once."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.jobs import schedule_verbs
from app.lifecycle.moves.guard import lock_job
from app.lifecycle.states import TERMINAL_JOBS, ExecutionStatus, JobStatus
from app.plumbing.database import Database
from app.schedules.decide import times_of
from tests.integration.app.rig import (
    Door,
    claimed,
    door,
    ending,
    new_term,
    rows_of,
    settled,
    value_of,
)
from tests.integration.app.schedule_rig import children, moved_back, skips
from tests.support.engines import Engine
from tests.support.wait import until_async

EVERY = 10 * 60_000
STEPS = 40
ENDS_AT_ONCE = 10


class Hands:
    """All that may be done to one schedule."""

    def __init__(self, api: Door, schedule: int, dice: random.Random, term: int) -> None:
        self.api = api
        self.schedule = schedule
        self.dice = dice
        self.term = term

    async def fire(self) -> None:
        await self.api.parts.spawner.fire_due(self.term)

    async def pause(self) -> None:
        await self._post("pause")

    async def resume(self) -> None:
        await self._post("resume", {"missed": self.dice.choice(["skip", "catchUp"])})

    async def trigger(self) -> None:
        request = {"clientRequestId": f"{self.schedule}-{self.dice.randrange(3)}"}
        await self._post("trigger", self.dice.choice([request, {}]))

    async def patch(self) -> None:
        change = self.dice.choice(
            [{"intervalMs": EVERY}, {"misfirePolicy": "once"}, {"priority": 7}, {"jitterMs": 1000}]
        )
        answer = await self.api.client.patch(
            f"/openapi/jobs/{self.schedule}", json=change, headers={"If-Match": "*"}
        )
        assert answer.status_code == 200, answer.text

    async def end_a_child(self) -> None:
        waiting = await rows_of(
            self.api.database,
            "SELECT id FROM job_info WHERE parent_id = :id AND status = 0 ORDER BY id",
            id=self.schedule,
        )
        for row in waiting[:1]:
            for run in await claimed(self.api.database, [row["id"]], term=self.term):
                status = self.dice.choice([ExecutionStatus.SUCCEEDED, ExecutionStatus.FAILED])
                await settled(self.api.database, ending(run, status, retryable=False))

    async def cancel_a_child(self) -> None:
        row = await self._child([0, 6])
        if row is not None:
            answer = await self.api.client.post(f"/openapi/jobs/{row}/cancel")
            assert answer.status_code in {200, 409}

    async def retry_a_child(self) -> None:
        row = await self._child([3, 5])
        if row is not None:
            answer = await self.api.client.post(f"/openapi/jobs/{row}/retry")
            assert answer.status_code in {200, 409}

    async def mend(self) -> None:
        await self.api.parts.spawner.mend()

    async def _child(self, states: list[int]) -> int | None:
        found = [
            one["id"]
            for one in await children(self.api.database, self.schedule)
            if one["status"] in states
        ]
        return self.dice.choice(found) if found else None

    async def _post(self, verb: str, body: Any = None) -> None:
        path = f"/openapi/jobs/{self.schedule}/{verb}"
        answer = await self.api.client.post(path, json=body)
        assert answer.status_code in {200, 409}, answer.text


async def look(database: Database, schedule: int) -> tuple[dict[str, Any], int]:
    """The schedule's row, and how many of its fires are on record; all of it must fit."""
    (row,) = await rows_of(database, "SELECT * FROM job_info WHERE id = :id", id=schedule)
    own = await children(database, schedule)
    ledger = await skips(database, schedule)
    fired = [one["nominal_time"] for one in own if not one["child_key"]]
    assert len(fired) == len(set(fired))
    for before, after in itertools.pairwise(ledger):
        assert before["to_time"] < after["from_time"]
    for one in ledger:
        assert one["from_time"] <= one["to_time"]
        assert not [t for t in fired if one["from_time"] <= t <= one["to_time"]]
    assert all(time <= row["trigger_ts"] for time in fired)
    open_ones = {one["id"] for one in own if one["status"] not in TERMINAL_JOBS}
    live = await rows_of(
        database, "SELECT child_id FROM schedule_live WHERE schedule_id = :id", id=schedule
    )
    assert {one["child_id"] for one in live} >= open_ones
    waiting = [one for one in own if one["status"] == JobStatus.BLOCKED]
    if waiting:
        assert open_ones - {one["id"] for one in waiting}, "something that it waits for goes on"
    keys = [one["child_key"] for one in own if one["child_key"]]
    assert len(keys) == len(set(keys))
    return row, len(fired) + sum(one["count"] for one in ledger)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("overlap", ["skip", "queue", "allow", "replace"])
async def test_each_fire_is_decided_once(migrated_engine: Engine, overlap: str, seed: int) -> None:
    dice = random.Random(f"{overlap}-{seed}")
    async with door(migrated_engine) as one, door(migrated_engine) as other:
        database = one.database
        schedule = await one.submitted(
            intervalMs=EVERY,
            overlapPolicy=overlap,
            misfirePolicy="all",
            misfireCap=4,
            misfireSpacingMs=0,
            maxRetry=0,
        )
        term = await new_term(database)
        hands = [Hands(api, schedule, dice, term) for api in (one, other)]
        before, on_record = await look(database, schedule)
        for _ in range(STEPS):
            if dice.random() < 0.6:
                await moved_back(database, schedule, dice.choice([1, 1, 2, 9]) * EVERY)
                before, on_record = await look(database, schedule)
            now = int(await value_of(database, f"SELECT {database.now_ms}"))
            await asyncio.gather(*(action() for action in chosen(hands, dice)))
            after, now_on_record = await look(database, schedule)
            times = times_of(before)
            assert times is not None
            assert after["trigger_ts"] <= now + 60_000
            # Under a rule that was changed meanwhile, the cursor stands at the change.
            decided = times.count(before["trigger_ts"], after["trigger_ts"])
            assert now_on_record - on_record == decided
            before, on_record = after, now_on_record
        if overlap != "allow":
            await drained(hands[0])
        assert before["status"] in {JobStatus.SCHEDULED, JobStatus.PAUSED}


def chosen(hands: list[Hands], dice: random.Random) -> list[Callable[[], Awaitable[None]]]:
    """One or two things to do at once, each by a dispatcher of its own; fires are frequent."""
    first, second = (
        [
            *(each.fire, each.fire, each.fire, each.end_a_child, each.end_a_child, each.pause),
            *(each.resume, each.resume, each.trigger, each.patch, each.cancel_a_child),
            *(each.retry_a_child, each.mend),
        ]
        for each in hands
    )
    if dice.random() < 0.5:
        return [dice.choice(first)]
    return [dice.choice(first), dice.choice(second)]


async def drained(hands: Hands) -> None:
    """Every child of a line gets its turn, one after another."""
    for _ in range(200):
        states = [one["status"] for one in await children(hands.api.database, hands.schedule)]
        if all(status in TERMINAL_JOBS for status in states):
            return
        assert JobStatus.WAITING in states
        await hands.end_a_child()
    raise AssertionError("the line does not end")


async def test_when_the_last_two_runs_end_at_once_on_two_dispatchers_the_next_is_let_go_once(
    migrated_engine: Engine,
) -> None:
    async with door(migrated_engine) as one, door(migrated_engine) as other:
        term = await new_term(one.database)
        for _ in range(ENDS_AT_ONCE):
            schedule = await one.submitted(intervalMs=EVERY, overlapPolicy="queue", maxRetry=0)
            for _ in range(2):
                answer = await one.client.post(f"/openapi/jobs/{schedule}/trigger")
                assert answer.status_code == 200, answer.text
            pair = [row["id"] for row in await children(one.database, schedule)]
            first, second = await claimed(one.database, pair, term=term)
            await moved_back(one.database, schedule, EVERY)
            await one.parts.spawner.fire_due(term)
            (waits,) = [
                row for row in await children(one.database, schedule) if row["id"] not in pair
            ]
            assert waits["status"] == JobStatus.BLOCKED
            ends = await asyncio.gather(
                settled(one.database, ending(first, ExecutionStatus.SUCCEEDED)),
                settled(other.database, ending(second, ExecutionStatus.SUCCEEDED)),
            )
            assert sum(len(end.followed.claimable) for (end,) in ends) == 1
            status = await value_of(
                one.database, "SELECT status FROM job_info WHERE id = :id", id=waits["id"]
            )
            assert status == JobStatus.WAITING


@pytest.mark.parametrize("paused", [False, True])
async def test_a_fire_that_comes_due_while_a_patch_settles_the_past_is_not_lost(
    migrated_engine: Engine, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    async with door(migrated_engine) as api:
        database = api.database
        made = await api.submitted(
            intervalMs=100, overlapPolicy="allow", misfirePolicy="all", misfireCap=1000
        )
        if paused:
            assert (await api.client.post(f"/openapi/jobs/{made}/pause")).status_code == 200
        (row,) = await rows_of(database, "SELECT * FROM job_info WHERE id = :id", id=made)
        anchor = row["anchor_at"]

        async def after_another_fire(*given: Any) -> Any:
            """Lock the row again only when one more nominal time has passed."""
            now = int(await value_of(database, f"SELECT {database.now_ms}"))
            await passed(database, anchor + ((now - anchor) // 100 + 1) * 100)
            return await lock_job(*given)

        await passed(database, anchor)
        monkeypatch.setattr(schedule_verbs, "lock_job", after_another_fire)
        answer = await api.client.patch(
            f"/openapi/jobs/{made}", json={"jitterMs": 0}, headers={"If-Match": "*"}
        )
        assert answer.status_code == 200, answer.text
        if paused:
            resumed = await api.client.post(f"/openapi/jobs/{made}/resume", json={"missed": "skip"})
            assert resumed.status_code == 200, resumed.text
        await api.parts.spawner.fire_due(await new_term(database))

        (row,) = await rows_of(database, "SELECT * FROM job_info WHERE id = :id", id=made)
        on_record = [one["nominal_time"] for one in await children(database, made)]
        for one in await skips(database, made):
            on_record += range(one["from_time"], one["to_time"] + 1, 100)
        assert sorted(on_record) == list(range(anchor, row["trigger_ts"] + 1, 100))


async def passed(database: Database, moment_ms: int) -> None:
    """Return when the database's clock is past a moment."""
    query = f"SELECT CASE WHEN {database.now_ms} > :moment THEN 1 ELSE 0 END"
    await until_async(
        lambda: value_of(database, query, moment=moment_ms), what="a moment of the database's clock"
    )
