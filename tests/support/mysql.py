"""A private MySQL server in the place of MariaDB, where `ONCUE_TEST_MYSQLD` names its program."""

from __future__ import annotations

import os
import subprocess
from contextlib import closing, suppress

import pymysql

from tests.support.mariadb import PrivateMariaDB

PROGRAM = "ONCUE_TEST_MYSQLD"
_ROOT = """\
CREATE USER root@'127.0.0.1' IDENTIFIED BY '';
GRANT ALL PRIVILEGES ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;
"""


class PrivateMySQL(PrivateMariaDB):
    """A MySQL server for tests, with the promises of `PrivateMariaDB`."""

    def __init__(self, *flags: str, in_memory: bool = False) -> None:
        super().__init__("--mysqlx=OFF", "--secure-file-priv=", *flags, in_memory=in_memory)

    @classmethod
    def program(cls) -> str | None:
        """Return the path that the environment names."""
        return os.environ.get(PROGRAM)

    @classmethod
    def missing(cls) -> str | None:
        """Name the variable that is not set, or None."""
        return PROGRAM if cls.program() is None else None

    def drop_database(self, url: str) -> None:
        """Remove what `create_database` made, whoever is still connected to it."""
        name = url.rsplit("/", 1)[1]
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT id FROM information_schema.processlist WHERE user = %s", (name,))
            for (number,) in cursor.fetchall():
                with suppress(pymysql.err.OperationalError):  # it may have gone by itself
                    cursor.execute(f"KILL {number}")
        self.execute(f"DROP DATABASE {name}")
        self.execute(f"DROP USER {name}@'127.0.0.1'")

    def _install(self) -> None:
        program = self.program()
        assert program is not None
        self._scratch.mkdir()
        first = self.directory / "first.sql"
        first.write_text(_ROOT)
        done = subprocess.run(
            [
                program,
                "--no-defaults",
                "--initialize-insecure",
                f"--init-file={first}",
                f"--user={self._user}",
                f"--datadir={self._data}",
                f"--tmpdir={self._scratch}",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"mysqld --initialize failed:\n{done.stdout}{done.stderr}"
