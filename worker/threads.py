"""The threads that run sync handlers: what is handed to them is begun and heard, or never begun."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

Result = TypeVar("Result")


class NoThread(Exception):
    """No thread could be started, and what was to run in it never will."""


class RunThreads(Generic[Result]):
    """At most so many threads as runs fit at once, started when they are needed."""

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._pool = self._new_pool()

    def start(self, body: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run `body` in a thread, in a copy of the caller's context.

        Raises:
            NoThread: the system gives no more threads; `body` will not run.
        """
        heard: Future[Result] = Future()

        def run() -> Result:
            if not heard.set_running_or_notify_cancel():
                raise NoThread("it was given up before it could begin")
            try:
                result = body()
            except BaseException as error:
                heard.set_exception(error)
                raise
            heard.set_result(result)
            return result

        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(self._pool, partial(contextvars.copy_context().run, run))
        except RuntimeError as error:
            # The pool queues first and starts a thread then: one that comes free may have begun.
            # It has also lost count of its idle threads, so another takes its place.
            self._pool.shutdown(wait=False)
            self._pool = self._new_pool()
            if heard.cancel():
                raise NoThread(str(error)) from error
            return asyncio.wrap_future(heard)

    def close(self) -> None:
        """Let idle threads go; busy ones are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._most, thread_name_prefix="oncue-run")
