"""A platform as it is deployed, on private servers, for measuring: nothing of it is left behind."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import psutil

from bench.drive import NUMBER
from tests.support.engines import EngineName, Servers
from tests.support.guardian import GUARDIAN
from tests.support.mariadb import PrivateMariaDB
from tests.support.processes import Platform

CAPACITY: Final = 100
"""Runs at once of a worker."""
HANDLERS: Final = "bench.handlers"
TEXT: Final = "x" * 200

_MARIADB: Final = (
    "--innodb-buffer-pool-size=2G",
    "--innodb-log-file-size=1G",
    "--performance-schema=OFF",
)
_BINLOG: Final = ("--log-bin", "--sync-binlog=1", "--server-id=1", "--binlog-format=ROW")


class BenchServers(Servers):
    """The servers of one sitting; MariaDB with the memory of a small production server."""

    def __init__(self, *, binlog: bool = False) -> None:
        super().__init__()
        self._flags = (*_MARIADB, *(_BINLOG if binlog else ()))

    @functools.cached_property
    def mariadb(self) -> PrivateMariaDB:
        """The MariaDB; every commit is flushed."""
        return self._start(PrivateMariaDB(*self._flags, driver="asyncmy"))


@contextlib.contextmanager
def servers(*, binlog: bool = False) -> Iterator[BenchServers]:
    """Lend the servers, started when first asked for."""
    found = BenchServers(binlog=binlog)
    try:
        yield found
    finally:
        found.remove()


@contextlib.contextmanager
def platform(
    lent: Servers,
    name: EngineName,
    *,
    workers: int = 2,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    capacity: int = CAPACITY,
) -> Iterator[Platform]:
    """Run one dispatcher and some workers over a fresh database; they are up when lent."""
    engine = lent.engine(name)
    told = {
        "ONCUE_LOG_LEVEL": "warning",
        "ONCUE_WORKER_CAPACITY": str(capacity),
        **(environment or {}),
    }
    running = Platform(engine, GUARDIAN.temporary_directory(), told)
    try:
        running.dispatcher(1, *flags)
        for number in range(1, workers + 1):
            running.worker(f"worker-{number}", handlers=HANDLERS, capacity=capacity, wait=False)
        for service in running.services.values():
            service.wait_ready()
        if workers:
            running.wait_for_workers(workers)
        yield running
    finally:
        running.close()
        lent.drop(engine)


def trees(running: Platform) -> dict[str, int]:
    """Return the process ids of everything that a platform is made of, by name."""
    found = {name: service.child.pid for name, service in running.services.items()}
    if running.engine.name == "mariadb+redis":
        found["mariadb"] = running.engine.servers.mariadb.pid
    found["redis"] = running.engine.redis.pid
    return found


def job_body(
    hook_url: str | None, *, handler: str = "echo", label: str = "bench", **fields: Any
) -> str:
    """Return the body of a job that is done at once; each time it is sent is another job."""
    body: dict[str, Any] = {
        "clientRequestId": f"{label}-{NUMBER}",
        "jobName": "bench",
        "jobHandler": handler,
        "params": {"text": TEXT, "n": 1},
        **fields,
    }
    if hook_url is not None:
        body["callbackUrl"] = hook_url
    return json.dumps(body, separators=(",", ":"))


def memory_mib(pid: int) -> float:
    """Return what a process and its children hold of the machine's memory (PSS, in MiB)."""
    root = psutil.Process(pid)
    held = 0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            held += process.memory_full_info().pss
    return held / 2**20


def engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the engine."""
    parser.add_argument(
        "--embedded", action="store_true", help="SQLite and Valkey in place of MariaDB and Redis"
    )
    parser.add_argument(
        "--binlog", action="store_true", help="MariaDB with a binary log, flushed at every commit"
    )


def engine_name(given: argparse.Namespace) -> EngineName:
    """Return the engine that the flags chose."""
    return "sqlite+valkey" if given.embedded else "mariadb+redis"
