"""The test support keeps its own promises: private servers come, go and leave nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pymysql
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine
from standardwebhooks.webhooks import WebhookVerificationError

from oncue import sign_webhook
from tests.support.child import Child, ChildDied, ChildrenLeft, Process, is_running
from tests.support.engines import Engine, migrated
from tests.support.mariadb import PrivateMariaDB
from tests.support.missing import not_tested_here
from tests.support.receiver import Answer, Receiver
from tests.support.redis import PrivateRedis, PrivateValkey
from tests.support.wait import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mariadb() -> Iterator[PrivateMariaDB]:
    if (missing := PrivateMariaDB.missing()) is not None:
        not_tested_here("mariadb", f"no {missing} found")
    server = PrivateMariaDB()
    yield server
    server.remove()


@pytest.fixture(params=[PrivateRedis, PrivateValkey])
def redis(request: pytest.FixtureRequest) -> Iterator[PrivateRedis]:
    if (missing := request.param.missing()) is not None:
        not_tested_here(request.param.name, f"no {missing} found")
    server: PrivateRedis = request.param()
    yield server
    server.remove()


def test_mariadb_keeps_commits_over_a_kill_and_leaves_no_process(mariadb: PrivateMariaDB) -> None:
    mariadb.start()
    pid = mariadb.pid
    url = mariadb.create_database()
    name = url.rsplit("/", 1)[1]
    mariadb.execute(f"CREATE TABLE {name}.kept (id INT PRIMARY KEY)")
    mariadb.execute(f"INSERT INTO {name}.kept VALUES (7)")
    mariadb.kill()
    mariadb.start()
    with closing(mariadb.connect(name)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT id FROM kept")
        assert cursor.fetchall() == ((7,),)
    mariadb.restart()
    mariadb.drop_database(url)
    mariadb.stop()
    assert not psutil.pid_exists(pid)
    mariadb.remove()
    assert not mariadb.directory.exists()


def test_mariadb_user_has_rights_on_its_own_database_only(mariadb: PrivateMariaDB) -> None:
    mariadb.start()
    mine, other = (mariadb.create_database().rsplit("/", 1)[1] for _ in range(2))
    with pytest.raises(pymysql.err.OperationalError, match="denied"):
        pymysql.connect(
            host="127.0.0.1", port=mariadb.port, user=mine, password=mine, database=other
        )


def test_redis_keeps_writes_over_a_restart_and_leaves_no_process(redis: PrivateRedis) -> None:
    redis.start()
    pid = redis.pid
    assert redis.command("SET kept 7") == b"+OK"
    redis.stop()
    assert not psutil.pid_exists(pid)
    redis.start()
    assert redis.command("STRLEN kept") == b":1"
    redis.flushall()
    assert redis.command("STRLEN kept") == b":0"
    redis.remove()
    assert not redis.directory.exists()


async def test_engine_is_reached_by_its_url_and_has_the_schema(engine: Engine) -> None:
    migrated(engine)
    database = create_async_engine(engine.database_url)
    async with database.connect() as connection:
        tables = await connection.run_sync(lambda c: sqlalchemy.inspect(c).get_table_names())
    await database.dispose()
    assert "job_info" in tables
    assert engine.redis.command("PING") == b"+PONG"


def test_a_process_that_dies_at_start_tells_its_last_words(tmp_path: Path) -> None:
    child = Child(
        "dying", [sys.executable, "-c", "raise SystemExit('no luck')"], log=tmp_path / "log"
    )
    with pytest.raises(ChildDied, match="no luck"):
        child.start(ready=lambda: False)


def test_a_kill_ends_the_children_too(tmp_path: Path) -> None:
    child = Child(
        "parent", ["/bin/sh", "-c", "/bin/sleep 60 & echo $!; wait"], log=tmp_path / "log"
    )
    child.start(ready=child.log_tail)
    grandchild = int(child.log_tail())
    child.kill()
    until(lambda: not is_running(grandchild), what="the grandchild to end")


class WithoutAGroup(Child):
    """As a copy is between its beginning and its own session."""

    def _begin(self) -> Process:
        return subprocess.Popen(self._command)


def test_a_kill_ends_what_is_in_no_group_of_its_own_yet(tmp_path: Path) -> None:
    child = WithoutAGroup("early", ["/bin/sleep", "20"], log=tmp_path / "log")
    child.start()
    child.kill()
    assert child.exit_code == -signal.SIGKILL


def test_children_left_by_an_orderly_end_are_told(tmp_path: Path) -> None:
    child = Child("parent", ["/bin/sh", "-c", "/bin/sleep 60 & echo $!"], log=tmp_path / "log")
    child.start()
    with pytest.raises(ChildrenLeft, match="sleep 60"):
        child.wait(children_timeout=2)
    until(lambda: not is_running(int(child.log_tail())), what="the grandchild to end")


def test_a_killed_test_run_leaves_no_process_and_no_directory() -> None:
    program = (
        "import time; from tests.support.redis import PrivateValkey\n"
        "server = PrivateValkey(); server.start()\n"
        "print(server.pid, server.directory, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as run:
        assert run.stdout is not None
        pid, directory = run.stdout.readline().split()
        assert is_running(int(pid))
        run.send_signal(signal.SIGKILL)
    until(lambda: not is_running(int(pid)), what="the server to end")
    until(lambda: not Path(directory).exists(), what="its directory to go")


def test_receiver_answers_as_told_and_keeps_its_notes_over_a_kill(receiver: Receiver) -> None:
    receiver.answer("/hook", Answer(500), Answer(204))
    statuses = [_post(receiver)]
    receiver.kill()
    with pytest.raises(httpx.ConnectError):
        _post(receiver)
    receiver.start()
    statuses += [_post(receiver), _post(receiver)]
    assert statuses == [500, 204, 204]
    assert [one.body for one in receiver.wait_for(3, "/hook")] == ["{}"] * 3


def test_receiver_verifies_a_signature_by_an_independent_package(receiver: Receiver) -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = json.dumps({"type": "job.succeeded"})
    headers = sign_webhook(secret, "msg_1", int(time.time()), body.encode())
    httpx.post(receiver.url(), content=body, headers=headers, trust_env=False, timeout=30)
    (received,) = receiver.wait_for(1)
    assert received.webhook_id == "msg_1"
    assert received.verified(secret) == {"type": "job.succeeded"}
    with pytest.raises(WebhookVerificationError):
        received.verified("whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")


def _post(receiver: Receiver) -> int:
    return httpx.post(receiver.url(), content="{}", trust_env=False, timeout=30).status_code
