"""Background tasks end in the order in which they began, in every process alike."""

from __future__ import annotations

import asyncio

from app.plumbing.loops import Tasks

COUNT = 100


async def test_tasks_are_ended_in_the_order_in_which_they_began() -> None:
    tasks = Tasks()
    ended: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    for number in range(COUNT):
        tasks.start(wait(number), name=f"wait {number}")
    await asyncio.sleep(0)
    await tasks.stop()

    assert ended == list(range(COUNT))
