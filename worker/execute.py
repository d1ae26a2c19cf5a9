"""Runs handlers: async ones in the event loop, sync ones in threads, isolated ones in children.

However a run goes, exactly one verdict comes out of it. A reason to stop (timeout, cancel,
shutdown, death) that came first decides, whatever the handler does afterwards.
"""

from __future__ import annotations

import asyncio
import functools
import time
import traceback
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import structlog

import oncue.handlers
from oncue.handlers import Context
from oncue.output import LogOutput
from worker.capture import CURRENT, stand_in
from worker.child_frames import ChildPipes
from worker.clock import DatabaseClock
from worker.egress import RUN_NETWORKS
from worker.held import Execution, Phase
from worker.isolate import kill_group, run_in_child
from worker.log_buffer import RunLog
from worker.threads import NoThread, RunThreads
from worker.verdict import Verdict, judge_error, judge_value

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
CLEANUP_SECONDS: Final = 3.0
"""How long a cancelled coroutine or a killed child may take before it counts as unstoppable."""
TIMER_SECONDS: Final = 0.001
STEP_SECONDS: Final = 0.0002
LONGEST_TIMER_SECONDS: Final = 366 * 86_400.0
BEGINS: Final = 5
"""How often a run is tried to be begun that gets no thread, before it is given back."""
BEGIN_AGAIN_SECONDS: Final = 1.0

_OURS: Final = frozenset({__file__, oncue.handlers.__file__})

log = structlog.get_logger(__name__)

TIMED_OUT: Final = Verdict(
    "timed_out", code="timeout", message="the run took longer than timeoutMs"
)
OVERDUE: Final = Verdict(
    "timed_out",
    code="timeout",
    message="the run was still going on long after timeoutMs, and a dispatcher stopped it",
)
SHUT_DOWN: Final = Verdict(
    "returned", code="worker_shutdown", message="the worker was shut down before the run ended"
)
CUT_OFF: Final = Verdict(
    "returned",
    code="worker_cut_off",
    message="the worker reached neither Redis nor a dispatcher and stopped its runs",
)
LEASE_LOST: Final = Verdict(
    "returned", code="lease_lost", message="another execution holds the lease of this attempt"
)
NOT_BEGUN: Final = Verdict(
    "returned", code="not_begun", message="the worker could not begin the run"
)
NO_RESULT_KEY: Final = Verdict(
    "failed",
    code="secret_keys_missing",
    message="the results of this handler are secret, and the dispatcher has no ONCUE_SECRET_KEYS",
)
UNWANTED: Final = Verdict("cancelled", code="cancelled", message="the run was no longer wanted")


def cancelled_as(status: str) -> Verdict:
    """The verdict for a run that its dispatcher stopped."""
    if status == OVERDUE.status:
        return OVERDUE
    return Verdict(status, code="cancelled", message="the run was cancelled")


class Executor:
    """Starts runs and stops them; tells `ended` once a run, and `gone` for one that lingered."""

    def __init__(
        self,
        *,
        capacity: int,
        clock: DatabaseClock,
        modules: tuple[str, ...],
        open_log: Callable[[str], RunLog],
        ended: Callable[[Execution, Verdict, bool], None],
        gone: Callable[[Execution], None],
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        self._clock = clock
        self._may_begin = may_begin
        self._open_log = open_log
        self._modules = modules
        self._ended = ended
        self._gone = gone
        self._tasks: set[asyncio.Task[Verdict]] = set()
        self._last_words: set[asyncio.Task[None]] = set()
        self._threads: RunThreads[Verdict] = RunThreads(capacity)

    def start(self, execution: Execution) -> None:
        """Begin a run at its time; its timeout counts from then."""
        execution.log = self._open_log(execution.id)
        self._begin_in_time(execution)

    def _begin_in_time(self, execution: Execution) -> None:
        left = 0.0 if execution.start_at is None else execution.start_at - time.monotonic()
        if left <= 0:
            self._begin_guarded(execution)
            return
        # A timer is good to a millisecond: the last one is walked in small steps.
        pause = left - TIMER_SECONDS if left > 2 * TIMER_SECONDS else STEP_SECONDS
        execution.timer = asyncio.get_running_loop().call_later(
            pause, self._begin_in_time, execution
        )

    def _begin_guarded(self, execution: Execution) -> None:
        """Begin a run, or give it back: one that did neither would be held for ever."""
        try:
            self._begin(execution)
        except NoThread as error:
            execution.begins += 1
            log.warning("no thread for a run", execution_id=execution.id, reason=str(error))
            if execution.begins >= BEGINS:
                self.stop(execution, NOT_BEGUN)
                return
            # Its slot stays taken meanwhile: what has no threads should not get more runs.
            execution.timer = asyncio.get_running_loop().call_later(
                BEGIN_AGAIN_SECONDS, self._begin_guarded, execution
            )
        except Exception:
            log.exception("a run could not be begun", execution_id=execution.id)
            self.stop(execution, NOT_BEGUN)

    def _begin(self, execution: Execution) -> None:
        loop = asyncio.get_running_loop()
        if (execution.start_at is not None or execution.begins) and not self._may_begin():
            # This process may have been paused since it accepted the run, and given up.
            self.stop(execution, CUT_OFF)
            return
        if execution.handler.secret_result and execution.run.result_key is None:
            self.stop(execution, NO_RESULT_KEY)
            return
        if execution.handler.isolation == "process":
            execution.task = self._spawn(self._run_child(execution))
        elif execution.handler.is_async:
            execution.task = self._spawn(self._run_async(execution))
        else:
            execution.task = self._threads.start(functools.partial(self._run_thread, execution))
        execution.task.add_done_callback(functools.partial(self._over, execution))
        seconds = min(execution.run.timeout_ms / 1000, LONGEST_TIMER_SECONDS)
        execution.timer = loop.call_later(seconds, self.stop, execution, TIMED_OUT)

    def stop(self, execution: Execution, verdict: Verdict) -> None:
        """Make a run end with `verdict`; the first reason to stop wins, later ones do nothing."""
        if execution.phase is not Phase.RUNNING or execution.stop_verdict is not None:
            return
        if execution.has_verdict:
            # It ended before it was stopped. A child may be tidying up after itself: no longer.
            kill_group(execution.child_pid)
            return
        execution.stop_verdict = verdict
        execution.cancel_event.set()
        self._disarm(execution)
        if execution.task is None:
            # Its time has not come: there is nothing to stop.
            if execution.log is not None:
                execution.log.close()
            self._ended(execution, verdict, False)
            return
        if execution.handler.isolation == "process":
            kill_group(execution.child_pid)
        elif execution.handler.is_async:
            execution.task.cancel()
        else:
            self._give_up(execution)
            return
        loop = asyncio.get_running_loop()
        execution.timer = loop.call_later(CLEANUP_SECONDS, self._give_up, execution)

    async def wait_over(self) -> None:
        """Return when no coroutine of a run is left, and the last words of children are read."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.wait_last_words()

    async def wait_last_words(self) -> None:
        """Return when what ended children said is in their logs."""
        await asyncio.gather(*self._last_words, return_exceptions=True)

    def close(self) -> None:
        """Let idle threads go; busy ones are not waited for."""
        self._threads.close()

    def _spawn(self, run: Coroutine[Any, Any, Verdict]) -> asyncio.Task[Verdict]:
        task = asyncio.get_running_loop().create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _give_up(self, execution: Execution) -> None:
        """Report a run that cannot be stopped as stopping: its slot and its lease stay taken."""
        if execution.phase is Phase.RUNNING and execution.stop_verdict is not None:
            self._ended(execution, execution.stop_verdict, True)
        if execution.handler.is_async and execution.task is not None and not execution.task.done():
            # A cancellation may have been swallowed by accident; ask again until it ends.
            execution.task.cancel()
            loop = asyncio.get_running_loop()
            execution.timer = loop.call_later(CLEANUP_SECONDS, self._give_up, execution)

    def _over(self, execution: Execution, task: asyncio.Future[Verdict]) -> None:
        self._disarm(execution)
        if execution.log is not None and execution.last_words is None:
            execution.log.close()
        if execution.phase is Phase.STOPPING:
            self._gone(execution)
        elif execution.stop_verdict is not None:
            self._ended(execution, execution.stop_verdict, False)
        elif task.cancelled():
            self._ended(execution, judge_error(asyncio.CancelledError()), False)
        elif error := task.exception():
            self._ended(execution, judge_error(error), False)
        else:
            self._ended(execution, task.result(), False)

    def _disarm(self, execution: Execution) -> None:
        if execution.timer is not None:
            execution.timer.cancel()
            execution.timer = None

    async def _run_async(self, execution: Execution) -> Verdict:
        bind_run(execution)
        try:
            verdict = judge_value(await self._call(execution))
        except BaseException as error:  # noqa: BLE001 (SystemExit in a handler must not end us)
            verdict = self._failed(execution, error)
        execution.has_verdict = True
        return verdict

    def _run_thread(self, execution: Execution) -> Verdict:
        if execution.stop_verdict is not None:
            # It was stopped while it waited for a thread: its handler must not begin any more.
            return execution.stop_verdict
        bind_run(execution)
        try:
            verdict = judge_value(self._call(execution))
        except BaseException as error:  # noqa: BLE001 (SystemExit in a handler must not end us)
            verdict = self._failed(execution, error)
        execution.has_verdict = True
        return verdict

    async def _run_child(self, execution: Execution) -> Verdict:
        bind_run(execution)
        execution.started_at = self._start_time(execution)
        pipes: ChildPipes | None = None
        try:
            assert execution.log is not None, "a run has a log from its start"
            pipes = ChildPipes(execution.log, lambda: self._clock.offset_ms)
            await pipes.open()
            return await run_in_child(execution, self._context(execution), self._modules, pipes)
        except Exception as error:
            log.exception("a child process could not be run")
            return judge_error(error)
        finally:
            # In the background: no report waits for a run's last words.
            if pipes is not None:
                self._hear_out(execution, pipes)

    def _hear_out(self, execution: Execution, pipes: ChildPipes) -> None:
        task = asyncio.get_running_loop().create_task(pipes.drain())
        execution.last_words = task
        self._last_words.add(task)
        task.add_done_callback(self._last_words.discard)

    def _start_time(self, execution: Execution) -> int:
        """The time to record: this clock is a guess, which may be behind what is known."""
        return max(self._clock.now_ms(), execution.accepted_at, execution.run.due_at or 0)

    def _call(self, execution: Execution) -> Any:
        execution.started_at = self._start_time(execution)
        return execution.handler.call(execution.run.params, lambda: self._context(execution))

    def _failed(self, execution: Execution, error: BaseException) -> Verdict:
        verdict = judge_error(error)
        if execution.stop_verdict is None:
            trace = error if verdict.code == "handler_error" else None
            log.warning("the handler failed", code=verdict.code, exc_info=trace)
            if trace is not None and execution.log is not None:
                execution.log.add("error", "log", handler_trace(error), {"logger": "oncue.handler"})
        return verdict

    def _context(self, execution: Execution) -> Context:
        run = execution.run
        started_at = execution.started_at or self._clock.now_ms()
        return Context(
            job_id=run.job_id,
            execution_id=run.execution_id,
            handler=run.job_handler,
            job_name=run.job_name,
            attempt=run.attempt,
            max_attempts=run.max_attempts,
            trigger_ts=run.trigger_ts,
            deadline_ms=started_at + run.timeout_ms,
            client_request_id=run.client_request_id,
            shard_index=run.shard_index,
            shard_total=run.shard_total,
            secret_params=run.secret_params,
            nominal_time=moment_of(run.nominal_time),
            cancel_event=execution.cancel_event,
            output=execution.log or LogOutput(),
        )


def moment_of(epoch_ms: int | None) -> datetime | None:
    """Return a time of the wire as handlers are given it: aware, in UTC."""
    return None if epoch_ms is None else EPOCH + timedelta(milliseconds=epoch_ms)


def handler_trace(error: BaseException) -> str:
    """Write the traceback of a handler's error from its own first frame on."""
    try:
        # Who reads it looks for the handler's lines: ours that called it are left out.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
        return "the handler failed\n" + "".join(lines).rstrip()
    except Exception:  # noqa: BLE001 (a broken __str__ must not hide that the handler failed)
        return f"the handler failed with {type(error).__name__}"


def bind_run(execution: Execution) -> None:
    """From here on in this context, log lines have the run's ids, and the run what is printed."""
    CURRENT.set(execution.log)
    RUN_NETWORKS.set(execution.run.egress_allow)
    stand_in()
    structlog.contextvars.bind_contextvars(job_id=execution.run.job_id, execution_id=execution.id)
