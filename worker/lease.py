"""Run leases and outcomes in Redis: one script call for a whole batch, never repeated blindly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from oncue.protocol import LEASE_SECONDS, TOMBSTONE_SECONDS, stopping_key
from worker.held import Execution, Phase

REDIS_TIMEOUT_SECONDS: Final = 2.0
LEASE_MS: Final = int(LEASE_SECONDS * 1000)
TOMBSTONE_MS: Final = int(TOMBSTONE_SECONDS * 1000)
KEYS_PER_CALL: Final = 500
REDIS_ERRORS: Final = (RedisError, OSError, RuntimeError)
"""What a Redis that is away raises; uvloop's word for a closed transport is RuntimeError."""

WRITTEN_SECONDS: Final = 60
"""So long what is written as a trial stays: the key of a worker that has ended goes by itself."""

TAKE = """
local answers = {}
for i, key in ipairs(KEYS) do
  local mark = ARGV[i + 1]
  local value = redis.call('GET', key)
  answers[i] = ''
  if not value then
    if mark ~= '' then redis.call('SET', key, mark, 'PX', ARGV[1]) end
  elseif value == mark then
    redis.call('PEXPIRE', key, ARGV[1])
  else
    answers[i] = value
  end
end
return answers
"""

# A run that goes on after its end gets a lease of its own in the step that takes the run key's
# away: in between nobody would seem to run it.
STORE = """
for i = 1, #KEYS / 2 do
  local key, going = KEYS[2 * i - 1], KEYS[2 * i]
  local mark, body, goes_on = ARGV[3 * i], ARGV[3 * i + 1], ARGV[3 * i + 2]
  local value = redis.call('GET', key)
  if not value or string.sub(value, 1, #mark) == mark then
    if goes_on == '1' then redis.call('SET', going, mark, 'PX', ARGV[2]) end
    redis.call('SET', key, mark .. body, 'PX', ARGV[1])
  end
end
"""

RELEASE = """
for i, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[i] then redis.call('DEL', key) end
end
"""

# Of what stands under a key only the beginning is read: an outcome may be long. Nothing but a bare
# lease gets another life, so that no tombstone's becomes shorter.
RENEW = """
local found = {}
for i, key in ipairs(KEYS) do
  local mark = ARGV[i + 1]
  local value = redis.call('GETRANGE', key, 0, #mark)
  found[i] = 1
  if value == '' then
    redis.call('SET', key, mark, 'PX', ARGV[1])
  elseif value == mark then
    redis.call('PEXPIRE', key, ARGV[1])
  elseif string.sub(value, 1, #mark) == mark then
    found[i] = 2
  else
    found[i] = 0
  end
end
return found
"""
TAKEN: Final = 0
"""What `RENEW` says of a key that another execution has."""
LEASED: Final = 1
"""What it says of one that has a lease now and no outcome, whatever it had before."""


class LeaseUnavailable(Exception):
    """Redis cannot be reached, so nobody can tell whose run this is."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A key to look at; with a mark, also to take when nobody has it."""

    key: str
    mark: str = ""


def connect_redis(url: str) -> Redis:
    """A client that sends each command at most once: a repeated script would meet its own ghost."""
    return Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=REDIS_TIMEOUT_SECONDS,
        socket_connect_timeout=REDIS_TIMEOUT_SECONDS,
    )


class Leases:
    """The run keys of this worker."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._written_key = f"{prefix}:written"
        self._take = redis.register_script(TAKE)
        self._store = redis.register_script(STORE)
        self._release = redis.register_script(RELEASE)

    async def take(self, wanted: Sequence[Wanted]) -> list[bytes]:
        """Take the leases in one round trip; an entry is empty where it is mine or was absent.

        Raises:
            LeaseUnavailable: Redis did not answer; what it did is unknown, and safe to repeat.
        """
        answers = await self._call(
            self._take, [one.key for one in wanted], [LEASE_MS, *(one.mark for one in wanted)]
        )
        return cast(list[bytes], answers)

    async def store(self, executions: Sequence[Execution], *, small: bool = False) -> None:
        """Put outcomes under their keys, where those are still mine.

        Raises:
            LeaseUnavailable: Redis did not answer.
        """
        keys: list[str] = []
        values: list[Any] = [TOMBSTONE_MS, LEASE_MS]
        for one in executions:
            if one.outcome is None:
                raise ValueError(f"execution {one.id} has not ended")
            keys += (one.key, stopping_key(one.key))
            body = one.outcome.small if small else one.outcome.wire
            values += (one.mark, body, int(one.phase is Phase.STOPPING))
        await self._call(self._store, keys, values)

    async def release(self, executions: Sequence[Execution]) -> None:
        """Give back leases of runs that were not begun.

        Raises:
            LeaseUnavailable: Redis did not answer; the leases expire by themselves.
        """
        await self._call(
            self._release, [one.key for one in executions], [one.mark for one in executions]
        )

    async def is_reachable(self) -> bool:
        """Tell whether Redis takes writes now: one that is full, or a replica, grants no lease."""
        try:
            await self._redis.set(self._written_key, "1", ex=WRITTEN_SECONDS)
        except REDIS_ERRORS:
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _call(self, script: Any, keys: list[str], values: list[Any]) -> Any:
        try:
            return await script(keys=keys, args=values)
        except REDIS_ERRORS as error:
            raise LeaseUnavailable(f"Redis did not answer: {type(error).__name__}") from error
