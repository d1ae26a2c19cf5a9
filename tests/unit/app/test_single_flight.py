"""One call is for all who ask while it is under way, and wakes them together."""

from __future__ import annotations

import asyncio

import pytest

from app.plumbing.single_flight import SingleFlight

ASKERS = 1000
FEW_TURNS = 10


class Slow:
    """A call that ends when it is told to."""

    def __init__(self) -> None:
        self.made = 0
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.made += 1
        made = self.made
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return made


async def begun(
    flights: SingleFlight[str, int], slow: Slow, askers: int
) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(flights.call("one", slow)) for _ in range(askers)]
    while slow.made == 0:
        await asyncio.sleep(0)
    return tasks


async def test_all_who_ask_share_a_call_and_are_woken_within_a_few_turns_of_the_loop() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    slow = Slow()
    tasks = await begun(flights, slow, ASKERS)
    slow.may_end.set()
    turns = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turns += 1
    assert turns <= FEW_TURNS
    assert {task.result() for task in tasks} == {1}
    assert await flights.call("one", slow) == 2


async def test_other_keys_have_calls_of_their_own() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    slow = Slow()
    slow.may_end.set()
    assert sorted(await asyncio.gather(*(flights.call(key, slow) for key in "ab"))) == [1, 2]


async def test_an_error_is_told_to_all_and_the_next_one_asks_anew() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    slow = Slow()
    slow.error = ValueError("away")
    tasks = await begun(flights, slow, 3)
    slow.may_end.set()
    for task in tasks:
        with pytest.raises(ValueError, match="away"):
            await task
    slow.error = None
    assert await flights.call("one", slow) == 2


async def test_who_leaves_does_not_end_the_call_of_the_others() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    slow = Slow()
    first, second = await begun(flights, slow, 2)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    slow.may_end.set()
    assert await second == 1
