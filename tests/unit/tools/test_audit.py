"""The audit of dependencies tells what is known, and never takes silence for an all-clear."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.support.ports import free_port
from tools.audit import FOUND, UNREACHABLE, Pin, audit, pins_of


@pytest.fixture
def database() -> Iterator[Any]:
    """A database that knows of one advisory, for a package named by `server.bad`."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
            bad = self.server.bad  # type: ignore[attr-defined]
            results = [
                {"vulns": [{"id": "GHSA-1"}]} if one["package"]["name"] == bad else {}
                for one in asked
            ]
            if bad == "nonsense":
                results = []
            body = json.dumps({"results": results}).encode()
            self.send_response(200)
            missing = 10 if bad == "cut off" else 0
            self.send_header("content-length", str(len(body) + missing))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    server.bad = ""  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_lock_file_names_its_pins() -> None:
    lock = "a-b==1.2 \\\n    --hash=sha256:00\nC[x]==3 ; python_version < '4' \\\n# d==1\n"
    assert pins_of(lock) == {Pin("a-b", "1.2"), Pin("c", "3")}


@pytest.mark.parametrize(
    ("bad", "code", "told"),
    [
        ("", 0, "0 with known advisories"),
        ("fastapi", FOUND, "GHSA-1"),
        ("nonsense", UNREACHABLE, "NOT AUDITED"),
        ("cut off", UNREACHABLE, "NOT AUDITED"),
    ],
)
def test_what_is_known_decides(
    database: Any, capsys: pytest.CaptureFixture[str], bad: str, code: int, told: str
) -> None:
    database.bad = bad
    url = f"http://127.0.0.1:{database.server_port}"
    assert audit(url, if_reachable=False) == code
    assert told in capsys.readouterr().out


def test_an_unreachable_database_is_told_and_fails_unless_asked_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert audit(nowhere, if_reachable=False) == UNREACHABLE
    assert audit(nowhere, if_reachable=True) == 0
    assert capsys.readouterr().out.count("NOT AUDITED") == 2
