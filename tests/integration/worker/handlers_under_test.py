"""Handlers that behave well or badly, for the worker's tests."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from oncue import Context, Fail, Retry, handler

GATES: dict[str, threading.Event] = {}
"""Events by name, with which a test lets a run of its own process end."""
COUNTERS: dict[str, int] = {}
COUNTING = threading.Lock()


@handler("w_wait")
async def wait(params: Any, ctx: Context) -> dict[str, Any]:
    """Sleep `seconds` in the loop."""
    await asyncio.sleep(params["seconds"])
    return {"attempt": ctx.attempt}


@handler("w_deaf")
async def deaf(params: Any) -> str:
    """Swallow one cancellation and go on until the gate opens."""
    gate = GATES.setdefault(params["gate"], threading.Event())
    while not gate.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue
    return "too late"


@handler("w_thread")
def thread(params: Any, ctx: Context) -> Any:
    """Block a thread until the gate opens, deaf to being cancelled."""
    GATES.setdefault(params["gate"], threading.Event()).wait(30)
    return {"cancelled": ctx.cancelled}


@handler("w_count")
def count(params: Any) -> int:
    """Count the runs of a thread under a name."""
    with COUNTING:
        COUNTERS[params["counter"]] = COUNTERS.get(params["counter"], 0) + 1
        return COUNTERS[params["counter"]]


@handler("w_polite")
def polite(_: Any, ctx: Context) -> Any:
    """Block a thread until told to stop."""
    return {"cancelled": ctx.cancel_event.wait(30)}


@handler("w_return")
async def give_back(params: Any) -> Any:
    """Return what `kind` names."""
    return {
        "surrogate": "\ud800",
        "nan": float("nan"),
        "object": object(),
        "big": "x" * (64 * 1024),
        "largest": "x" * (64 * 1024 - 2),
        "huge_number": 2**200,
    }[params["kind"]]


@handler("w_raise")
async def give_up(params: Any) -> None:
    """Raise what `kind` names."""
    raise {
        "fail": Fail("no such customer", code="no_customer"),
        "retry": Retry("later", after=1.5),
        "value": ValueError("x" * 5000),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "surrogate": ValueError("\ud800"),
        "cancelled": asyncio.CancelledError(),
    }[params["kind"]]


@handler("w_thread_exit")
def thread_exit(_: Any) -> None:
    """Try to end the process from a thread."""
    sys.exit(3)


@handler("w_rogue_task")
async def rogue_task(_: Any) -> str:
    """Leave a task behind that tries to end the process."""

    async def end() -> None:
        raise SystemExit(3)

    task = asyncio.create_task(end())
    await asyncio.sleep(0.05)
    del task
    return "still here"


@handler("w_monotonic")
async def monotonic(_: Any) -> float:
    """Tell when it began."""
    return time.monotonic()


@handler("w_nominal")
async def nominal(_: Any, ctx: Context) -> str:
    """Tell which time the run stands for."""
    return repr(ctx.nominal_time)


@handler("w_nominal_child", isolation="process")
def nominal_child(_: Any, ctx: Context) -> str:
    """Tell the same from a child."""
    return repr(ctx.nominal_time)


@handler("w_child", isolation="process")
def child(params: Any, ctx: Context) -> Any:
    """Print, note the pid, sleep, and return the params."""
    print("a handler may print", {"status": "failed"})
    if "pid_file" in params:
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(params["pid_file"]).write_text(f"{os.getpid()} {grandchild.pid}")
    time.sleep(params.get("seconds", 0))
    return {"params": params, "attempt": ctx.attempt, "key": ctx.idempotency_key}


@handler("w_child_forks", isolation="process")
def child_forks(params: Any) -> int | None:
    """Fork a process, wait for a gate, and return how it ended."""
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
    forked.start()
    Path(params["pid_file"]).write_text(f"{os.getpid()} {forked.pid}")
    while not Path(params["gate"]).exists():
        time.sleep(0.01)
        forked.join(0)
    forked.join()
    return forked.exitcode


@handler("w_child_async", isolation="process")
async def child_async(params: Any) -> Any:
    """Be async in a child."""
    await asyncio.sleep(0)
    return params


@handler("w_child_lingers", isolation="process")
def child_lingers(params: Any) -> str:
    """Return at once, with a thread that keeps the process for a while."""
    threading.Thread(target=time.sleep, args=(params["seconds"],)).start()
    return "charged"


@handler("w_child_die", isolation="process")
def child_die(_: Any) -> None:
    """Die without a word."""
    os._exit(9)


@handler("w_child_raise", isolation="process")
def child_raise(_: Any) -> None:
    """Fail in a child."""
    raise Fail("not today", code="not_today")


@handler("w_burn")
async def burn(params: Any) -> int:
    """Hold the event loop and the interpreter in pure Python for `seconds`, or to a gate."""
    rounds, end = 0, time.monotonic() + params["seconds"]
    gate = GATES.get(params.get("gate", ""), threading.Event())
    while time.monotonic() < end and not gate.is_set():
        rounds += 1
    return rounds


@handler("w_note")
async def note(params: Any) -> None:
    """Write a line every 50 ms, so that a test sees for how long the run goes on."""
    while True:
        with Path(params["file"]).open("a") as out:
            out.write(f"{time.monotonic()}\n")
        await asyncio.sleep(0.05)


@handler("w_block")
def block(params: Any) -> None:
    """Block a thread for good."""
    Path(params["file"]).write_text("begun")
    time.sleep(600)


@handler("w_speak")
async def speak(params: Any, ctx: Context) -> None:
    """Say `name` in each way there is, `times` times, letting others run in between."""
    log = logging.getLogger("shop")
    for number in range(params["times"]):
        ctx.log(f"{params['name']} ctx {number}", "debug", number=number)
        print(params["name"], "stdout", number)
        await asyncio.sleep(0)
        print(params["name"], "stderr", number, file=sys.stderr)
        log.error("%s log %s", params["name"], number)
        await asyncio.to_thread(print, params["name"], "thread", number)
        ctx.progress(number / params["times"], params["name"])


@handler("w_speak_thread")
def speak_thread(params: Any, ctx: Context) -> None:
    """The same from a thread."""
    log = logging.getLogger("shop")
    for number in range(params["times"]):
        ctx.log(f"{params['name']} ctx {number}")
        print(params["name"], "stdout", number)
        log.error("%s log %s", params["name"], number)
        time.sleep(0.001)


@handler("w_speak_child", isolation="process")
def speak_child(params: Any, ctx: Context) -> None:
    """The same from a child process, and past Python's streams, and from a program."""
    speak_thread(params, ctx)
    ctx.progress(0.5, "half")
    os.write(1, b"past python\n")
    subprocess.run([sys.executable, "-c", "print('a program')"], check=True)


@handler("w_last_words", isolation="process")
def last_words(params: Any, ctx: Context) -> None:
    """Speak, without an end of the line, and wait to be killed."""
    ctx.log("before the end")
    print("last words", end="")
    Path(params["file"]).write_text("said")
    time.sleep(60)


@handler("w_flood")
def flood(params: Any, ctx: Context) -> int:
    """Print in a tight loop for `seconds`."""
    number, end = 0, time.monotonic() + params["seconds"]
    while time.monotonic() < end:
        print(f"{number} {'x' * 100}")
        number += 1
    return number


@handler("w_long_line")
async def long_line(params: Any, ctx: Context) -> None:
    """Say lines that are longer than a line may be."""
    ctx.log("ü" * 20_000, order=1)
    print("y" * 40_000)
    for _ in range(5):
        print("z" * 10_000, end="")
    print()
