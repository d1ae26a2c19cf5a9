"""The engines that the platform runs on: pairs of a database and a Redis, fresh for each test."""

from __future__ import annotations

import functools
import secrets
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from app.migrate import migrate
from tests.support.guardian import GUARDIAN
from tests.support.mariadb import PrivateMariaDB
from tests.support.missing import not_tested_here
from tests.support.mysql import PrivateMySQL
from tests.support.redis import PrivateRedis, PrivateValkey

EngineName = Literal["sqlite+valkey", "mariadb+redis"]
Server = TypeVar("Server", PrivateMariaDB, PrivateRedis, PrivateValkey)
ENGINE_NAMES: tuple[EngineName, ...] = get_args(EngineName)


@dataclass(frozen=True)
class Engine:
    """An empty database and an unused Redis prefix of one pair of servers."""

    name: EngineName
    database_url: str
    redis_url: str
    redis_prefix: str
    servers: Servers = field(repr=False, compare=False)

    @property
    def environment(self) -> dict[str, str]:
        """The settings by which a dispatcher finds this engine."""
        return {
            "ONCUE_DATABASE_URL": self.database_url,
            "ONCUE_REDIS_URL": self.redis_url,
            "ONCUE_REDIS_PREFIX": self.redis_prefix,
        }

    @property
    def redis(self) -> PrivateRedis:
        """The Redis server behind `redis_url`, shared by the tests of this process."""
        return self.servers.valkey if self.name == "sqlite+valkey" else self.servers.redis


def migrated(engine: Engine) -> Engine:
    """Return the engine, its empty database given the current schema as by `oncue migrate`."""
    engine.servers.give_schema(engine)
    return engine


class Servers:
    """The servers of one test process, each started when first asked for and shared by its tests.

    A test that stops or loses a server makes one of its own (`PrivateRedis()`). With `in_memory`
    no database is kept on a disk, where there is memory enough.
    """

    def __init__(self, *, in_memory: bool = False) -> None:
        self._in_memory = in_memory
        self._started: list[PrivateMariaDB | PrivateRedis] = []

    @functools.cached_property
    def mariadb(self) -> PrivateMariaDB:
        """The shared MariaDB, or the MySQL that the environment names in its place."""
        kind = PrivateMySQL if PrivateMySQL.program() else PrivateMariaDB
        return self._start(kind(in_memory=self._in_memory))

    @functools.cached_property
    def redis(self) -> PrivateRedis:
        """The shared Redis."""
        return self._start(PrivateRedis())

    @functools.cached_property
    def valkey(self) -> PrivateValkey:
        """The shared Valkey."""
        return self._start(PrivateValkey())

    def engine(self, name: EngineName) -> Engine:
        """Make a fresh engine; skips the test (or fails it in CI) where a program is missing."""
        if name == "sqlite+valkey":
            path = self._files / f"{secrets.token_hex(6)}.db"
            database_url, redis_url = f"sqlite+aiosqlite:///{path}", self.valkey.socket_url
        else:
            missing = [kind.missing() for kind in (PrivateMariaDB, PrivateRedis)]
            if any(missing):
                not_tested_here(name, f"no {', '.join(filter(None, missing))} found")
            database_url, redis_url = self.mariadb.create_database(), self.redis.url
        return Engine(name, database_url, redis_url, f"t{secrets.token_hex(6)}", self)

    def give_schema(self, engine: Engine) -> None:
        """Copy the schema, which is migrated once a process, into the engine's empty database."""
        if engine.name == "sqlite+valkey":
            shutil.copyfile(self._sqlite_template, _sqlite_path(engine.database_url))
        else:
            self.mariadb.copy_tables(self._mariadb_template, engine.database_url)

    def drop(self, engine: Engine) -> None:
        """Remove the engine's database."""
        if engine.name == "sqlite+valkey":
            path = _sqlite_path(engine.database_url)
            for file in path.parent.glob(f"{path.name}*"):
                file.unlink(missing_ok=True)
        else:
            self.mariadb.drop_database(engine.database_url)

    def remove(self) -> None:
        """End all servers that were started."""
        for server in self._started:
            server.remove()
        if "_files" in self.__dict__:
            shutil.rmtree(self._files)

    @functools.cached_property
    def _files(self) -> Path:
        return GUARDIAN.temporary_directory(in_memory=self._in_memory)

    @functools.cached_property
    def _sqlite_template(self) -> Path:
        path = self._files / "template.db"
        migrate(f"sqlite+aiosqlite:///{path}")
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return path

    @functools.cached_property
    def _mariadb_template(self) -> str:
        url = self.mariadb.create_database()
        migrate(url)
        return url

    def _start(self, server: Server) -> Server:
        server.start()
        self._started.append(server)
        return server


def _sqlite_path(url: str) -> Path:
    return Path(url.removeprefix("sqlite+aiosqlite:///"))
