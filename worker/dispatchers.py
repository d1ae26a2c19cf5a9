"""The way to the dispatchers: the next address is tried when one fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import aiohttp

REQUEST_TIMEOUT_SECONDS: Final = 10.0
CONNECT_TIMEOUT_SECONDS: Final = 3.0


class NoDispatcher(Exception):
    """None of the addresses gave an answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a dispatcher answered."""

    status: int
    body: bytes


class Dispatchers:
    """An HTTP client over the dispatchers' addresses; it stays with the one that answers."""

    def __init__(self, urls: tuple[str, ...], token: str | None) -> None:
        self._urls = urls
        self._current = 0
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(
                total=REQUEST_TIMEOUT_SECONDS, sock_connect=CONNECT_TIMEOUT_SECONDS
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def post(self, path: str, body: bytes) -> Reply:
        """Send to the first dispatcher that answers anything but 502, 503 or 504.

        Raises:
            NoDispatcher: none did.
        """
        reason = "no address"
        for _ in self._urls:
            url = self._urls[self._current]
            try:
                async with self._session.post(
                    url + path, data=body, allow_redirects=False
                ) as response:
                    if response.status not in (502, 503, 504):
                        return Reply(response.status, await response.read())
                    reason = f"{url} answered {response.status}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = f"{url} failed with {type(error).__name__}"
            self._current = (self._current + 1) % len(self._urls)
        raise NoDispatcher(reason)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
