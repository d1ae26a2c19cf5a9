"""What is divided among dispatchers: all of it, evenly, and in turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.fleet.portions import TURN_MS, Portion, Use, seats_of

few = st.integers(1, 64)


@given(slots=st.integers(0, 1000), of=few, turn=st.integers(0, 10**12))
def test_in_each_turn_the_parts_are_all_slots_and_even(slots: int, of: int, turn: int) -> None:
    parts = [Portion(place, of).part(slots, turn=turn) for place in range(of)]
    assert sum(parts) == slots
    assert max(parts) - min(parts) <= 1


@given(of=few, place=st.integers(0, 63), turn=st.integers(0, 10**12))
def test_a_single_slot_is_everybodys_in_turn(of: int, place: int, turn: int) -> None:
    one = Portion(place % of, of)
    assert sum(one.part(1, turn=turn + passed) for passed in range(of)) == 1


@given(of=few, partitions=few)
def test_shares_of_partitions_are_all_of_them_and_even(of: int, partitions: int) -> None:
    shares = [seats_of(place, of=of, partitions=partitions) for place in range(of)]
    assert sum(shares) == partitions
    assert max(shares) - min(shares) <= 1
    assert max(shares) <= -(-partitions // of)


@given(
    capacity=st.integers(1, 50),
    of=st.integers(2, 8),
    number=st.integers(0, 2**32),
    start=st.integers(0, 10**6),
)
def test_from_idle_all_together_fill_a_worker_and_never_ask_for_more(
    capacity: int, of: int, number: int, start: int
) -> None:
    portions = [Portion(place, of) for place in range(of)]
    uses = [Use(number) for _ in portions]
    now_ms = start * TURN_MS
    free = capacity
    asked = [
        use.allowed(portion, capacity=capacity, free=free, now_ms=now_ms)
        for portion, use in zip(portions, uses, strict=True)
    ]
    assert sum(asked) == capacity


@given(capacity=st.integers(1, 20), of=st.integers(2, 8), number=st.integers(0, 2**32))
def test_one_that_has_all_the_work_gets_every_slot_within_some_turns(
    capacity: int, of: int, number: int
) -> None:
    use, portion = Use(number), Portion(0, of)
    for turn in range(of * capacity + 1):
        use.own += use.allowed(
            portion, capacity=capacity, free=capacity - use.own, now_ms=turn * TURN_MS
        )
    assert use.own == capacity


def test_a_slot_that_its_owner_fills_again_and_again_is_not_lent() -> None:
    use, portion = Use(0, own=1), Portion(0, 2)
    asked = []
    for turn in range(10):
        # The other's run has ended as the turn begins; in the midst of it the next one runs.
        asked.append(use.allowed(portion, capacity=2, free=1, now_ms=turn * TURN_MS))
        asked.append(use.allowed(portion, capacity=2, free=0, now_ms=turn * TURN_MS + 50))
    assert sum(asked) == 0


def test_a_slot_that_was_lent_is_taken_by_whose_it_is_when_it_is_free_again() -> None:
    borrower, owner = Use(0), Use(0)
    turn = 4  # of two, place 0 has the odd slot of a worker with one in even turns
    borrower.own = 1
    assert owner.allowed(Portion(0, 2), capacity=1, free=0, now_ms=turn * TURN_MS) == 0
    borrower.own = 0
    assert owner.allowed(Portion(0, 2), capacity=1, free=1, now_ms=turn * TURN_MS) == 1
    assert borrower.allowed(Portion(1, 2), capacity=1, free=1, now_ms=turn * TURN_MS) == 0
