"""Which part of the workers is a dispatcher's, where several send to the same ones. Pure.

Of a worker's slots each dispatcher has an equal part, and what is over goes round from turn to
turn, so that a worker with one slot is everybody's in turn. The part is what one may always hold;
what of the others' parts has lain idle for a turn is divided in the same way, anew each turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

TURN_MS: Final = 100
"""So long a turn lasts. All count turns by the database's clock, so that they go round together."""

SCATTER: Final = 0x9E3779B1
"""Knuth's multiplicative hash: the golden ratio of 32 bits."""


class Portion(NamedTuple):
    """One dispatcher's place, counted from 0, among `of` that send."""

    place: int
    of: int

    def part(self, slots: int, *, turn: int) -> int:
        """Return its part of some slots; in each turn the parts of all are the slots.

        In as many turns as there are places each has what is over equally often, and in another
        order each time: runs that all take as long must not end in the same one's turn for ever.
        """
        whole, over = divmod(slots, self.of)
        order = (turn // self.of * SCATTER % 2**32) >> 16
        return whole + ((self.place + turn + order) % self.of < over)


@dataclass(slots=True)
class Use:
    """How a dispatcher uses one worker: `own` runs that it sent there, as far as it knows.

    `budget` of the idle slots it may have this turn, counted from `own_then`, its runs at the
    turn's start; `idle` slots were never used in this turn.
    """

    number: int
    own: int = 0
    turn: int = -1
    own_then: int = 0
    budget: int = 0
    idle: int = 0

    def allowed(self, portion: Portion, *, capacity: int, free: int, now_ms: float) -> int:
        """Return how many more of the `free` slots it may use now."""
        turn = int(now_ms // TURN_MS)
        shifted = turn + self.number
        if turn != self.turn:
            self.turn = turn
            self.own_then = self.own
            self.budget = portion.part(min(self.idle, free), turn=shifted)
            self.idle = free
        # A slot that was free for a moment only is its owner's: whoever is busy fills it at once.
        self.idle = min(self.idle, free)
        entitled = portion.part(capacity, turn=shifted) - self.own
        lent = self.own_then + self.budget - max(self.own, self.own_then)
        return max(0, min(free, max(entitled, lent)))


def seats_of(place: int, *, of: int, partitions: int) -> int:
    """Return how many partitions are for the dispatcher at a place: even to within one."""
    whole, over = divmod(partitions, of)
    return whole + (place < over)
