"""Threads of runs: begun and heard, or never begun, also where the system gives no more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from tests.support.wait import until_async
from worker.threads import NoThread, RunThreads


def refuse_threads(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    def refuse(_: threading.Thread) -> None:
        before()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


async def test_what_gets_no_thread_is_not_begun_by_one_that_comes_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: RunThreads[str] = RunThreads(8)
    gate, begun = threading.Event(), list[str]()

    def late() -> str:
        begun.append("late")
        return "late"

    def busy() -> str:
        gate.wait(60)
        return "busy"

    first = threads.start(busy)
    with monkeypatch.context() as patched:
        refuse_threads(patched, lambda: None)
        with pytest.raises(NoThread):
            _ = threads.start(late)
    gate.set()
    assert await first == "busy"
    after = [threads.start(partial(str, number)) for number in range(8)]
    assert await asyncio.gather(*after) == [str(number) for number in range(8)]
    # The thread of the first pool has gone through its queue when it has ended.
    await until_async(lambda: threading.active_count() <= 9)
    assert begun == []
    threads.close()


async def test_what_a_thread_took_that_came_free_meanwhile_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: RunThreads[str] = RunThreads(8)
    gate, begun, end = threading.Event(), threading.Event(), threading.Event()

    def busy() -> str:
        gate.wait(60)
        return "busy"

    def overtaken() -> str:
        begun.set()
        end.wait(60)
        return "heard"

    def let_it_be_taken() -> None:
        gate.set()
        assert begun.wait(60)

    first = threads.start(busy)
    with monkeypatch.context() as patched:
        refuse_threads(patched, let_it_be_taken)
        second = threads.start(overtaken)
    assert await first == "busy"
    end.set()
    assert await second == "heard"
    threads.close()
