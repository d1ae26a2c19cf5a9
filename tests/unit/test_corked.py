"""An answer leaves as one segment: its head waits for its body, but for nothing else."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

import app.plumbing.doorway
import worker.doorway

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
BOTH = pytest.mark.parametrize("door", [app.plumbing.doorway, worker.doorway])


class Wire:
    """What a transport was told, in order."""

    def __init__(self) -> None:
        self.told: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.told.append(data)

    def close(self) -> None:
        self.told.append("closed")

    def is_closing(self) -> bool:
        return "closed" in self.told


def corked(door: Any, wire: Wire) -> Any:
    return door.Corked(cast(asyncio.Transport, wire), asyncio.get_running_loop())


@BOTH
async def test_a_head_and_the_body_that_follows_it_are_one_write(door: Any) -> None:
    wire = Wire()
    transport = corked(door, wire)
    for body in (b"{}", b"[]"):
        transport.write(HEAD)
        assert wire.told[-1:] != [HEAD]
        transport.write(body)
        assert wire.told[-1] == HEAD + body
    await asyncio.sleep(0)
    assert wire.told == [HEAD + b"{}", HEAD + b"[]"]


@BOTH
async def test_a_head_whose_body_comes_later_does_not_wait_for_it(door: Any) -> None:
    wire = Wire()
    transport = corked(door, wire)
    transport.write(HEAD)
    await asyncio.sleep(0)
    assert wire.told == [HEAD]
    transport.write(b"data: 1\n\n")
    assert wire.told == [HEAD, b"data: 1\n\n"]


@BOTH
async def test_an_answer_without_a_body_leaves_before_the_connection_is_closed(door: Any) -> None:
    wire = Wire()
    transport = corked(door, wire)
    transport.write(HEAD)
    transport.close()
    await asyncio.sleep(0)
    assert (wire.told, transport.is_closing()) == ([HEAD, "closed"], True)


@BOTH
async def test_a_head_is_not_written_to_a_connection_that_was_lost_meanwhile(door: Any) -> None:
    wire = Wire()
    transport = corked(door, wire)
    transport.write(HEAD)
    wire.close()
    await asyncio.sleep(0)
    transport.close()
    assert wire.told == ["closed", "closed"]
