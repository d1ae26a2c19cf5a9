"""The platform as it is deployed: dispatchers and workers as processes of their own."""

from __future__ import annotations

import base64
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
import psutil

from tests.support.child import Child
from tests.support.engines import Engine, migrated
from tests.support.handlers import RecordLine, read_record
from tests.support.ports import free_port
from tests.support.wait import until
from tests.support.warm import WarmChild

ROOT = Path(__file__).parents[2]
HANDLERS = "tests.support.handlers"
ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
_TAG = "ONCUE_TEST_PLATFORM"
"""Names the platform in the environment of all its processes, so that strays are found."""


class ProcessesLeft(AssertionError):
    """Processes of a platform outlived it."""


@dataclass(frozen=True)
class Service:
    """A dispatcher or worker: its process, and where it listens."""

    child: Child
    url: str

    def start(self, *, wait: bool = True, timeout: float = 120) -> Service:
        """Start it, again on the same port, and return once `/readyz` answers 200."""
        self.child.start(self.ready if wait else None, timeout)
        return self

    def ready(self) -> bool:
        """Whether `/readyz` answers 200."""
        # Not httpx, whose every new client loads the certificates: this is asked in a loop.
        with closing(HTTPConnection(urlsplit(self.url).netloc, timeout=2)) as connection:
            try:
                connection.request("GET", "/readyz")
                return connection.getresponse().status == HTTPStatus.OK
            except (OSError, HTTPException):
                return False

    def wait_ready(self, timeout: float = 120) -> None:
        """Return once `/readyz` answers 200; raises `ChildDied` if the process ends."""
        self.child.wait_until(self.ready, timeout)

    def kill(self) -> None:
        """Kill it and its children at once (kill -9)."""
        self.child.kill()

    def terminate(self, timeout: float = 60) -> int:
        """Ask it to end (SIGTERM) and return its exit code."""
        return self.child.terminate(timeout)

    def freeze(self) -> None:
        """Stop it where it stands (SIGSTOP)."""
        self.child.freeze()

    def thaw(self) -> None:
        """Let it go on (SIGCONT)."""
        self.child.thaw()


@dataclass
class Platform:
    """One deployment over one engine; `close` ends all of it and looks for strays.

    The addresses of all its dispatchers are known to its workers from the start, started or
    not. `environment` is added to that of every process. With `as_copies` processes begin as
    copies of one that has imported this code; those of other code are started anew.
    """

    engine: Engine
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    dispatchers: int = 1
    as_copies: bool = True

    def __post_init__(self) -> None:
        self.internal_token = secrets.token_hex(16)
        self.webhook_secret = f"whsec_{base64.b64encode(secrets.token_bytes(24)).decode()}"
        self.record_file = self.directory / "record.jsonl"
        self.services: dict[str, Service] = {}
        self._children: list[Child] = []
        self._tag = secrets.token_hex(8)
        self._ports = [free_port() for _ in range(self.dispatchers)]
        migrated(self.engine)
        self.http = httpx.Client(base_url=self.url, timeout=70, trust_env=False)

    @property
    def dispatcher_urls(self) -> list[str]:
        """Where the dispatchers listen, or will."""
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    @property
    def url(self) -> str:
        """Where the first dispatcher listens; `http` is a client of it."""
        return self.dispatcher_urls[0]

    def dispatcher(
        self,
        number: int = 1,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Service:
        """Start dispatcher `number`, counted from 1, and return once it is ready."""
        port = self._ports[number - 1]
        command = ["dispatcher", "--host", "127.0.0.1", "--port", str(port), *flags]
        return self._launch(f"dispatcher-{number}", command, port, environment or {}, wait)

    def worker(
        self,
        name: str = "worker-1",
        *flags: str,
        capacity: int = 10,
        handlers: str = HANDLERS,
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Service:
        """Start a worker and return once it is ready; it keeps its name when started again."""
        port = free_port()
        command = ["worker", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--handlers", handlers, *flags]
        own = {
            "ONCUE_WORKER_NAME": name,
            "ONCUE_WORKER_CAPACITY": str(capacity),
            "ONCUE_ADVERTISE_URL": f"http://127.0.0.1:{port}",
            **(environment or {}),
        }
        return self._launch(name, command, port, own, wait)

    def start(self, workers: int = 1) -> Platform:
        """Start all dispatchers and some workers, and return once a worker is known as UP."""
        for number in range(1, self.dispatchers + 1):
            self.dispatcher(number, wait=False)
        for number in range(1, workers + 1):
            self.worker(f"worker-{number}", wait=False)
        for service in self.services.values():
            service.wait_ready()
        if workers:
            self.wait_for_workers(workers)
        return self

    def wait_for_workers(self, count: int, timeout: float = 60) -> None:
        """Return once the first dispatcher lists `count` workers as UP."""
        until(
            lambda: (
                [one["state"] for one in self.get("/openapi/workers")["items"]].count("UP") >= count
            ),
            timeout,
            what=f"{count} workers to be UP",
        )

    def submit(self, handler: str, params: Any = None, **fields: Any) -> int:
        """Submit a job (a fresh `clientRequestId` unless given) and return its id."""
        body = {
            "clientRequestId": secrets.token_hex(8),
            "jobName": handler,
            "jobHandler": handler,
            "params": params,
            **fields,
        }
        answer = self.http.post("/openapi/jobs", json=body)
        assert answer.is_success, f"{answer.status_code}: {answer.text}"
        return int(answer.json()["jobId"])

    def job(self, job_id: int) -> dict[str, Any]:
        """Return the job as the first dispatcher tells it."""
        return self.get(f"/openapi/jobs/{job_id}")

    def ended(self, job_id: int, timeout: float = 60) -> dict[str, Any]:
        """Return the job once its status is terminal."""

        def found() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["status"] in ENDED else None

        return until(found, timeout, what=f"job {job_id} to end")

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON at a path of the first dispatcher, which must answer 2xx."""
        answer = self.http.get(path)
        assert answer.is_success, f"{answer.status_code}: {answer.text}"
        found: dict[str, Any] = answer.json()
        return found

    def record(self, job_id: int | None = None) -> list[RecordLine]:
        """Return what the recording handlers noted, or their lines for one job."""
        return [line for line in read_record(self.record_file) if job_id in (None, line.job_id)]

    def close(self) -> None:
        """Kill all that runs; raises `ProcessesLeft` (and kills them) if anything outlives it."""
        self.http.close()
        for service in self.services.values():
            service.kill()
        try:
            until(lambda: not self._strays(), 20, what="the platform's processes to be gone")
        except TimeoutError:
            left = self._strays()
            told = [f"{stray.pid} {' '.join(stray.cmdline())}" for stray in left]
            for stray in left:
                stray.kill()
            raise ProcessesLeft(f"outlived the platform: {told}") from None

    def _launch(
        self, name: str, command: list[str], port: int, own: Mapping[str, str], wait: bool
    ) -> Service:
        if (before := self.services.get(name)) is not None:
            before.kill()
        environment = {**self._shared_environment(), **self.environment, **own}
        as_copies = self.as_copies and environment["PYTHONPATH"] == str(ROOT)
        child = (WarmChild if as_copies else Child)(
            name,
            command if as_copies else [*_oncue(), *command],
            log=self.directory / f"{name}.log",
            environment=environment,
            directory=self.directory,  # not the checkout: a developer's .env is not the test's
        )
        self._children.append(child)
        self.services[name] = Service(child, f"http://127.0.0.1:{port}")
        return self.services[name].start(wait=wait)

    def _shared_environment(self) -> dict[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("ONCUE_")
        }
        return {
            **inherited,
            # A machine that is busy with other tests is no database that says nothing.
            "ONCUE_DATABASE_SECONDS": "60",
            **self.engine.environment,
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",
            "ONCUE_INTERNAL_TOKEN": self.internal_token,
            "ONCUE_WEBHOOK_SECRET": self.webhook_secret,
            "ONCUE_EGRESS_ALLOW": "127.0.0.0/8",
            "ONCUE_DISPATCHER_URL": ",".join(self.dispatcher_urls),
            "ONCUE_HANDLERS": HANDLERS,
            "ONCUE_TEST_RECORD": str(self.record_file),
            _TAG: self._tag,
        }

    def _sessions(self) -> set[int]:
        return {session for child in self._children for session in child.sessions}

    def _strays(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and (
                process.environ().get(_TAG) == self._tag
                # A copy has the environment of what it is a copy of, as others see it.
                or os.getsid(process.pid) in self._sessions()
            )
        except (psutil.Error, OSError):
            return False


class NewPlatform(Protocol):
    """What the fixture `new_platform` is."""

    def __call__(
        self,
        engine: Engine,
        *,
        dispatchers: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> Platform:
        """Make a platform, nothing of it running yet, that ends with the test."""


def _oncue() -> list[str]:
    script = Path(sys.executable).parent / "oncue"
    return [str(script)] if script.exists() else [sys.executable, "-m", "app.cli"]
