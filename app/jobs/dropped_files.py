"""The files in which retention keeps what it deletes: NDJSON, gzip, one a day and process."""

from __future__ import annotations

import gzip
import os
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Final

import orjson

LEVEL: Final = 5


class DroppedFiles:
    """Appends jobs to the file of the day; what `keep` returned from is on the disk.

    Each call is one gzip member, so that a file is whole up to its last one. Not for two threads.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own = secrets.token_hex(4)

    def keep(self, jobs: Iterable[dict[str, Any]], at_ms: int) -> Path:
        """Write one line for each job, flush it to the disk, and return the file.

        Raises:
            OSError: nothing of it counts; the file is as it was before.
        """
        member = gzip.compress(
            b"".join(orjson.dumps(job, default=_as_text) + b"\n" for job in jobs), LEVEL
        )
        day = datetime.fromtimestamp(at_ms / 1000, UTC).date()
        path = self._directory / f"dropped-{day}-{self._own}.ndjson.gz"
        is_new = not path.exists()
        # Unbuffered: what a buffer still held when the disk was full would be written by `close`.
        with path.open("ab", buffering=0) as file:
            _append(file, member)
        if is_new:
            _flush_directory(self._directory)
        return path


def _append(file: FileIO, member: bytes) -> None:
    before = file.seek(0, os.SEEK_END)
    left = memoryview(member)
    try:
        while left:
            # A disk that is nearly full takes a part of it.
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError:
        os.ftruncate(file.fileno(), before)
        raise


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_text(value: Any) -> str:
    """Write what JSON does not know: integers of more than 64 bits, decimals."""
    return str(value)
