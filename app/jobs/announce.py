"""What the other parts are told once callers' changes of jobs are committed."""

from __future__ import annotations

from collections.abc import Sequence

from app.ground import Ground
from app.lifecycle.moves.fire import SCHEDULES_QUEUE
from app.lifecycle.moves.follow import Claimable
from app.lifecycle.moves.guard import Changed
from app.lifecycle.states import JobStatus
from app.plumbing.bus import CANCEL, ENDED, FIRE, OWED, WAKE


def announce(ground: Ground, verb: str, changes: Sequence[tuple[int, Changed]]) -> None:
    """Wake whoever waits for these (job id, change) of one verb, and count what ended."""
    ended = []
    earliest: dict[tuple[int, int], int] = {}
    for job_id, changed in changes:
        if verb == "cancel" and not changed.repeated:
            ended.append([job_id, "" if changed.stopped is None else changed.stopped[1]])
        if changed.stopped is not None:
            ground.bus.publish(CANCEL, list(changed.stopped))
        claimable = list(changed.followed.claimable)
        if verb != "cancel" and changed.due_ms is not None:
            claimable.append(Claimable(changed.queue_id, changed.priority, changed.due_ms))
        for queue_id, priority, due in claimable:
            place = (queue_id, priority)
            earliest[place] = min(due, earliest.get(place, due))
    if ended:
        ground.metrics.finished.labels(JobStatus.CANCELLED.name).inc(len(ended))
        ground.bus.publish(ENDED, ended)
    if any(changed.owed for _, changed in changes):
        ground.bus.publish(OWED, [])
    if earliest:
        ground.bus.publish(WAKE, [[*place, due] for place, due in earliest.items()])
    if any(_moves_a_schedule(verb, changed) for _, changed in changes):
        ground.bus.publish(FIRE, [])


def _moves_a_schedule(verb: str, changed: Changed) -> bool:
    """Tell whether some schedule may have another next time now; a cancelled one has none."""
    if changed.followed.schedules:
        return True
    return verb != "cancel" and changed.queue_id == SCHEDULES_QUEUE
