"""A simulated machine: an event loop on a virtual clock, and processes that can die or freeze.

What an operating system gives a process is replaced here for the whole interpreter: clocks,
random ids, threads, `exit`. Product code runs unchanged, and code that is written later cannot
escape by asking the clock in a new place.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import os
import random
import socket
import threading
import time
import traceback
import types
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from enum import Enum
from typing import Any, Final, NoReturn, cast

import anyio.to_thread
import uuid_utils
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
from sqlalchemy.util.concurrency import await_only, greenlet_spawn

EPOCH: Final = 1_900_000_000.0
"""The virtual clock starts here, in 2030: a due time of the host's clock would stand out."""


class State(Enum):
    """What the operating system does with a process."""

    RUNNING = "running"
    FROZEN = "frozen"
    DEAD = "dead"


RUNNING: Final = State.RUNNING


class Process:
    """One boot of a node: its tasks and threads are those whose context names it."""

    def __init__(self, node: str, boot: int, *, skew_seconds: float, uptime_seconds: float) -> None:
        self.node = node
        self.boot = boot
        self.name = f"{node}.{boot}"
        self.state = State.RUNNING
        self.skew_seconds = skew_seconds
        self.uptime_seconds = uptime_seconds
        self.serves: Any = None
        """Its ASGI application once it listens."""
        self.worker_id: str | None = None
        self.doomed_at = ("", 0)
        """It dies at its n-th next arrival at a point with this text in its label; 0 is never."""
        self.at_death: list[Callable[[], None]] = []
        self.requests = 0
        """Requests that it serves now."""
        self.stopping = asyncio.Event()
        """Set when it is told to end, as by SIGTERM."""
        self._frozen_work: list[Handle] = []
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of this process."""
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(
            work, context=self._context.copy()
        )
        return task

    def may_run(self, handle: Handle) -> bool:
        """Tell whether a callback of this process runs now; a frozen one's waits."""
        if self.state is State.RUNNING:
            return True
        if self.state is State.FROZEN:
            self._frozen_work.append(handle)
        return False

    def freeze(self) -> None:
        """Stop it as SIGSTOP does: its connections stay open, and nothing of it runs."""
        self.state = State.FROZEN

    def thaw(self) -> list[Handle]:
        """Let it go on, and return what is to be run now."""
        self.state = State.RUNNING
        waiting, self._frozen_work = self._frozen_work, []
        return waiting

    def die(self) -> None:
        """End it as SIGKILL does: not one more step of it runs, no clean-up of its own."""
        self.state = State.DEAD
        self.serves = None
        for tell in self.at_death:
            tell()
        self.at_death.clear()


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("PROCESS", default=None)


class _Task(asyncio.Task[Any]):
    process: Process | None = None


class Handle:
    """What `asyncio.Handle` and `asyncio.TimerHandle` are, without what only debugging needs."""

    __slots__ = ("_args", "_callback", "_context", "_when", "cancelled_")

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
        when: float = 0.0,
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self._when = when
        self.cancelled_ = False

    def cancel(self) -> None:
        """Do not run it."""
        self.cancelled_ = True

    def cancelled(self) -> bool:
        """True once it is not to run."""
        return self.cancelled_

    def when(self) -> float:
        """When a timer is due."""
        return self._when


MOST_RUNS_AT_ONCE: Final = 200_000
"""More callbacks than anything sane runs, and timers that are due, before time moves."""


class Stuck(Exception):
    """Nothing is left that could ever happen, or it happens for ever at one moment."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time costs nothing; the order of events follows from the program.

    Where another loop waits, its clock jumps to the next timer. Callbacks belong to the process
    that their context names: a dead one's are dropped, a frozen one's wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._jumps_at_once = 0
        self.unhandled: list[str] = []
        self._all: list[asyncio.Task[Any]] = []
        self._sweep_at = 2000
        self._ready: deque[Handle]
        self._timers: list[tuple[float, int, Handle | asyncio.Future[None]]] = []
        self._timers_made = 0
        self.set_exception_handler(self._note_unhandled)
        self.set_task_factory(self._make_task)

    get_debug = bool  # it is asked at each future, and is False

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self.now

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        """Schedule a callback as a part of the process whose context it has."""
        handle = Handle(callback, args, contextvars.copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        """Schedule a callback for later; of two at one time the first made is the first to run."""
        context = contextvars.copy_context() if context is None else context
        timer = Handle(callback, args, context, when)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        """Schedule a callback for so many seconds later."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def after(self, delay: float) -> asyncio.Future[None]:
        """Return a future that is done so many seconds later: a timer that needs no handle."""
        future: asyncio.Future[None] = asyncio.Future(loop=self)
        self._timers_made += 1
        heapq.heappush(self._timers, (self.now + delay, self._timers_made, future))
        return future

    def _run_once(self) -> None:
        """Run what is ready, or jump to the next timer."""
        ready = self._ready
        while not self._stopping:  # type: ignore[attr-defined]
            if not ready:
                self._jump()
            runs = 0
            while ready:
                runs += 1
                if runs > MOST_RUNS_AT_ONCE:
                    raise Stuck
                handle = ready.popleft()
                if handle.cancelled_:
                    continue
                context = handle._context
                process = context.get(PROCESS)
                if process is None or process.state is RUNNING or process.may_run(handle):
                    try:
                        context.run(handle._callback, *handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:  # noqa: BLE001 - as `asyncio.Handle` does
                        message = f"Exception in callback {handle._callback!r}"
                        self.call_exception_handler({"message": message, "exception": error})

    def _jump(self) -> None:
        """Go to the next moment at which anything happens."""
        timers = self._timers
        while timers:
            when, _, due = heapq.heappop(timers)
            if isinstance(due, Handle):
                if due.cancelled_:
                    continue
                self._go_to(when)
                self._ready.append(due)
                return
            if due.done():
                continue
            self._go_to(when)
            due.set_result(None)
            return
        raise Stuck

    def _go_to(self, when: float) -> None:
        if when > self.now:
            self.now = when
            self._jumps_at_once = 0
            return
        self._jumps_at_once += 1
        if self._jumps_at_once > MOST_RUNS_AT_ONCE:
            raise Stuck

    def resume(self, process: Process) -> None:
        """Let a frozen process go on."""
        self._ready.extend(process.thaw())

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a blocking function as a thread of the calling process."""
        future: asyncio.Future[Any] = self.create_future()

        async def body() -> None:
            try:
                value = await greenlet_spawn(func, *args)
            except Exception as error:  # noqa: BLE001 - it goes to who waits, as a thread's does
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(value)

        # It is kept with all tasks.
        _ = self.create_task(body())
        return future

    def forget_all(self) -> None:
        """Drop every task that is left without telling it, and say nothing of that."""
        for task in self._all:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._ready.clear()
        self._timers.clear()
        self._all.clear()

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task = _Task(work, loop=loop, context=context)
        task.process = PROCESS.get() if context is None else context.get(PROCESS)
        # A dead process's tasks must not be collected: that would run their clean-up.
        self._all.append(task)
        if len(self._all) > self._sweep_at:
            self._all = [one for one in self._all if not one.done()]
            self._sweep_at = 2 * len(self._all) + 2000
        return task

    def _note_unhandled(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        future: Any = context.get("future") or context.get("task")
        process = getattr(future, "process", None)
        if process is not None and process.state is State.DEAD:
            return
        name = "-" if process is None else process.name
        error = context.get("exception")
        trace = "".join(traceback.format_exception(error)[-3:]) if error is not None else ""
        self.unhandled.append(f"{name}: {context.get('message')} {future!r} {trace}")


class Machine:
    """The replaced operating system; use it as a context manager around one simulation."""

    def __init__(self, seed: int) -> None:
        self.loop = VirtualLoop()
        self.exits: Callable[[Process, int], None] = lambda process, _code: process.die()
        self._ids = random.Random(f"ids {seed}")
        self._seed = seed
        self._real: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Machine:
        """Take the place of the operating system."""
        random.seed(self._seed)
        self._replace(time, "time", self.wall)
        self._replace(time, "monotonic", self.uptime)
        self._replace(time, "perf_counter", self.uptime)
        self._replace(time, "time_ns", lambda: int(self.wall() * 1e9))
        self._replace(time, "monotonic_ns", lambda: int(self.uptime() * 1e9))
        self._replace(time, "clock_gettime", lambda _clock: self.uptime())
        self._replace(time, "sleep", _sleep)
        self._replace(uuid, "uuid4", self._uuid4)
        self._replace(uuid_utils, "uuid7", self._uuid7)
        self._replace(os, "_exit", self.exit)
        self._replace(os, "urandom", self._ids.randbytes)
        self._replace(random, "_urandom", self._ids.randbytes)  # of `secrets`
        self._replace(os, "getpid", _boot)
        self._replace(socket, "gethostname", _node)
        self._replace(asyncio, "sleep", sleep)
        self._replace(asyncio, "timeout", _timeout)
        self._replace(threading, "Event", _Event)
        self._replace(threading.Thread, "start", _start_thread)
        self._replace(threading.Thread, "join", _join_thread)
        self._replace(anyio.to_thread, "run_sync", _run_here)
        return self

    def __exit__(self, *_: object) -> None:
        """Give everything back."""
        for place, name, real in reversed(self._real):
            setattr(place, name, real)

    def wall(self) -> float:
        """The clock of the running process, which may be off; epoch seconds."""
        process = PROCESS.get()
        return EPOCH + self.loop.now + (0.0 if process is None else process.skew_seconds)

    def uptime(self) -> float:
        """Seconds since the running process's machine was started."""
        process = PROCESS.get()
        return self.loop.now + (0.0 if process is None else process.uptime_seconds)

    def exit(self, code: int) -> NoReturn:
        """End the running process at once."""
        process = PROCESS.get()
        assert process is not None, "the simulation itself must not exit"
        self.exits(process, code)
        await_only(asyncio.get_running_loop().create_future())
        raise AssertionError("a dead process went on")

    def _replace(self, place: Any, name: str, stand_in: Any) -> None:
        self._real.append((place, name, getattr(place, name)))
        setattr(place, name, stand_in)

    def _uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self._ids.getrandbits(128), version=4)

    def _uuid7(self) -> uuid.UUID:
        value = int(self.wall() * 1000) << 80 | self._ids.getrandbits(80)
        value = value & ~(0xF << 76) | 7 << 76
        return uuid.UUID(int=value & ~(3 << 62) | 2 << 62)


class _Thread(greenlet):  # type: ignore[misc] # it has no types
    """A simulated thread: what it waits for, it gives to the task that carries it.

    `greenlet_spawn` is the same with a coroutine between the two.
    """

    __sqlalchemy_greenlet_provider__ = True

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__(run)

    def __await__(self) -> Generator[Any, Any, None]:
        self.parent = getcurrent()
        self.gr_context = self.parent.gr_context
        awaited = self.switch()
        while not self.dead:
            try:
                value = yield from awaited.__await__()
            except BaseException as error:  # noqa: BLE001 - it is the thread's
                awaited = self.throw(error)
            else:
                awaited = self.switch(value)


class _Event:
    """`threading.Event` among simulated threads."""

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[asyncio.Future[None]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            loop = cast(VirtualLoop, asyncio.get_running_loop())
            waiter = loop.create_future() if timeout is None else loop.after(timeout)
            self._waiters.append(waiter)
            await_only(waiter)
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return self._set


class _Timeout:
    """`asyncio.Timeout` without what nobody uses."""

    __slots__ = ("_before", "_expired", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    async def __aenter__(self) -> _Timeout:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = task.cancelling()
        loop = asyncio.get_running_loop()
        if self._seconds > 0:
            self._timer = loop.call_later(self._seconds, self._expire)
        else:
            self._timer = cast(asyncio.TimerHandle, loop.call_soon(self._expire))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: types.TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if (
            self._expired
            and self._task.uncancel() <= self._before
            and kind is asyncio.CancelledError
        ):
            raise TimeoutError from error

    def _expire(self) -> None:
        self._task.cancel()
        self._expired = True


_real_timeout = asyncio.timeout


def _timeout(seconds: float | None) -> Any:
    return _real_timeout(None) if seconds is None else _Timeout(seconds)


async def sleep(seconds: float, result: Any = None) -> Any:
    """`asyncio.sleep` on the virtual loop."""
    if seconds <= 0:
        await _give_way()
    else:
        await cast(VirtualLoop, asyncio.get_running_loop()).after(seconds)
    return result


@types.coroutine
def _give_way() -> Generator[None, None, None]:
    yield


def _boot() -> int:
    process = PROCESS.get()
    return 0 if process is None else process.boot


def _node() -> str:
    process = PROCESS.get()
    return "" if process is None else process.node


def _sleep(seconds: float) -> None:
    await_only(sleep(seconds))


def _start_thread(thread: threading.Thread) -> None:
    async def body() -> None:
        await _Thread(thread.run)

    thread._simulated = asyncio.get_running_loop().create_task(body())  # type: ignore[attr-defined]


def _join_thread(thread: threading.Thread, timeout: float | None = None) -> None:
    await_only(asyncio.wait([thread._simulated], timeout=timeout))  # type: ignore[attr-defined]


async def _run_here(func: Callable[..., Any], *args: Any, **_: Any) -> Any:
    return func(*args)
