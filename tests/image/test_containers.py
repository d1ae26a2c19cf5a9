"""What the Dockerfile builds and compose.yaml starts, run on this machine without Docker.

The build stage is carried out as it stands, but for its places. The processes of compose are then
started with the commands and variables that they have there, each once its health checks say so;
only the names of hosts become ports of this machine.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.child import Child
from tests.support.engines import Servers
from tests.support.guardian import GUARDIAN
from tests.support.image import BuiltImage, read_compose, start_order
from tests.support.mariadb import PrivateMariaDB
from tests.support.missing import not_tested_here
from tests.support.ports import free_port
from tests.support.processes import ENDED, ROOT
from tests.support.redis import PrivateRedis
from tests.support.wait import until

pytestmark = [pytest.mark.xdist_group("image"), pytest.mark.timeout(600)]

VARIABLES = {
    "MYSQL_PASSWORD": secrets.token_hex(12),
    "ONCUE_INTERNAL_TOKEN": secrets.token_hex(16),
    "ONCUE_API_KEYS": f"billing:{secrets.token_hex(16)}",
    "ONCUE_WEBHOOK_SECRET": f"whsec_{base64.b64encode(secrets.token_bytes(24)).decode()}",
    "ONCUE_EGRESS_ALLOW": "",
}
KEY = VARIABLES["ONCUE_API_KEYS"].partition(":")[2]
SERVICES: dict[str, Any] = read_compose(VARIABLES)["services"]
OURS = [name for name in start_order(SERVICES) if SERVICES[name]["image"] == "oncue"]


@pytest.fixture(scope="module")
def image(tools: Path) -> Iterator[BuiltImage]:
    """The build stage of the Dockerfile, carried out."""
    place = GUARDIAN.temporary_directory()
    built = BuiltImage(place)
    home = {"HOME": os.environ["HOME"]}

    def run(command: str, directory: Path, variables: Mapping[str, str]) -> None:
        # `python` and `pip` are those of the base image there, of the contract tools here; and
        # a machine that builds often keeps what it downloads.
        done = subprocess.run(
            ["/bin/sh", "-eu", "-c", command],
            cwd=directory,
            env={
                "PATH": f"{tools}:/usr/bin:/bin",
                **home,
                **variables,
                "PIP_NO_CACHE_DIR": "0",
                "PIP_RETRIES": "10",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        if "No matching distribution" in done.stderr and not index_answers(tools):
            not_tested_here("the image", "no package index answers")
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    built.build(run)
    yield built
    shutil.rmtree(place)


def index_answers(tools: Path) -> bool:
    """Whether the package index has what every build needs."""
    asked = subprocess.run(
        [tools / "pip", "download", "--no-deps", "--dest", GUARDIAN.temporary_directory(), "pip"],
        capture_output=True,
        check=False,
        timeout=60,
    )
    return asked.returncode == 0


def told(command: Sequence[str | Path], directory: Path, variables: Mapping[str, str]) -> str:
    """Run a command that must succeed, with no other environment, and return what it said."""
    done = subprocess.run(
        command,
        cwd=directory,
        env=dict(variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_image_holds_the_wheel_alone(image: BuiltImage, tmp_path: Path) -> None:
    python = image.health_check[0]
    where = "import app.migrate, oncue, worker; print(app.migrate.SCRIPTS, *oncue.__path__)"
    scripts, package = told([python, "-c", where], tmp_path, image.environment).split()
    for path in (scripts, package):
        assert Path(path).is_relative_to(image.root / "opt")
    shipped = {file.name for file in (Path(scripts) / "versions").glob("*.py")}
    assert shipped == {file.name for file in (ROOT / "alembic" / "versions").glob("*.py")}
    assert not list((image.root / "opt").rglob("pip")), "what installs is none of the image"


def test_the_command_works_outside_of_a_checkout(image: BuiltImage, tmp_path: Path) -> None:
    assert "oncue dispatcher" in told(
        image.command(["dispatcher", "--help"]), tmp_path, image.environment
    )
    url = {"ONCUE_DATABASE_URL": f"sqlite+aiosqlite:///{tmp_path / 'oncue.db'}"}
    for _ in range(2):
        said = told(image.command(["migrate"]), tmp_path, {**image.environment, **url})
        assert "up to date" in said
    assert (tmp_path / "oncue.db").exists()


def test_the_default_command_is_a_dispatcher_that_stays_shut_without_keys(
    image: BuiltImage, tmp_path: Path
) -> None:
    assert image.command()[1:] == ["dispatcher"]
    for command, wanted in (([], "ONCUE_API_KEYS"), (["worker"], "ONCUE_INTERNAL_TOKEN")):
        done = subprocess.run(
            image.command(command or None),
            cwd=tmp_path,
            env=image.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 2
        assert wanted in done.stderr


class Containers:
    """The services of compose.yaml as processes of this machine."""

    def __init__(self, image: BuiltImage, directory: Path, mysql_port: int) -> None:
        self.ports = {name: free_port() for name in SERVICES}
        self.ports["mysql"] = mysql_port
        self.running: dict[str, Child] = {}
        self._image = image
        self._directory = directory

    def environment(self, name: str) -> dict[str, str]:
        """Return what the process of a service sees: the image's variables and its own."""
        given = SERVICES[name].get("environment", {})
        own = {key: self._here(str(value)) for key, value in given.items()}
        if name not in OURS:
            return {**self._image.environment, **own, "MYSQL_TCP_PORT": str(self.ports["mysql"])}
        # Containers have a port each for themselves; here each process is told its own.
        kind = "ONCUE_WORKER_PORT" if "worker" in SERVICES[name]["command"] else "ONCUE_PORT"
        nobody = {"ONCUE_PORT": "1", "ONCUE_WORKER_PORT": "1"}
        ports = {**nobody, kind: str(self.ports[name])}
        return {**self._image.environment, **ports, **own}

    def start(self, name: str) -> None:
        """Start a service, all that it depends on being as far as compose.yaml asks."""
        for needed, how in SERVICES[name].get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                self.wait_healthy(needed)
            else:
                assert self.running[needed].wait(60) == 0, self.running[needed].log_tail()
        self.running[name] = Child(
            name,
            self.command(name),
            log=self._directory / f"{name}.log",
            environment=self.environment(name),
            directory=self._directory,
        )
        self.running[name].start()

    def command(self, name: str) -> list[str]:
        """Return the process of a service."""
        words: list[str] = SERVICES[name]["command"]
        if name in OURS:
            return self._image.command(words)
        place = self._directory / name
        place.mkdir()
        return [*words, "--port", str(self.ports[name]), "--bind", "127.0.0.1", "--dir", str(place)]

    def wait_healthy(self, name: str) -> None:
        """Return once the health check of a service succeeds."""
        until(lambda: self.is_healthy(name), 60, what=f"{name} to be healthy")

    def is_healthy(self, name: str) -> bool:
        """Whether the health check of a service succeeds: the image's, or one of its own."""
        if name in self.running and not self.running[name].running:
            raise AssertionError(f"{name} ended: {self.running[name].log_tail()}")
        checked = SERVICES[name].get("healthcheck")
        if checked is None:
            command = self._image.health_check
        elif checked["test"][0] == "CMD-SHELL":
            command = ["/bin/sh", "-c", checked["test"][1]]
        else:
            assert checked["test"] == ["CMD", "redis-cli", "ping"]
            command = ["redis-cli", "-p", str(self.ports[name]), "ping"]
        try:
            done = subprocess.run(
                command, env=self.environment(name), capture_output=True, check=False, timeout=60
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def end(self) -> dict[str, int | None]:
        """Ask the dispatchers and workers to end, and return their exit codes."""
        return {name: self.running[name].terminate(35) for name in OURS if name != "migrate"}

    def _here(self, text: str) -> str:
        """Put ports of this machine where a text names a container's host and port."""
        names = "|".join(map(re.escape, SERVICES))
        return re.sub(rf"\b({names}):\d+", lambda one: f"127.0.0.1:{self.ports[one[1]]}", text)


@pytest.fixture
def mysql(servers: Servers) -> Iterator[PrivateMariaDB]:
    """A database server with what the MySQL image makes of its variables."""
    missing = [kind.missing() for kind in (PrivateMariaDB, PrivateRedis)]
    if any(missing):
        not_tested_here("compose.yaml", f"no {', '.join(filter(None, missing))} found")
    environment = SERVICES["mysql"]["environment"]
    name, user = environment["MYSQL_DATABASE"], environment["MYSQL_USER"]
    server = servers.mariadb
    server.execute(f"CREATE DATABASE {name}")
    server.execute(
        f"CREATE USER {user}@'127.0.0.1' IDENTIFIED BY '{environment['MYSQL_PASSWORD']}'"
    )
    server.execute(f"GRANT ALL PRIVILEGES ON {name}.* TO {user}@'127.0.0.1'")
    yield server
    server.execute(f"DROP DATABASE {name}")
    server.execute(f"DROP USER {user}@'127.0.0.1'")


def test_the_flags_of_the_database_are_known_to_it(mysql: PrivateMariaDB) -> None:
    server = mysql._child._command[0]
    flags = SERVICES["mysql"]["command"]
    done = subprocess.run(
        [server, "--no-defaults", f"--datadir={mysql.directory}", *flags, "--help", "--verbose"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "unknown" not in done.stderr


def test_compose_runs_the_whole_platform_in_health_order(
    image: BuiltImage, mysql: PrivateMariaDB, tmp_path: Path
) -> None:
    containers = Containers(image, tmp_path, mysql.port)
    with ExitStack() as ends:
        for name in start_order(SERVICES):
            if name != "mysql":
                if name not in {"redis", "migrate"}:
                    assert not containers.is_healthy(name)
                containers.start(name)
                ends.callback(containers.running[name].kill)
        for name in ("dispatcher-1", "dispatcher-2", "worker-1", "worker-2"):
            containers.wait_healthy(name)
        for number in (1, 2):
            use(f"http://127.0.0.1:{containers.ports[f'dispatcher-{number}']}", f"d-{number}")

        grace = containers.end()
        assert grace == {name: 0 for name in OURS if name != "migrate"}
        for name in grace:
            log = containers.running[name].log.read_text()
            assert '"level": "error"' not in log, log


def use(url: str, request_id: str) -> None:
    """Use a dispatcher as its callers and operators do."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:

        def workers() -> list[str]:
            items = client.get("/openapi/workers").json()["items"]
            return sorted(one["name"] for one in items if one["state"] == "UP")

        until(lambda: workers() == ["worker-1", "worker-2"], 30, what="both workers to be UP")
        answer = client.post(
            "/openapi/jobs",
            json={
                "clientRequestId": request_id,
                "jobName": "in containers",
                "jobHandler": "echo",
                "params": {"from": url},
            },
        )
        assert answer.status_code == 202, answer.text
        job = client.get(answer.headers["Location"], params={"wait": 20}).json()
        assert job["status"] in ENDED
        assert (job["status"], job["result"]) == ("SUCCEEDED", {"from": url})

        # The documents and the documentation come with the wheel.
        document = json.loads((ROOT / "openapi" / "dispatcher.json").read_text())
        assert client.get("/openapi.json").json() == document
        assert client.get("/docs").status_code == 200
        assert client.get("/metrics", headers={"Authorization": ""}).status_code == 200
