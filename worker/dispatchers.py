"""The way to the dispatchers: the next address is tried when one fails or cannot answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

import aiohttp

REQUEST_TIMEOUT_SECONDS: Final = 10.0
CONNECT_TIMEOUT_SECONDS: Final = 3.0
NEXT_SECONDS: Final = 1.0
"""A dispatcher that is silent for so long is not waited for alone: the next one is asked too."""
ABOUT_THE_CONTENT: Final = frozenset({400, 413, 422})
"""Answers that one item of a request may have caused."""
PROBLEM: Final = "application/problem+json"


class NoDispatcher(Exception):
    """None of the addresses gave an answer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a dispatcher answered."""

    status: int
    body: bytes
    media_type: str = field(default="", compare=False)

    @property
    def is_about_the_content(self) -> bool:
        """A dispatcher has read the request and refuses something in it, not a proxy on the way."""
        return self.status in ABOUT_THE_CONTENT and self.media_type == PROBLEM


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

        One that is silent for a second is not waited for alone: a paused one would hold up what
        the others could store. So what is sent must be safe to be taken twice. When none works,
        the last reply is returned.

        Raises:
            NoDispatcher: there was no reply at all.
        """
        first, count = self._current, len(self._urls)
        tries: dict[asyncio.Task[Reply | str], int] = {}
        last: Reply | None = None
        reason = "no address"
        try:
            for turn in range(count):
                index = (first + turn) % count
                tries[asyncio.ensure_future(self._ask(self._urls[index] + path, body))] = index
                is_last = turn + 1 == count
                while tries:
                    done, _ = await asyncio.wait(
                        tries,
                        timeout=None if is_last else NEXT_SECONDS,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    for one in [one for one in tries if one in done]:
                        found, index = one.result(), tries.pop(one)
                        if isinstance(found, str):
                            reason = found
                            continue
                        last = found
                        if found.status == 200 or found.is_about_the_content:
                            self._current = index
                            return found
                    if not is_last:
                        break
        finally:
            for one in tries:
                one.cancel()
        if last is None:
            raise NoDispatcher(reason)
        return last

    async def _ask(self, url: str, body: bytes) -> Reply | str:
        """Return the reply, or the reason why there is none."""
        try:
            async with self._session.post(url, data=body, allow_redirects=False) as response:
                return Reply(response.status, await response.read(), response.content_type)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"{url} failed with {type(error).__name__}"

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
