"""What a seed stands for: the jobs that callers submit, and the faults, with their times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from tests.faults.links import Mode

DISPATCHERS: Final = ("dispatcher-1", "dispatcher-2")
WORKERS: Final = ("worker-1", "worker-2", "worker-3")
CALLERS: Final = 12
BROKEN: Final = (Mode.SLOW, Mode.DOWN, Mode.SILENT, Mode.DEAF, Mode.HALF_CLOSED)


Drawn = tuple[dict[str, Any], set[str]]


def _short(draw: Callable[[int], int]) -> Drawn:
    return {"jobHandler": "fault_async", "params": {"ms": draw(200)}}, {"SUCCEEDED"}


def _speaking(draw: Callable[[int], int]) -> Drawn:
    params = {"ms": draw(500), "lines": 1 + draw(20)}
    return {"jobHandler": "fault_async", "params": params}, {"SUCCEEDED"}


def _long(draw: Callable[[int], int]) -> Drawn:
    return {"jobHandler": "fault_async", "params": {"ms": 2_000 + draw(20_000)}}, {"SUCCEEDED"}


def _thread(draw: Callable[[int], int]) -> Drawn:
    return {"jobHandler": "fault_thread", "params": {"ms": draw(4_000)}}, {"SUCCEEDED"}


def _child(draw: Callable[[int], int]) -> Drawn:
    return {"jobHandler": "fault_process", "params": {"ms": draw(4_000)}}, {"SUCCEEDED"}


def _stumbling(draw: Callable[[int], int]) -> Drawn:
    params = {"ms": draw(300), "times": 2}
    return {"jobHandler": "fault_failing", "params": params}, {"SUCCEEDED"}


def _failing(draw: Callable[[int], int]) -> Drawn:
    params = {"ms": draw(300), "times": 99}
    return {"jobHandler": "fault_failing", "params": params, "maxRetry": 2}, {"FAILED"}


def _late_thread(draw: Callable[[int], int]) -> Drawn:
    body = {"jobHandler": "fault_stubborn", "params": {"ms": 1_500 + draw(3_000)}}
    # A worker that stood still past both its timeout and its end wakes to a run that has ended.
    ends = {"FAILED", "SUCCEEDED"}
    return {**body, "timeoutMs": 300 + draw(900), "maxRetry": 1}, ends


def _late_child(_draw: Callable[[int], int]) -> Drawn:
    body = {"jobHandler": "fault_process", "params": {"ms": 30_000}}
    return {**body, "timeoutMs": 1_500, "maxRetry": 1}, {"FAILED"}


def _deaf_thread(draw: Callable[[int], int]) -> Drawn:
    return {"jobHandler": "fault_stubborn", "params": {"ms": 500 + draw(6_000)}}, {"SUCCEEDED"}


def _once(draw: Callable[[int], int]) -> Drawn:
    body = {"jobHandler": "fault_async", "params": {"ms": draw(3_000)}, "maxRetry": 0}
    return body, {"SUCCEEDED", "FAILED"}


def _expiring(draw: Callable[[int], int]) -> Drawn:
    body = {"jobHandler": "fault_async", "params": {"ms": draw(1_000)}}
    return {**body, "expiresInMs": 3_000 + draw(9_000)}, {"SUCCEEDED", "FAILED"}


KINDS: Final[tuple[tuple[float, Callable[[Callable[[int], int]], Drawn]], ...]] = (
    (0.30, _short),
    (0.38, _speaking),
    (0.48, _long),
    (0.58, _thread),
    (0.66, _child),
    (0.74, _stumbling),
    (0.80, _failing),
    (0.84, _late_thread),
    (0.87, _late_child),
    (0.90, _deaf_thread),
    (0.95, _once),
    (1.01, _expiring),
)
"""The kinds of jobs: up to which chance each is drawn, the fields of its body, and its ends."""


class Kind(Enum):
    """The kinds of faults."""

    KILL = "kill -9"
    KILL_ALONE = "kill -9 without its children"
    FREEZE = "freeze"
    RESTART = "restart"
    FLUSH = "Redis flushed"
    LINK = "link"
    CLOCK = "clock"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: at `at` seconds something happens to `target`, for `seconds`."""

    at: float
    kind: Kind
    target: str
    seconds: float = 0.0
    mode: Mode = Mode.OPEN
    clock_seconds: float = 0.0

    @property
    def name(self) -> str:
        """How the table calls it."""
        part = self.target.rstrip("-0123456789")
        if self.kind is Kind.LINK:
            return f"link {self.mode.value}"
        if self.kind is Kind.FLUSH:
            return str(self.kind.value)
        return f"{self.kind.value} {part}"


@dataclass(frozen=True, slots=True)
class Call:
    """One job that a caller submits at `at`, and what else the caller does with it.

    `ends` are the ends that the job may have unless its caller cancels it.
    """

    at: float
    body: dict[str, Any]
    ends: frozenset[str]
    twice: bool = False
    cancel_after: float | None = None
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a seed decides."""

    seed: int
    seconds: float
    stall_seconds: float
    faults: tuple[Fault, ...]
    calls: tuple[tuple[Call, ...], ...]


def link_names() -> list[str]:
    """The links of the cluster, `from>to`."""
    nodes = [*DISPATCHERS, *WORKERS]
    return [
        *(f"{node}>redis" for node in nodes),
        *(f"{node}>mariadb" for node in DISPATCHERS),
        *(f"{worker}>{dispatcher}" for worker in WORKERS for dispatcher in DISPATCHERS),
        *(f"dispatchers>{worker}" for worker in WORKERS),
    ]


def make_plan(seed: int, *, seconds: float, jobs: int, clocks: bool) -> Plan:
    """Draw the plan of a seed; the same arguments give the same plan."""
    dice = random.Random(f"faults {seed}")
    calls: list[list[Call]] = [[] for _ in range(CALLERS)]
    for number in range(jobs):
        calls[number % CALLERS].append(_call(dice, seed, number, seconds * number / jobs))
    return Plan(
        seed=seed,
        seconds=seconds,
        stall_seconds=dice.choice((20.0, 300.0)),
        faults=tuple(_faults(dice, seconds, clocks=clocks)),
        calls=tuple(map(tuple, calls)),
    )


def _faults(dice: random.Random, seconds: float, *, clocks: bool) -> list[Fault]:
    faults: list[Fault] = []
    at = 1.0
    while (at := at + dice.uniform(2, 7)) < seconds:
        faults.append(_fault(dice, at, clocks=clocks))
    return faults


def _fault(dice: random.Random, at: float, *, clocks: bool) -> Fault:
    chance = dice.random()
    node = dice.choice((*DISPATCHERS, *WORKERS))
    long = dice.uniform(1, 25)
    short = dice.uniform(0, 4)
    clock = dice.choice((-3600.0, -5.0, -1.0, 0.0, 1.0, 5.0, 3600.0))
    bands: Sequence[tuple[float, Fault]] = (
        (0.18, Fault(at, Kind.KILL, node, short)),
        (0.22, Fault(at, Kind.KILL_ALONE, dice.choice(WORKERS), short)),
        (0.34, Fault(at, Kind.FREEZE, node, long)),
        (0.42, Fault(at, Kind.RESTART, node, short)),
        (0.48, Fault(at, Kind.FLUSH, "redis")),
        (0.53, Fault(at, Kind.KILL, "redis", short)),
        (0.57, Fault(at, Kind.FREEZE, "redis", dice.uniform(1, 8))),
        (0.60, Fault(at, Kind.RESTART, "redis", short)),
        (0.64, Fault(at, Kind.KILL, "mariadb", short)),
        (0.68, Fault(at, Kind.FREEZE, "mariadb", dice.uniform(1, 8))),
        (0.70, Fault(at, Kind.RESTART, "mariadb", short)),
        (0.73, Fault(at, Kind.KILL, "receiver", short)),
        (0.75, Fault(at, Kind.FREEZE, "receiver", dice.uniform(1, 8))),
    )
    link = Fault(at, Kind.LINK, dice.choice(link_names()), dice.uniform(1, 20), dice.choice(BROKEN))
    for edge, fault in bands:
        if chance < edge:
            return fault
    if clocks and chance > 0.95:
        return Fault(at, Kind.CLOCK, node, clock_seconds=clock)
    return link


def _call(dice: random.Random, seed: int, number: int, at: float) -> Call:
    body: dict[str, Any] = {
        "clientRequestId": f"seed-{seed}-{number}",
        "jobName": "fault",
        "priority": dice.randrange(10),
        "maxRetry": 30,
        "retryIntervalSeconds": 0.2,
    }
    if dice.random() < 0.15:
        body["delayMs"] = dice.randrange(8_000)
    chance = dice.random()
    draw = next(draw for edge, draw in KINDS if chance < edge)
    special, ends = draw(dice.randrange)
    body |= special
    return Call(
        at=at,
        body=body,
        ends=frozenset(ends),
        twice=dice.random() < 0.1,
        cancel_after=dice.uniform(0, 4) if dice.random() < 0.06 else None,
        retry=dice.random() < 0.4,
    )
