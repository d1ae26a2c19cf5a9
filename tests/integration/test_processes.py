"""The runner of platforms keeps its promises, shown with a stand-in for `oncue`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.child import ChildDied
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform, ProcessesLeft
from tests.support.wait import until

STAND_IN = """
import http.server, os, subprocess, sys, time

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()

if "stray" in os.environ.get("ONCUE_WORKER_NAME", ""):
    subprocess.Popen(["/bin/sleep", "120"], start_new_session=True)
if "dying" in os.environ.get("ONCUE_WORKER_NAME", ""):
    sys.exit("no luck")
port = int(sys.argv[sys.argv.index("--port") + 1])
print(*sys.argv[1:], flush=True)
http.server.HTTPServer(("127.0.0.1", port), Ready).serve_forever()
"""


@pytest.fixture
def stand_in(
    sqlite_engine: Engine,
    new_platform: NewPlatform,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Platform:
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(processes, "_oncue", lambda: [sys.executable, str(program)])
    platform = new_platform(sqlite_engine, dispatchers=2)
    platform.as_copies = False
    return platform


def test_a_service_is_ready_when_started_and_again_on_the_same_port(stand_in: Platform) -> None:
    dispatcher = stand_in.dispatcher(2)
    assert dispatcher.url == stand_in.dispatcher_urls[1]
    dispatcher.kill()
    assert not dispatcher.ready()
    dispatcher.start()
    assert until(dispatcher.ready)
    assert dispatcher.terminate() == -15


def test_a_frozen_service_is_not_ready_until_thawed(stand_in: Platform) -> None:
    worker = stand_in.worker("frozen")
    worker.freeze()
    assert not worker.ready()
    worker.thaw()
    assert until(worker.ready)


def test_a_service_that_dies_at_start_tells_its_last_words(stand_in: Platform) -> None:
    with pytest.raises(ChildDied, match="no luck"):
        stand_in.worker("dying")


def test_a_process_that_outlives_its_platform_is_found_and_killed(stand_in: Platform) -> None:
    stand_in.worker("stray")
    with pytest.raises(ProcessesLeft, match="sleep"):
        stand_in.close()
    stand_in.close()
