"""Transports of httpx that send for real, and keep what was sent."""

from __future__ import annotations

import httpx


class Watched(httpx.HTTPTransport):
    """Sends requests, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        self.requests.append(request)
        return super().handle_request(request)


class AsyncWatched(httpx.AsyncHTTPTransport):
    """Sends requests, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        self.requests.append(request)
        return await super().handle_async_request(request)
