"""The first key: made in the database itself, since nobody has one yet to ask the API with."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from app.client import show
from app.client.access import keys
from app.client.talk import AsJson
from app.settings import Settings

if TYPE_CHECKING:
    from app.access.tokens import Drawn
    from app.admin.schemas import CreateKey
    from app.plumbing.database import Database

BY: Final = "command line"
REFUSED: Final = 2
DEVELOPMENT: Final = "development"


@dataclass(frozen=True, slots=True)
class DevelopmentKey:
    """A key that a home keeps for whoever works there."""

    key: str = field(repr=False)
    is_asked_for: bool
    """Whether callers need one; else any text opens the API, this one too."""


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
        typer.echo(json.dumps({"key": made["key"]} | made, indent=2))
        return
    # The whole key stands first: its prefix begins like one, and is none.
    typer.echo(f"secret    {made['key']}\nkey       {made['keyId']}\nprefix    {made['prefix']}")
    typer.echo(f"name      {made['name']}\nmay       {' '.join(made['roles'])}")
    typer.echo("Keep it now: it is not shown again. Callers send it as ONCUE_API_KEY.")


def make_key_in(database_url: str, request: CreateKey) -> dict[str, Any]:
    """Make a key of the tenant 0 in a database, and return it as the API would.

    Raises:
        NotMade: the schema is not this code's, or the database is away.
    """
    return asyncio.run(_make_key_in(database_url, request))


def development_key(database_url: str, home: Path, *, wanted: bool) -> DevelopmentKey | None:
    """Return the key that a home keeps in `api-key`; it is drawn when it is first needed.

    Is it `wanted`, it is an admin's from then on, and callers are asked for one. Else nothing is
    stored: it is for an API that is open, and None where there are keys and it is none of them.

    Raises:
        NotMade: as it says.
    """
    from app.access.tokens import Drawn, draw, read_token

    path = home / "api-key"
    if not path.exists():
        drawn = draw("caller")
    else:
        kept = path.read_text().strip()
        token = read_token(kept)
        if token is None or token.kind != "caller":
            raise NotMade(f"{path} does not hold a key: remove it, and another one is drawn")
        drawn = Drawn(token.prefix, kept)
    return asyncio.run(_development_key(database_url, path, drawn, wanted=wanted))


async def _development_key(
    database_url: str, path: Path, drawn: Drawn, *, wanted: bool
) -> DevelopmentKey | None:
    from app.access.keys import fits, has_ended
    from app.access.tokens import digest_of, draw
    from app.admin.keys import make_key
    from app.admin.schemas import CreateKey
    from app.lifecycle.api_keys import any_key, find_key
    from app.lifecycle.audit import Actor
    from app.lifecycle.tenants import DEFAULT_TENANT

    async with _opened(database_url) as database:
        found = await database.read(lambda connection: find_key(connection, drawn.prefix))
        now = await database.now()
        right = found is not None and fits(found, digest_of(drawn.key), now)
        if found is not None and right and not has_ended(found, now):
            return DevelopmentKey(drawn.key, is_asked_for=True)
        if not wanted and await database.read(lambda one: any_key(one, "caller")):
            return None
        if found is not None:
            drawn = draw("caller")  # the one that is kept was ended, or given another secret
        # Kept first: a key that is stored and that nobody knows would close the API.
        _keep(path, drawn.key)
        if wanted:
            request = CreateKey.model_validate({"name": DEVELOPMENT, "roles": ["admin"]})
            await make_key(database, Actor(BY), request, tenant_id=DEFAULT_TENANT, drawn=drawn)
    return DevelopmentKey(drawn.key, is_asked_for=wanted)


def _keep(path: Path, key: str) -> None:
    temporary = path.with_suffix(".new")
    with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:  # noqa: PTH123 - the mode must be right from the first byte
        file.write(key + "\n")
    temporary.replace(path)


async def _make_key_in(database_url: str, request: CreateKey) -> dict[str, Any]:
    from app.admin.keys import key_view, make_key
    from app.lifecycle.audit import Actor
    from app.lifecycle.tenants import DEFAULT_TENANT

    async with _opened(database_url) as database:
        stored, key = await make_key(database, Actor(BY), request, tenant_id=DEFAULT_TENANT)
        now = await database.now()
    return key_view(stored, now_ms=now) | {"key": key}


@asynccontextmanager
async def _opened(database_url: str) -> AsyncIterator[Database]:
    """Open a database whose schema is this code's.

    Raises:
        NotMade: it is not, or the database is away.
    """
    from app.lifecycle.schema import SchemaMismatch, check_schema
    from app.plumbing.database import Database, DatabaseUnavailable

    database = Database(database_url, pool_size=1)
    try:
        await check_schema(database)
        yield database
    except SchemaMismatch as error:
        raise NotMade(str(error)) from None
    except DatabaseUnavailable as error:
        where = database.url.render_as_string()
        raise NotMade(f"{where}: {error}") from None
    finally:
        await database.close()


def _refuse(sentence: str) -> NoReturn:
    print(f"oncue: {show.printable(sentence)}", file=sys.stderr)
    raise typer.Exit(REFUSED)
