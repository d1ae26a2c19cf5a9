"""Keys that callers choose, as rows: who counts or changes what one limits holds its row.

The row of `limit_key` comes after the rows of jobs in the order of locks. `concurrency_slot` lists
the jobs that hold a concurrency key, and those that wait for it; the state of a listed job is
looked at whenever it matters, so a row too many is harmless, and none is too few: it is written
with the claim. So an end and a claim of the same key cannot miss each other: whichever is second
sees the other.

Each function is one statement, however many keys there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.lifecycle.bulk import (
    ColumnType,
    delete_by_rows,
    insert_from_rows,
    rows_json,
    select_by_rows,
)
from app.lifecycle.states import JobStatus
from app.plumbing.database import keep_first

CONCURRENCY: Final = 0
RATE: Final = 1


class Key(NamedTuple):
    """A key of a tenant."""

    tenant_id: int
    name: str


class KeysInUse(NamedTuple):
    """A page of keys: concurrency keys that are waited for, rate keys of no more use.

    `last` is (tenant, kind, name) to go on behind, None at the end.
    """

    waited_for: list[Key]
    idle_rates: list[Key]
    last: tuple[int, int, str] | None


Slots = Sequence[Mapping[str, Any]] | Sequence[RowMapping]
"""Rows that have the columns of `concurrency_slot`."""


@dataclass(slots=True)
class Holders:
    """How many jobs hold each key, the slots of those that hold it no more, who is waited for."""

    count: dict[Key, int]
    gone: list[dict[str, Any]] = field(default_factory=list)
    waited_for: set[Key] = field(default_factory=set)


KEY_COLUMNS: Final[dict[str, ColumnType]] = {"tenant_id": "BIGINT", "name": "TEXT"}
SLOT_COLUMNS: Final[dict[str, ColumnType]] = {
    **KEY_COLUMNS,
    "waits": "BIGINT",
    "turn": "BIGINT",
    "due": "BIGINT",
    "job_id": "BIGINT",
}
_LOCK: Final = {
    sqlite: insert_from_rows(
        sqlite=sqlite,
        table="limit_key",
        columns=KEY_COLUMNS,
        values={
            "tenant_id": "v.v_tenant_id",
            "kind": ":kind",
            "name": "v.v_name",
            "next_at": "0",
            "begins_at": "0",
        },
        # On MySQL the row is locked, there or not.
        keep_first=keep_first(sqlite, "limit_key.next_at"),
    )
    for sqlite in (True, False)
}
_IS_WAITED_FOR: Final = (
    "EXISTS (SELECT 1 FROM concurrency_slot AS w WHERE w.tenant_id = v.v_tenant_id "
    "AND w.name = v.v_name AND w.waits = 1)"
)
_HOLDERS: Final = {
    sqlite: select_by_rows(
        sqlite=sqlite,
        columns=KEY_COLUMNS,
        select=(
            "v.v_tenant_id AS tenant_id, v.v_name AS name, 0 AS waits, s.turn, s.due, s.job_id, "
            "j.status, j.stopping_execution_id, j.concurrency_key, "
            f"{_IS_WAITED_FOR} AS waited_for"
        ),
        join="LEFT JOIN concurrency_slot AS s ON s.tenant_id = v.v_tenant_id "
        "AND s.name = v.v_name AND s.waits = 0 LEFT JOIN job_info AS j ON j.id = s.job_id",
    )
    for sqlite in (True, False)
}
_LIST: Final = {
    sqlite: insert_from_rows(
        sqlite=sqlite,
        table="concurrency_slot",
        columns=SLOT_COLUMNS,
        values={name: f"v.v_{name}" for name in SLOT_COLUMNS},
        keep_first=keep_first(sqlite, "concurrency_slot.waits"),
    )
    for sqlite in (True, False)
}
_FORGET: Final = {
    sqlite: delete_by_rows(sqlite=sqlite, table="concurrency_slot", columns=SLOT_COLUMNS)
    for sqlite in (True, False)
}
_DROP: Final = {
    sqlite: delete_by_rows(
        sqlite=sqlite,
        table="limit_key",
        columns=KEY_COLUMNS,
        guard=f"limit_key.kind = {CONCURRENCY} AND NOT EXISTS (SELECT 1 FROM concurrency_slot AS s "
        "WHERE s.tenant_id = limit_key.tenant_id AND s.name = limit_key.name)",
    )
    for sqlite in (True, False)
}
_FORGET_RATES: Final = {
    sqlite: delete_by_rows(
        sqlite=sqlite,
        table="limit_key",
        columns=KEY_COLUMNS,
        guard=f"limit_key.kind = {RATE} AND limit_key.next_at < :before "
        "AND limit_key.begins_at < :before",
    )
    for sqlite in (True, False)
}
_PAGE: Final = text(
    "SELECT k.tenant_id, k.kind, k.name, k.next_at, k.begins_at, "
    "EXISTS (SELECT 1 FROM concurrency_slot AS s WHERE s.tenant_id = k.tenant_id "
    "AND s.name = k.name AND s.waits = 1) AS waited_for "
    "FROM limit_key AS k WHERE k.tenant_id > :tenant OR (k.tenant_id = :tenant AND "
    "(k.kind > :kind OR (k.kind = :kind AND k.name > :name))) "
    "ORDER BY k.tenant_id, k.kind, k.name LIMIT :limit"
)


def concurrency_key(row: Any) -> Key | None:
    """Return the concurrency key of a row of `job_info`, if it has one."""
    name = row["concurrency_key"]
    return None if name is None else Key(row["tenant_id"], name)


async def lock_keys(connection: AsyncConnection, keys: Sequence[Key], kind: int) -> None:
    """Lock the rows of these sorted keys; those that are not there are made."""
    await connection.execute(_LOCK[_is_sqlite(connection)], {"rows": named(keys), "kind": kind})


async def read_holders(connection: AsyncConnection, keys: Sequence[Key]) -> Holders:
    """Return who holds each of these locked keys, and which of them are waited for."""
    listed = await connection.execute(_HOLDERS[_is_sqlite(connection)], {"rows": named(keys)})
    found = Holders(dict.fromkeys(keys, 0))
    for row in listed.mappings():
        key = Key(row["tenant_id"], row["name"])
        if row["waited_for"]:
            found.waited_for.add(key)
        # One that has left the key holds it only while a run from before goes on.
        runs = row["status"] == JobStatus.RUNNING and row["concurrency_key"] == key.name
        if runs or row["stopping_execution_id"] is not None:
            found.count[key] += 1
        elif row["job_id"] is not None:
            found.gone.append({name: row[name] for name in SLOT_COLUMNS})
    return found


def slot(key: Key, row: Any, *, waits: int) -> dict[str, Any]:
    """Return the slot of a job: one that holds the key, or that waits for it in its turn."""
    return {
        **key._asdict(),
        "waits": waits,
        "turn": 9 - row["priority"] if waits else 0,
        "due": row["next_trigger_time"] if waits else 0,
        "job_id": row["id"],
    }


async def list_slots(connection: AsyncConnection, slots: Slots) -> None:
    """List jobs that hold locked keys, or wait for them."""
    if slots:
        await connection.execute(_LIST[_is_sqlite(connection)], {"rows": _sorted(slots)})


async def forget_slots(connection: AsyncConnection, slots: Slots) -> None:
    """List these no more."""
    if slots:
        await connection.execute(_FORGET[_is_sqlite(connection)], {"rows": _sorted(slots)})


async def drop_keys(connection: AsyncConnection, keys: Sequence[Key]) -> None:
    """Drop the rows of those locked concurrency keys that list nobody."""
    if keys:
        await connection.execute(_DROP[_is_sqlite(connection)], {"rows": named(keys)})


async def look_through_keys(
    connection: AsyncConnection, after: tuple[int, int, str], *, idle_before_ms: float, limit: int
) -> KeysInUse:
    """Look at `limit` keys behind one; a rate is idle if its next time is long past."""
    tenant, kind, name = after
    rows = (
        await connection.execute(
            _PAGE, {"tenant": tenant, "kind": kind, "name": name, "limit": limit}
        )
    ).all()
    last = rows[-1] if len(rows) == limit else None
    return KeysInUse(
        [
            Key(one.tenant_id, one.name)
            for one in rows
            if one.kind == CONCURRENCY and one.waited_for
        ],
        [
            Key(one.tenant_id, one.name)
            for one in rows
            if one.kind == RATE and max(one.next_at, one.begins_at) < idle_before_ms * 1000
        ],
        None if last is None else (last.tenant_id, last.kind, last.name),
    )


async def forget_rates(
    connection: AsyncConnection, keys: Sequence[Key], *, idle_before_ms: float
) -> None:
    """Forget rate keys, unless one was used meanwhile: a new one has no next time either."""
    await connection.execute(
        _FORGET_RATES[_is_sqlite(connection)],
        {"rows": named(sorted(keys)), "before": round(idle_before_ms * 1000)},
    )


def named(keys: Sequence[Key]) -> str:
    """Encode keys as the rows of a statement with `KEY_COLUMNS`."""
    return rows_json(KEY_COLUMNS, [key._asdict() for key in keys])


def _sorted(slots: Slots) -> str:
    rows = [{name: one[name] for name in SLOT_COLUMNS} for one in slots]
    return rows_json(SLOT_COLUMNS, sorted(rows, key=lambda row: tuple(row.values())))


def _is_sqlite(connection: AsyncConnection) -> bool:
    return connection.dialect.name == "sqlite"
