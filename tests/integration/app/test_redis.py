"""A Redis connection that was lost is a RedisError, whatever the event loop calls it."""

from __future__ import annotations

from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis
from redis.exceptions import RedisError

from app.plumbing.redis import patient_redis, single_shot_redis
from tests.support.engines import Engine
from tests.support.wait import until_async


def test_a_write_to_a_connection_that_was_just_reset_is_a_loss(sqlite_engine: Engine) -> None:
    for url in (sqlite_engine.redis.url, sqlite_engine.redis.socket_url):
        for client in (single_shot_redis(url), patient_redis(url)):
            uvloop.run(_lose(client))


async def _lose(client: Redis) -> None:
    pool: Any = client.connection_pool
    connection = await pool.get_connection()
    transport = connection._writer.transport

    def is_closed() -> bool:
        try:
            transport.writelines([b""])
        except RuntimeError as error:
            return "the handler is closed" in str(error)
        return False

    transport.abort()
    await until_async(is_closed, what="the event loop to refuse the transport")
    with pytest.raises(RedisError):
        await connection.send_command("PING")
    await pool.release(connection)
    assert await client.ping()
    await client.aclose()
