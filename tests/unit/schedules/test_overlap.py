"""Which fires run beside, behind or in place of others: the rule of overlap by itself."""

from __future__ import annotations

from typing import Any

import pytest

from app.schedules.decide import DEFAULT_SPACING_MS, decide, spread_ms_of

EVERY = 60_000
GRACE = 10_000
ROW: dict[str, Any] = {
    "tenant_id": 1,
    "client_request_id": "c",
    "cron_expr": None,
    "interval_ms": EVERY,
    "interval_mode": "fixedRate",
    "misfire_policy": "once",
    "misfire_cap": None,
    "misfire_spacing_ms": None,
    "catch_up_ms": None,
    "overlap_policy": "skip",
    "jitter_ms": 0,
    "max_fires": None,
    "fires": 0,
    "start_at": None,
    "end_at": None,
    "anchor_at": 0,
    "skip_from": None,
    "skip_reason": None,
    "trigger_ts": 0,
}


@pytest.mark.parametrize(
    ("overlap", "going", "waiting"),
    [
        ("skip", 0, 0),
        ("skip", 1, 0),
        ("queue", 0, 0),
        ("queue", 1, 1),
        ("replace", 0, 0),
        ("replace", 1, 0),
    ],
)
def test_what_is_put_off_stands_in_a_line_and_replaces_nothing(
    overlap: str, going: int, waiting: int
) -> None:
    now = 100 * EVERY + 30_000
    row = ROW | {"overlap_policy": overlap, "jitter_ms": 10 * EVERY}
    spread = spread_ms_of(row)
    assert spread > 3 * EVERY
    row["trigger_ts"] = (now - spread) // EVERY * EVERY
    found = decide(row, now_ms=now, grace_ms=GRACE, going=going, waiting=waiting, ahead_ms=spread)
    assert not found.replaces
    assert found.ledger == ()
    assert [one.nominal_ms for one in found.runs] == list(
        range(row["trigger_ts"] + EVERY, now, EVERY)
    )
    assert all(one.due_ms == one.nominal_ms + spread > now for one in found.runs)
    waits = [one.waits for one in found.runs]
    assert waits == [bool(going)] + [True] * (len(waits) - 1)


@pytest.mark.parametrize("going", [0, 1])
def test_what_is_put_off_stands_behind_what_replaces(going: int) -> None:
    now = 100 * EVERY + 30_000
    row = ROW | {"overlap_policy": "replace", "jitter_ms": 10 * EVERY}
    spread = spread_ms_of(row)
    assert spread > 3 * EVERY
    # One more is due, in time.
    due = (now - spread) // EVERY * EVERY
    row["trigger_ts"] = due - EVERY
    found = decide(row, now_ms=now, grace_ms=EVERY, going=going, waiting=0, ahead_ms=spread)
    assert found.replaces == bool(going)
    assert found.runs[0].nominal_ms == due
    assert [one.waits for one in found.runs] == [False] + [True] * (len(found.runs) - 1)


@pytest.mark.parametrize(
    ("overlap", "going", "waiting", "runs", "lapped"),
    [
        ("skip", 0, 0, 1, 2),
        ("queue", 0, 0, 2, 1),
        ("queue", 1, 0, 1, 2),
        ("queue", 1, 1, 0, 3),
        ("replace", 1, 0, 1, 2),
        ("allow", 1, 0, 3, 0),
    ],
)
def test_fires_that_were_not_missed_meet_the_rule_of_overlap_also_where_all_are_made_up_for(
    overlap: str, going: int, waiting: int, runs: int, lapped: int
) -> None:
    """Three fires are due at once, and none of them was missed."""
    row = ROW | {"overlap_policy": overlap, "misfire_policy": "all", "interval_ms": 100}
    found = decide(row, now_ms=300, grace_ms=GRACE, going=going, waiting=waiting)
    assert len(found.runs) == runs
    assert sum(one.count for one in found.ledger if one.reason == "overlap") == lapped


@pytest.mark.parametrize("overlap", ["skip", "queue", "replace"])
def test_missed_fires_that_are_all_made_up_for_stand_in_a_line(overlap: str) -> None:
    row = ROW | {"overlap_policy": overlap, "misfire_policy": "all"}
    found = decide(row, now_ms=3 * EVERY + 2 * GRACE, grace_ms=GRACE, going=0, waiting=0)
    assert [one.waits for one in found.runs] == [False, True, True]
    assert found.ledger == ()


@pytest.mark.parametrize(
    ("told", "apart"),
    [(None, DEFAULT_SPACING_MS), (0, 0), (250, 250)],
    ids=["default", "none", "own"],
)
def test_missed_fires_that_are_made_up_for_begin_apart(told: int | None, apart: int) -> None:
    row = ROW | {
        "misfire_policy": "all",
        "overlap_policy": "allow",
        "misfire_spacing_ms": told,
    }
    now = 3 * EVERY + 2 * GRACE
    found = decide(row, now_ms=now, grace_ms=GRACE, going=0, waiting=0)
    assert [one.due_ms for one in found.runs] == [now, now + apart, now + 2 * apart]
    assert DEFAULT_SPACING_MS > 0
