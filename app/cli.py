"""The `oncue` command. Each flag has an `ONCUE_*` variable; the flag wins."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from pydantic import SecretStr, ValidationError
from pydantic_settings import BaseSettings
from typer.exceptions import TyperException

from app.client import access, change, fleet, logs, look, submit, webhooks
from app.client.access import keys, tenants
from app.client.show import examples, printable
from app.client.talk import INTERRUPTED, AsJson, commands
from app.cron_commands import commands as cron_commands
from app.key_commands import DevelopmentKey, NotMade, development_key
from app.settings import Settings, is_loopback
from oncue.version import __version__

if TYPE_CHECKING:
    from app.embedded import EmbeddedValkey, UpSettings

AnySettings = TypeVar("AnySettings", bound=BaseSettings)

app = typer.Typer(
    name="oncue",
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Each file has added its commands; the help shows them in this order.
_ORDER = [one.__name__ for one in (submit, look, logs, change, webhooks, fleet, access)]
commands.registered_commands.sort(
    key=lambda one: (
        _ORDER.index(one.callback.__module__)
        if one.callback is not None and one.callback.__module__ in _ORDER
        else len(_ORDER)
    )
)
app.add_typer(commands)
app.add_typer(cron_commands)
app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")

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
FAULT = 70
TERMINATED = 128 + signal.SIGTERM
UNREAD = 128 + signal.SIGPIPE
OWN_PACKAGES = {"app", "oncue", "worker"}
FIRST_JOB = (
    '{"clientRequestId":"hello-1","jobName":"hello","jobHandler":"echo","params":{"hello":"world"}}'
)


@app.command(epilog=examples("oncue up", "oncue up --port 9000 --home /tmp/try --handlers greet"))
def up(
    port: Port = None,
    worker_port: WorkerPort = None,
    home: Annotated[
        Path | None, typer.Option(help="Where the state lives.", envvar="ONCUE_HOME")
    ] = None,
    handlers: Handlers = None,
    with_key: Annotated[
        bool,
        typer.Option(
            "--with-key",
            help="Make the development key, kept in the home, an admin's, and ask callers for one.",
            envvar="ONCUE_WITH_KEY",
        ),
    ] = False,
) -> None:
    """Run the whole platform here: database and Redis embedded, one dispatcher, one worker."""
    settings = _settings(port=port, home=home)
    _logs(settings)
    _started_by(lambda: _up(settings, worker_port, handlers or [], with_key=with_key))


@app.command(
    epilog=examples(
        "oncue dispatcher",
        "oncue dispatcher --host 0.0.0.0 --port 8080 --processes 4",
        "oncue settings",
    )
)
def dispatcher(
    host: Host = None,
    port: Port = None,
    no_dispatch: Annotated[
        bool,
        typer.Option("--no-dispatch", help="Serve the API only.", envvar="ONCUE_NO_DISPATCH"),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            help="So many dispatcher processes behind the port; ONCUE_PROCESS_PORTS gives each a "
            "port of its own besides.",
            envvar="ONCUE_PROCESSES",
            min=1,
            max=64,
        ),
    ] = None,
) -> None:
    """Run a dispatcher, or several: the API and, for the holder of a lock, dispatch."""
    settings = _settings(host=host, port=port, no_dispatch=no_dispatch or None, processes=processes)
    _logs(settings)
    if settings.processes > 1:
        sys.exit(_supervised(settings))
    from app.serve import run, serve
    from app.supervise import inherited_sockets

    sockets = inherited_sockets(os.environ)
    _started_by(lambda: run(lambda: serve(settings, sockets=sockets)))


def _supervised(settings: Settings) -> int:
    from app.supervise import CannotListen, supervise

    try:
        return supervise(
            host=settings.host,
            port=settings.port,
            processes=settings.processes,
            own_ports=settings.process_ports,
            grace_seconds=settings.grace_seconds,
            no_dispatch=settings.no_dispatch,
        )
    except CannotListen as error:
        _refuse(str(error))


@app.command(
    epilog=examples(
        "oncue worker --handlers my.module",
        "oncue worker --host 0.0.0.0 --port 8081 --handlers billing --handlers mail",
    )
)
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
    if importlib.util.find_spec("uvicorn") is None:
        raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
    # The worker shares no code with the dispatcher: this process becomes it.
    os.execve(sys.executable, [sys.executable, "-m", "worker"], environment)


@app.command(epilog=examples("oncue migrate"))
def migrate(as_json: AsJson = False) -> None:
    """Bring the database's schema up to date; nothing else needs to run."""
    from sqlalchemy.engine import make_url
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
    if as_json:
        typer.echo(json.dumps({"schemaRevision": revision}))
    else:
        where = make_url(settings.database_url).render_as_string()  # without its password
        typer.echo(f"schema revision {revision}: up to date in {where}")


@app.command(
    name="settings", epilog=examples("oncue settings", "ONCUE_PORT=9000 oncue settings --json")
)
def show_settings(as_json: AsJson = False) -> None:
    """List every setting: its variable, its value here, and what it means."""
    settings = _settings()
    own = [
        {
            "variable": f"ONCUE_{name.upper()}",
            "value": _shown(getattr(settings, name)),
            "description": field.description or "",
        }
        for name, field in type(settings).model_fields.items()
    ]
    # The worker shares no code with the dispatcher: another process tells of it.
    asked = subprocess.run(
        [sys.executable, "-m", "worker.settings"], capture_output=True, text=True, check=False
    )
    of_worker = json.loads(asked.stdout) if asked.returncode == 0 else None
    reason = asked.stderr.strip().rpartition("\n")[2]
    if as_json:
        typer.echo(json.dumps({"dispatcher": own, "worker": of_worker}, indent=2))
    else:
        _print_settings(own)
        typer.echo("\nOf the worker:" + ("" if of_worker is not None else f" {reason}"))
        _print_settings(of_worker or [])
    if of_worker is None:
        _refuse(reason)


def _print_settings(listed: list[dict[str, str]]) -> None:
    for one in listed:
        typer.echo(f"{one['variable']}={one['value']}")
        typer.echo(f"    {one['description']}")


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Oncue: jobs, on cue. `oncue up` runs the whole platform on this machine."""
    if version:
        typer.echo(f"oncue {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(REFUSED)


def main() -> NoReturn:
    """Run the command line; whatever goes wrong is told in one sentence."""
    # Until a server has its own way to end: as process 1 of a container it would not end at all.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))
    try:
        code = app(standalone_mode=False)
    except TyperException as error:
        ctx = getattr(error, "ctx", None)
        command = "oncue" if ctx is None else ctx.command_path
        sentence = " ".join(error.format_message().split()).rstrip(".")
        _say(f"{sentence}: see `{command} --help`")
        code = error.exit_code
    except SystemExit as ended:
        # So typer ends, with a 1, when who reads the output has left: no job has ended otherwise.
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        code = UNREAD
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        code = INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OWN_PACKAGES:
            raise
        _say(f"this command needs the server: pip install 'oncue[server]' ({error.msg})")
        code = REFUSED
    except Exception as error:
        if os.environ.get("ONCUE_TRACEBACK"):
            raise
        said = " ".join(str(error).split())
        _say(f"a fault of oncue: {type(error).__name__}: {said} (ONCUE_TRACEBACK=1 shows where)")
        code = FAULT
    sys.exit(code if isinstance(code, int) else 0)


async def _up_async(
    settings: Settings, own: UpSettings, valkey: EmbeddedValkey | None, key: DevelopmentKey | None
) -> None:
    from app.embedded import WorkerProcess, when_ready, worker_environment, worker_limit
    from app.serve import serve

    api_url = f"http://{settings.host}:{settings.port}"
    worker_url = f"http://127.0.0.1:{own.worker_port}"
    process = WorkerProcess(
        {
            **worker_environment(settings, own, api_url),
            "ONCUE_ADVERTISE_URL": worker_url,
        },
        limit_seconds=worker_limit(settings.grace_seconds),
    )

    async def beside(stopping: asyncio.Event) -> None:
        banner = _banner(api_url, worker_url, settings, own, key)
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


def _up(
    settings: Settings, worker_port: int | None, handlers: list[str], *, with_key: bool
) -> None:
    from app.embedded import UpSettings, embed, exclusive_home, wait_for_port
    from app.migrate import migrate as run_migrations
    from app.serve import run

    if not is_loopback(settings.host):
        _refuse("`oncue up` is for this machine alone: use `oncue dispatcher` and `oncue worker`")
    own = _read(
        UpSettings,
        {"worker_port": worker_port, "handlers": ",".join(handlers) or None},
    )
    if 0 in (settings.port, own.worker_port):
        _refuse("`oncue up` needs a --port and a --worker-port of 1 to 65535, not 0")
    # Until the servers run, either signal simply ends this process, and with it its children.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with exclusive_home(settings.home):
        settings, valkey = embed(settings)
        for busy in (settings.port, own.worker_port):
            wait_for_port(settings.host, busy, _say)
        run_migrations(settings.database_url)
        key = _development_key(settings, with_key=with_key)
        try:
            if valkey is not None:
                valkey.start()
            run(lambda: _up_async(settings, own, valkey, key))
        finally:
            if valkey is not None:
                valkey.stop()
        typer.echo("oncue: stopped")


def _development_key(settings: Settings, *, with_key: bool) -> DevelopmentKey | None:
    if settings.api_keys.get_secret_value() and not with_key:
        return None
    try:
        return development_key(settings.database_url, settings.home, wanted=with_key)
    except NotMade as error:
        _refuse(str(error))


def _banner(
    api_url: str,
    worker_url: str,
    settings: Settings,
    own: UpSettings,
    key: DevelopmentKey | None,
) -> str:
    header = ""
    if key is None:
        named = "of ONCUE_API_KEYS, and " if settings.api_keys.get_secret_value() else ""
        keys = f"those {named}of the database"
    else:
        keys = f"{key.key}   (kept in {settings.home}/api-key)"
        if key.is_asked_for:
            header = f" -H 'Authorization: Bearer {key.key}'"
        else:
            keys += (
                "\n           No key is asked for until one is made: --with-key asks for this one, "
                "`oncue keys bootstrap` makes another."
            )
    return f"""
Oncue is up.

  API      {api_url}/openapi/jobs
  Docs     {api_url}/docs
  Health   {api_url}/readyz   worker: {worker_url}/readyz
  Keys     {keys}
  State    {settings.home}/   callbacks may reach {own.egress_allow} (ONCUE_EGRESS_ALLOW)

Try:

  curl -s {api_url}/openapi/jobs -H 'Content-Type: application/json'{header} \\
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
    import structlog

    from app.serve import StartRefused

    try:
        start()
    except StartRefused as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        sys.exit(0)
    except Exception:  # noqa: BLE001 - it is logged whole, and ends the process
        # Of a server a sentence is not enough: its log tells where it broke.
        structlog.get_logger(__name__).exception("ended_by_a_fault")
        sys.exit(FAULT)


def _refuse(sentence: str) -> NoReturn:
    _say(sentence)
    sys.exit(REFUSED)


def _say(sentence: str) -> None:
    typer.echo(f"oncue: {printable(sentence)}", err=True)


def _shown(value: Any) -> str:
    if isinstance(value, SecretStr):
        return "(set)" if value.get_secret_value() else ""
    if isinstance(value, tuple):
        return ",".join(f"{item:g}" for item in value)
    if isinstance(value, dict):
        return ",".join(f"{name}={item:g}" for name, item in value.items())
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


if __name__ == "__main__":
    main()
