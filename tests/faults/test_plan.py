"""A seed is a plan, and nothing else decides it."""

from __future__ import annotations

from tests.faults.plan import Kind, link_names, make_plan


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    plan = make_plan(7, seconds=600, jobs=500, clocks=True)
    assert plan == make_plan(7, seconds=600, jobs=500, clocks=True)
    assert plan != make_plan(8, seconds=600, jobs=500, clocks=True)


def test_ten_minutes_hold_more_than_sixty_faults_of_every_kind() -> None:
    plan = make_plan(7, seconds=600, jobs=5000, clocks=True)
    assert len(plan.faults) > 60
    assert {fault.kind for fault in plan.faults} == set(Kind)
    links = {fault.target for fault in plan.faults if fault.kind is Kind.LINK}
    assert links <= set(link_names())
    requests = [call.body["clientRequestId"] for calls in plan.calls for call in calls]
    assert len(set(requests)) == 5000
