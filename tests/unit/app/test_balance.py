"""Which worker a task is dealt to: the formula, chance among near-equals, the other policies."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fleet.balance import Policy, Slots, choose, load_of

POLICIES: tuple[Policy, ...] = ("least_load", "round_robin", "random", "rendezvous")


def worker(
    name: str = "w",
    *,
    active: int = 0,
    capacity: int = 10,
    cost: float = 0,
    idle: float = 100,
    weight: float = 1,
) -> Slots:
    return Slots(name, active, capacity, cost, idle, weight)


workers = st.builds(
    worker,
    st.text("abc", min_size=1, max_size=3),
    active=st.integers(0, 40),
    capacity=st.integers(0, 40),
    cost=st.floats(0, 100_000),
    idle=st.floats(0, 100),
    weight=st.floats(0.1, 10),
)
fleets = st.lists(workers, max_size=8, unique_by=lambda one: one.worker_id)
draws = st.floats(0, 1, exclude_max=True)


def chosen(fleet: list[Slots], policy: Policy = "least_load", draw: float = 0.5) -> str | None:
    found = choose(fleet, policy, draw=draw, turn=0, key="k")
    return None if found is None else found.worker_id


@pytest.mark.parametrize(
    ("one", "load"),
    [
        (worker(), 0),
        (worker(active=3), 30),
        (worker(cost=2500), 2.5),
        (worker(idle=40), 6),
        (worker(active=3, cost=2500, idle=40), 38.5),
        (worker(active=3, cost=2500, idle=40, weight=2), 19.25),
    ],
)
def test_the_load_is_the_formula_of_the_contract(one: Slots, load: float) -> None:
    assert load_of(one) == pytest.approx(load)


@given(fleets, st.sampled_from(POLICIES), draws, st.integers(0, 10**9), st.text())
def test_a_full_worker_is_never_chosen_and_a_free_one_always(
    fleet: list[Slots], policy: Policy, draw: float, turn: int, key: str
) -> None:
    found = choose(fleet, policy, draw=draw, turn=turn, key=key)
    if found is None:
        assert all(one.free == 0 for one in fleet)
    else:
        assert found.free > 0


@given(fleets, draws)
def test_the_least_load_is_chosen_or_a_near_equal(fleet: list[Slots], draw: float) -> None:
    found = choose(fleet, "least_load", draw=draw, turn=0, key="")
    if found is not None:
        least = min(load_of(one) for one in fleet if one.free)
        assert load_of(found) < least + 5


def test_a_worker_with_fewer_runs_is_chosen() -> None:
    assert chosen([worker("busy", active=4), worker("idle", active=2)], draw=0.99) == "idle"


def test_near_equals_share_by_chance() -> None:
    fleet = [worker("a", idle=80), worker("b", idle=99), worker("c", cost=1000)]
    counts = Counter(chosen(fleet, draw=number / 300) for number in range(300))
    assert counts == {"a": 100, "b": 100, "c": 100}


def test_a_heavier_worker_takes_its_share() -> None:
    fleet = [worker("one", capacity=1000), worker("three", capacity=1000, weight=3)]
    for number in range(400):
        found = choose(fleet, "least_load", draw=(number * 0.618) % 1, turn=number, key="")
        assert found is not None
        found.active += 1
    share = fleet[1].active / fleet[0].active
    assert 2.7 <= share <= 3.3


def test_round_robin_takes_free_workers_in_turn() -> None:
    fleet = [worker("b"), worker("a"), worker("full", active=10), worker("c")]
    found = [choose(fleet, "round_robin", draw=0, turn=turn, key="") for turn in range(6)]
    assert [one.worker_id for one in found if one] == ["a", "b", "c"] * 2


def test_rendezvous_keeps_a_key_on_its_worker_while_others_come_and_go() -> None:
    fleet = [worker(name) for name in "abcde"]
    keys = [str(number) for number in range(500)]

    def places(members: list[Slots]) -> dict[str, str]:
        found = {key: choose(members, "rendezvous", draw=0, turn=0, key=key) for key in keys}
        return {key: one.worker_id for key, one in found.items() if one is not None}

    before, after = places(fleet), places(fleet[:-1])
    assert all(after[key] == place for key, place in before.items() if place != "e")
    spread = sorted(Counter(before.values()).values())
    assert len(spread) == 5
    assert spread[0] > 60


def test_equal_workers_get_equal_shares_of_a_burst() -> None:
    fleet = [worker(name, capacity=1000) for name in "abc"]
    for number in range(300):
        found = choose(fleet, "least_load", draw=(number * 0.618) % 1, turn=number, key="")
        assert found is not None
        found.active += 1
    counts = sorted(one.active for one in fleet)
    assert all(later - earlier <= 2 for earlier, later in pairwise(counts))
