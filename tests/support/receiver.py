"""A receiver of callbacks: a real HTTP server in a process of its own that notes all it gets.

It can be killed and started again on the same port; what it has noted stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from standardwebhooks.webhooks import Webhook

from tests.support.child import Child
from tests.support.ports import free_port
from tests.support.wait import until

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """What the receiver says to one request, after `delay_ms`."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    delay_ms: int = 0


@dataclass(frozen=True)
class Received:
    """A request as it came in; header names are lower case, `at` is epoch seconds."""

    method: str
    path: str
    headers: dict[str, str]
    body: str
    at: float

    @property
    def webhook_id(self) -> str:
        """The id to dedupe by."""
        return self.headers["webhook-id"]

    def verified(self, secret: str) -> Any:
        """Return the body's JSON once the independent `standardwebhooks` package accepts it."""
        return Webhook(secret).verify(self.body, self.headers)


class Receiver:
    """The receiver's process; answers 200 unless told otherwise."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._record = directory / "received.jsonl"
        self._answers = directory / "answers.json"
        self._told: dict[str, list[dict[str, Any]]] = {}
        self._child = Child(
            "receiver",
            [
                *(sys.executable, "-m", "tests.support.receiver", "--port", str(self.port)),
                *("--record", self._record, "--answers", self._answers),
            ],
            log=directory / "receiver.log",
            directory=ROOT,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def start(self) -> None:
        """Start it, on the same port as before, and return once it accepts connections."""
        self._child.start(ready=self._accepts)

    def kill(self) -> None:
        """Kill it: connections are refused until it is started again."""
        self._child.kill()

    def freeze(self) -> None:
        """Let it accept connections but answer nothing."""
        self._child.freeze()

    def thaw(self) -> None:
        """Let a frozen receiver go on."""
        self._child.thaw()

    def url(self, path: str = "/hook") -> str:
        """The address of one of its paths; each may be told other answers."""
        return f"http://127.0.0.1:{self.port}{path}"

    def answer(self, path: str, *answers: Answer) -> None:
        """Give the n-th request to `path` the n-th answer, and all later ones the last."""
        self._told[path] = [asdict(answer) for answer in answers]
        fresh = self._answers.with_suffix(".new")
        fresh.write_text(json.dumps(self._told))
        fresh.replace(self._answers)

    def received(self, path: str | None = None) -> list[Received]:
        """Return all requests so far, in order, or those to one path."""
        return [one for one in _read(self._record) if path in (None, one.path)]

    def wait_for(self, count: int, path: str | None = None, timeout: float = 60) -> list[Received]:
        """Return the requests once there are at least `count` of them."""
        return until(
            lambda: found if len(found := self.received(path)) >= count else None,
            timeout,
            what=f"{count} requests to the receiver's {path or 'paths'}",
        )

    def _accepts(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        return True


def _read(record: Path) -> list[Received]:
    if not record.exists():
        return []
    whole, _, _ = record.read_text().rpartition("\n")  # a line may be half written
    return [Received(**json.loads(line)) for line in whole.splitlines()]


async def _serve(port: int, record: Path, answers: Path) -> None:
    counts = Counter(one.path for one in _read(record))

    async def receive(request: web.Request) -> web.Response:
        body = (await request.read()).decode(errors="surrogateescape")
        headers = {name.lower(): value for name, value in request.headers.items()}
        one = Received(request.method, request.path, headers, body, time.time())
        with record.open("a") as notes:
            notes.write(f"{json.dumps(asdict(one))}\n")
        told = json.loads(answers.read_text()) if answers.exists() else {}
        choices = [Answer(**answer) for answer in told.get(request.path, [])] or [Answer()]
        answer = choices[min(counts[request.path], len(choices) - 1)]
        counts[request.path] += 1
        await asyncio.sleep(answer.delay_ms / 1000)
        return web.Response(status=answer.status, headers=answer.headers, text=answer.body)

    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", receive)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    given = parser.parse_args()
    asyncio.run(_serve(given.port, given.record, given.answers))


if __name__ == "__main__":
    main()
