"""What holds for every expression, zone and instant."""

from __future__ import annotations

import random
import time
from zoneinfo import available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.schedules.cron import CronTimes, parse_cron
from app.schedules.grammar import CronError
from app.schedules.sentence import sentence
from app.schedules.zone import zone_clock
from tests.unit.schedules.expressions import Sample, draw_sample
from tests.unit.schedules.looking import epoch_ms, times_of

ZONES = sorted(available_timezones() - {"localtime", "Factory", "posixrules"})
SAMPLES = st.integers(0, 2**32).map(lambda seed: draw_sample(random.Random(seed)))
INSTANTS = st.integers(-(10**12), 8 * 10**12)


def fires_of(sample: Sample, zone: str, **choices: str) -> CronTimes | None:
    try:
        cron = parse_cron(sample.expression, sample.dialect)
    except CronError:
        return None
    return CronTimes(cron, zone_clock(zone), **choices)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(
    sample=SAMPLES,
    zone=st.sampled_from(ZONES),
    instant=INSTANTS,
    gap=st.sampled_from(("shift", "skip")),
    fold=st.sampled_from(("first", "both", "second")),
)
def test_next_is_later_previous_is_earlier_and_they_undo_each_other(
    sample: Sample, zone: str, instant: int, gap: str, fold: str
) -> None:
    times = fires_of(sample, zone, dst_gap=gap, dst_fold=fold)
    if times is None:
        return
    after, before = times.next_after(instant), times.previous_before(instant)
    assert after is None or after > instant
    assert before is None or before < instant
    if after is not None:
        assert times.next_after(after - 1) == after
        assert times.previous_before(after + 1) == after
        assert times.count(instant, after) == 1
        assert times.count(instant, after - 1) == 0
        assert times.previous_before(after) in {before, instant}
    if before is not None:
        assert times.next_after(before) in {after, instant}


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="0123456789*/-,?LW#@ SUNMONJAdaily\t", max_size=140))
def test_any_text_is_an_expression_or_refused_with_a_sentence(text: str) -> None:
    for dialect in (None, "unix", "quartz"):
        try:
            told = sentence(parse_cron(text, dialect).fields)
        except CronError as error:
            told = f"{error}."
        assert len(told) > 10
        assert told.endswith(".")


@pytest.mark.parametrize(
    ("expression", "zone"),
    [
        ("0 0 0 1 1 ? 2199", "Africa/Casablanca"),
        ("0 0 0 29 2 ? 2196", "America/New_York"),
        ("0 0 0 ? 2 1#5", "Europe/Berlin"),
        ("0 0 0 1 1 ? 1970", "Europe/Berlin"),
    ],
)
def test_rare_expressions_cost_bounded_work(expression: str, zone: str) -> None:
    times = times_of(expression, zone)
    began = time.process_time()
    times.next_after(epoch_ms("1970-06-01T00:00:00+00:00"))
    times.previous_before(epoch_ms("2199-06-01T00:00:00+00:00"))
    assert time.process_time() - began < 0.5


def test_counting_a_year_of_seconds_walks_over_none_of_them() -> None:
    times = times_of("* * * * * *", "America/New_York")
    start, end = epoch_ms("2026-01-01T00:00:00-05:00"), epoch_ms("2027-01-01T00:00:00-05:00")
    began = time.process_time()
    assert times.count(start - 1, end - 1) == 365 * 86_400
    assert time.process_time() - began < 0.5
