"""The `oncue` command. Each flag has an `ONCUE_*` variable; the flag wins."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from pydantic import SecretStr, ValidationError
from pydantic_settings import BaseSettings

from app import client_logs  # noqa: F401 - adds its command
from app.client_commands import commands
from app.settings import Settings, is_loopback

if TYPE_CHECKING:
    from app.embedded import EmbeddedValkey, UpSettings

AnySettings = TypeVar("AnySettings", bound=BaseSettings)

app = typer.Typer(
    name="oncue",
    help="Oncue: jobs, on cue. `oncue up` runs the whole platform on this machine.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(commands)

Host = Annotated[str | None, typer.Option(help="Address to listen on.", envvar="ONCUE_HOST")]
Port = Annotated[
    int | None, typer.Option(help="Port of the dispatcher.", envvar="ONCUE_PORT", min=0, max=65535)
]
WorkerPort = Annotated[
    int | None,
    typer.Option(help="Port of the worker.", envvar="ONCUE_WORKER_PORT", min=0, max=65535),
]
Handlers = Annotated[
    list[str] | None,
    typer.Option(help="Module with @handler functions; may be repeated.", envvar="ONCUE_HANDLERS"),
]

REFUSED = 2
FIRST_JOB = (
    '{"clientRequestId":"hello-1","jobName":"hello","jobHandler":"echo","params":{"hello":"world"}}'
)


@app.command()
def up(
    port: Port = None,
    worker_port: WorkerPort = None,
    home: Annotated[
        Path | None, typer.Option(help="Where the state lives.", envvar="ONCUE_HOME")
    ] = None,
    handlers: Handlers = None,
) -> None:
    """Run the whole platform here: database and Redis embedded, one dispatcher, one worker."""
    settings = _settings(port=port, home=home)
    _logs(settings)
    _started_by(lambda: _up(settings, worker_port, handlers or []))


@app.command()
def dispatcher(
    host: Host = None,
    port: Port = None,
    no_dispatch: Annotated[
        bool,
        typer.Option("--no-dispatch", help="Serve the API only.", envvar="ONCUE_NO_DISPATCH"),
    ] = False,
) -> None:
    """Run a dispatcher: the API and, for the holder of the lock, dispatch."""
    settings = _settings(host=host, port=port, no_dispatch=no_dispatch or None)
    _logs(settings)
    from app.serve import run, serve

    _started_by(lambda: run(lambda: serve(settings)))


@app.command()
def worker(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", envvar="ONCUE_WORKER_HOST")
    ] = None,
    port: WorkerPort = None,
    handlers: Handlers = None,
) -> None:
    """Run a worker: it takes runs, runs handlers, reports, and delivers callbacks."""
    environment = dict(os.environ)
    if host is not None:
        environment["ONCUE_WORKER_HOST"] = host
    if port is not None:
        environment["ONCUE_WORKER_PORT"] = str(port)
    if handlers:
        environment["ONCUE_HANDLERS"] = ",".join(handlers)
    # The worker shares no code with the dispatcher: this process becomes it.
    os.execve(sys.executable, [sys.executable, "-m", "worker"], environment)


@app.command()
def migrate() -> None:
    """Bring the database's schema up to date; nothing else needs to run."""
    from sqlalchemy.exc import SQLAlchemyError

    from app.migrate import MigrationBusy
    from app.migrate import migrate as run_migrations

    settings = _settings()
    try:
        revision = run_migrations(settings.database_url)
    except MigrationBusy as error:
        _refuse(str(error))
    except SQLAlchemyError as error:
        _refuse(f"the database refuses: {getattr(error, 'orig', None) or error}")
    typer.echo(f"schema revision {revision}: up to date")


@app.command(name="settings")
def show_settings() -> None:
    """List every setting: its variable, its value here, and what it means."""
    settings = _settings()
    fields: list[tuple[str, str, str]] = [
        (name, _shown(getattr(settings, name)), field.description or "")
        for name, field in type(settings).model_fields.items()
    ]
    for name, value, description in fields:
        typer.echo(f"ONCUE_{name.upper()}={value}")
        if description:
            typer.echo(f"    {description}")
    typer.echo("\nOf the worker:")
    for name, description in WORKER_SETTINGS.items():
        typer.echo(f"{name}={'(set)' if _is_secret(name) else ''}{_environment(name)}")
        typer.echo(f"    {description}")


WORKER_SETTINGS = {
    "ONCUE_DISPATCHER_URL": "dispatchers, a comma list; the next is tried when one fails",
    "ONCUE_ADVERTISE_URL": "the worker's address as dispatchers reach it; http://host:port",
    "ONCUE_WORKER_NAME": "its name; host name and port",
    "ONCUE_WORKER_HOST": "address to listen on; 127.0.0.1",
    "ONCUE_WORKER_PORT": "port to listen on; 8081",
    "ONCUE_WORKER_CAPACITY": "runs at once; 32",
    "ONCUE_WORKER_WEIGHT": "its share of the load relative to others; 1",
    "ONCUE_WORKER_LABELS": "name=value,...: what `worker.NAME` labels of jobs ask for",
    "ONCUE_HANDLERS": "modules with @handler functions, a comma list",
    "ONCUE_WEBHOOK_SECRET": "whsec_...: signs callbacks; without it the worker delivers none",
    "ONCUE_EGRESS_ALLOW": "networks that callbacks may reach besides public ones",
}


def main() -> None:
    """Run the command line."""
    app()


async def _up_async(settings: Settings, own: UpSettings, valkey: EmbeddedValkey | None) -> None:
    from app.embedded import WorkerProcess, load_secrets, when_ready
    from app.serve import serve

    secret = own.webhook_secret
    api_url = f"http://{settings.host}:{settings.port}"
    worker_url = f"http://127.0.0.1:{own.worker_port}"
    process = WorkerProcess(
        {
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
            "ONCUE_ADVERTISE_URL": worker_url,
            "ONCUE_HANDLERS": own.handlers,
        }
    )

    async def beside(stopping: asyncio.Event) -> None:
        banner = _banner(api_url, worker_url, settings, own)
        ready = asyncio.create_task(
            when_ready(
                [f"{api_url}/readyz", f"{worker_url}/readyz"],
                stopping,
                lambda: typer.echo(banner),
            )
        )
        watch = None if valkey is None else asyncio.create_task(valkey.keep_running(stopping))
        try:
            await process.keep_running(stopping)
            if watch is not None:
                await watch
        finally:
            ready.cancel()

    await serve(settings, beside=beside)


def _up(settings: Settings, worker_port: int | None, handlers: list[str]) -> None:
    from app.embedded import (
        EmbeddedValkey,
        UpSettings,
        exclusive_home,
        load_secrets,
        wait_for_port,
    )
    from app.migrate import migrate as run_migrations
    from app.serve import run

    if not is_loopback(settings.host):
        _refuse("`oncue up` is for this machine alone: use `oncue dispatcher` and `oncue worker`")
    own = _read(
        UpSettings,
        {"worker_port": worker_port, "handlers": ",".join(handlers) or None},
    )
    # Until the servers run, either signal simply ends this process, and with it its children.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with exclusive_home(settings.home):
        changes: dict[str, Any] = {}
        if not settings.internal_token.get_secret_value():
            changes["internal_token"] = SecretStr(load_secrets(settings.home).internal_token)
        if "database_url" not in settings.model_fields_set:
            path = settings.home.resolve() / "oncue.db"
            changes["database_url"] = f"sqlite+aiosqlite:///{path}"
        valkey = None
        if "redis_url" not in settings.model_fields_set:
            valkey = EmbeddedValkey(settings.home)
            changes["redis_url"] = valkey.url
        settings = settings.model_copy(update=changes)
        for busy in (settings.port, own.worker_port):
            wait_for_port(settings.host, busy)
        run_migrations(settings.database_url)
        try:
            if valkey is not None:
                valkey.start()
            run(lambda: _up_async(settings, own, valkey))
        finally:
            if valkey is not None:
                valkey.stop()
        typer.echo("oncue: stopped")


def _banner(api_url: str, worker_url: str, settings: Settings, own: UpSettings) -> str:
    return f"""
Oncue is up.

  API      {api_url}/openapi/jobs
  Docs     {api_url}/docs
  Health   {api_url}/readyz   worker: {worker_url}/readyz
  State    {settings.home}/   callbacks may reach {own.egress_allow} (ONCUE_EGRESS_ALLOW)

Try:

  curl -s {api_url}/openapi/jobs -H 'Content-Type: application/json' \\
    -d '{FIRST_JOB}'

Ctrl-C stops it.
"""


def _settings(**flags: Any) -> Settings:
    return _read(Settings, flags)


def _read(kind: type[AnySettings], flags: dict[str, Any]) -> AnySettings:
    """Read settings; flags that are None were not given. A bad value ends the command."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = "_".join(str(part) for part in first["loc"])
        prefix = f"ONCUE_{name.upper()}: " if name else ""
        _refuse(prefix + first["msg"].removeprefix("Value error, "))


def _logs(settings: Settings) -> None:
    from app.logs import configure_logs

    configure_logs(settings.log_level, as_json=settings.log_json)


def _started_by(start: Any) -> None:
    from app.serve import StartRefused

    try:
        start()
    except StartRefused as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        sys.exit(0)


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"oncue: {sentence}", err=True)
    sys.exit(REFUSED)


def _shown(value: Any) -> str:
    if isinstance(value, SecretStr):
        return "(set)" if value.get_secret_value() else ""
    if isinstance(value, tuple):
        return ",".join(f"{item:g}" for item in value)
    text = str(value)
    return "" if value is None else _without_password(text)


def _without_password(address: str) -> str:
    """Show an address without what may be secret in it; one that cannot be read is not shown."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    if "://" not in address:
        return address
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):
        return "(set)"
    secret = [name for name in url.query if "pass" in name.lower() or "secret" in name.lower()]
    return url.update_query_dict(dict.fromkeys(secret, "***")).render_as_string()


def _is_secret(name: str) -> bool:
    return name == "ONCUE_WEBHOOK_SECRET" and bool(os.environ.get(name))


def _environment(name: str) -> str:
    return "" if name == "ONCUE_WEBHOOK_SECRET" else os.environ.get(name, "")
