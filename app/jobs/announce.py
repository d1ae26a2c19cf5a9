"""What the other parts are told once callers' changes of jobs are committed."""

from __future__ import annotations

from collections.abc import Sequence

from app.ground import Ground
from app.lifecycle.moves.guard import Changed
from app.lifecycle.states import JobStatus
from app.plumbing.bus import CANCEL, ENDED, OWED, WAKE


def announce(ground: Ground, verb: str, changes: Sequence[tuple[int, Changed]]) -> None:
    """Wake whoever waits for these (job id, change) of one verb, and count what ended."""
    ended = []
    earliest: dict[tuple[int, int], int] = {}
    for job_id, changed in changes:
        if verb == "cancel" and not changed.repeated:
            ended.append([job_id, "" if changed.stopped is None else changed.stopped[1]])
        if changed.stopped is not None:
            ground.bus.publish(CANCEL, list(changed.stopped))
        if verb != "cancel" and changed.due_ms is not None:
            place = (changed.queue_id, changed.priority)
            earliest[place] = min(changed.due_ms, earliest.get(place, changed.due_ms))
    if ended:
        ground.metrics.finished.labels(JobStatus.CANCELLED.name).inc(len(ended))
        ground.bus.publish(ENDED, ended)
    if any(changed.owed for _, changed in changes):
        ground.bus.publish(OWED, [])
    if earliest:
        ground.bus.publish(WAKE, [[*place, due] for place, due in earliest.items()])
