"""Redis on the virtual clock: the commands that the services use, and their real Lua scripts."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import orjson
from lupa.lua54 import LuaRuntime  # type: ignore[import-untyped]
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from sqlalchemy.util.concurrency import await_only

from tests.simulation.history import History
from tests.simulation.machine import Process, VirtualLoop
from tests.simulation.network import Network

NODE: Final = "redis"
SOCKET_TIMEOUT_SECONDS: Final = 2.0
Value = bytes | int | None | list[Any] | dict[bytes, bytes]


class RedisServer:
    """The data, and whether it can be reached. Commands and scripts take no time by themselves."""

    def __init__(
        self,
        *,
        network: Network,
        dice: random.Random,
        history: History,
        now: Callable[[], float],
    ) -> None:
        self.network = network
        self.dice = dice
        self.history = history
        self.down = False
        self._now = now
        self._data: dict[bytes, tuple[bytes, float]] = {}
        self.subscriptions: list[Subscription] = []
        self._lua = LuaRuntime(encoding=None, register_eval=False, unpack_returned_tuples=True)
        self._redis = self._lua.table_from({b"call": self._from_lua})
        self._scripts: dict[str, Any] = {}

    def command(self, name: str, *arguments: bytes) -> Value:
        """Do one command."""
        do = getattr(self, f"_do_{name.lower()}", None)
        if do is None:
            raise NotImplementedError(f"the simulated Redis has no {name}: add it")
        value: Value = do(*arguments)
        return value

    def script(self, text: str, keys: Sequence[str], arguments: Sequence[Any]) -> Value:
        """Run a script, which is one step."""
        function = self._scripts.get(text)
        if function is None:
            function = self._scripts[text] = self._lua.execute(
                b"return function(KEYS, ARGV, redis) " + text.encode() + b" end"
            )
        answer = function(
            self._lua.table_from([_bytes(key) for key in keys]),
            self._lua.table_from([_bytes(one) for one in arguments]),
            self._redis,
        )
        return self._reply(answer)

    def flush(self) -> None:
        """Lose everything, as FLUSHALL or a restart without a file does."""
        self._data.clear()

    def stop(self) -> None:
        """Go down: connections break."""
        self.down = True
        for subscription in self.subscriptions:
            subscription.break_off()
        self.subscriptions.clear()

    def get(self, key: str) -> bytes | None:
        """Look at a value without being a client."""
        return self._do_get(key.encode())

    def _from_lua(self, name: bytes, *arguments: Any) -> Any:
        value = self.command(name.decode(), *(_bytes(one) for one in arguments))
        if isinstance(value, list):
            return self._lua.table_from(value)
        # As Redis does: a nil reply is `false` to a script.
        return False if value is None else value

    def _reply(self, answer: Any) -> Value:
        if answer is None or answer is False:
            return None
        if answer is True:
            return 1
        if isinstance(answer, (bytes, int)):
            return answer
        if isinstance(answer, float):
            return int(answer)
        return [self._reply(answer[place]) for place in range(1, len(answer) + 1)]

    def _do_ping(self) -> bytes:
        return b"PONG"

    def _do_get(self, key: bytes) -> bytes | None:
        value, until = self._data.get(key, (b"", 0.0))
        if until <= self._now():
            self._data.pop(key, None)
            return None
        return value

    def _do_getrange(self, key: bytes, first: bytes, last: bytes) -> bytes:
        return (self._do_get(key) or b"")[int(first) : int(last) + 1]

    def _do_set(self, key: bytes, value: bytes, *options: bytes) -> bytes:
        if not options:
            life = float("inf")
        elif options[0] == b"PX" and len(options) == 2:
            life = int(options[1]) / 1000
        else:
            raise NotImplementedError(f"SET with {options}")
        self._data[key] = (value, self._now() + life)
        return b"OK"

    def _do_del(self, key: bytes) -> int:
        there = self._do_get(key) is not None
        self._data.pop(key, None)
        return int(there)

    def _do_pexpire(self, key: bytes, milliseconds: bytes) -> int:
        value = self._do_get(key)
        if value is None:
            return 0
        self._data[key] = (value, self._now() + int(milliseconds) / 1000)
        return 1

    def _do_pttl(self, key: bytes) -> int:
        if self._do_get(key) is None:
            return -2
        left = self._data[key][1] - self._now()
        return -1 if left == float("inf") else int(left * 1000)

    def _do_hset(self, key: bytes, field: bytes, value: bytes) -> int:
        known = self._hash(key)
        _, until = self._data.get(key, (b"", float("inf")))
        self._data[key] = (orjson.dumps(known | {field.hex(): value.hex()}), until)
        return int(field.hex() not in known)

    def _do_hdel(self, key: bytes, *fields: bytes) -> int:
        known = self._hash(key)
        left = {name: value for name, value in known.items() if bytes.fromhex(name) not in fields}
        if known:
            self._data[key] = (orjson.dumps(left), self._data[key][1])
        return len(known) - len(left)

    def _do_hgetall(self, key: bytes) -> dict[bytes, bytes]:
        known = self._hash(key)
        return {bytes.fromhex(name): bytes.fromhex(value) for name, value in known.items()}

    def _do_time(self) -> list[Value]:
        return [str(int(part)).encode() for part in divmod(self._now() * 1e6, 1e6)]

    def _do_zadd(self, key: bytes, score: bytes, member: bytes) -> int:
        return self._do_hset(key, member, score)

    def _do_zrem(self, key: bytes, *members: bytes) -> int:
        return self._do_hdel(key, *members)

    def _do_zremrangebyscore(self, key: bytes, least: bytes, most: bytes) -> int:
        scores = self._do_hgetall(key)
        old = [one for one, score in scores.items() if float(least) <= float(score) <= float(most)]
        return self._do_hdel(key, *old)

    def _do_zrange(self, key: bytes, first: bytes, last: bytes) -> list[Value]:
        if (first, last) != (b"0", b"-1"):
            raise NotImplementedError("ZRANGE of a part")
        scores = self._do_hgetall(key)
        return [one for _, one in sorted((float(score), one) for one, score in scores.items())]

    def _hash(self, key: bytes) -> dict[str, str]:
        value = self._do_get(key)
        known: dict[str, str] = {} if value is None else orjson.loads(value)
        return known

    def publish(self, channel: str, message: bytes) -> int:
        """Send a message to whoever listens and can be reached."""
        loop = asyncio.get_running_loop()
        for subscription in self.subscriptions:
            if subscription.channel != channel:
                continue
            node = subscription.process.node
            if (NODE, node) not in self.network.cuts:
                loop.call_later(
                    self.network.latency(NODE, node),
                    subscription.deliver,
                    message,
                    context=contextvars.Context(),
                )
        return len(self.subscriptions)


class RedisClient:
    """The part of `redis.asyncio.Redis` that the services use."""

    def __init__(self, server: RedisServer, process: Process, *, text: bool, repeats: int) -> None:
        self._server = server
        self._process = process
        self._text = text
        self._repeats = repeats

    async def ping(self) -> bool:
        """Ask whether it is there."""
        await self._ask("PING", lambda: self._server.command("PING"))
        return True

    async def get(self, key: str) -> Any:
        """Read a value."""
        return await self._ask("GET", lambda: self._server.command("GET", key.encode()))

    async def set(self, key: str, value: str, *, ex: int) -> Any:
        """Write a value that lives for `ex` seconds."""
        life = str(ex * 1000).encode()
        return await self._ask(
            "SET", lambda: self._server.command("SET", key.encode(), value.encode(), b"PX", life)
        )

    async def expire(self, key: str, seconds: int) -> Any:
        """Give a value another life."""
        life = str(seconds * 1000).encode()
        return await self._ask(
            "EXPIRE", lambda: self._server.command("PEXPIRE", key.encode(), life)
        )

    async def hdel(self, key: str, *fields: str) -> Any:
        """Remove fields of a hash."""
        words = [_bytes(one) for one in (key, *fields)]
        return await self._ask("HDEL", lambda: self._server.command("HDEL", *words))

    def pipeline(self, *, transaction: bool) -> Pipeline:
        """Return commands that travel together."""
        return Pipeline(self)

    async def together(self, commands: Sequence[tuple[str, tuple[bytes, ...]]]) -> Any:
        """Do commands that travel together."""
        return await self._ask(
            "PIPELINE", lambda: [self._server.command(name, *words) for name, words in commands]
        )

    async def publish(self, channel: str, message: bytes) -> Any:
        """Send a message."""
        return await self._ask("PUBLISH", lambda: self._server.publish(channel, message))

    async def eval(self, script: str, count: int, *rest: Any) -> Any:
        """Run a script."""
        return await self._ask(
            "EVAL", lambda: self._server.script(script, rest[:count], rest[count:])
        )

    def register_script(self, script: str) -> Callable[..., Any]:
        """Return a function that runs a script."""

        async def run(*, keys: Sequence[str], args: Sequence[Any]) -> Any:
            return await self.eval(script, len(keys), *keys, *args)

        return run

    def pubsub(self, *, ignore_subscribe_messages: bool) -> Subscription:
        """Return a subscription to use as a context manager."""
        return Subscription(self, self._server, self._process)

    async def aclose(self) -> None:
        """Close nothing: connections are not kept."""

    async def _ask(self, label: str, effect: Callable[[], Value]) -> Any:
        for left in range(self._repeats, -1, -1):
            try:
                return self._shown(await self._ask_once(label, effect))
            except (RedisConnectionError, RedisTimeoutError):
                if not left:
                    raise
                await asyncio.sleep(0.05)
        raise AssertionError

    async def _ask_once(self, label: str, effect: Callable[[], Value]) -> Value:
        server, node = self._server, self._process.node
        network, dice = server.network, server.dice
        await network.arrive(f"{node}>redis {label}")
        if (node, NODE) in network.cuts:
            await asyncio.sleep(SOCKET_TIMEOUT_SECONDS)
            raise RedisTimeoutError("no answer in time")
        await network.travel(node, NODE)
        if server.down:
            raise RedisConnectionError("refused")
        fate = dice.random()
        if fate < network.loss / 4:
            raise RedisConnectionError("broken before it arrived")
        value = effect()
        await network.arrive(f"{node}<redis {label}")
        if fate < network.loss / 2 or (NODE, node) in network.cuts:
            await asyncio.sleep(SOCKET_TIMEOUT_SECONDS)
            raise RedisTimeoutError("no answer in time")
        await network.travel(NODE, node)
        return value

    def _shown(self, value: Value) -> Any:
        if isinstance(value, bytes) and self._text:
            return value.decode()
        if isinstance(value, list):
            return [self._shown(one) for one in value]
        if isinstance(value, dict):
            return {self._shown(name): self._shown(one) for name, one in value.items()}
        return value


class Pipeline:
    """Commands that are gathered, and sent as one."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._commands: list[tuple[str, tuple[bytes, ...]]] = []

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send nothing more."""

    def hset(self, key: str, field: str, value: bytes) -> None:
        """Set a field of a hash."""
        self._add("HSET", key, field, value)

    def hgetall(self, key: str) -> None:
        """Read a hash."""
        self._add("HGETALL", key)

    def pexpire(self, key: str, milliseconds: int) -> None:
        """Give a value another life."""
        self._add("PEXPIRE", key, milliseconds)

    def set(self, key: str, value: bytes, *, px: int) -> None:
        """Write a value that lives for `px` milliseconds."""
        self._add("SET", key, value, "PX", px)

    def get(self, key: str) -> None:
        """Read a value."""
        self._add("GET", key)

    def pttl(self, key: str) -> None:
        """Ask how long a value lives."""
        self._add("PTTL", key)

    async def execute(self) -> Any:
        """Send what was gathered, and return what each command answered."""
        return await self._client.together(self._commands)

    def _add(self, name: str, *words: Any) -> None:
        self._commands.append((name, tuple(_bytes(one) for one in words)))


class Subscription:
    """A subscriber's own connection."""

    def __init__(self, client: RedisClient, server: RedisServer, process: Process) -> None:
        self.process = process
        self.channel = ""
        self._client = client
        self._server = server
        self._messages: deque[bytes] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._broken = False

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Listen no longer."""
        if self in self._server.subscriptions:
            self._server.subscriptions.remove(self)

    async def subscribe(self, channel: str) -> None:
        """Begin to listen."""
        await self._client.ping()
        self.channel = channel
        self._server.subscriptions.append(self)
        self.process.at_death.append(self.leave)

    async def get_message(self, *, timeout: float) -> dict[str, Any] | None:
        """Return the next message, or None after a while."""
        if not self._messages and not self._broken:
            self._arrived = cast(VirtualLoop, asyncio.get_running_loop()).after(timeout)
            await self._arrived
        if self._messages:
            return {"type": "message", "data": self._messages.popleft()}
        if self._broken:
            raise RedisConnectionError("the subscription ended")
        return None

    def deliver(self, message: bytes) -> None:
        """Take a message that has arrived."""
        self._messages.append(message)
        self._wake()

    def break_off(self) -> None:
        """End, as the connection has."""
        self._broken = True
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


class BlockingRedis:
    """The part of the blocking `redis.Redis` that the renewal of leases uses."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def ping(self) -> bool:
        """Ask whether it is there."""
        return bool(await_only(self._client.ping()))

    def register_script(self, script: str) -> Callable[..., Any]:
        """Return a function that runs a script."""
        run = self._client.register_script(script)
        return lambda *, keys, args: await_only(run(keys=keys, args=args))

    def close(self) -> None:
        """Close nothing: connections are not kept."""


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
