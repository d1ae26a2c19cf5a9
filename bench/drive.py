"""The load: one `wrk` that POSTs a fixed number of bodies over keep-alive connections.

Every stack that is compared is driven by this, so that the load costs each of them the same.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import urlsplit

SCRIPT: Final = Path(__file__).with_name("drive.lua")
NUMBER: Final = "%" * 12
"""Stands in a body for the request's number, twelve digits."""
TURN: Final = "#" * 4
"""Stands behind it for one of 50 numbers, which take turns."""


class LoadFailed(Exception):
    """The load could not be sent, or not all of it was answered in time."""


@dataclass(frozen=True)
class Load:
    """What became of a load. `began` and `ended` are seconds of the monotonic clock."""

    count: int
    refused: int
    began: float
    ended: float
    p50_ms: float
    p99_ms: float

    @property
    def per_second(self) -> float:
        """Answered requests a second."""
        return self.count / (self.ended - self.began)


def missing() -> str | None:
    """Say what has to be installed first, if anything."""
    return None if shutil.which("wrk") else "wrk is not installed (`apt-get install wrk`)"


async def post(
    url: str,
    body: str,
    count: int,
    *,
    connections: int = 64,
    headers: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> Load:
    """POST `body` to a loopback address `count` times, and return once all are answered.

    Raises:
        LoadFailed: connections failed, or answers are missing after `timeout` seconds.
    """
    program, parts = shutil.which("wrk"), urlsplit(url)
    if program is None:
        raise LoadFailed(missing())
    if parts.hostname != "127.0.0.1":
        raise LoadFailed(f"{url}: load is sent to 127.0.0.1 alone")
    connections = min(connections, count)
    lines = [
        f"POST {parts.path} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body.encode())}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    with TemporaryDirectory(prefix="oncue-load-") as directory:
        request = Path(directory) / "request"
        request.write_bytes(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
        process = await asyncio.create_subprocess_exec(
            *(program, "-t1", f"-c{connections}", f"-d{timeout:.0f}s", "--latency"),
            *("--timeout", "30s", "-s", SCRIPT, f"http://{parts.netloc}"),
            *("--", request, str(count), str(connections)),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            return await _watched(process, count, timeout)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _watched(process: asyncio.subprocess.Process, count: int, timeout: float) -> Load:
    assert process.stdout is not None
    began = ended = None
    try:
        async with asyncio.timeout(timeout):
            async for line in process.stdout:
                if line == b"begun\n":
                    began = time.monotonic()
                elif line == b"answered\n":
                    ended = time.monotonic()
                    break
    except TimeoutError:
        pass
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
    told = (await process.stdout.read()).decode()
    await process.wait()
    if began is None or ended is None:
        raise LoadFailed(f"not all of {count} requests were answered in {timeout:.0f} s:\n{told}")
    if "Socket errors" in told:
        raise LoadFailed(f"connections failed under the load:\n{told}")
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", told)
    return Load(
        count,
        int(refused[1]) if refused else 0,
        began,
        ended,
        _latency(told, 50),
        _latency(told, 99),
    )


def _latency(told: str, percent: int) -> float:
    found = re.search(rf"{percent}%\s+([\d.]+)(us|ms|s|m)\b", told)
    if found is None:
        raise LoadFailed(f"wrk told no latencies:\n{told}")
    return float(found[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}[found[2]]
