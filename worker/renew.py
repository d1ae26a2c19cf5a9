"""Lease renewal from a thread of its own, which a busy event loop cannot stop.

It also sees what a flush of Redis has taken: leases are set again at once, and outcomes that no
dispatcher has are stored again before anybody may take them for gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import structlog
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from oncue.protocol import LEASE_SECONDS, stopping_key
from worker.clock import boot_seconds
from worker.held import Execution, Held, Phase
from worker.lease import KEYS_PER_CALL, LEASE_MS, LEASED, REDIS_TIMEOUT_SECONDS, RENEW, TAKEN
from worker.liveness import Liveness

RENEW_SECONDS: Final = LEASE_SECONDS / 3
RETRY_SECONDS: Final = 0.5

log = structlog.get_logger(__name__)


def connect_redis(url: str) -> Redis:
    """A blocking client that sends each command at most once."""
    return Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=REDIS_TIMEOUT_SECONDS,
        socket_connect_timeout=REDIS_TIMEOUT_SECONDS,
    )


class Kept(NamedTuple):
    """A key that must live on, and whether it is the one under which an outcome was stored."""

    execution: Execution
    key: str
    stored: bool = False


def keys_to_renew(executions: Sequence[Execution]) -> list[Kept]:
    """Return the keys of what is held.

    Once its end is stored under the run key, a run that goes on has a lease of its own.
    """
    keys = [
        Kept(one, one.key, one.stored_at is not None)
        for one in executions
        if one.phase is not Phase.STOPPING or one.stored_at is None or not one.acknowledged
    ]
    keys += [Kept(one, stopping_key(one.key)) for one in executions if one.phase is Phase.STOPPING]
    return keys


class Renewal(threading.Thread):
    """Keeps the keys of all that is held, and sets leases again after a flush of Redis.

    `forgotten` is told of ended executions whose outcome was stored, and is there no more.
    """

    def __init__(
        self,
        redis: Redis,
        held: Held,
        liveness: Liveness,
        *,
        lost: Callable[[Execution], None],
        forgotten: Callable[[list[Execution]], None],
        failed: Callable[[], None],
    ) -> None:
        super().__init__(name="oncue-renewal", daemon=True)
        self._held = held
        self._liveness = liveness
        self._lost = lost
        self._forgotten = forgotten
        self._failed = failed
        self._silent = False
        self._end = threading.Event()
        self._redis = redis
        self._script = self._redis.register_script(RENEW)

    def run(self) -> None:
        """Renew until told to end."""
        wait = 0.0
        while not self._end.wait(wait):
            wait = RENEW_SECONDS if self._renew_guarded() else RETRY_SECONDS
        self._redis.close()

    def end(self) -> None:
        """Stop renewing."""
        self._end.set()

    def _renew_guarded(self) -> bool:
        sent_at = boot_seconds()
        try:
            self._renew(keys_to_renew(self._held.snapshot()))
        except (RedisError, OSError) as error:
            self._failed()
            if not self._silent:
                log.warning("leases cannot be renewed", error=type(error).__name__)
            self._silent = True
            return False
        except Exception:
            # The thread must outlive any surprise: without it all leases would run out.
            log.exception("the renewal of leases failed")
            self._failed()
            return False
        if self._silent:
            log.info("leases are renewed again")
        self._silent = False
        self._liveness.renewed(sent_at)
        return True

    def _renew(self, keys: list[Kept]) -> None:
        if not keys:
            self._redis.ping()
        for start in range(0, len(keys), KEYS_PER_CALL):
            part = keys[start : start + KEYS_PER_CALL]
            found: Any = self._script(
                keys=[one.key for one in part],
                args=[LEASE_MS, *(one.execution.mark for one in part)],
            )
            seen = list(zip(part, found, strict=True))
            for kept, what in seen:
                if what == TAKEN and kept.execution.phase is not Phase.ENDED:
                    self._lost(kept.execution)
            if gone := [kept.execution for kept, what in seen if what == LEASED and kept.stored]:
                log.warning("outcomes are gone from Redis, they are stored again", runs=len(gone))
                self._forgotten(gone)
