"""What keeps the workers from taking a due job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from app.dispatch.standing import Standings
from app.jobs.reason_codes import Reason, ReasonCode
from app.jobs.stories import worker_name
from app.lifecycle.evidence import Evidence
from app.lifecycle.nodes import Node
from app.lifecycle.requirement import asked_labels, meets
from app.plumbing.times import rfc3339
from oncue.protocol import LEASE_SECONDS, WorkerState

SILENT_MS: Final = LEASE_SECONDS * 1000
NAMED: Final = 10
"""How many workers or handlers are named; `more` counts the others."""


def why_not_taken(found: Evidence, told: Standings) -> list[Reason]:
    """Tell what is wrong with the workers; nothing, when one of them has a free slot."""
    now, handler = found.job["now_ms"], found.job["job_handler"]
    requirement = found.job["requirement"] or ""
    offering = [node for node in found.nodes if handler in node.handler_names]
    live = [node for node in offering if is_live(node, now)]
    silent = [
        node for node in offering if node.state is not WorkerState.DOWN and not is_live(node, now)
    ]
    fit = [node for node in live if meets(requirement, node.labels)]
    draining = [node for node in fit if _is_draining(node, told)]
    taking = [node for node in fit if not _is_draining(node, told)]
    suspect = [node for node in taking if is_suspect(node, told)]
    usable = [node for node in taking if not is_suspect(node, told)]
    if usable and any(_active(node, told) < node.capacity for node in usable):
        return []
    reasons = []
    if usable:
        reasons.append(_all_full(found, told, usable))
    elif not live and not silent:
        reasons.append(_nobody(found, offering))
    elif live and not fit:
        reasons.append(_no_match(requirement, live))
    if draining:
        reasons.append(_draining(draining))
    unreachable = suspect + [node for node in silent if meets(requirement, node.labels)]
    if unreachable or (silent and not live):
        reasons.append(_unreachable(unreachable or silent, now))
    return reasons


def _nobody(found: Evidence, offering: Sequence[Node]) -> Reason:
    handler, now = found.job["job_handler"], found.job["now_ms"]
    offered = sorted(
        {name for node in found.nodes if is_live(node, now) for name in node.handler_names}
    )
    words = ", ".join(offered[:NAMED]) or "nothing"
    past = ""
    if offering:
        last = max(offering, key=lambda node: node.last_heartbeat)
        past = f" {worker_name(last.worker_id)} did until {rfc3339(last.last_heartbeat)}."
    return Reason(
        ReasonCode.NO_LIVE_WORKER,
        f"No live worker offers the handler '{handler}'; on offer is {words}.{past}",
        {
            "handler": handler,
            "offered": offered[:NAMED],
            "moreOffered": max(0, len(offered) - NAMED),
            "down": [
                {"workerId": node.worker_id, "lastHeartbeat": rfc3339(node.last_heartbeat)}
                for node in offering[:NAMED]
            ],
            "moreDown": max(0, len(offering) - NAMED),
        },
        max((node.last_heartbeat for node in offering), default=None),
    )


def _no_match(requirement: str, live: Sequence[Node]) -> Reason:
    wanted = asked_labels(requirement)
    words = ", ".join(f"{name}={value}" for name, value in wanted.items())
    return Reason(
        ReasonCode.NO_WORKER_MATCHES_LABELS,
        f"{_offers(len(live), 'live worker')} the handler, but none has the labels {words}.",
        {
            "required": wanted,
            "workers": [
                {"workerId": node.worker_id, "labels": node.labels} for node in live[:NAMED]
            ],
            "more": max(0, len(live) - NAMED),
        },
    )


def _all_full(found: Evidence, told: Standings, usable: Sequence[Node]) -> Reason:
    ahead = found.ahead
    before = ahead.higher + ahead.same
    least = "at least " if ahead.at_least else ""
    return Reason(
        ReasonCode.ALL_FULL,
        f"Every worker that may run it is full; {least}{before} due "
        f"{'job' if before == 1 else 'jobs'} of its queue come first.",
        {
            "workers": [
                {
                    "workerId": node.worker_id,
                    "active": _active(node, told),
                    "capacity": node.capacity,
                }
                for node in usable[:NAMED]
            ],
            "more": max(0, len(usable) - NAMED),
            "ahead": before,
            "atLeast": ahead.at_least,
        },
    )


def _draining(nodes: Sequence[Node]) -> Reason:
    names = ", ".join(worker_name(node.worker_id) for node in nodes[:NAMED])
    return Reason(
        ReasonCode.WORKERS_DRAINING,
        f"Workers that could run it take nothing new, for they are about to stop: {names}.",
        {
            "workers": [node.worker_id for node in nodes[:NAMED]],
            "more": max(0, len(nodes) - NAMED),
        },
    )


def _unreachable(nodes: Sequence[Node], now: int) -> Reason:
    names = ", ".join(worker_name(node.worker_id) for node in nodes[:NAMED])
    return Reason(
        ReasonCode.WORKER_UNREACHABLE,
        f"Workers that could run it do not beat, or do not answer at their address: {names}.",
        {
            "workers": [
                {
                    "workerId": node.worker_id,
                    "url": node.url,
                    "lastHeartbeat": rfc3339(node.last_heartbeat),
                    "beats": is_live(node, now),
                }
                for node in nodes[:NAMED]
            ],
            "more": max(0, len(nodes) - NAMED),
        },
    )


def is_live(node: Node, now: int) -> bool:
    """Tell whether a worker has beaten within the last 15 s and was not declared dead."""
    return node.state is not WorkerState.DOWN and now - node.last_heartbeat <= SILENT_MS


def _is_draining(node: Node, told: Standings) -> bool:
    view = told.workers.get(node.worker_id)
    return node.state is WorkerState.DRAINING or (view is not None and view.draining)


def is_suspect(node: Node, told: Standings) -> bool:
    """Tell whether the lock holder waits for a worker to answer at its address."""
    view = told.workers.get(node.worker_id)
    return view is not None and view.suspect


def _active(node: Node, told: Standings) -> int:
    view = told.workers.get(node.worker_id)
    return node.active if view is None else view.active


def _offers(number: int, noun: str) -> str:
    return f"One {noun} offers" if number == 1 else f"{number} {noun}s offer"
