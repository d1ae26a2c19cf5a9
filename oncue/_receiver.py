"""The receiver of callbacks that comes with a platform for tests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from oncue.results import Job
from oncue.webhooks import WebhookVerificationError, verify_webhook

MAX_BODY_BYTES: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Delivery:
    """A callback whose signature was verified. `id` is the same in every try of one end."""

    id: str
    type: str
    timestamp: str
    data: Mapping[str, Any]
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def job_id(self) -> int:
        """The job that ended."""
        job_id: int = self.data["jobId"]
        return job_id


class Webhooks:
    """Listens on a free port, verifies what comes, answers 204, and keeps it.

    What is not verified is answered with 400, and `refused` says why. Delivery is at least once:
    the same `id` may come twice.
    """

    def __init__(self, secret: Callable[[], str]) -> None:
        self._secret = secret
        self._changed = threading.Condition()
        self._deliveries: list[Delivery] = []
        self._refused: list[str] = []
        receive = self._receive

        class Receiving(BaseHTTPRequestHandler):
            timeout = 10  # of a client that stays silent

            def do_POST(self) -> None:
                length = self.headers.get("Content-Length", "")
                if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                    status = 411 if not length.isdigit() else 413
                else:
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    status = receive(self.path, headers, self.rfile.read(int(length)))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - its name
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Receiving)
        self._server.daemon_threads = False  # so that closing waits for them
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="oncue-webhooks", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address for `callback_url`; any path below it is received as well."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    @property
    def deliveries(self) -> tuple[Delivery, ...]:
        """All verified deliveries so far, in the order they came."""
        with self._changed:
            return tuple(self._deliveries)

    @property
    def refused(self) -> tuple[str, ...]:
        """Why each delivery that was not verified was refused."""
        with self._changed:
            return tuple(self._refused)

    def wait(
        self, job: int | Job | None = None, *, kind: str | None = None, timeout: float = 30
    ) -> Delivery:
        """Return the first delivery for a job, of a kind (`job.failed`); it may be there already.

        Raises:
            TimeoutError: none came in `timeout` seconds; the message says what did.
        """
        job_id = job.job_id if isinstance(job, Job) else job
        deadline = time.monotonic() + timeout
        with self._changed:
            while (found := self._find(job_id, kind)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(self._missed(job_id, kind, timeout))
                self._changed.wait(left)
        return found

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _find(self, job_id: int | None, kind: str | None) -> Delivery | None:
        for one in self._deliveries:
            if job_id in (None, one.job_id) and kind in (None, one.type):
                return one
        return None

    def _missed(self, job_id: int | None, kind: str | None, timeout: float) -> str:
        what = f"{kind or 'callback'} of {'any job' if job_id is None else f'job {job_id}'}"
        came = ", ".join(f"{one.type} of job {one.job_id}" for one in self._deliveries) or "none"
        refused = f"; refused: {', '.join(self._refused)}" if self._refused else ""
        return f"no {what} came within {timeout:g} s (came: {came}{refused})"

    def _receive(self, path: str, headers: dict[str, str], body: bytes) -> int:
        try:
            verify_webhook(self._secret(), headers, body)
            document = json.loads(body)
            delivery = Delivery(
                id=headers["webhook-id"],
                type=document["type"],
                timestamp=document["timestamp"],
                data=document["data"],
                path=path,
                headers=headers,
                body=body,
            )
        except (WebhookVerificationError, ValueError, KeyError) as error:
            self._keep(self._refused, str(error))
            return 400
        self._keep(self._deliveries, delivery)
        return 204

    def _keep(self, kept: list[Any], one: Any) -> None:
        with self._changed:
            kept.append(one)
            self._changed.notify_all()


class AsyncWebhooks:
    """`Webhooks` for async tests."""

    def __init__(self, webhooks: Webhooks) -> None:
        self._webhooks = webhooks

    @property
    def url(self) -> str:
        """The address for `callback_url`."""
        return self._webhooks.url

    @property
    def deliveries(self) -> tuple[Delivery, ...]:
        """All verified deliveries so far, in the order they came."""
        return self._webhooks.deliveries

    @property
    def refused(self) -> tuple[str, ...]:
        """Why each delivery that was not verified was refused."""
        return self._webhooks.refused

    async def wait(
        self, job: int | Job | None = None, *, kind: str | None = None, timeout: float = 30
    ) -> Delivery:
        """Return the first delivery that fits: see `Webhooks.wait`."""
        return await asyncio.to_thread(self._webhooks.wait, job, kind=kind, timeout=timeout)
