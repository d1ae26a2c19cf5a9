"""The worker's ways to the outside: everything that leaves the process, in one place."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from worker.cpu import CpuIdle
from worker.dispatchers import Dispatchers
from worker.egress import Egress
from worker.heartbeat import BeatSender
from worker.lease import connect_redis
from worker.renew import connect_redis as connect_blocking_redis
from worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class Outside:
    """Connections that open at their first use; they are closed with the parts that use them.

    Those for threads block, so that a busy event loop cannot stop them.
    """

    redis: Redis
    blocking_redis: BlockingRedis
    dispatchers: Dispatchers
    beat_sender: BeatSender
    egress: Egress
    cpu_idle_percent: Callable[[], float]
    exit_process: Callable[[int], None] = os._exit


def reach_outside(settings: WorkerSettings) -> Outside:
    """Build the connections that the settings name; must be called in the event loop."""
    token = settings.sent_token
    return Outside(
        redis=connect_redis(settings.redis_url),
        blocking_redis=connect_blocking_redis(settings.redis_url),
        dispatchers=Dispatchers(settings.dispatcher_url, token),
        beat_sender=BeatSender(settings.dispatcher_url, token),
        egress=Egress(settings.egress_allow),
        cpu_idle_percent=CpuIdle().percent,
    )
