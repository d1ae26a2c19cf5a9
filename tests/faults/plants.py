"""Bugs and stops that tests put into a running dispatcher or worker; see `on_path`.

Each function replaces one named thing of the product in the process that it is called in.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection


def no_fencing() -> None:
    """Let the end of whatever execution end its job's current one."""
    module = _module("app.lifecycle.moves.settle")
    fenced = module.settle
    current = module.text("SELECT id, execution_id FROM job_info WHERE id = :id")

    async def settle(
        connection: AsyncConnection, database: Any, endings: Sequence[Any], *rest: Any
    ) -> Any:
        changed = []
        for ending in endings:
            row = (await connection.execute(current, {"id": ending.job_id})).one_or_none()
            execution = ending.execution_id if row is None else row.execution_id
            changed.append(dataclasses.replace(ending, execution_id=execution))
        return await fenced(connection, database, changed, *rest)

    _module("app.fleet.settler").settle = settle


def no_lease_stop() -> None:
    """Let a worker go on though neither channel answers."""
    _module("worker.liveness").Liveness.must_stop = lambda _self: False


def report_before_store() -> None:
    """Report outcomes first, and put them under their keys only once they are acknowledged."""
    store_type = _module("worker.store").OutcomeStore
    stored = store_type._store

    def add(self: Any, execution: Any) -> None:
        self._stored(execution)

    async def store(self: Any, executions: list[Any]) -> None:
        await stored(self, [one for one in executions if one.acknowledged])

    store_type.add, store_type._store = add, store


def outbox_after_commit() -> None:
    """Write the callbacks in a transaction of their own, after the one that ends the jobs.

    Between the two the process dies, if the file ONCUE_TEST_TRAP is there.
    """
    user, module = _module("app.fleet.settler"), _module("app.lifecycle.moves.settle")
    insert = module.insert_callbacks
    kept: list[dict[str, Any]] = []
    commit = user.Settler._commit

    async def keep(_connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
        kept.extend(rows)

    async def commit_then_owe(self: Any, endings: Sequence[Any]) -> Any:
        settlements = await commit(self, endings)
        if kept and _trap_is_set():
            os.kill(os.getpid(), signal.SIGKILL)
        rows = list(kept)
        kept.clear()
        await self._database.write(lambda connection: insert(connection, rows))
        return settlements

    module.insert_callbacks = keep
    user.Settler._commit = commit_then_owe


def stop_in_claim() -> None:
    """Stop (SIGSTOP) in the middle of a claim: its rows are locked, nothing is committed."""
    module = _module("app.dispatch.loop")
    real = module.claim

    async def claim(*arguments: Any, **named: Any) -> Any:
        claimed = await real(*arguments, **named)
        if claimed and _spring_trap():
            os.kill(os.getpid(), signal.SIGSTOP)
        return claimed

    module.claim = claim


def stop_before_send() -> None:
    """Stop (SIGSTOP) when a claim is committed and nothing of it has been sent."""
    _before_send(signal.SIGSTOP)


def die_before_send() -> None:
    """Die when a claim is committed and nothing of it has been sent."""
    _before_send(signal.SIGKILL)


def die_after_send() -> None:
    """Die when a worker has answered, before the dispatcher has taken the answer."""
    sender = _module("app.dispatch.send").Sender
    post = sender._post

    async def post_then_die(self: Any, *arguments: Any) -> Any:
        reply = await post(self, *arguments)
        if _spring_trap():
            os.kill(os.getpid(), signal.SIGKILL)
        return reply

    sender._post = post_then_die


def hold_sends() -> None:
    """Keep what is claimed while the trap is set until a worker has been asked to stop it."""
    sender = _module("app.dispatch.send").Sender
    stopper = _module("app.dispatch.stop").Stopper
    post, ask = sender._post, stopper._ask
    asked = asyncio.Event()

    async def post_later(self: Any, *arguments: Any) -> Any:
        if _trap_is_set():
            await asked.wait()
        return await post(self, *arguments)

    async def ask_and_tell(self: Any, *arguments: Any) -> Any:
        over = await ask(self, *arguments)
        asked.set()
        return over

    sender._post, stopper._ask = post_later, ask_and_tell


def _before_send(number: signal.Signals) -> None:
    sender = _module("app.dispatch.send").Sender
    send = sender.send

    def send_later(self: Any, runs: Sequence[Any], *, again: bool = False) -> None:
        if runs and not again and _spring_trap():
            os.kill(os.getpid(), number)
        send(self, runs, again=again)

    sender.send = send_later


def _module(name: str) -> Any:
    """Import what is replaced here, in the planted process alone."""
    return importlib.import_module(name)


def _trap() -> Path:
    return Path(os.environ["ONCUE_TEST_TRAP"])


def _trap_is_set() -> bool:
    return _trap().exists()


def _spring_trap() -> bool:
    """Tell whether the trap is set, for the first who asks."""
    try:
        _trap().rename(_trap().with_suffix(f".sprung-{os.getpid()}"))
    except FileNotFoundError:
        return False
    return True
