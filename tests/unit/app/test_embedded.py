"""`oncue up` before anything is started: what is in its way is told, in a sentence and soon."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app import embedded
from app.embedded import (
    EmbeddedValkey,
    UpSettings,
    exclusive_home,
    wait_for_port,
    worker_environment,
    worker_limit,
)
from app.serve import StartRefused
from app.settings import Settings
from tests.support.ports import free_port


def test_a_home_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "home"
    with (
        pytest.raises(StartRefused, match=f"the home {home} cannot be used"),
        exclusive_home(home),
    ):
        pass


def test_a_valkey_that_a_killed_platform_left_ends_before_the_next_begins(tmp_path: Path) -> None:
    first = EmbeddedValkey(tmp_path)
    first.start()
    second = EmbeddedValkey(tmp_path)
    try:
        second.start()
        assert first._process is not None
        assert first._process.wait(60) == 0
    finally:
        second.stop()
        first.stop()


def test_one_that_answers_nothing_is_no_reason_to_begin_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that write to one file would ruin it."""
    monkeypatch.setattr(embedded, "START_SECONDS", 0.2)
    monkeypatch.setattr(embedded, "LEFTOVER_SECONDS", 0.2)
    home = EmbeddedValkey(tmp_path)
    home.socket.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(home.socket))
        silent.listen()
        with pytest.raises(StartRefused, match="does not end"):
            home.start()


def test_a_port_in_use_is_told_long_before_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PORT_FREE_SECONDS", 2.0)
    monkeypatch.setattr(embedded, "QUIET_SECONDS", 0.0)
    said: list[str] = []
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(StartRefused, match="choose another port"),
    ):
        wait_for_port("127.0.0.1", port, said.append)
    (once,) = said
    assert once.startswith(f"127.0.0.1:{port} cannot be used yet (Address already in use)")
    wait_for_port("127.0.0.1", port, said.append)
    assert said == [once]


@pytest.mark.parametrize("port", ["--port", "--worker-port"])
def test_a_port_that_nobody_could_know_is_refused(port: str, tmp_path: Path) -> None:
    # In a process of its own: it sets up the logs of the whole process.
    command = [sys.executable, "-m", "app.cli", "up", port, "0", "--home", str(tmp_path / "home")]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "1 to 65535" in told.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("grace_seconds", [5, 30, 45, 600])
def test_its_worker_ends_by_itself_before_it_is_killed_and_that_before_the_platform_ends(
    grace_seconds: float, tmp_path: Path
) -> None:
    settings = Settings(_env_file=None, home=tmp_path, grace_seconds=grace_seconds)
    told = worker_environment(settings, UpSettings(_env_file=None), "http://127.0.0.1:1")
    own, limit = float(told["ONCUE_GRACE_SECONDS"]), worker_limit(grace_seconds)
    assert grace_seconds * 0.7 < own < limit < grace_seconds
