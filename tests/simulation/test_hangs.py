"""A simulation that does not get on is told of, and never waited for."""

from __future__ import annotations

import asyncio

import pytest

from tests.simulation import many
from tests.simulation.machine import Stuck, VirtualLoop
from tests.simulation.many import play_bounded


def test_timers_that_are_due_at_once_for_ever_are_no_story() -> None:
    loop = VirtualLoop()

    def again() -> None:
        loop.call_later(0.0, again)

    again()
    with pytest.raises(Stuck):
        loop.run_until_complete(loop.create_future())
    loop.forget_all()
    loop.close()


def test_code_that_does_not_give_way_breaks_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(seed: int, *, bug: str | None) -> None:
        async def forever() -> None:
            while True:
                try:
                    _ = [seed, bug]
                except Exception:  # noqa: BLE001 - as loops of the product do
                    continue

        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(forever())
        finally:
            loop.close()

    monkeypatch.setattr(many, "play", spin)
    played = play_bounded(7, longest=0.2)
    assert played.seed == 7
    [violation] = played.violations
    assert violation.startswith("hangs: not over after 0 s")
    assert "forever" in violation
