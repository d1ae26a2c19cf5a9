"""Schedules of a simulated cluster and what their callers do to them; bulk operations."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any, Final

from tests.simulation.history import History
from tests.simulation.workload import RECEIVER, Callers
from tests.support.checker import Accepted
from tests.support.fires import BulkAsked, ScheduleEnds, ScheduleMade

CRONS: Final = {15: "*/15 * * * * *", 20: "5/20 * * * * *", 30: "0,30 * * * * *", 60: "* * * * *"}
LAST_RESUME_SECONDS: Final = 24.0
POLICIES: Final = ("skip", "queue", "allow", "replace")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a caller submits and when, and the verbs that it uses so many seconds after that."""

    at: float
    body: dict[str, Any]
    step_ms: int
    verbs: tuple[tuple[float, str], ...]
    cancel_after: float | None
    with_children: bool


def draw_schedules(dice: random.Random, *, seconds: float) -> list[Schedule]:
    """Draw up to three schedules, of every kind and policy."""
    return [_draw(dice, number, seconds) for number in range(dice.randrange(1, 4))]


def _draw(dice: random.Random, number: int, seconds: float) -> Schedule:
    step = dice.choice(list(CRONS))
    misfire = dice.choice(["once", "skip", "all"])
    body: dict[str, Any] = {
        "clientRequestId": f"schedule-{number}",
        "jobName": f"schedule {number}",
        "jobHandler": "brief",
        "params": {
            "seconds": dice.choice([0.2, dice.uniform(1.0, 10.0), dice.uniform(10.0, 50.0)])
        },
        "maxRetry": dice.choice([0, 2, 5]),
        "retryIntervalSeconds": 1,
        "overlapPolicy": dice.choice(POLICIES),
        "misfirePolicy": misfire,
    }
    if dice.random() < 0.5:
        body["cronExpr"] = CRONS[step]
    else:
        body["intervalMs"] = step * 1000
    if misfire == "all":
        body["misfireCap"] = dice.choice([2, 100])
    if dice.random() < 0.5:
        body["callbackUrl"] = f"http://{RECEIVER}/schedule-{number}"
    if dice.random() < 0.2:
        body["jitterMs"] = 4000
    verbs: list[tuple[float, str]] = []
    if dice.random() < 0.5:
        paused_at = dice.uniform(10.0, seconds * 0.6)
        verbs.append((paused_at, "pause"))
        verbs.append((paused_at + dice.uniform(1.0, 90.0), dice.choice(["resume", "catch up"])))
    verbs += [(dice.uniform(1.0, seconds * 0.8), "trigger") for _ in range(dice.randrange(3))]
    return Schedule(
        dice.uniform(1.0, seconds * 0.3),
        body,
        step * 1000,
        tuple(sorted(verbs)),
        cancel_after=dice.uniform(60.0, seconds * 0.6) if dice.random() < 0.2 else None,
        with_children=dice.random() < 0.3,
    )


class Planner:
    """A caller that makes schedules, uses their verbs, and cancels them when all is calm again."""

    def __init__(
        self, callers: Callers, history: History, dice: random.Random, *, over_at: float
    ) -> None:
        self._callers = callers
        self._history = history
        self._dice = dice
        self._over_at = over_at

    async def play(self, schedule: Schedule) -> None:
        """Make a schedule, use its verbs in their order, and cancel it."""
        await asyncio.sleep(schedule.at)
        asked_at = self._history.now
        answer = await self._callers.insist("/openapi/jobs", schedule.body)
        assert answer.status in (200, 202), answer.body
        job_id = int(json.loads(answer.body)["jobId"])
        body = schedule.body
        self._history.add(
            ScheduleMade(
                self._history.now,
                job_id,
                schedule.step_ms,
                body["overlapPolicy"],
                body["maxRetry"],
                "callbackUrl" in body,
                waited=self._history.now - asked_at,
            )
        )
        since = self._history.now
        until = schedule.cancel_after
        end = self._over_at if until is None else min(self._over_at, since + until)
        for number, (after, verb) in enumerate(schedule.verbs):
            await self._sleep_until(min(since + after, end))
            if self._history.now < end or verb != "trigger":
                await self._use(job_id, verb, f"{body['clientRequestId']}-{number}", schedule)
        late = end >= self._over_at
        if late and any(verb == "pause" for _, verb in schedule.verbs):
            # A copy of the pause may have come after the resume; none is on its way any more.
            await self._sleep_until(end - LAST_RESUME_SECONDS)
            await self._use(job_id, "catch up", "", schedule)
        await self._sleep_until(end)
        self._history.add(ScheduleEnds(self._history.now, job_id, late, schedule.with_children))
        path = f"/openapi/jobs/{job_id}/cancel"
        if schedule.with_children:
            path += "?children=true"
        await self._callers.insist(path, None)

    async def change_many(self, at: float) -> None:
        """Cancel, retry, or pause and later resume all jobs whose name begins alike."""
        action = self._dice.choice(["cancel", "retry", "pause"])
        digit = self._dice.randrange(1, 5)
        await asyncio.sleep(at)
        if action != "pause":
            # It is on record before it is sent: it may be heard although nobody answers.
            self._history.add(BulkAsked(self._history.now, action, f"request-{digit}"))
        await self._bulk(action, digit, action)
        if action == "pause":
            await asyncio.sleep(self._dice.uniform(5.0, 60.0))
            await self._bulk("resume", digit, "resume")
            # What was on its way to be paused when it was resumed is resumed in the end.
            await self._sleep_until(self._over_at)
            await self._bulk("resume", digit, "last")

    async def _bulk(self, action: str, digit: int, request: str) -> None:
        answer = await self._callers.insist(
            "/openapi/bulk",
            {
                "action": action,
                "filter": {"namePrefix": f"job {digit}"},
                "clientRequestId": f"bulk-{request}",
            },
        )
        assert answer.status in (200, 202), answer.body

    async def _use(self, job_id: int, verb: str, request: str, schedule: Schedule) -> None:
        path = f"/openapi/jobs/{job_id}/{'resume' if verb == 'catch up' else verb}"
        if verb == "trigger":
            answer = await self._callers.insist(path, {"clientRequestId": request})
            assert answer.status in (200, 202), answer.body
            child = json.loads(answer.body)
            self._history.add(
                Accepted(
                    self._history.now,
                    request,
                    child["jobId"],
                    schedule.body["maxRetry"],
                    "callbackUrl" in schedule.body,
                )
            )
            return
        await self._callers.insist(path, {"missed": "catchUp"} if verb == "catch up" else None)

    async def _sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - self._history.now))
