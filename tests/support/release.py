"""The code of the last release, unpacked from the history of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

from tests.support.engines import Engine, Servers
from tests.support.missing import not_tested_here

ROOT = Path(__file__).parents[2]
KEPT_AT = "openapi/released/dispatcher.json"
"""`make release-api` writes it: the last commit that changed it is the last release."""
PACKAGES = ("app", "worker", "oncue", "alembic")


class Release:
    """The last release's packages in a directory of their own, run by this environment's Python."""

    def __init__(self, directory: Path) -> None:
        self.commit = _commit()
        self.path = directory / f"release-{self.commit[:12]}"
        archive = _git("archive", "--format=tar", self.commit, *PACKAGES)
        with tarfile.open(fileobj=BytesIO(archive)) as packed:
            packed.extractall(self.path, filter="data")

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process of the platform one of the release; handlers are those of here."""
        return {"PYTHONPATH": os.pathsep.join([str(self.path), str(ROOT)])}

    def migrate(self, engine: Engine) -> None:
        """Give a database the release's schema."""
        run_migrate(engine, self.environment)


class ReleasedServers(Servers):
    """Servers whose fresh databases get the schema of a release."""

    def __init__(self, release: Release) -> None:
        super().__init__()
        self._release = release

    def give_schema(self, engine: Engine) -> None:
        """Migrate by the release's own command."""
        self._release.migrate(engine)


def run_migrate(engine: Engine, environment: dict[str, str] | None = None) -> None:
    """Run `oncue migrate` as an operator does, of this code unless told otherwise."""
    done = subprocess.run(
        [sys.executable, "-c", "from app.cli import main; main()", "migrate"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **engine.environment, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        cwd=engine.servers.redis.directory if engine.name == "mariadb+redis" else Path("/"),
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _commit() -> str:
    """Name the commit of the last release; skips (fails in CI) where the history is not there."""
    what = "the upgrade from the last release"
    try:
        if _git("rev-parse", "--is-shallow-repository").strip() == b"true":
            not_tested_here(what, "a shallow clone: fetch the whole history (fetch-depth: 0)")
        found = _git("log", "-1", "--format=%H", "--", KEPT_AT).decode().strip()
    except (OSError, subprocess.CalledProcessError) as error:
        not_tested_here(what, f"no git history: {error}")
    if not found:
        not_tested_here(what, f"no commit has {KEPT_AT}")
    return found


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True).stdout
