"""The first key: made in the database itself, since nobody has one yet to ask the API with."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from app.client import show
from app.client.access import keys
from app.client.talk import AsJson
from app.settings import Settings

if TYPE_CHECKING:
    from app.admin.schemas import CreateKey

BY: Final = "command line"
REFUSED: Final = 2
DEVELOPMENT: Final = "development"


class NotMade(Exception):
    """No key was made; the message is one sentence for the operator."""


@keys.command(
    epilog=show.examples("oncue keys bootstrap", "oncue keys bootstrap --name ops --json")
)
def bootstrap(
    name: Annotated[str, typer.Option(help="Whose it is.")] = "bootstrap",
    as_json: AsJson = False,
) -> None:
    """Make an admin's key in ONCUE_DATABASE_URL itself; it closes an API that was open."""
    from pydantic import ValidationError

    from app.admin.schemas import CreateKey

    try:
        settings = Settings()
        request = CreateKey.model_validate({"name": name, "roles": ["admin"]})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "_".join(str(part) for part in first["loc"])
        _refuse(f"{where}: {first['msg'].removeprefix('Value error, ')}")
    try:
        made = make_key_in(settings.database_url, request)
    except NotMade as error:
        _refuse(str(error))
    if as_json:
        typer.echo(json.dumps(made, indent=2))
        return
    typer.echo(f"key       {made['keyId']}\nprefix    {made['prefix']}\nname      {made['name']}")
    typer.echo(f"may       {' '.join(made['roles'])}\nsecret    {made['key']}")
    typer.echo("Keep it now: it is not shown again. Callers send it as ONCUE_API_KEY.")


def make_key_in(database_url: str, request: CreateKey) -> dict[str, Any]:
    """Make a key of the tenant 0 in a database, and return it as the API would.

    Raises:
        NotMade: the schema is not this code's, or the database is away.
    """
    return asyncio.run(_make_key_in(database_url, request))


def development_key(database_url: str, home: Path) -> str:
    """Return the admin's key that a home keeps in `api-key`; one is made when there is none.

    Raises:
        NotMade: as it says.
    """
    from app.admin.schemas import CreateKey

    path = home / "api-key"
    if path.exists():
        return path.read_text().strip()
    request = CreateKey.model_validate({"name": DEVELOPMENT, "roles": ["admin"]})
    key: str = make_key_in(database_url, request)["key"]
    temporary = path.with_suffix(".new")
    with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:  # noqa: PTH123 - the mode must be right from the first byte
        file.write(key + "\n")
    temporary.replace(path)
    return key


async def _make_key_in(database_url: str, request: CreateKey) -> dict[str, Any]:
    from app.admin.keys import key_view, make_key
    from app.lifecycle.audit import Actor
    from app.lifecycle.schema import SchemaMismatch, check_schema
    from app.lifecycle.tenants import DEFAULT_TENANT
    from app.plumbing.database import Database, DatabaseUnavailable

    database = Database(database_url, pool_size=1)
    try:
        await check_schema(database)
        stored, key = await make_key(database, Actor(BY), request, tenant_id=DEFAULT_TENANT)
        now = await database.now()
    except SchemaMismatch as error:
        raise NotMade(str(error)) from None
    except DatabaseUnavailable as error:
        where = database.url.render_as_string()
        raise NotMade(f"{where}: {error}") from None
    finally:
        await database.close()
    return key_view(stored, now_ms=now) | {"key": key}


def _refuse(sentence: str) -> NoReturn:
    print(f"oncue: {show.printable(sentence)}", file=sys.stderr)
    raise typer.Exit(REFUSED)
