"""Transactions outlive the callers that leave, and connections are closed when all is over."""

from __future__ import annotations

import asyncio

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from tests.integration.app.rig import opened, value_of
from tests.support.engines import Engine


async def test_closing_waits_for_a_write_whose_caller_has_left(migrated_engine: Engine) -> None:
    half_way = asyncio.Event()

    async def slow(connection: AsyncConnection) -> None:
        await connection.execute(text("UPDATE dispatch_term SET term = 7"))
        half_way.set()
        await asyncio.sleep(0.2)

    async with opened(migrated_engine) as database:
        caller = asyncio.create_task(database.write(slow))
        await half_way.wait()
        caller.cancel()
        await asyncio.wait([caller])
    async with opened(migrated_engine) as again:
        assert await value_of(again, "SELECT term FROM dispatch_term") == 7
