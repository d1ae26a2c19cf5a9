"""Redis clients: one that retries for reads and signals, one that never does for locks."""

from __future__ import annotations

from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError

SOCKET_TIMEOUT_SECONDS: Final = 2.0
HEALTH_CHECK_SECONDS: Final = 10
"""A connection unused this long is asked first: one that a firewall dropped looks open."""
WRITTEN_SECONDS: Final = 60
"""So long what is written as a trial stays: the key of a process that has ended goes by itself."""
REDIS_ERRORS: Final = (RedisError, OSError, TimeoutError)
"""What a Redis that is away raises; whoever meets it goes on without Redis or waits."""


async def ensure_writable(redis: Redis, prefix: str) -> None:
    """Return if Redis takes writes: one that is full, or a replica, answers only reads.

    Raises:
        REDIS_ERRORS: it takes none, or is away.
    """
    await redis.set(f"{prefix}:written", "1", ex=WRITTEN_SECONDS)


def patient_redis(url: str) -> Redis:
    """Return a client for commands that may be sent twice."""
    return _client(url, retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 2))


def single_shot_redis(url: str) -> Redis:
    """Return a client that never sends a command again.

    A repeated "set if absent" whose first reply was lost would report its own ghost as
    somebody else's lock.
    """
    return _client(url, retry=Retry(NoBackoff(), 0))


def _client(url: str, *, retry: Retry) -> Redis:
    options: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT_SECONDS,
        "socket_connect_timeout": SOCKET_TIMEOUT_SECONDS,
        "health_check_interval": HEALTH_CHECK_SECONDS,
        "retry": retry,
        "max_connections": 64,
        "decode_responses": True,
    }
    client: Redis = Redis.from_url(url, **options)
    pool = client.connection_pool
    pool.connection_class = _sturdy(pool.connection_class)
    return client


def _sturdy(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """Return a kind of connection whose every loss is a RedisError.

    uvloop raises RuntimeError for a write to a transport that was reset a moment before.
    """

    class Sturdy(kind):  # type: ignore[valid-type, misc]
        """Says of a closed transport what it says of a broken one."""

        async def send_packed_command(self, *arguments: Any, **named: Any) -> None:
            try:
                await super().send_packed_command(*arguments, **named)
            except RuntimeError as error:
                raise ConnectionLost(f"the connection was closed: {error}") from error

    return Sturdy
