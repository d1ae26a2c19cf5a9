"""Tells workers to take no more runs, by the token that they share with dispatchers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import httpx

    from oncue import Client, Worker

REQUEST_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 0.5


class DrainRefused(Exception):
    """A worker is unknown, or refuses; the message is one sentence for the operator."""


class WorkerNotReached(Exception):
    """A worker does not answer at its address."""


class StillHeld(Exception):
    """The time is over, and a worker still holds something; it goes on draining."""


@dataclass(frozen=True, slots=True)
class Draining:
    """A worker that takes no more runs, and what it still holds."""

    name: str
    url: str
    active: int
    unreported: int
    deliveries: int

    @property
    def is_empty(self) -> bool:
        """Whether it may be ended without anybody noticing."""
        return not (self.active or self.unreported or self.deliveries)

    def document(self) -> dict[str, str | int]:
        """For scripts."""
        return {
            "worker": self.name,
            "url": self.url,
            "state": "DRAINING",
            "active": self.active,
            "unreported": self.unreported,
            "deliveries": self.deliveries,
        }

    def sentence(self) -> str:
        """For people."""
        if self.is_empty:
            return f"{self.name} takes no more runs and holds nothing: it can be stopped"
        parts = [
            (self.active, "run", "goes on", "go on"),
            (self.unreported, "outcome", "is to be reported", "are to be reported"),
            (self.deliveries, "callback", "is being delivered", "are being delivered"),
        ]
        held = [
            f"{count} {noun if count == 1 else noun + 's'} {one if count == 1 else many}"
            for count, noun, one, many in parts
            if count
        ]
        return f"{self.name} takes no more runs; {', '.join(held)}"


@dataclass(frozen=True, slots=True)
class Target:
    """A worker to be drained, and where it listens."""

    name: str
    url: str
    worker_id: str | None = None
    """None for one that was given by its address."""


def find_targets(client: Client, named: Sequence[str]) -> list[Target]:
    """Find workers by name, id or address; an address is taken as it is, without asking.

    Raises:
        DrainRefused: one of them is unknown, or its name is that of several; none is drained.
    """
    by_address = [one for one in named if one.startswith(("http://", "https://"))]
    live = [] if len(by_address) == len(named) else _live(client.workers())
    return [
        Target(one, one.rstrip("/")) if one in by_address else _find(live, one)
        for one in dict.fromkeys(named)
    ]


def drain(
    targets: Iterable[Target],
    token: str | None,
    *,
    wait: bool = False,
    timeout: float | None = None,
    watch: Callable[[Draining], None] = lambda _: None,
) -> list[Draining]:
    """Drain workers; with `wait`, return when none of them holds anything.

    `watch` is told of each answer that says something new.

    Raises:
        DrainRefused: a worker does not accept the token.
        WorkerNotReached: a worker does not answer.
        StillHeld: `timeout` seconds were not enough.
    """
    import httpx

    sent = sent_token(token)
    headers = {"Authorization": f"Bearer {sent}"} if sent else {}
    # Workers are asked directly: a proxy of this machine does not lead to them.
    with httpx.Client(headers=headers, timeout=REQUEST_SECONDS, trust_env=False) as http:
        return drain_by(partial(_ask, http), targets, wait=wait, timeout=timeout, watch=watch)


def drain_by(
    ask: Callable[[Target], Draining],
    targets: Iterable[Target],
    *,
    wait: bool,
    timeout: float | None,
    watch: Callable[[Draining], None],
) -> list[Draining]:
    """Drain workers as `drain` does, by a way of asking each."""
    began = time.monotonic()
    told = {target: ask(target) for target in targets}
    for draining in told.values():
        watch(draining)
    while wait and not all(one.is_empty for one in told.values()):
        left = LOOK_SECONDS if timeout is None else began + timeout - time.monotonic()
        if left <= 0:
            raise StillHeld("; ".join(x.sentence() for x in told.values() if not x.is_empty))
        time.sleep(min(LOOK_SECONDS, left))
        for target, before in told.items():
            if not before.is_empty and (now := ask(target)) != before:
                told[target] = now
                watch(now)
    return list(told.values())


def sent_token(token: str | None) -> str | None:
    """Return what a worker is sent: the first internal token, or what the key of its group is for.

    A worker of a group takes no internal token: with its own key one proves the same.
    """
    from oncue.protocol import call_token

    first = (token or "").split(",")[0].strip()
    if first.startswith("ocw_"):
        return call_token(hashlib.sha256(first.encode()).hexdigest())
    return first or None


def ask_through(client: Client) -> Callable[[Target], Draining]:
    """Return how workers are drained by the dispatchers, with an API key and no token."""

    def ask(target: Target) -> Draining:
        if target.worker_id is None:
            raise DrainRefused(f"{target.url}: an address needs ONCUE_INTERNAL_TOKEN")
        told = client.drain(target.worker_id)
        return Draining(target.name, target.url, told.active, told.unreported, told.deliveries)

    return ask


def _ask(http: httpx.Client, target: Target) -> Draining:
    """Send `POST /drain`, which may be repeated: the answer says what is left."""
    import httpx
    from pydantic import ValidationError

    from oncue.protocol import DRAIN_PATH, DrainResponse

    try:
        response = http.post(f"{target.url}{DRAIN_PATH}")
    except (httpx.RequestError, httpx.InvalidURL) as error:
        where = "" if target.name == target.url else f" at {target.url}"
        raise WorkerNotReached(f"{target.name} does not answer{where}: {error}") from None
    if response.status_code == 401:
        raise DrainRefused(
            f"{target.name} refuses the internal token: set ONCUE_INTERNAL_TOKEN to the one that "
            "it shares with its dispatchers (`oncue up` keeps it in secrets.json of its home)"
        )
    try:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
        answer = DrainResponse.model_validate_json(response.content)
    except (ValidationError, ValueError):
        raise DrainRefused(
            f"what answers at {target.url} ({response.status_code}) is not a worker"
        ) from None
    return Draining(
        target.name, target.url, answer.load.active, answer.unreported, answer.deliveries
    )


def _live(workers: Iterable[Worker]) -> list[Worker]:
    return [one for one in workers if one.state != "DOWN"]


def _find(live: Sequence[Worker], wanted: str) -> Target:
    found = [one for one in live if wanted in (one.name, one.worker_id)]
    if not found:
        known = ", ".join(sorted(one.name or one.worker_id for one in live)) or "none"
        raise DrainRefused(f"no live worker is named {wanted!r} (there are: {known})")
    if len(found) > 1:
        ids = ", ".join(one.worker_id for one in found)
        raise DrainRefused(f"several workers are named {wanted!r}: name one by its id ({ids})")
    return Target(found[0].name or wanted, found[0].url.rstrip("/"), found[0].worker_id)
