"""Write the generated files, or with `--check` fail when one of them is stale.

Generated are the two OpenAPI documents, the schema dumps of both dialects, the diagram of the
states, the table of reasons, and the reference pages of the documentation.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import worker.main
from app.jobs.reason_codes import reason_table
from app.lifecycle.states import diagram, verb_table
from app.main import openapi_document
from app.migrate import migrate, offline_sql
from tools.reference import commands_page, errors_page, metrics_page, settings_page

ROOT = Path(__file__).parent.parent


def generated() -> dict[Path, str]:
    """Return every generated file with what it must hold."""
    return {
        ROOT / "openapi" / "dispatcher.json": _json(openapi_document()),
        ROOT / "openapi" / "worker.json": _json(worker.main.openapi_document()),
        ROOT / "alembic" / "schema.mysql.sql": offline_sql("mysql"),
        ROOT / "alembic" / "schema.sqlite.sql": _sqlite_schema(),
        ROOT / "docs" / "states.md": _states(),
        ROOT / "docs" / "reasons.md": _reasons(),
        ROOT / "docs" / "reference" / "settings.md": settings_page(),
        ROOT / "docs" / "reference" / "cli.md": commands_page(),
        ROOT / "docs" / "reference" / "errors.md": errors_page(),
        ROOT / "docs" / "reference" / "metrics.md": metrics_page(),
    }


def main() -> int:
    """Write the files, or tell which are stale; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when stale")
    check = parser.parse_args().check
    stale = 0
    for path, content in generated().items():
        name = str(path.relative_to(ROOT))
        found = path.read_text() if path.exists() else ""
        if found == content:
            continue
        stale += 1
        if check:
            sys.stdout.writelines(
                difflib.unified_diff(
                    found.splitlines(keepends=True), content.splitlines(keepends=True), name, name
                )
            )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            sys.stdout.write(f"wrote {name}\n")
    if check and stale:
        sys.stdout.write(f"\n{stale} generated file(s) stale: run `make generate`\n")
    return 1 if check and stale else 0


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def _sqlite_schema() -> str:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "schema.db"
        migrate(f"sqlite+aiosqlite:///{path}")
        with closing(sqlite3.connect(path)) as connection:
            rows = connection.execute(
                "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type DESC, name"
            ).fetchall()
    return "".join(f"{sql};\n" for (sql,) in rows)


def _states() -> str:
    return (
        "# States\n\n"
        "Generated from `app/lifecycle/states.py`, where the legal moves are data: the guards "
        "of the SQL come from the same table.\n\n" + diagram() + "\n\n## What callers may ask\n\n"
        "Where each verb leads; `-` is 409 `verb_not_possible`. A retry of a child whose group has "
        "ended is 409 too.\n\n" + verb_table() + "\n"
    )


def _reasons() -> str:
    return (
        "# Reasons\n\n"
        "What `GET /openapi/jobs/{id}/explain` may answer as `code`. Generated from "
        "`app/jobs/reason_codes.py`. The codes are stable; new ones may come.\n\n"
        + reason_table()
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
