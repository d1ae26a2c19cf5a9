"""The stacks that are compared, each as its processes and the body that is POSTed to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from bench.cluster import TEXT, job_body, platform, trees
from tests.support.child import Child
from tests.support.engines import EngineName, Servers
from tests.support.guardian import GUARDIAN
from tests.support.ports import free_port

ROOT: Final = Path(__file__).parents[1]
SLOTS: Final = 250
"""Of each worker; a job has its slot until its end is reported, which takes longer than its run."""
PeerName = Literal["celery", "taskiq"]
MODULES: Final[dict[PeerName, str]] = {"celery": "ref_app", "taskiq": "ref2_app"}


@dataclass(frozen=True)
class Stack:
    """A stack that runs. `body` gives a body of many jobs, told apart by a label and a number."""

    name: str
    url: str
    body: Callable[[str], str]
    pids: dict[str, int] = field(default_factory=dict)


class Spread(NamedTuple):
    """How many processes the dispatcher has, and how many partitions."""

    processes: int = 1
    partitions: int = 1


@contextlib.contextmanager
def oncue(
    lent: Servers,
    engine: EngineName,
    hook_url: str,
    *,
    dispatch: bool = True,
    spread: Spread = Spread(),  # noqa: B008 - a tuple, which nobody changes
) -> Iterator[Stack]:
    """Run one dispatcher and two workers, or a dispatcher that serves the API alone."""
    flags = ["--processes", str(spread.processes), *([] if dispatch else ["--no-dispatch"])]
    told = {"ONCUE_DISPATCH_PARTITIONS": str(spread.partitions)}
    with platform(
        *(lent, engine),
        workers=2 if dispatch else 0,
        flags=flags,
        environment=told,
        capacity=SLOTS,
    ) as running:
        yield Stack(
            "oncue",
            f"{running.url}/openapi/jobs",
            lambda label: job_body(hook_url, label=label),
            trees(running),
        )


@contextlib.contextmanager
def noop(hook_url: str, *, processes: int = 1) -> Iterator[Stack]:
    """Run a FastAPI service whose POST does nothing."""
    command = _uvicorn(sys.executable, "bench.reference.noop:app")
    if processes > 1:
        command += ["--workers", str(processes)]
    with _child("noop", command, {}) as (api, port):
        yield Stack(
            "noop",
            f"http://127.0.0.1:{port}/openapi/jobs",
            lambda label: job_body(hook_url, label=label),
            {"api": api.pid},
        )


@contextlib.contextmanager
def peer(
    name: PeerName, lent: Servers, peers: Path, python: Path, hook_url: str
) -> Iterator[Stack]:
    """Run a reference stack from a folder of peers, by the Python of its own environment."""
    database_url = lent.mariadb.create_database()
    lent.redis.flushall()
    told = {
        "BENCH_PEERS": str(peers.resolve()),
        "BENCH_MYSQL": f"{database_url.partition('://')[2]}?charset=utf8mb4",
        "BENCH_REDIS": lent.redis.url.removesuffix("/0"),
        "BENCH_STACK": MODULES[name],
    }
    work: list[str | Path]
    if name == "celery":
        work = [python, "-m", "celery", "-A", "bench.reference.given:celery", "worker"]
        work += ["-P", "prefork", "-c", "2", "-l", "error"]
        work += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    else:
        work = [python, "-m", "taskiq", "worker", "bench.reference.given:broker"]
        work += ["--workers", "1", "--max-async-tasks", "100", "--log-level", "ERROR"]
    subprocess.run(
        [python, "-m", "bench.reference.given"], env=_environment(told), cwd=ROOT, check=True
    )
    body = {"handler": "noop", "payload": {"text": TEXT, "n": 1}, "callback_url": hook_url}
    api_command = _uvicorn(python, "bench.reference.given:app")
    try:
        with (
            _child(f"{name}-api", api_command, told) as (api, port),
            _child(f"{name}-worker", work, told) as (worker, _),
        ):
            yield Stack(
                name,
                f"http://127.0.0.1:{port}/openapi/jobs",
                lambda _label: json.dumps(body, separators=(",", ":")),
                {
                    "api": api.pid,
                    "worker": worker.pid,
                    "mariadb": lent.mariadb.pid,
                    "redis": lent.redis.pid,
                },
            )
    finally:
        lent.mariadb.drop_database(database_url)


def _uvicorn(python: str | Path, app: str) -> list[str | Path]:
    quiet = ["--log-level", "warning", "--no-access-log", "--timeout-keep-alive", "120"]
    return [python, "-m", "uvicorn", app, *quiet, "--port", "PORT"]


@contextlib.contextmanager
def _child(
    name: str, command: list[str | Path], told: dict[str, str]
) -> Iterator[tuple[Child, int]]:
    """Run a command whose word PORT is a free port, until left; it listens there when lent."""
    port = free_port()
    listens = "PORT" in command
    child = Child(
        name,
        [str(port) if word == "PORT" else word for word in command],
        log=GUARDIAN.temporary_directory() / "log",
        environment=_environment(told),
        directory=ROOT,
    )
    child.start()
    try:
        if listens:
            child.wait_until(lambda: _accepts(port))
        yield child, port
    finally:
        child.kill()


def _accepts(port: int) -> bool:
    socket.create_connection(("127.0.0.1", port), timeout=1).close()
    return True


def _environment(told: dict[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("ONCUE_")}
    return {**own, "PYTHONPATH": str(ROOT), **told}
