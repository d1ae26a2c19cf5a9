"""The schema: one history for both dialects, safe to run at once, checked at every start."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, event
from sqlalchemy.engine import Engine as AnyEngine
from sqlalchemy.engine import make_url

from app.lifecycle.schema import SchemaMismatch, check_schema
from app.lifecycle.tables import SCHEMA_REVISION, metadata
from app.migrate import migrate
from tests.integration.app.rig import change, opened, rows_of, value_of
from tests.support.engines import Engine

ROOT = Path(__file__).parents[3]


def differences(engine: Engine) -> list[Any]:
    """Compare the database's schema with the one that the code is written for."""
    url = make_url(engine.database_url)
    driver = "sqlite+pysqlite" if url.get_backend_name() == "sqlite" else "mysql+pymysql"
    connectable = create_engine(url.set(drivername=driver))
    try:
        with connectable.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            return list(compare_metadata(context, metadata))
    finally:
        connectable.dispose()


def test_the_migrated_schema_is_the_one_in_the_code(migrated_engine: Engine) -> None:
    assert differences(migrated_engine) == []


async def test_migrating_again_changes_nothing(migrated_engine: Engine) -> None:
    async with opened(migrated_engine) as database:
        await change(database, "UPDATE dispatch_term SET term = 41")
        migrate(migrated_engine.database_url)
        assert await value_of(database, "SELECT term FROM dispatch_term") == 41
    assert differences(migrated_engine) == []


async def test_migrations_that_start_at_once_do_the_work_once(engine: Engine) -> None:
    program = "import sys; from app.migrate import migrate; migrate(sys.argv[1])"

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, engine.database_url],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    with ThreadPoolExecutor(4) as pool:
        done = [one.result() for one in [pool.submit(run) for _ in range(4)]]
    assert [one.returncode for one in done] == [0] * 4, [one.stderr for one in done]
    async with opened(engine) as database:
        await check_schema(database)
        assert len(await rows_of(database, "SELECT * FROM dispatch_term")) == 1
    assert differences(engine) == []


def test_a_migration_is_committed_before_the_next_may_begin(engine: Engine) -> None:
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        statements.append(statement.split("(", maxsplit=1)[0])

    def note_commit(_connection: Any) -> None:
        statements.append("COMMIT")

    event.listen(AnyEngine, "before_cursor_execute", note)
    event.listen(AnyEngine, "commit", note_commit)
    try:
        migrate(engine.database_url)
    finally:
        event.remove(AnyEngine, "before_cursor_execute", note)
        event.remove(AnyEngine, "commit", note_commit)
    changes = [at for at, one in enumerate(statements) if not one.startswith("SELECT")]
    assert statements[changes[-1]] == "COMMIT"
    if engine.database_url.startswith("mysql"):
        assert statements.index("SELECT GET_LOCK") < changes[0]
        assert statements[-1] == "SELECT RELEASE_LOCK"
    else:
        assert statements[0] == "BEGIN IMMEDIATE"


@pytest.mark.parametrize(
    ("revision", "oldest_code", "words"),
    [
        (SCHEMA_REVISION - 1, 0, "run `oncue migrate`"),
        (SCHEMA_REVISION + 2, SCHEMA_REVISION + 1, "upgrade this process"),
    ],
)
async def test_another_schema_is_refused_with_what_to_do(
    migrated_engine: Engine, revision: int, oldest_code: int, words: str
) -> None:
    async with opened(migrated_engine) as database:
        await change(
            database,
            "UPDATE schema_revision SET revision = :revision, oldest_code = :oldest_code",
            revision=revision,
            oldest_code=oldest_code,
        )
        with pytest.raises(SchemaMismatch, match=words):
            await check_schema(database)


async def test_a_later_schema_that_still_accepts_this_code_is_accepted(
    migrated_engine: Engine,
) -> None:
    async with opened(migrated_engine) as database:
        await change(database, "UPDATE schema_revision SET revision = revision + 1")
        await check_schema(database)


async def test_an_empty_database_is_refused_with_what_to_do(engine: Engine) -> None:
    async with opened(engine) as database:
        with pytest.raises(SchemaMismatch, match="run `oncue migrate`"):
            await check_schema(database)
