"""`oncue up`: the whole platform by one command, ended cleanly and started again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.child import Child
from tests.support.missing import not_tested_here
from tests.support.ports import free_port
from tests.support.processes import ENDED, ROOT
from tests.support.wait import until

README = ROOT / "README.md"


class Up:
    """An `oncue up` with a home and ports of its own."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        self.port, self.worker_port = free_port(), free_port()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ONCUE_")}
        self.environment = {
            **kept,
            "PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', '')}",
            "ONCUE_PORT": str(self.port),
            "ONCUE_WORKER_PORT": str(self.worker_port),
            "ONCUE_HOME": str(self.home),
        }
        self.directory = directory
        self.child = self._child()

    def _child(self) -> Child:
        return Child(
            "up",
            [Path(sys.executable).with_name("oncue"), "up"],
            log=self.directory / "log",
            environment=self.environment,
            directory=self.directory,
        )

    def start(self) -> None:
        """Start it and return once it says that it is up."""
        before = self.child.log_tail(100_000).count("Oncue is up")
        self.child.start(lambda: self.child.log_tail(100_000).count("Oncue is up") > before, 60)

    def processes(self) -> list[psutil.Process]:
        """All processes that carry this home in their environment."""
        return [one for one in psutil.process_iter() if self._is_ours(one)]

    def shell(self, command: str) -> dict[str, Any]:
        """Run a command of the README, with the ports of this platform."""
        done = subprocess.run(
            ["bash", "-c", command.replace(":8080", f":{self.port}")],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=self.directory,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def job(self, job_id: int) -> dict[str, Any]:
        """Return a job once it has ended."""
        return until(lambda: found if (found := self._get(job_id))["status"] in ENDED else None, 30)

    def end(self) -> None:
        """Kill whatever is left."""
        self.child.kill()
        for one in self.processes():
            one.kill()

    def _get(self, job_id: int) -> dict[str, Any]:
        return self.shell(f"curl -s localhost:8080/openapi/jobs/{job_id}")

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return (
                process.environ().get("ONCUE_HOME") == str(self.home)
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            return False


@pytest.fixture
def curl() -> None:
    """What the README's commands need beside the platform."""
    if shutil.which("curl") is None:
        not_tested_here("the README's commands", "no curl found")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """A platform that is not started yet and leaves nothing."""
    found = Up(tmp_path)
    yield found
    found.end()


def first_examples() -> list[str]:
    """The first two commands of the README that speak to the API: submit a job, wait for it."""
    blocks: list[str] = re.findall(r"```sh\n(curl .*?)```", README.read_text(), re.DOTALL)
    return blocks[:2]


@pytest.mark.usefixtures("curl")
def test_the_first_example_succeeds_and_its_data_outlives_a_stop_and_a_kill(up: Up) -> None:
    up.start()
    submit, wait = first_examples()
    job_id = up.shell(submit)["jobId"]
    assert up.shell(wait)["status"] == "SUCCEEDED"
    assert up.child.terminate(60) == 0
    assert up.processes() == []

    up.start()
    assert up.job(job_id)["status"] == "SUCCEEDED"
    again = up.shell(submit)
    assert (again["jobId"], again["status"]) == (job_id, "SUCCEEDED")

    up.child.kill_alone()
    up.start()
    assert up.job(job_id)["status"] == "SUCCEEDED"
    up.child.signal(signal.SIGINT)
    assert up.child.wait(60) == 0
    until(lambda: up.processes() == [], what="everything to be gone")


@pytest.mark.usefixtures("curl")
def test_the_development_key_is_told_at_once_and_asked_for_when_that_is_wanted(up: Up) -> None:
    up.start()
    said = up.child.log_tail(10_000)
    (key,) = re.findall(r"\bock_\S+", said)
    assert "No key is asked for until one is made" in said
    kept = up.home / "api-key"
    assert kept.read_text().strip() == key
    assert kept.stat().st_mode & 0o077 == 0
    listing = "curl -s localhost:8080/openapi/jobs"
    with_key = f"-H 'Authorization: Bearer {key}'"
    assert up.shell(f"{listing} {with_key}")["items"] == []
    assert up.shell(listing)["items"] == []
    assert up.shell("curl -s localhost:8080/openapi/keys")["items"] == []
    assert up.child.terminate(60) == 0

    up.environment["ONCUE_WITH_KEY"] = "true"
    up.child = up._child()
    up.start()
    assert up.shell(listing)["code"] == "unauthorized"
    banner = re.findall(
        r"^  (curl .*?'\n?.*?)\n\nCtrl-C", up.child.log_tail(10_000), re.DOTALL | re.MULTILINE
    )
    assert key in banner[-1]
    assert up.shell(banner[-1])["status"] == "WAITING"
    assert kept.read_text().strip() == key
    listed = up.shell(f"curl -s localhost:8080/openapi/keys {with_key}")
    assert [one["name"] for one in listed["items"]] == ["development"]
    assert up.child.terminate(60) == 0


def test_a_second_platform_in_the_same_home_is_refused(up: Up, tmp_path: Path) -> None:
    up.start()
    environment = {**up.environment, "ONCUE_PORT": str(free_port())}
    done = subprocess.run(
        [Path(sys.executable).with_name("oncue"), "up"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "another `oncue up`" in done.stderr
    assert up.child.terminate(60) == 0
