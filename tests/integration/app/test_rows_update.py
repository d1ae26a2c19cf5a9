"""Updates of many rows by their ids: each gets its own values, and none is made by it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from app.lifecycle.bulk import RowNotThere, RowsUpdate
from app.lifecycle.tables import webhook_secret
from app.plumbing.json_text import Unencodable
from tests.integration.app.rig import opened, rows_of
from tests.integration.app.test_rows_insert import HOSTILE
from tests.support.engines import Engine, migrated

CHANGE = RowsUpdate(
    table=webhook_secret,
    columns={"sealed": "TEXT", "shown": "TEXT", "expires_at": "BIGINT"},
    same={"created_at": "j.created_at + 1", "tenant_id": ":tenant"},
)


async def keep(engine: Engine, count: int) -> None:
    """Store rows with the ids from 1 to `count`."""
    async with opened(engine) as database:
        await database.write(
            lambda connection: connection.execute(
                text(
                    "INSERT INTO webhook_secret (id, tenant_id, sealed, shown, created_at) "
                    "VALUES (:id, 0, 'before', 'before', 7)"
                ),
                [{"id": number} for number in range(1, count + 1)],
            )
        )


async def change(engine: Engine, rows: list[dict[str, Any]], tenant: int = 5) -> None:
    async with opened(engine) as database:
        await database.write(lambda connection: CHANGE.run(connection, rows, tenant=tenant))


async def stored(engine: Engine) -> list[tuple[Any, ...]]:
    async with opened(engine) as database:
        found = await rows_of(database, "SELECT * FROM webhook_secret ORDER BY id")
    return [tuple(row.values()) for row in found]


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "sealed": "after", "shown": "after", "expires_at": None, **more}


async def test_every_row_gets_its_own_values_and_the_same_for_all(migrated_engine: Engine) -> None:
    await keep(migrated_engine, len(HOSTILE) + 1)
    rows = [
        row(number, sealed=one, expires_at=None if number % 2 else number)
        for number, one in enumerate(HOSTILE, 1)
    ]
    await change(migrated_engine, rows[::-1])
    assert await stored(migrated_engine) == [
        *((one["id"], 5, one["sealed"], "after", 8, one["expires_at"]) for one in rows),
        (len(HOSTILE) + 1, 0, "before", "before", 7, None),
    ]


async def test_a_row_that_is_not_there_is_not_made_and_no_other_changes(
    migrated_engine: Engine,
) -> None:
    await keep(migrated_engine, 2)
    before = await stored(migrated_engine)
    with pytest.raises(RowNotThere):
        await change(migrated_engine, [row(1), row(3)])
    with pytest.raises(RowNotThere):
        await change(migrated_engine, [row(4)])
    assert await stored(migrated_engine) == before


def test_mysql_is_told_the_new_row_by_a_name() -> None:
    """There `VALUES(column)` is a warning each time, for which the drivers ask."""
    ends = CHANGE._ends
    assert ends[False].startswith(" AS new_row ON DUPLICATE KEY UPDATE sealed = new_row.sealed, ")
    assert "created_at = webhook_secret.created_at + 1" in ends[False]
    assert "VALUES(" not in ends[False]
    assert ends[True].startswith(" ON DUPLICATE KEY UPDATE sealed = VALUES(sealed), ")


async def test_what_does_not_fit_is_refused_whole_and_not_quoted(mariadb_engine: Engine) -> None:
    engine = migrated(mariadb_engine)
    await keep(engine, 2)
    before = await stored(engine)
    with pytest.raises(DBAPIError, match="too long") as caught:
        await change(engine, [row(1), row(2, shown="private" * 100)])
    assert "private" not in str(caught.value)
    assert await stored(engine) == before


async def test_what_is_not_unicode_is_refused(migrated_engine: Engine) -> None:
    await keep(migrated_engine, 1)
    before = await stored(migrated_engine)
    with pytest.raises(Unencodable):
        await change(migrated_engine, [row(1, sealed="\ud800")])
    assert await stored(migrated_engine) == before
