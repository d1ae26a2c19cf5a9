"""Plays the faults of a plan against a running cluster, and heals all of it in the end."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Final

from tests.faults.cluster import Cluster
from tests.faults.links import Mode
from tests.faults.plan import Fault, Kind, Plan

SLOW_SECONDS: Final = 0.5
WATCH_SECONDS: Final = 0.3


class Storm:
    """The faults of one plan. Faults of one part come one after the other, others at once."""

    def __init__(self, cluster: Cluster, plan: Plan, say: Callable[[str], None]) -> None:
        self.happened: Counter[str] = Counter()
        self.broken: list[str] = []
        """What the harness itself could not do, or a node did wrong while it ended."""
        self._cluster = cluster
        self._plan = plan
        self._say = say
        self._links = {name: threading.Lock() for name in cluster.links.names()}
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep_up, name="keeper", daemon=True)

    def blow(self) -> None:
        """Play all faults, and return once the last has passed."""
        self._keeper.start()
        began = time.monotonic()
        threads: list[threading.Thread] = []
        for fault in self._plan.faults:
            time.sleep(max(0.0, began + fault.at - time.monotonic()))
            thread = threading.Thread(target=self._play, args=(fault,), name=fault.name)
            thread.start()
            threads.append(thread)
        time.sleep(max(0.0, began + self._plan.seconds - time.monotonic()))
        for thread in threads:
            thread.join()

    def heal(self) -> None:
        """Mend everything, and return once all nodes are ready."""
        cluster = self._cluster
        cluster.links.mend()
        for name in (*cluster.dispatchers, *cluster.workers):
            cluster.shift_clock(name, 0)
        for name in (*cluster.dispatchers, *cluster.workers):
            with cluster.locks[name]:
                if not cluster.platform.services[name].child.running:
                    self._note_own_end(name)
                    cluster.restart(name)
        for service in cluster.platform.services.values():
            service.wait_ready(60)

    def end(self) -> None:
        """Stop keeping nodes up."""
        self._over.set()
        self._keeper.join()

    def _play(self, fault: Fault) -> None:
        lock = self._links.get(fault.target) or self._cluster.locks[fault.target]
        try:
            with lock:
                self._say(f"{fault.name}: {fault.target} {fault.seconds:.1f} s")
                self._do(fault)
                self._say(f"  over: {fault.name}: {fault.target}")
        except Exception:  # noqa: BLE001 (it is told at the end, and fails the run)
            self.broken.append(f"{fault}: {traceback.format_exc()}")
            self._say(self.broken[-1])

    def _do(self, fault: Fault) -> None:
        cluster, target = self._cluster, fault.target
        is_node = target in (*cluster.dispatchers, *cluster.workers)
        if is_node and not cluster.platform.services[target].child.running:
            self._note_own_end(target)
            cluster.restart(target)
        self.happened[fault.name] += 1
        match fault.kind:
            case Kind.KILL | Kind.KILL_ALONE:
                cluster.kill(target, alone=fault.kind is Kind.KILL_ALONE)
                time.sleep(fault.seconds)
                cluster.restart(target)
            case Kind.FREEZE:
                with cluster.froze(target):
                    time.sleep(fault.seconds)
            case Kind.RESTART if is_node:
                was_ready = cluster.platform.services[target].ready()
                code = cluster.terminate(target)
                # One that has not finished its start has nothing to end in order.
                if code != 0 and was_ready:
                    self.broken.append(f"{target} ended with {code} on SIGTERM")
                time.sleep(fault.seconds)
                cluster.restart(target)
            case Kind.RESTART:
                cluster.stop_server(target)
                cluster.restart(target)
            case Kind.FLUSH:
                cluster.flush()
            case Kind.LINK:
                delay = SLOW_SECONDS if fault.mode is Mode.SLOW else 0.0
                with cluster.broken(target, fault.mode, delay):
                    time.sleep(fault.seconds)
            case Kind.CLOCK:
                cluster.shift_clock(target, fault.clock_seconds)

    def _keep_up(self) -> None:
        """Start nodes that ended by themselves (a worker that cannot stop a run ends itself)."""
        cluster = self._cluster
        while not self._over.wait(WATCH_SECONDS):
            for name in (*cluster.dispatchers, *cluster.workers):
                if cluster.locks[name].acquire(blocking=False):
                    try:
                        if not cluster.platform.services[name].child.running:
                            self._note_own_end(name)
                            cluster.restart(name)
                    finally:
                        cluster.locks[name].release()

    def _note_own_end(self, name: str) -> None:
        code = self._cluster.platform.services[name].child.exit_code
        self._say(f"{name} ended by itself with {code}")
        self.happened[f"own end {name.rstrip('-0123456789')} {code}"] += 1
