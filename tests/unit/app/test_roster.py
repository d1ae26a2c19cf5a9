"""What a dispatcher counts of workers that others send to as well."""

from __future__ import annotations

from typing import Any

from app.fleet.portions import Portion
from app.fleet.roster import LISTED_MS, Roster
from app.lifecycle.nodes import Node
from oncue.protocol import Load, WorkerState

WORKER = "w#boot"
BEAT = 1_700_000_000_000


class Clock:
    """A time that the test moves; epoch ms."""

    def __init__(self) -> None:
        self.now: float = BEAT

    def __call__(self) -> float:
        return self.now


def node(**changes: Any) -> Node:
    fields: dict[str, Any] = {
        "worker_id": WORKER,
        "name": "w",
        "boot_id": "boot",
        "url": "http://127.0.0.1:9",
        "version": "1",
        "state": WorkerState.UP,
        "handlers": ({"name": "echo"},),
        "labels": {},
        "capacity": 4,
        "weight": 1.0,
        "delivers": True,
        "load_seq": 1,
        "active": 0,
        "queued": 0,
        "avg_cost_ms": 0.0,
        "cpu_idle_percent": 100.0,
        "held": frozenset(),
        "beats": 1,
        "last_heartbeat": BEAT,
        "handler_names": frozenset({"echo"}),
    }
    return Node(**{**fields, **changes})


def free_for(roster: Roster, *, seated: bool = False) -> int:
    """Return how many tasks of the worker's handler may be dealt now."""
    return roster.free_for("echo", "", roster.free(), seated=seated)


def shared(clock: Clock, **changes: Any) -> Roster:
    """A roster of one worker, of whose slots every other one is this dispatcher's."""
    roster = Roster(clock)
    roster.portion = Portion(0, 2)
    roster.refresh([node(**changes)])
    roster.trust(WORKER)
    return roster


def test_a_part_of_the_slots_is_counted_and_the_rest_once_it_has_lain_idle() -> None:
    clock = Clock()
    roster = shared(clock)
    assert free_for(roster) == 2
    (slots,) = roster.slots_for("echo", "")
    assert (slots.active, slots.free) == (0, 2)
    for number in range(2):
        roster.sent(WORKER, f"e{number}")
    assert free_for(roster) == 0
    clock.now += 100
    assert free_for(roster) == 1


def test_a_run_that_is_over_makes_room_for_the_next() -> None:
    clock = Clock()
    roster = shared(clock)
    for number in range(2):
        roster.sent(WORKER, f"e{number}")
        roster.answered(WORKER, f"e{number}")
    roster.observe(WORKER, Load(seq=2, active=4))  # two of them are another dispatcher's
    assert free_for(roster) == 0
    roster.over("e0")
    roster.over("e0")
    roster.observe(WORKER, Load(seq=3, active=3))
    assert free_for(roster) == 1


def test_an_end_that_nobody_told_of_is_seen_by_a_later_beat() -> None:
    clock = Clock()
    roster = shared(clock)
    for number in range(2):
        roster.sent(WORKER, f"e{number}")
        roster.answered(WORKER, f"e{number}")
    clock.now += LISTED_MS
    roster.refresh([node(last_heartbeat=BEAT + LISTED_MS, load_seq=2, active=2)])
    assert free_for(roster) <= 1  # both may have come too late for that beat
    clock.now += 1
    beat = node(last_heartbeat=BEAT + LISTED_MS + 1, load_seq=3, active=3, held=frozenset({"e1"}))
    roster.refresh([beat])
    assert free_for(roster) == 1


def test_one_that_knows_no_partitions_gets_those_of_the_first_alone() -> None:
    roster = shared(Clock())
    assert roster.slots_for("echo", "")
    assert not roster.slots_for("echo", "", seated=True)
    assert free_for(roster, seated=True) == 0
    roster.note_seats(WORKER, True)
    assert free_for(roster, seated=True) == 2


def test_one_that_alone_dispatches_counts_every_slot() -> None:
    roster = shared(Clock())
    roster.portion = None
    assert free_for(roster) == 4
    roster.sent(WORKER, "e0")
    assert free_for(roster) == 3


def test_what_an_earlier_term_sent_takes_no_slot() -> None:
    roster = Roster(Clock())
    roster.refresh([node()])
    roster.trust(WORKER)
    roster.sent(WORKER, "e1")
    assert free_for(roster) == 3
    roster.forget_sent()
    roster.answered(WORKER, "e1")
    assert free_for(roster) == 4
