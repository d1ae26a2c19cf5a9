"""Lease renewal from a thread of its own, which a busy event loop cannot stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import structlog
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from oncue.protocol import LEASE_SECONDS, stopping_key
from worker.clock import boot_seconds
from worker.held import Execution, Held, Phase
from worker.lease import KEYS_PER_CALL, LEASE_MS, REDIS_TIMEOUT_SECONDS, RENEW
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


class Renewal(threading.Thread):
    """Keeps the leases of all runs that go on, and sets them again after a flush of Redis."""

    def __init__(
        self,
        redis: Redis,
        held: Held,
        liveness: Liveness,
        *,
        lost: Callable[[Execution], None],
        failed: Callable[[], None],
    ) -> None:
        super().__init__(name="oncue-renewal", daemon=True)
        self._held = held
        self._liveness = liveness
        self._lost = lost
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
            self._renew(self._held.to_renew())
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

    def _renew(self, executions: list[Execution]) -> None:
        if not executions:
            self._redis.ping()
        # Once its end is stored under the run key, a run that goes on has a lease of its own.
        leases = [
            (one, one.key)
            for one in executions
            if one.phase is not Phase.STOPPING or one.stored_at is None
        ]
        leases += [
            (one, stopping_key(one.key)) for one in executions if one.phase is Phase.STOPPING
        ]
        for start in range(0, len(leases), KEYS_PER_CALL):
            part = leases[start : start + KEYS_PER_CALL]
            kept: Any = self._script(
                keys=[key for _, key in part], args=[LEASE_MS, *(one.mark for one, _ in part)]
            )
            for (execution, _), mine in zip(part, kept, strict=True):
                if not mine:
                    self._lost(execution)
