"""A dispatcher inside the process of a test: what `oncue.testing.Platform` loads."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from app.embedded import EmbeddedValkey, UpSettings, embed, worker_environment
from app.main import create_app
from app.migrate import migrate
from app.serve import StartRefused, http_server
from app.settings import Settings
from oncue._platform import Opened, PlatformUnavailable

START_SECONDS: Final = 30.0

AnySettings = TypeVar("AnySettings", bound=BaseSettings)


class _Told:
    """Settings that come from arguments alone: no environment, no `.env`."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class _ToldSettings(_Told, Settings):
    """A dispatcher's."""


class _ToldUpSettings(_Told, UpSettings):
    """What a dispatcher passes on to its worker."""


@asynccontextmanager
async def open_dispatcher(home: Path, given: Mapping[str, str]) -> AsyncIterator[Opened]:
    """Run a dispatcher in this event loop, with its database and Valkey in `home`.

    Raises:
        PlatformUnavailable: it refuses to start.
        ValueError: a setting is not usable.
    """
    told_settings, unknown = _read(_ToldSettings, {**given, "ONCUE_HOME": str(home)})
    own, _ = _read(_ToldUpSettings, given)
    settings, valkey = embed(told_settings)
    with _logs_to_logging(), socket.create_server((settings.host, 0)) as listener:
        url = f"http://{settings.host}:{listener.getsockname()[1]}"
        try:
            migrate(settings.database_url)
            if valkey is not None:
                valkey.start()
        except StartRefused as error:
            raise PlatformUnavailable(str(error)) from None
        with _ended_with_us(valkey, home):
            async with _serving(settings, listener):
                told = {**worker_environment(settings, own, url), "ONCUE_WORKER_PORT": "0"}
                yield Opened(url, told, unknown)


@asynccontextmanager
async def _serving(settings: Settings, listener: socket.socket) -> AsyncIterator[None]:
    """Serve and dispatch, from when the lock is held until left."""
    app = create_app(settings)
    server = http_server(app, settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    holding = asyncio.create_task(app.state.parts.lock.changed.wait())
    try:
        await asyncio.wait(
            {serving, holding}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if not holding.done():
            raise PlatformUnavailable("the dispatcher did not start: see the log")
        yield
    finally:
        holding.cancel()
        server.should_exit = True
        await serving


@contextmanager
def _ended_with_us(valkey: EmbeddedValkey | None, home: Path) -> Iterator[None]:
    """Stop the Valkey and be done; a watch does so, and removes the home, should we be killed."""
    if valkey is None:
        yield
        return
    # It reads until our end of the pipe closes, however this process ends.
    watch = subprocess.Popen(
        [
            *("/bin/sh", "-c", 'read -r _; kill -9 "$0"; rm -rf -- "$@"'),
            *(str(valkey.pid), str(home), str(valkey.socket)),
        ],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watch.kill()
        watch.wait()
        if watch.stdin is not None:
            watch.stdin.close()
        valkey.stop()


def _read(kind: type[AnySettings], given: Mapping[str, str]) -> tuple[AnySettings, frozenset[str]]:
    """Read settings from `ONCUE_*` names; tell also which names are none of them."""
    name_of = {f"ONCUE_{name.upper()}": name for name in kind.model_fields}
    known: dict[str, Any] = {
        name_of[variable]: value for variable, value in given.items() if variable in name_of
    }
    try:
        return kind(**known), frozenset(given.keys() - name_of.keys())
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]
        variable = f"ONCUE_{'_'.join(str(part) for part in first['loc']).upper()}"
        raise ValueError(f"{variable}: {first['msg'].removeprefix('Value error, ')}") from None


def _as_a_log_record(
    _logger: Any, _name: str, event: MutableMapping[str, Any]
) -> tuple[tuple[str], dict[str, Any]]:
    """Write the event and its fields in one line, and leave a traceback to `logging`."""
    trace = event.pop("exc_info", None)
    words = [str(event.pop("event", "")), *(f"{name}={value!r}" for name, value in event.items())]
    return (" ".join(words),), {"exc_info": trace}


_configured_lock = threading.Lock()
_configured_count = 0


@contextmanager
def _logs_to_logging() -> Iterator[None]:
    """Send the platform's logs to `logging`, unless the process has set structlog up itself.

    Several platforms may run: the last one puts it back.
    """
    global _configured_count  # noqa: PLW0603 - structlog's configuration is global, too
    with _configured_lock:
        ours = _configured_count > 0 or not structlog.is_configured()
        if ours:
            _configured_count += 1
            structlog.configure(
                processors=[
                    structlog.contextvars.merge_contextvars,
                    structlog.stdlib.filter_by_level,
                    _as_a_log_record,
                ],
                logger_factory=structlog.stdlib.LoggerFactory(),
                wrapper_class=structlog.stdlib.BoundLogger,
            )
    try:
        yield
    finally:
        with _configured_lock:
            if ours:
                _configured_count -= 1
                if _configured_count == 0:
                    structlog.reset_defaults()
