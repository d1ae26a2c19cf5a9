"""A deploy under load: each process restarted in turn, and nobody notices."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from oncue import Client
from tests.faults.scene import Scene, scene
from tests.support.checker import Accepted, Event

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]
CALLERS = 6
HANDLERS = ("fault_async", "fault_thread", "fault_process")


class Caller(threading.Thread):
    """Submits by the client, with its own retries and nothing else, until told to end."""

    def __init__(self, number: int, one: Scene, over: threading.Event) -> None:
        super().__init__(name=f"caller-{number}")
        self.told: list[Event] = []
        self.errors: list[Exception] = []
        urls = one.platform.dispatcher_urls
        self._url = urls[number % len(urls)]
        self._callback_url = one.cluster.receiver.url()
        self._dice = random.Random(number)
        self._over = over

    def run(self) -> None:
        with Client(self._url) as client:
            while not self._over.wait(self._dice.uniform(0, 0.6)):
                # Some are longer than the grace period: those are given back, and run again.
                ms = self._dice.choice((50, 300, 3_000, 15_000))
                request = f"{self.name}-{len(self.told)}"
                try:
                    job = client.submit(
                        self._dice.choice(HANDLERS),
                        {"ms": ms},
                        request_id=request,
                        max_retry=0,
                        callback_url=self._callback_url,
                    )
                except Exception as error:  # noqa: BLE001 (any is a failure, told at the end)
                    self.errors.append(error)
                else:
                    self.told.append(
                        Accepted(time.monotonic(), request, job.job_id, 0, webhook=True)
                    )


def test_a_rolling_restart_of_everything_gives_no_error_and_wastes_no_attempt(
    tmp_path: Path,
) -> None:
    with scene(tmp_path, dispatchers=2, workers=3, capacity=20) as one:
        over = threading.Event()
        callers = [Caller(number, one, over) for number in range(CALLERS)]
        for caller in callers:
            caller.start()
        codes = _restart_each(one, [*one.cluster.dispatchers, *one.cluster.workers])
        over.set()
        for caller in callers:
            caller.join()
            one.told += caller.told
        report = one.settled(120)
        print(report.table())
        assert codes == [0] * 5
        assert [error for caller in callers for error in caller.errors] == []
        assert report.violations == []
        wasted = one.cluster.rows("SELECT id, status, attempt FROM job_info WHERE status <> 2")
        assert wasted == []


def _restart_each(one: Scene, names: Sequence[str]) -> list[int]:
    codes = []
    for name in names:
        codes.append(one.cluster.terminate(name))
        one.cluster.restart(name, wait=True)
        one.platform.wait_for_workers(len(one.cluster.workers), 60)
    return codes
