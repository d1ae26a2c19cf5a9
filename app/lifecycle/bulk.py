"""One INSERT, UPDATE or DELETE for many rows with different values.

The rows are one JSON parameter: MySQL reads them through JSON_TABLE, SQLite through json_each. The
joined table comes second and is reached by its key, so that only the rows named are locked
(STRAIGHT_JOIN: the optimizer would else start from an index of the table and lock ranges of it).
What is only inserted is written into the statement for MySQL, which reads that in half the time;
so is what is updated by the id of rows that are locked, where MySQL else fills temporary tables.

Rows are typed BIGINT or TEXT only: JSON_TABLE cuts what is too long for a VARCHAR with a mere
warning, while the assignment of a long TEXT to a short column is refused in strict mode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import orjson
from sqlalchemy import Column, CursorResult, String, Table, TextClause, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.plumbing.database import keep_first as keep
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
    index: str = "",
) -> TextClause:
    """Build `UPDATE table AS j ... FROM rows AS v` with the parameter `:rows`.

    `columns` names the fields of each row and their SQL types; `key` is the one joined to the
    table's column of that name, and `v.<field>` is used in `assignments` and `guard`. Fields
    must not be named like columns that are assigned. `index` is that of the key, for MySQL, which
    may walk a small table instead.
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
    hint = f"FORCE INDEX ({index}) " if index else ""
    return text(
        f"UPDATE {source} AS v STRAIGHT_JOIN {table} AS j {hint}ON j.{key} = v.v_{key} "
        f"SET {assignments} WHERE {guard}"
    )


class RowsInsert:
    """INSERT INTO table of many rows by one statement; a row whose key is taken changes nothing.

    `columns` names the fields of each row and their SQL types; `values` gives for each column of
    the table, by whether the database is SQLite, its expression over `v.v_<field>` and over
    `:<name>`, which is the same for all rows. `keep_first` is a column for the function of that
    name, or empty where a taken key is an error.
    """

    def __init__(
        self,
        *,
        table: str,
        columns: Mapping[str, ColumnType],
        values: Callable[[bool], Mapping[str, str]],
        keep_first: str = "",
    ) -> None:
        ends = {sqlite: keep(sqlite, keep_first) if keep_first else "" for sqlite in (True, False)}
        self._columns = columns
        self._from_json = insert_from_rows(
            sqlite=True,
            table=table,
            columns=columns,
            values=values(True),
            keep_first=ends[True],
        )
        own = values(False)
        self._head = f"INSERT INTO {table} ({', '.join(own)}) VALUES "
        self._end = f" {ends[False]}"
        expressions = ", ".join(own.values()).replace("%", "%%")
        self._row = f"({_PLACE.sub('%s', expressions)})"
        self._places = [field or name for field, name in _PLACE.findall(expressions)]

    async def run(
        self,
        connection: AsyncConnection,
        rows: Sequence[Mapping[str, Any]],
        **same: int | str | None,
    ) -> None:
        """Insert the rows, one or more, in their order; `same` has what is the same for all.

        Raises:
            Unencodable: a text is not Unicode.
            KeyError: a row lacks a column.
        """
        if connection.dialect.name == "sqlite":
            given = {"rows": rows_json(self._columns, rows), **same}
            await connection.execute(self._from_json, given)
            return
        shared = {name: _literal(value) for name, value in same.items()}
        lines = [
            self._row
            % tuple(
                [shared[name] if name in shared else _literal(row[name]) for name in self._places]
            )
            for row in rows
        ]
        await _execute_written(connection, self._head, lines, self._end)


class RowNotThere(Exception):
    """A row that was to be updated is not there, or is so already; nothing may be committed."""


class RowsUpdate:
    """UPDATE of rows of `table` by their ids: of rows that this transaction found and has locked.

    `columns` names those that differ from row to row, and their SQL types, which are the fields of
    each row too, beside `id`. `same` gives for others their expression over the row, `j.<column>`,
    and over `:<name>`, which is the same for all. Each row must change by it, as a version does.

    For MySQL it is an INSERT of ids that are taken: an UPDATE that joins rows writes them, the
    table's values and the new ones into a temporary table first, on disk where they are texts.
    """

    def __init__(
        self, *, table: Table, columns: Mapping[str, ColumnType], same: Mapping[str, str]
    ) -> None:
        self._name = table.name
        self._fields: dict[str, ColumnType] = {"id": "BIGINT", **columns}
        assigned = {**{name: f"v.v_{name}" for name in columns}, **same}
        self._from_json = update_from_rows(
            sqlite=True,
            table=table.name,
            key="id",
            columns=self._fields,
            assignments=", ".join(f"{name} = {value}" for name, value in assigned.items()),
            guard="1 = 1",
        )
        # Never stored: an id that is not taken is an error.
        needed = [
            one
            for one in table.columns
            if not one.nullable and one.server_default is None and one.name not in self._fields
        ]
        names = [*self._fields, *(one.name for one in needed)]
        filled = "".join(f", {_filler(one)}" for one in needed)
        self._head = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES "
        self._row = f"({', '.join(['%s'] * len(self._fields))}{filled})"
        self._ends = {
            mariadb: _ending(table.name, columns, same, mariadb=mariadb)
            for mariadb in (True, False)
        }

    async def run(
        self,
        connection: AsyncConnection,
        rows: Sequence[Mapping[str, Any]],
        **same: int | str | None,
    ) -> None:
        """Update the rows, one or more, in the order of their ids.

        Raises:
            RowNotThere: one is not there, or would not change.
            Unencodable: a text is not Unicode.
            KeyError: a row lacks a column.
        """
        in_order = sorted(rows, key=lambda row: int(row["id"]))
        if connection.dialect.name == "sqlite":
            given = {"rows": rows_json(self._fields, in_order), **same}
            done = await connection.execute(self._from_json, given)
            expected = len(in_order)
        else:
            lines = [
                self._row % tuple([_literal(row[name]) for name in self._fields])
                for row in in_order
            ]
            mariadb = bool(getattr(connection.dialect, "is_mariadb", False))
            end = _PLACE.sub(lambda found: _literal(same[found[2]]), self._ends[mariadb])
            done = await _execute_written(connection, self._head, lines, end)
            # A row that is changed counts twice, one that is inserted or stays as it was once.
            expected = 2 * len(in_order)
        if done.rowcount != expected:
            raise RowNotThere(f"{self._name}: {done.rowcount} in place of {expected}")


def _ending(table: str, columns: Iterable[str], same: Mapping[str, str], *, mariadb: bool) -> str:
    """Write what becomes of a row whose id is taken.

    MySQL (8.0.19) names the new row; its older word for that, the only one that MariaDB knows, is
    a warning to it for each column, and each of our drivers asks for warnings.
    """
    own = {name: expression.replace("j.", f"{table}.") for name, expression in same.items()}
    new, named = ("VALUES({})", "") if mariadb else ("new_row.{}", " AS new_row")
    taken = {**{name: new.format(name) for name in columns}, **own}
    changes = ", ".join(f"{name} = {value}" for name, value in taken.items())
    return f"{named} ON DUPLICATE KEY UPDATE {changes}"


def _filler(column: Column[Any]) -> str:
    """Write a value that a column takes which may not be NULL."""
    return "''" if isinstance(column.type, String) else "0"


async def _execute_written(
    connection: AsyncConnection, head: str, lines: Sequence[str], end: str
) -> CursorResult[Any]:
    """Execute a statement that has its rows in it; an error tells nothing of them."""
    try:
        return await connection.exec_driver_sql(
            head + ", ".join(lines) + end, execution_options={"no_parameters": True}
        )
    except DBAPIError as error:
        # Its text goes to the logs, where nobody's params belong.
        error.statement = f"{head}... ({len(lines)} rows)"
        raise


_PLACE: Final = re.compile(r"v\.v_(\w+)|:(\w+)")


def _literal(value: int | str | None) -> str:
    """Write a value as MySQL reads it, whatever its mode says of backslashes.

    Raises:
        Unencodable: the text is not Unicode.
    """
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(int(value))
    if "'" in value or "\\" in value or not value.isascii():
        try:
            return f"_utf8mb4 X'{value.encode().hex()}'"
        except UnicodeEncodeError as error:
            raise Unencodable(str(error)) from None
    return f"'{value}'"


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
