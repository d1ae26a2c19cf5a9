"""The way to the dispatchers: the next address is tried when one fails or cannot answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import aiohttp

REQUEST_TIMEOUT_SECONDS: Final = 10.0
CONNECT_TIMEOUT_SECONDS: Final = 3.0
WORKING: Final = frozenset({200, 400, 413, 422})
"""Statuses of a dispatcher that read the request; any other may be the fault of its address."""


class NoDispatcher(Exception):
    """None of the addresses gave an answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a dispatcher answered."""

    status: int
    body: bytes


class Dispatchers:
    """An HTTP client over the dispatchers' addresses; it stays with the one that works."""

    def __init__(
        self,
        urls: tuple[str, ...],
        token: str | None,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self._urls = urls
        self._current = 0
        self._session = session or self._open_session(token)

    @staticmethod
    def _open_session(token: str | None) -> aiohttp.ClientSession:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        return aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(
                total=REQUEST_TIMEOUT_SECONDS, sock_connect=CONNECT_TIMEOUT_SECONDS
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def post(self, path: str, body: bytes) -> Reply:
        """Send to the dispatcher that worked last, then to the next until one works.

        When none does, the last reply is returned.

        Raises:
            NoDispatcher: there was no reply at all.
        """
        reason = "no address"
        last: Reply | None = None
        first = self._current
        for turn in range(len(self._urls)):
            index = (first + turn) % len(self._urls)
            url = self._urls[index]
            try:
                async with self._session.post(
                    url + path, data=body, allow_redirects=False
                ) as response:
                    last = Reply(response.status, await response.read())
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = f"{url} failed with {type(error).__name__}"
                continue
            if last.status in WORKING:
                self._current = index
                return last
        if last is None:
            raise NoDispatcher(reason)
        return last

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
