"""A worker inside the process of a test: what `oncue.testing.Platform` loads."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import structlog
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from oncue._platform import Opened, PlatformUnavailable, modules_for_children
from oncue.handlers import RegisteredHandler
from worker.main import create_app, http_server, listen
from worker.outside import reach_outside
from worker.parts import Parts
from worker.settings import WorkerSettings

START_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.005
LEFT_SECONDS: Final = 5.0
"""How long the end of a platform waits for threads that were told to stop."""

log = structlog.get_logger(__name__)


class _ToldSettings(WorkerSettings):
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


@asynccontextmanager
async def open_worker(
    given: Mapping[str, str], handlers: Mapping[str, RegisteredHandler]
) -> AsyncIterator[Opened]:
    """Run a worker in this event loop that offers `handlers` beside the built-in ones.

    Raises:
        PlatformUnavailable: it refuses to start.
        ValueError: a setting is not usable.
    """
    settings, unknown = _read({**given, "ONCUE_HANDLERS": ""})
    listener = listen(settings)
    settings = settings.model_copy(
        update={
            "port": listener.getsockname()[1],
            "worker_name": settings.worker_name or "worker",
            # Only a child imports anything: here the handlers are at hand.
            "handlers": modules_for_children(handlers.values()),
        }
    )
    app = create_app(
        settings,
        handlers=handlers,
        outside=lambda: replace(reach_outside(settings), exit_process=_stay),
    )
    server = http_server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    parts: Parts | None = None
    try:
        try:
            async with asyncio.timeout(START_SECONDS):
                while parts is None or parts.liveness.beat_age_seconds() is None:
                    if serving.done():
                        raise PlatformUnavailable("the worker did not start: see the log")
                    await asyncio.sleep(LOOK_SECONDS)
                    parts = getattr(app.state, "parts", None)
        except TimeoutError:
            raise PlatformUnavailable("no dispatcher has acknowledged the worker") from None
        yield Opened(settings.url, {}, unknown)
    finally:
        server.should_exit = True
        await serving
        if parts is not None:
            await _wait_for_threads(parts)


async def _wait_for_threads(parts: Parts) -> None:
    """Wait a little for runs in threads, which were told to stop, and say which go on."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(parts.held.wait_idle(), LEFT_SECONDS)
    left = sorted({one.run.job_handler for one in parts.held.running()})
    if left:
        warnings.warn(
            f"the threads of {', '.join(left)} go on after the end of the platform: "
            "a handler in a thread must look at ctx.cancelled",
            RuntimeWarning,
            stacklevel=1,
        )


def _stay(exit_code: int) -> None:
    """A test's process is not ours to end."""
    log.critical("a worker would have ended its process", exit_code=exit_code)


def _read(given: Mapping[str, str]) -> tuple[WorkerSettings, frozenset[str]]:
    """Read settings from `ONCUE_*` names; tell also which names are none of them."""
    name_of = {
        str(field.validation_alias or f"ONCUE_{name.upper()}"): name
        for name, field in WorkerSettings.model_fields.items()
    }
    known: dict[str, Any] = {
        name_of[variable]: value for variable, value in given.items() if variable in name_of
    }
    try:
        return _ToldSettings(**known), frozenset(given.keys() - name_of.keys())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        variable = name if name.startswith("ONCUE_") else f"ONCUE_{name.upper()}"
        raise ValueError(f"{variable}: {first['msg'].removeprefix('Value error, ')}") from None
