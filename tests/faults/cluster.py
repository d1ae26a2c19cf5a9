"""A whole deployment whose every part and link can be broken, and the notes of what broke when."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil
import pymysql

from tests.faults.handlers import Note, read_notes
from tests.faults.links import Links, Mode
from tests.support.checker import Frozen, RedisTrouble
from tests.support.engines import Servers
from tests.support.mariadb import PrivateMariaDB
from tests.support.processes import ROOT, Platform
from tests.support.receiver import Receiver
from tests.support.wait import until

HANDLERS: Final = "tests.faults.handlers"
ON_PATH: Final = ROOT / "tests" / "faults" / "on_path"
TICK_SECONDS: Final = 0.02
GRACE_SECONDS: Final = 10
TERM_SECONDS: Final = 35.0
CALLBACK_SCHEDULE: Final = ",".join(["0", "1", "2", "4", *["8"] * 40])


@dataclass(slots=True)
class Life:
    """One process of a node, from its start to its end (seconds on the monotonic clock)."""

    name: str
    pid: int
    since: float
    until: float | None = None
    how: str = ""


class Watch(threading.Thread):
    """Notes when processes end, to a few milliseconds, whoever ends them and however."""

    def __init__(self, record: Path) -> None:
        super().__init__(name="watch", daemon=True)
        self.lives: list[Life] = []
        self.children_ended: dict[str, float] = {}
        self._record = record
        self._offset = 0
        self._ended: dict[int, Callable[[float], None]] = {}
        self._poll = select.poll()
        self._lock = threading.Lock()
        self._end = threading.Event()

    def run(self) -> None:
        """Watch until told to end."""
        while not self._end.is_set():
            self._watch_children()
            ready = self._poll.poll(TICK_SECONDS * 1000)
            now = time.monotonic()
            for descriptor, _events in ready:
                with self._lock:
                    ended = self._ended.pop(descriptor)
                    self._poll.unregister(descriptor)
                os.close(descriptor)
                ended(now)
            if not self._ended:
                self._end.wait(TICK_SECONDS)

    def end(self) -> None:
        """Stop watching."""
        self._end.set()
        self.join()
        for descriptor in self._ended:
            os.close(descriptor)

    def begin(self, name: str, pid: int) -> Life:
        """Watch a node's new process."""
        life = Life(name, pid, time.monotonic())
        self.lives.append(life)

        def ended(at: float) -> None:
            life.until = at

        self._add(pid, ended)
        return life

    def life_of(self, note: Note) -> Life:
        """The process of a worker that made a note, itself or by a child."""
        own = [one for one in self.lives if one.name == note.worker and one.since <= note.at]
        return own[-1]

    def _watch_children(self) -> None:
        notes, self._offset = read_notes(self._record, self._offset)
        for note in notes:
            if note.event != "start" or any(one.pid == note.pid for one in self.lives):
                continue

            def ended(at: float, execution_id: str = note.execution_id) -> None:
                self.children_ended[execution_id] = at

            self._add(note.pid, ended)

    def _add(self, pid: int, ended: Callable[[float], None]) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            ended(time.monotonic())
            return
        with self._lock:
            self._ended[descriptor] = ended
            self._poll.register(descriptor, select.POLLIN)


class Cluster:
    """MariaDB, Redis, dispatchers, workers and a receiver of callbacks, with links between them.

    All times are seconds on the monotonic clock.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dispatchers: int = 2,
        workers: int = 3,
        capacity: int = 20,
        environment: Mapping[str, str] | None = None,
        own: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.directory = directory
        self.dispatchers = [f"dispatcher-{number + 1}" for number in range(dispatchers)]
        self.workers = [f"worker-{number + 1}" for number in range(workers)]
        self.frozen: list[Frozen] = []
        self.redis_troubles: list[RedisTrouble] = []
        self.locks: dict[str, threading.Lock] = {}
        self._own = own or {}
        self._capacity = capacity
        self._ends = ExitStack()
        self.servers = Servers()
        self._ends.callback(self.servers.remove)
        self.engine = self.servers.engine("mariadb+redis")
        self.links = Links()
        self._ends.callback(self.links.close)
        self.platform = Platform(
            self.engine,
            directory,
            {
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ON_PATH}",
                "ONCUE_CALLBACK_SCHEDULE_SECONDS": CALLBACK_SCHEDULE,
                "ONCUE_GRACE_SECONDS": str(GRACE_SECONDS),
                "ONCUE_HANDLERS": HANDLERS,
                **(environment or {}),
            },
            dispatchers,
        )
        self._ends.callback(self.platform.close)
        self.receiver = Receiver(directory)
        self._ends.callback(self.receiver.kill)
        self.watch = Watch(self.platform.record_file)
        for name in (*self.dispatchers, *self.workers, "redis", "mariadb", "receiver"):
            self.locks[name] = threading.Lock()
        self._add_links()

    def start(self) -> Cluster:
        """Start everything and return once all workers are known as UP."""
        self.watch.start()
        self._ends.callback(self.watch.end)
        self.receiver.start()
        for name in (*self.dispatchers, *self.workers):
            self._first_start(name)
        for service in self.platform.services.values():
            service.wait_ready(60)
        self.platform.wait_for_workers(len(self.workers), 60)
        return self

    def close(self) -> None:
        """End everything."""
        self._ends.close()

    @contextmanager
    def running(self) -> Iterator[Cluster]:
        """Start it, and end it with the block."""
        try:
            yield self.start()
        finally:
            self.close()

    # What can be done to a part.

    def kill(self, name: str, *, alone: bool = False) -> None:
        """Kill a node, or a server; with `alone` none of its children."""
        if name == "redis":
            with self._redis_trouble():
                self.servers.redis.kill()
        elif name == "mariadb":
            self.servers.mariadb.kill()
        elif name == "receiver":
            self.receiver.kill()
        else:
            child = self.platform.services[name].child
            (child.kill_alone if alone else child.kill)()
            self._gone(name, "killed")

    def terminate(self, name: str) -> int:
        """Ask a node to end (SIGTERM) and return its exit code."""
        code = self.platform.services[name].child.terminate(TERM_SECONDS)
        self._gone(name, f"SIGTERM, {code}")
        return code

    def stop_server(self, name: str) -> None:
        """Shut Redis or MariaDB down in order."""
        if name == "redis":
            with self._redis_trouble():
                self.servers.redis.stop()
        else:
            self.servers.mariadb.stop()

    def restart(self, name: str, *, wait: bool = False) -> None:
        """Start what has ended."""
        if name == "redis":
            with self._redis_trouble():
                self.servers.redis.start()
        elif name == "mariadb":
            self.servers.mariadb.start()
        elif name == "receiver":
            self.receiver.start()
        else:
            service = self.platform.services[name]
            service.start(wait=False)
            self.watch.begin(name, service.child.pid)
            if wait:
                service.wait_ready(60)

    @contextmanager
    def froze(self, name: str) -> Iterator[None]:
        """Stop a part where it stands, with its children, as long as the block runs."""
        since = time.monotonic()
        pids = self._tree(self._pid(name))
        for pid in pids:
            _signal(pid, "suspend")
        try:
            yield
        finally:
            woken = time.monotonic()
            for pid in reversed(pids):
                _signal(pid, "resume")
            self._note_frozen(name, since, woken)

    def flush(self) -> None:
        """Empty Redis."""
        with self._redis_trouble():
            self.servers.redis.flushall()

    @contextmanager
    def broken(self, link: str, mode: Mode, delay_seconds: float = 0.0) -> Iterator[None]:
        """Break a link as long as the block runs."""
        since = time.monotonic()
        self.links.switch(link, mode, delay_seconds)
        try:
            yield
        finally:
            self.links.switch(link, Mode.OPEN)
            self._note_link(link, since)

    def cut(self, *links: str) -> Callable[[], None]:
        """Take links down until what is returned is called."""
        stack = ExitStack()
        for link in links:
            stack.enter_context(self.broken(link, Mode.DOWN))
        self._ends.callback(stack.close)
        return stack.close

    def links_of(self, name: str) -> list[str]:
        """All links that begin or end at a node."""
        return [one for one in self.links.names() if name in one.split(">")]

    def shift_clock(self, name: str, seconds: float) -> None:
        """Put a node's wall clock off by so much."""
        fresh = self._clock_file(name).with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.replace(self._clock_file(name))

    def trap(self, name: str) -> Path:
        """The file that sets off the plant of a node; see `plants`."""
        return self.directory / f"{name}.trap"

    # What can be asked.

    def rows(self, statement: str) -> list[dict[str, Any]]:
        """Read rows of the database past all links."""
        name = urlsplit(self.engine.database_url).path[1:]
        with (
            closing(self.servers.mariadb.connect(name)) as connection,
            connection.cursor(pymysql.cursors.DictCursor) as cursor,
        ):
            cursor.execute(statement)
            return list(cursor.fetchall())

    def notes(self) -> list[Note]:
        """All that the handlers noted."""
        return read_notes(self.platform.record_file)[0]

    def starts(self, job_id: int | None = None) -> list[Note]:
        """The noted starts, or those of one job."""
        return [
            one for one in self.notes() if one.event == "start" and job_id in (None, one.job_id)
        ]

    def active_dispatcher(self, timeout: float = 20) -> str:
        """The dispatcher that holds the lock."""
        return until(self._holder, timeout, what="a holder of the dispatch lock")

    def settled(self, timeout: float) -> float:
        """Wait until every job is terminal and every callback delivered; return the seconds."""
        began = time.monotonic()
        until(lambda: not self.unsettled(), timeout, what=f"all to settle ({self.unsettled()})")
        return time.monotonic() - began

    def unsettled(self) -> dict[str, int]:
        """Count what has not come to its end."""
        counts: dict[str, int] = {}
        for name, statement in (
            ("jobs", "job_info WHERE kind = 0 AND status NOT IN (2, 3, 5)"),
            ("callbacks", "callback_delivery WHERE status = 0"),
            ("stopping", "stopping_execution"),
        ):
            (row,) = self.rows(f"SELECT COUNT(*) AS n FROM {statement}")
            if row["n"]:
                counts[name] = row["n"]
        return counts

    def _holder(self) -> str | None:
        for name in self.dispatchers:
            if (service := self.platform.services.get(name)) and service.child.running:
                with suppress(OSError, ValueError):
                    if _metric(service.url, "oncue_dispatch_lock_held"):
                        return name
        return None

    def _add_links(self) -> None:
        redis, mariadb = self.servers.redis.port, self.servers.mariadb.port
        for name in (*self.dispatchers, *self.workers):
            self.links.add(f"{name}>redis", redis)
        for name in self.dispatchers:
            self.links.add(f"{name}>mariadb", mariadb)
        ports = [int(url.rsplit(":", 1)[1]) for url in self.platform.dispatcher_urls]
        for worker in self.workers:
            for dispatcher, port in zip(self.dispatchers, ports, strict=True):
                self.links.add(f"{worker}>{dispatcher}", port)
            self.links.add(f"dispatchers>{worker}")

    def _first_start(self, name: str) -> None:
        self.shift_clock(name, 0)
        environment = {
            "ONCUE_REDIS_URL": f"redis://127.0.0.1:{self.links[f'{name}>redis'].port}/0",
            "ONCUE_TEST_CLOCK": str(self._clock_file(name)),
            "ONCUE_TEST_TRAP": str(self.trap(name)),
            **self._own.get(name, {}),
        }
        if name in self.dispatchers:
            port = self.links[f"{name}>mariadb"].port
            environment["ONCUE_DATABASE_URL"] = self.engine.database_url.replace(
                f":{self.servers.mariadb.port}/", f":{port}/"
            )
            number = self.dispatchers.index(name) + 1
            service = self.platform.dispatcher(number, environment=environment, wait=False)
        else:
            door = self.links[f"dispatchers>{name}"]
            ways = [self.links[f"{name}>{one}"].port for one in self.dispatchers]
            environment |= {
                "ONCUE_ADVERTISE_URL": f"http://127.0.0.1:{door.port}",
                "ONCUE_DISPATCHER_URL": ",".join(f"http://127.0.0.1:{port}" for port in ways),
            }
            service = self.platform.worker(
                name,
                capacity=self._capacity,
                handlers=HANDLERS,
                environment=environment,
                wait=False,
            )
            door.target = urlsplit(service.url).port or 0
        self.watch.begin(name, service.child.pid)

    def _pid(self, name: str) -> int:
        if name == "redis":
            return self.servers.redis.pid
        if name == "mariadb":
            return self.servers.mariadb.pid
        if name == "receiver":
            return self.receiver.pid
        return self.platform.services[name].child.pid

    def _tree(self, pid: int) -> list[int]:
        try:
            process = psutil.Process(pid)
            return [pid, *(child.pid for child in process.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def _gone(self, name: str, how: str) -> None:
        life = next(one for one in reversed(self.watch.lives) if one.name == name)
        life.how = how
        until(lambda: life.until is not None, 5, what=f"the end of {name} to be seen")

    def _note_frozen(self, name: str, since: float, woken: float) -> None:
        if name in self.workers:
            pid = self._pid(name)
            life = next(one for one in reversed(self.watch.lives) if one.pid == pid)
            self.frozen.append(Frozen(woken, since, worker_id(life, self.watch.lives)))
            # For a frozen worker Redis is as far away as if the link were cut.
            self.redis_troubles.append(RedisTrouble(woken, since, name))
        elif name == "redis":
            self.redis_troubles.append(RedisTrouble(woken, since))

    def _note_link(self, link: str, since: float) -> None:
        node, _, server = link.partition(">")
        if server == "redis" and node in self.workers:
            self.redis_troubles.append(RedisTrouble(time.monotonic(), since, node))

    @contextmanager
    def _redis_trouble(self) -> Iterator[None]:
        since = time.monotonic()
        try:
            yield
        finally:
            self.redis_troubles.append(RedisTrouble(time.monotonic(), since))

    def _clock_file(self, name: str) -> Path:
        return self.directory / f"{name}.clock"


def worker_id(life: Life, lives: list[Life]) -> str:
    """Name one boot of a worker, `worker-1#2`."""
    own = [one for one in lives if one.name == life.name]
    return f"{life.name}#{own.index(life) + 1}"


def has_servers() -> bool:
    """Whether MariaDB is installed; without it there is no cluster."""
    return PrivateMariaDB.missing() is None


def _signal(pid: int, what: str) -> None:
    with suppress(psutil.NoSuchProcess):
        getattr(psutil.Process(pid), what)()


def _metric(url: str, name: str) -> float:

    with closing(HTTPConnection(urlsplit(url).netloc, timeout=1)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])
