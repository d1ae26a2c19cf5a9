"""Who may send a worker anything: whoever has a token, and guessing one is bounded."""

from __future__ import annotations

from starlette.types import Message, Receive, Scope, Send

from oncue.protocol import RUN_PATH
from worker.guard import MOST_WRONG, WRONG_SECONDS, Guard


class Rig:
    """A guard before an app that lets everybody in, at a time that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._guard = Guard(self._app, tokens=["right", "older"], now=lambda: self.now)

    async def _app(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, token: str | None, address: str = "192.0.2.1") -> tuple[int, str | None]:
        """Send a request; return the status, and after how many seconds to come again."""
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        scope = {
            "type": "http",
            "method": "POST",
            "path": RUN_PATH,
            "headers": headers,
            "client": (address, 4000),
        }
        await self._guard(scope, receive, send)
        told = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], told.get("retry-after")


async def test_after_many_wrong_tokens_no_other_is_looked_at_until_the_window_is_over() -> None:
    rig = Rig()
    for number in range(MOST_WRONG):
        assert await rig.ask(f"wrong-{number}") == (401, None)
    assert await rig.ask("right") == (401, "60"), "guessed at last, and not looked at"
    assert await rig.ask("right", "192.0.2.2") == (200, None)
    rig.now += WRONG_SECONDS
    assert await rig.ask("right") == (200, None)


async def test_a_token_that_was_right_before_stays_so_whatever_others_guess_beside_it() -> None:
    rig = Rig()
    assert await rig.ask("right") == (200, None)
    for number in range(5 * MOST_WRONG):
        await rig.ask(f"wrong-{number}")
    assert await rig.ask("right") == (200, None)
    assert (await rig.ask("older"))[0] == 401


async def test_requests_without_a_token_are_no_guesses() -> None:
    rig = Rig()
    for _ in range(5 * MOST_WRONG):
        assert await rig.ask(None) == (401, None)
    assert await rig.ask("right") == (200, None)
