"""Calls to workers: the dispatcher's one HTTP seam, with the internal token and short limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from pydantic_core import from_json

MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
ANSWER_SECONDS: Final = 10.0
CONNECT_SECONDS: Final = 1.5


class NoAnswer(Exception):
    """The call may or may not have arrived; `connected` tells a silent peer from a failed one."""

    def __init__(self, message: str, *, connected: bool) -> None:
        super().__init__(message)
        self.connected = connected


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer of any status; `body` is None unless it was JSON."""

    status: int
    body: Any


class InternalClient:
    """Speaks JSON to workers over kept connections; redirects and proxies are not followed.

    `open_session` is called at the first call, in the event loop.
    """

    def __init__(
        self, token: str, open_session: Callable[[], aiohttp.ClientSession] | None = None
    ) -> None:
        self._headers = _bearer(token) if token else {}
        self._open_session = open_session or _open_session
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        seconds: float = ANSWER_SECONDS,
        call_token: str | None = None,
    ) -> Reply:
        """POST a JSON body, with `call_token` in place of the internal token if it is given.

        Raises:
            NoAnswer: nothing that is an HTTP answer came back.
        """
        return await self._call("POST", url, body, seconds, call_token)

    async def get(
        self, url: str, *, seconds: float = ANSWER_SECONDS, call_token: str | None = None
    ) -> Reply:
        """GET a JSON document, with `call_token` in place of the internal token if it is given.

        Raises:
            NoAnswer: nothing that is an HTTP answer came back.
        """
        return await self._call("GET", url, None, seconds, call_token)

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def _call(
        self, method: str, url: str, body: bytes | None, seconds: float, call_token: str | None
    ) -> Reply:
        headers = self._headers if call_token is None else _bearer(call_token)
        if body is not None:
            headers = headers | _JSON
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._open().request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                content = await _read(response)
                return Reply(response.status, _json(content))
        except (aiohttp.ClientError, OSError) as error:
            # Only a peer that accepted the connection and then said nothing is silent.
            silent = isinstance(error, TimeoutError) and not isinstance(
                error, aiohttp.ConnectionTimeoutError
            )
            raise NoAnswer(f"{type(error).__name__}: {error}", connected=silent) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = self._open_session()
        return self._session


def _open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Read an answer, but not without end: anything may stand at a worker's address."""
    content = bytearray()
    async for chunk in response.content.iter_chunked(64 * 1024):
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError("the answer is too long")
    return bytes(content)


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


_JSON: Final = {"Content-Type": "application/json"}


def _json(content: bytes) -> Any:
    try:
        return from_json(content) if content else None
    except ValueError:
        return None
