"""One INSERT, UPDATE or DELETE for many rows with different values, given as one JSON parameter.

MySQL reads the rows through JSON_TABLE, SQLite through json_each. The joined table comes
second and is reached by its key, so that only the rows named are locked (STRAIGHT_JOIN: the
optimizer would else start from an index of the table and lock ranges of it).

Rows are typed BIGINT or TEXT only: JSON_TABLE cuts what is too long for a VARCHAR with a mere
warning, while the assignment of a long TEXT to a short column is refused in strict mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import orjson
from sqlalchemy import TextClause, text

from app.plumbing.json_text import Unencodable

ColumnType = Literal["BIGINT", "TEXT"]
# Without its own character set a column takes the database's, which may not be Unicode.
_MYSQL_TYPES: Final[dict[ColumnType, str]] = {
    "BIGINT": "BIGINT",
    "TEXT": "TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
}


def update_from_rows(
    *,
    sqlite: bool,
    table: str,
    key: str,
    columns: Mapping[str, ColumnType],
    assignments: str,
    guard: str,
) -> TextClause:
    """Build `UPDATE table AS j ... FROM rows AS v` with the parameter `:rows`.

    `columns` names the fields of each row and their SQL types; `key` is the one joined to the
    table's column of that name, and `v.<field>` is used in `assignments` and `guard`. Fields
    must not be named like columns that are assigned.
    """
    source = _rows(columns, sqlite=sqlite)
    if sqlite:
        # By the row's own id and nothing else: SQLite would else begin with an index of the guard,
        # the status, and look through all rows that wait once for each row that is given.
        by_id = "NOT INDEXED " if key == "id" else ""
        return text(
            f"UPDATE {table} AS j {by_id}SET {assignments} FROM {source} AS v "
            f"WHERE j.{key} = v.v_{key} AND {guard}"
        )
    return text(
        f"UPDATE {source} AS v STRAIGHT_JOIN {table} AS j ON j.{key} = v.v_{key} "
        f"SET {assignments} WHERE {guard}"
    )


def insert_from_rows(
    *,
    sqlite: bool,
    table: str,
    columns: Mapping[str, ColumnType],
    values: Mapping[str, str],
    keep_first: str = "",
    join: str = "",
) -> TextClause:
    """Build `INSERT INTO table (...) SELECT ... FROM rows AS v` with the parameter `:rows`.

    `columns` names the fields of each row and their SQL types; `values` gives for each column
    of the table its expression over `v.v_<field>`, and over what `join` adds to the rows. Rows
    whose key is taken change nothing.
    """
    # SQLite takes ON CONFLICT for a join condition unless the SELECT has a WHERE.
    return text(
        f"INSERT INTO {table} ({', '.join(values)}) SELECT {', '.join(values.values())} "
        f"FROM {_rows(columns, sqlite=sqlite)} AS v {join} WHERE 1 = 1 {keep_first}"
    )


def delete_by_rows(
    *, sqlite: bool, table: str, columns: Mapping[str, ColumnType], guard: str = "1 = 1"
) -> TextClause:
    """Build the DELETE of the rows of `table` whose `columns` are those of a row of `:rows`.

    `columns` are the first ones of a key of the table; `guard` may use `<table>.<column>`.
    """
    source = _rows(columns, sqlite=sqlite)
    if sqlite:
        fields = ", ".join(f"v_{name}" for name in columns)
        return text(
            f"DELETE FROM {table} WHERE ({', '.join(columns)}) IN (SELECT {fields} FROM {source}) "
            f"AND {guard}"
        )
    same = " AND ".join(f"{table}.{name} = v.v_{name}" for name in columns)
    return text(f"DELETE {table} FROM {source} AS v STRAIGHT_JOIN {table} ON {same} WHERE {guard}")


def select_by_rows(
    *, sqlite: bool, columns: Mapping[str, ColumnType], select: str, join: str
) -> TextClause:
    """Build `SELECT select FROM rows AS v join` with the parameter `:rows`."""
    return text(f"SELECT {select} FROM {_rows(columns, sqlite=sqlite)} AS v {join}")


def _rows(columns: Mapping[str, ColumnType], *, sqlite: bool) -> str:
    # Rows are arrays: a value is found by its place much sooner than by its name.
    if sqlite:
        fields = ", ".join(
            f"json_extract(value, '$[{place}]') AS v_{name}" for place, name in enumerate(columns)
        )
        return f"(SELECT {fields} FROM json_each(:rows))"
    fields = ", ".join(
        f"v_{name} {_MYSQL_TYPES[kind]} PATH '$[{place}]'"
        for place, (name, kind) in enumerate(columns.items())
    )
    return f"JSON_TABLE(:rows, '$[*]' COLUMNS ({fields}))"


def rows_json(columns: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Encode rows for `:rows` of a statement that was built with the same `columns`.

    Order the rows by key first, which is the order of the locks.

    Raises:
        Unencodable: a text is not Unicode, or a number has more than 64 bits.
        KeyError: a row lacks a column.
    """
    names = tuple(columns)
    try:
        return orjson.dumps([[row[name] for name in names] for row in rows]).decode()
    except orjson.JSONEncodeError as error:
        raise Unencodable(str(error)) from None
