"""A private MariaDB server: the installed program on a free port, in a directory of its own."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pymysql

from tests.support.child import Child
from tests.support.guardian import GUARDIAN, MEMORY
from tests.support.ports import free_port


def _program(*names: str) -> str | None:
    """Find a server program, which Debian keeps outside a plain user's PATH."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


DRIVER: Final = os.environ.get("ONCUE_TEST_MYSQL_DRIVER", "aiomysql")
"""By which driver of Python the platform is tested."""


class PrivateMariaDB:
    """A MariaDB server for tests; commits are flushed, as P1 needs, and its zone is not UTC.

    Each of `flags` overrules those given here. With `in_memory` its files are kept there, if there
    is enough, and are not flushed elsewhere: tables are made and dropped sooner, and a kill of the
    server loses nothing either way.
    """

    def __init__(self, *flags: str, in_memory: bool = False, driver: str = DRIVER) -> None:
        self.driver = driver
        self.port = free_port()
        self.directory = GUARDIAN.temporary_directory(in_memory=in_memory)
        unflushed = in_memory and not self.directory.is_relative_to(MEMORY)
        self._user = getpass.getuser()
        server = self.program()
        assert server is not None
        self._child = Child(
            "mariadbd",
            [
                server,
                "--no-defaults",
                f"--user={self._user}",
                f"--datadir={self._data}",
                f"--tmpdir={self._scratch}",
                f"--socket={self.directory / 'sql.sock'}",
                f"--pid-file={self.directory / 'pid'}",
                f"--port={self.port}",
                "--bind-address=127.0.0.1",
                "--skip-name-resolve",
                "--skip-log-bin",
                "--max-connections=400",
                "--innodb-buffer-pool-size=256M",
                "--innodb-flush-log-at-trx-commit=1",
                "--default-time-zone=+05:45",  # nothing may depend on the server's zone
                *(["--innodb-flush-method=nosync"] if unflushed else []),
                *flags,
            ],
            log=self.directory / "log",
        )

    @classmethod
    def program(cls) -> str | None:
        """Return the path of the server's program, None if it is not installed."""
        return _program("mariadbd", "mysqld")

    @classmethod
    def missing(cls) -> str | None:
        """Name the program that is not installed, or None when all are."""
        if cls.program() is None:
            return "mariadbd"
        if _program("mariadb-install-db") is None:
            return "mariadb-install-db"
        return None

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._child.pid

    def start(self) -> None:
        """Start it, on the same port and data as before, and return once it answers."""
        if not self._data.exists():
            self._install()
        self._child.start(ready=self._answers)

    def stop(self) -> None:
        """Shut it down in order."""
        if self._child.running:
            self._child.terminate()

    def kill(self) -> None:
        """Kill it; what was committed is there after the next `start`."""
        self._child.kill()

    def restart(self) -> None:
        """Shut it down and start it again on the same port and data."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Let it accept connections but answer nothing."""
        self._child.freeze()

    def thaw(self) -> None:
        """Let a frozen server go on."""
        self._child.thaw()

    def remove(self) -> None:
        """Stop it and remove its directory; it cannot be started again."""
        self._child.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def create_database(self) -> str:
        """Make an empty database and a user with rights on it alone; return their URL."""
        name = f"t{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        self.execute(f"CREATE USER {name}@'127.0.0.1' IDENTIFIED BY '{name}'")
        self.execute(f"GRANT ALL PRIVILEGES ON {name}.* TO {name}@'127.0.0.1'")
        return f"mysql+{self.driver}://{name}:{name}@127.0.0.1:{self.port}/{name}"

    def drop_database(self, url: str) -> None:
        """Remove what `create_database` made, whoever is still connected to it."""
        name = url.rsplit("/", 1)[1]
        self.execute(f"KILL USER {name}")
        self.execute(f"DROP DATABASE {name}")
        self.execute(f"DROP USER {name}@'127.0.0.1'")

    def copy_tables(self, source: str, target: str) -> None:
        """Make all tables of the one database, with their rows, in the other, an empty one."""
        origin, copy = (url.rsplit("/", 1)[1] for url in (source, target))
        with closing(self.connect(copy)) as connection, connection.cursor() as cursor:
            cursor.execute("SET foreign_key_checks = 0")
            cursor.execute(f"SHOW TABLES FROM {origin}")
            for (table,) in cursor.fetchall():
                cursor.execute(f"SHOW CREATE TABLE {origin}.`{table}`")
                cursor.execute(cursor.fetchall()[0][1])
                cursor.execute(f"INSERT INTO `{table}` SELECT * FROM {origin}.`{table}`")

    def execute(self, statement: str) -> None:
        """Run one statement as the server's administrator."""
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(statement)

    def connect(self, database: str | None = None) -> pymysql.connections.Connection[Any]:
        """Open a connection as the server's administrator, in autocommit mode."""
        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user="root",
            database=database,
            autocommit=True,
            connect_timeout=30,
            read_timeout=60,
            init_command="SET lock_wait_timeout = 30",
        )

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _scratch(self) -> Path:
        """Its own: a server that starts removes all temporary tables that it finds in there."""
        return self.directory / "tmp"

    def _install(self) -> None:
        program = _program("mariadb-install-db")
        assert program is not None
        self._scratch.mkdir()
        done = subprocess.run(
            [
                program,
                "--no-defaults",
                f"--user={self._user}",
                f"--datadir={self._data}",
                f"--tmpdir={self._scratch}",
                "--auth-root-authentication-method=normal",
                "--skip-name-resolve",
                "--skip-test-db",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"mariadb-install-db failed:\n{done.stdout}{done.stderr}"

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except pymysql.err.OperationalError:
            return False
        return True
