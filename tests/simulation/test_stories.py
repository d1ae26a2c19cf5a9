"""Outages that are told step by step in a simulated cluster: what dice seldom bring together."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any, Final

import pytest

from tests.simulation.cluster import DISPATCHERS, Cluster
from tests.simulation.play import tell
from tests.simulation.workload import Callers
from tests.support.checker import (
    Accepted,
    Began,
    Event,
    Healed,
    JobRow,
    RedisTrouble,
    judge,
    of_kind,
)

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("simulation"), pytest.mark.timeout(600)]

SEED: Final = 5
SETTLED_SECONDS: Final = 40.0
"""So long after the start workers have beaten, and the quiet time of the lock is over."""
OVER_SECONDS: Final = 100.0


async def begun(cluster: Cluster, **fields: Any) -> str:
    """Start all and a job of `brief`; return its worker's node 2 s after the handler has begun."""
    history = cluster.history
    cluster.start_all()
    await asyncio.sleep(SETTLED_SECONDS)
    callers = Callers(cluster.network, history, random.Random(1), list(DISPATCHERS))
    body = {"clientRequestId": "one", "jobName": "j", "jobHandler": "brief", "maxRetry": 3}
    answer = await callers.insist("/openapi/jobs", body | fields)
    history.add(Accepted(history.now, "one", json.loads(answer.body)["jobId"], 3, False))
    while not (runs := of_kind(history.events, Began)):
        await asyncio.sleep(0.1)
    await asyncio.sleep(2)
    return runs[0].worker.partition("#")[0]


def both_ways(node: str) -> list[tuple[str, str]]:
    """The ways between a node and all dispatchers."""
    return [way for one in DISPATCHERS for way in ((node, one), (one, node))]


async def heal(cluster: Cluster, ways: Sequence[tuple[str, str]]) -> None:
    """Mend ways and let everything end."""
    for way in ways:
        cluster.network.mend(*way)
    cluster.history.add(Healed(cluster.history.now))
    await asyncio.sleep(OVER_SECONDS)


def succeeded_in_one_run(events: Sequence[Event]) -> bool:
    """Tell whether the job's handler began once, and its job has that end."""
    [job] = of_kind(events, JobRow)
    return job.status == "SUCCEEDED" and len(of_kind(events, Began)) == 1


def test_a_finished_run_whose_outcome_is_flushed_is_not_run_again_while_its_worker_lives() -> None:
    """The worker reaches Redis and no dispatcher, so that its key is all that speaks for it."""

    async def story(cluster: Cluster) -> None:
        node = await begun(cluster, params={"seconds": 5.0})
        for way in both_ways(node):
            cluster.network.cut(*way)
        await asyncio.sleep(6)
        cluster.redis.flush()
        cluster.history.add(RedisTrouble(cluster.history.now, cluster.history.now))
        await asyncio.sleep(60)
        await heal(cluster, both_ways(node))

    events = tell(story, SEED)
    assert judge(events).violations == []
    assert succeeded_in_one_run(events)


def test_a_worker_that_reaches_no_dispatcher_is_asked_how_its_runs_ended() -> None:
    """It answers, so that nobody may declare it dead, but its beats and reports are lost."""
    over: list[bool] = []

    async def story(cluster: Cluster) -> None:
        node = await begun(cluster, params={"seconds": 5.0})
        cluster.network.barred.update((node, one) for one in DISPATCHERS)
        await asyncio.sleep(60)
        over.append(cluster.is_over())
        cluster.network.barred.clear()
        await heal(cluster, [])

    events = tell(story, SEED)
    assert judge(events).violations == []
    assert succeeded_in_one_run(events)
    assert over == [True], "the job has ended while the worker could still not be heard"
