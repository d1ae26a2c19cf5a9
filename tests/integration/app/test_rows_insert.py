"""Inserts of many rows: whatever a text holds comes back as it was, and nothing is cut."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

from app.lifecycle.bulk import RowsInsert
from app.plumbing.json_text import Unencodable
from tests.integration.app.rig import opened, rows_of
from tests.support.engines import Engine, migrated

HOSTILE = [
    "plain",
    "it's",
    "''",
    "\\",
    "\\'",
    "\\' OR 1=1 -- ",
    "'); DROP TABLE job_label; -- ",
    "%s %(name)s %",
    ":name v.v_value",
    "line\nfeed\r\ttab\x1a",  # NUL, which SQLite cuts at, is refused at every door
    "\u00e9 \u4e2d \U0001f600 \u2028",
    "/* comment */ # -- ;",
    "?",
    "",
    "NULL",
    '`"',
]
LABELS = RowsInsert(
    table="job_label",
    columns={"job": "BIGINT", "name": "TEXT"},
    values=lambda _sqlite: {"job_id": "v.v_job", "name": "v.v_name", "value": ":value"},
    keep_first="name",
)


async def insert(engine: Engine, rows: list[dict[str, Any]], value: str = "x") -> None:
    async with opened(engine) as database:
        await database.write(lambda connection: LABELS.run(connection, rows, value=value))


async def labels(engine: Engine) -> list[tuple[int, str, str]]:
    async with opened(engine) as database:
        found = await rows_of(database, "SELECT job_id, name, value FROM job_label ORDER BY job_id")
    return [(row["job_id"], row["name"], row["value"]) for row in found]


async def test_every_text_comes_back_as_it_was(migrated_engine: Engine) -> None:
    await insert(migrated_engine, [{"job": n, "name": one} for n, one in enumerate(HOSTILE)])
    assert await labels(migrated_engine) == [(n, one, "x") for n, one in enumerate(HOSTILE)]


@pytest.mark.parametrize("value", HOSTILE)
async def test_so_does_what_is_the_same_for_all_rows(migrated_engine: Engine, value: str) -> None:
    await insert(migrated_engine, [{"job": 1, "name": "a"}, {"job": 2, "name": "b"}], value)
    assert await labels(migrated_engine) == [(1, "a", value), (2, "b", value)]


async def test_a_row_whose_key_is_taken_changes_nothing(migrated_engine: Engine) -> None:
    await insert(migrated_engine, [{"job": 1, "name": "a"}], "first")
    await insert(migrated_engine, [{"job": 1, "name": "a"}, {"job": 2, "name": "a"}], "second")
    assert await labels(migrated_engine) == [(1, "a", "first"), (2, "a", "second")]


async def test_what_does_not_fit_is_refused_whole_and_not_quoted(mariadb_engine: Engine) -> None:
    engine = migrated(mariadb_engine)
    rows = [{"job": 1, "name": "fits"}, {"job": 2, "name": "private" * 100}]
    with pytest.raises(DBAPIError, match="too long") as caught:
        await insert(engine, rows)
    assert "private" not in str(caught.value)
    assert await labels(engine) == []


async def test_what_is_not_unicode_is_refused(migrated_engine: Engine) -> None:
    with pytest.raises(Unencodable):
        await insert(migrated_engine, [{"job": 1, "name": "\ud800"}])
    assert await labels(migrated_engine) == []
