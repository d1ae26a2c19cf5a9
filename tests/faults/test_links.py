"""The links of the harness break as they say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.faults.links import Links, Mode

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that answers `>` and what it was sent, until its client is done."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(100):
                    connection.sendall(b">" + data)
                connection.sendall(b"bye")
            except OSError:
                return

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.close()


@pytest.fixture
def links(echo: int) -> Iterator[Links]:
    """One link, `a>b`, to the echo server."""
    found = Links()
    found.add("a>b", echo)
    yield found
    found.close()


def connect(links: Links) -> socket.socket:
    return socket.create_connection(("127.0.0.1", links["a>b"].port), timeout=5)


def ask(connection: socket.socket) -> bytes:
    connection.sendall(b"x")
    return connection.recv(100)


def test_an_open_link_carries_both_ways_and_the_end_of_either_side(links: Links) -> None:
    with connect(links) as connection:
        assert ask(connection) == b">x"
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b"bye"
        assert connection.recv(100) == b""


def test_a_link_that_is_down_resets_what_is_open_and_what_comes(links: Links) -> None:
    with connect(links) as connection:
        assert ask(connection) == b">x"
        links.switch("a>b", Mode.DOWN)
        with pytest.raises(ConnectionError):
            connection.recv(100)
    # The reset may come while it connects, or right after.
    with pytest.raises(ConnectionError), connect(links) as later:
        later.recv(100)
    links.mend()
    with connect(links) as mended:
        assert ask(mended) == b">x"


@pytest.mark.parametrize("mode", [Mode.SILENT, Mode.DEAF])
def test_a_lossy_link_answers_nothing_and_resets_when_it_is_mended(
    links: Links, mode: Mode
) -> None:
    with connect(links) as connection:
        assert ask(connection) == b">x"
        links.switch("a>b", mode)
        connection.sendall(b"x")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        links.mend()
        with pytest.raises(ConnectionError):
            connection.recv(100)


def test_a_half_closed_link_ends_the_asking_side_alone(links: Links) -> None:
    with connect(links) as connection:
        assert ask(connection) == b">x"
        links.switch("a>b", Mode.HALF_CLOSED)
        assert connection.recv(100) == b"bye"
