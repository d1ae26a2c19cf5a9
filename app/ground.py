"""What every part of a dispatcher stands on: its connections, its clock, its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

from app.metrics import Metrics
from app.plumbing.bus import Bus
from app.plumbing.clock import DatabaseClock
from app.plumbing.database import CLOSE_SECONDS, Database
from app.plumbing.http import InternalClient
from app.plumbing.redis import patient_redis, single_shot_redis
from app.plumbing.sealed import Sealer
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class Ground:
    """Opened lazily, shared by all parts of one process, closed last.

    `lock_redis` never sends a command twice.
    """

    settings: Settings
    database: Database
    redis: Redis
    lock_redis: Redis
    clock: DatabaseClock
    bus: Bus
    client: InternalClient
    metrics: Metrics
    sealer: Sealer

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Close every connection; writes under way may take so long."""
        await self.client.close()
        await self.redis.aclose()
        await self.lock_redis.aclose()
        await self.database.close(seconds)


def lay_ground(settings: Settings, *, internal_token: str) -> Ground:
    """Build the connections; nothing is opened yet. Calls to workers carry `internal_token`."""
    metrics = Metrics()
    database = Database(
        settings.database_url,
        answer_seconds=settings.database_seconds,
        retried=lambda kind: metrics.database_retries.labels(kind).inc(),
    )
    redis = patient_redis(settings.redis_url)
    return Ground(
        settings=settings,
        database=database,
        redis=redis,
        lock_redis=single_shot_redis(settings.redis_url),
        clock=DatabaseClock(database),
        bus=Bus(redis, settings.redis_prefix),
        client=InternalClient(internal_token),
        metrics=metrics,
        sealer=Sealer(settings.secret_keys.get_secret_value()),
    )
