"""The faults of a simulation: what breaks when, for how long, all drawn from the seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tests.simulation.cluster import DISPATCHERS, WORKERS, Cluster
from tests.simulation.machine import Process, State
from tests.support.checker import Frozen, RedisTrouble

NODES: Final = (*DISPATCHERS, *WORKERS)
IDLE_TRANSACTION_SECONDS: Final = 20.0
DEATHS_OF: Final = {
    "d": ("", "<db commit", "<db commit", ">db commit", ">w", "<w"),
    "w": ("", "<redis EVAL", ">redis EVAL", ">d", "<d", ">hook", "<hook"),
}
"""Where a dispatcher or a worker is made to die: before (>) or after (<) it has met another."""


class Faults:
    """Breaks things at random, several at once, and mends each after its time."""

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        self._cluster = cluster
        self._history = cluster.history
        self._dice = dice
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._troubles: list[RedisTrouble] = []
        self._open: list[tuple[float, str]] = []
        self._kinds: list[tuple[int, Callable[[], Iterator[float]]]] = [
            (5, self._kill_worker),
            (4, self._kill_dispatcher),
            (4, self._freeze),
            (3, self._terminate),
            (4, self._cut_from_redis),
            (3, self._cut_from_database),
            (4, self._cut_from_dispatchers),
            (5, self._isolate),
            (3, self._lose_worker),
            (2, self._stop_redis),
            (1, self._flush_redis),
            (3, self._stop_database),
            (2, self._slow_down),
            (3, self._lose_messages),
            (2, self._step_clock),
        ]

    async def run(self, seconds: float) -> None:
        """Break things for that long, then mend everything that is broken."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        pause = self._dice.uniform(3.0, 20.0)
        weights = [weight * self._dice.choice([0, 1, 1, 3]) for weight, _ in self._kinds]
        while True:
            at = loop.time() + self._dice.expovariate(1 / pause)
            await asyncio.sleep(min(at, until) - loop.time())
            if at >= until:
                break
            ((_, kind),) = self._dice.choices(self._kinds, weights if any(weights) else None)
            task = asyncio.create_task(self._hold(kind()))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.sleep(0)
        for node in NODES:
            process = self._cluster.process(node)
            if process is None:
                self._cluster.start(node)
            else:
                process.doomed_at = ("", 0)

    async def _hold(self, fault: Iterator[float]) -> None:
        """Keep a fault up for as long as it says; a generator breaks, yields, and mends."""
        with contextmanager(lambda: fault)() as seconds:
            await asyncio.sleep(seconds)

    def _kill(self, nodes: tuple[str, ...]) -> Iterator[float]:
        process = self._pick(nodes)
        if process is None:
            yield 0
            return
        if self._dice.random() < 0.6:
            # At a point where it meets the outside, a few steps from now.
            where = self._dice.choice(DEATHS_OF[process.node[0]])
            process.doomed_at = (where, self._dice.randrange(1, 4 if where else 60))
            self._history.fault("kill", f"{process.name} soon: {process.doomed_at}")
        else:
            self._history.fault("kill", process.name)
            self._cluster.crash(process, "killed")
        yield 0

    def _kill_worker(self) -> Iterator[float]:
        yield from self._kill(WORKERS)

    def _kill_dispatcher(self) -> Iterator[float]:
        yield from self._kill(DISPATCHERS)

    def _freeze(self) -> Iterator[float]:
        process = self._pick(NODES)
        if process is None:
            yield 0
            return
        seconds = self._dice.choice([self._dice.uniform(0.2, 10), self._dice.uniform(10, 70)])
        self._history.fault("freeze", f"{process.name} for {seconds:.1f} s")
        process.freeze()
        since = self._history.now
        loop = self._cluster.machine.loop
        idle = loop.call_later(
            self._dice.uniform(0, IDLE_TRANSACTION_SECONDS),
            self._cluster.database.drop_transactions,
            process,
        )
        try:
            yield seconds
        finally:
            idle.cancel()
            if process.state is State.FROZEN:
                self._history.say(f"{process.name} goes on", mark="+")
                loop.resume(process)
                self._trouble(since, process.node)
                if process.worker_id is not None:
                    self._history.add(Frozen(self._history.now, since, process.worker_id))

    def _terminate(self) -> Iterator[float]:
        process = self._pick(NODES)
        if process is not None:
            self._history.fault("terminate", process.name)
            self._cluster.terminate(process)
        yield 0

    def _cut_from_redis(self) -> Iterator[float]:
        node = self._dice.choice(NODES)
        yield from self._cut("cut from redis", node, ("redis",))

    def _cut_from_database(self) -> Iterator[float]:
        node = self._dice.choice(DISPATCHERS)
        yield from self._cut("cut from database", node, ("db",))

    def _cut_from_dispatchers(self) -> Iterator[float]:
        node = self._dice.choice(WORKERS)
        count = self._dice.choice([1, 2, 3, 3])
        yield from self._cut("cut from dispatchers", node, DISPATCHERS[:count])

    def _isolate(self) -> Iterator[float]:
        node = self._dice.choice(NODES)
        others = tuple(one for one in (*NODES, "redis", "db", "hook", "caller") if one != node)
        yield from self._cut("isolate", node, others)

    def _lose_worker(self) -> Iterator[float]:
        """A worker's machine loses its way to the dispatchers, and a while later it dies."""
        node = self._dice.choice(WORKERS)
        seconds = self._dice.uniform(4, 14)
        self._history.fault("lose worker", f"{node} after {seconds:.1f} s")
        pairs = [(node, other) for other in DISPATCHERS]
        for pair in pairs:
            self._cluster.network.cut(*pair)
        try:
            yield seconds
            process = self._cluster.process(node)
            if process is not None and process.state is State.RUNNING:
                self._cluster.crash(process, "its machine is gone")
        finally:
            for pair in pairs:
                self._cluster.network.mend(*pair)

    def _cut(self, kind: str, node: str, others: tuple[str, ...]) -> Iterator[float]:
        way = self._dice.choice(["both", "both", "out", "in"])
        # Somebody who is cut off from all is given up after 15 s: that is where it gets hard.
        short, long = self._dice.uniform(0.5, 10), self._dice.uniform(12, 50)
        seconds = self._dice.choice([short, long, long] if kind == "isolate" else [short, long])
        self._history.fault(kind, f"{node} {way} for {seconds:.1f} s")
        pairs = [(node, other) for other in others] if way != "in" else []
        pairs += [(other, node) for other in others] if way != "out" else []
        since = self._history.now
        for pair in pairs:
            self._cluster.network.cut(*pair)
        try:
            yield seconds
        finally:
            self._history.say(f"{kind} of {node} is over", mark="+")
            for pair in pairs:
                self._cluster.network.mend(*pair)
            if "redis" in others:
                self._trouble(since, node)

    def _stop_redis(self) -> Iterator[float]:
        redis = self._cluster.redis
        if redis.down:
            yield 0
            return
        seconds = self._dice.choice([self._dice.uniform(0.5, 8), self._dice.uniform(8, 40)])
        flushed = self._dice.random() < 0.5
        self._history.fault("redis away", f"for {seconds:.1f} s{', emptied' if flushed else ''}")
        since = self._history.now
        redis.stop()
        try:
            yield seconds
        finally:
            redis.down = False
            if flushed:
                redis.flush()
            self._history.say("redis is back", mark="+")
            self._trouble(since, "")

    def _flush_redis(self) -> Iterator[float]:
        self._history.fault("redis emptied", "")
        self._cluster.redis.flush()
        self._trouble(self._history.now, "")
        yield 0

    def _stop_database(self) -> Iterator[float]:
        database = self._cluster.database
        if database.down:
            yield 0
            return
        seconds = self._dice.choice([self._dice.uniform(0.2, 5), self._dice.uniform(5, 40)])
        self._history.fault("database away", f"for {seconds:.1f} s")
        database.stop()
        try:
            yield seconds
        finally:
            database.down = False
            self._history.say("the database is back", mark="+")

    def _slow_down(self) -> Iterator[float]:
        node = self._dice.choice([*NODES, "redis", "db", "hook"])
        factor, seconds = self._dice.uniform(20, 400), self._dice.uniform(2, 40)
        if node in self._cluster.network.slowness:
            yield 0
            return
        self._history.fault("slow", f"{node} by {factor:.0f} for {seconds:.1f} s")
        since = self._history.now
        self._cluster.network.slowness[node] = factor
        try:
            yield seconds
        finally:
            del self._cluster.network.slowness[node]
            self._trouble(since, "" if node == "redis" else node)

    def _lose_messages(self) -> Iterator[float]:
        network = self._cluster.network
        if network.loss or network.doubling:
            yield 0
            return
        network.loss = self._dice.choice([0.0, self._dice.uniform(0.01, 0.25)])
        network.doubling = self._dice.choice([0.0, self._dice.uniform(0.05, 0.5)])
        seconds = self._dice.uniform(3, 40)
        self._history.fault(
            "lossy", f"{network.loss:.2f} lost {network.doubling:.2f} doubled for {seconds:.1f} s"
        )
        since = self._history.now
        try:
            yield seconds
        finally:
            network.loss = network.doubling = 0.0
            self._trouble(since, "")

    def _step_clock(self) -> Iterator[float]:
        process = self._pick(NODES)
        if process is None:
            yield 0
            return
        step = self._dice.choice([-3600.0, -5.5, -2.0, 2.0, 5.5, 3600.0]) * self._dice.random()
        seconds = self._dice.uniform(5, 60)
        self._history.fault("clock", f"{process.name} by {step:+.1f} s")
        process.skew_seconds += step
        try:
            yield seconds
        finally:
            process.skew_seconds -= step

    def _trouble(self, since: float, node: str) -> None:
        self._history.add(RedisTrouble(self._history.now, since, node))

    def _pick(self, nodes: tuple[str, ...]) -> Process | None:
        process = self._cluster.process(self._dice.choice(nodes))
        return process if process is not None and process.state is State.RUNNING else None
