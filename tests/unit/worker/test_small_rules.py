"""Rules that take time, chance or files as arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oncue import Context, Fail
from oncue.protocol import DeliveryResult
from worker.clock import DatabaseClock, boot_seconds
from worker.cpu import CpuIdle, find_cgroup_limit
from worker.deliver import read_retry_after
from worker.execute import TIMED_OUT, cancelled_as
from worker.handlers.built_in import ToldToFail, echo, fail, sleep
from worker.outcome import encode_try
from worker.report import backoff_seconds

NOW = 1_800_000_000.0


def context(attempt: int = 1) -> Context:
    return Context(
        job_id=1,
        execution_id="e",
        handler="h",
        job_name="n",
        attempt=attempt,
        max_attempts=3,
        trigger_ts=1,
        deadline_ms=2,
    )


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (429, "0", 1000),
        (503, " 120 ", 120_000),
        (503, "86401", 86_400_000),
        (503, "9" * 400, 86_400_000),
        (503, "Fri, 15 Jan 2027 08:00:30 GMT", 30_000),
        (503, "Fri, 15 Jan 2000 08:00:30 GMT", None),
        (503, "-5", None),
        (503, "²", None),
        (503, "tomorrow", None),
        (503, "", None),
        (500, "120", None),
    ],
)
def test_retry_after_is_read_or_ignored(status: int, text: str, expected: int | None) -> None:
    assert read_retry_after(status, {"Retry-After": text}, NOW) == expected


@pytest.mark.parametrize(
    ("failures", "chance", "seconds"),
    [(0, 0, 0.05), (0, 1, 0.1), (1, 1, 0.2), (4, 1, 1.6), (5, 1, 2), (10_000, 1, 2)],
)
def test_backoff_doubles_up_to_two_seconds(failures: int, chance: float, seconds: float) -> None:
    assert backoff_seconds(failures, chance) == pytest.approx(seconds)


def test_the_tightest_cgroup_limit_around_a_process_counts(tmp_path: Path) -> None:
    inner = tmp_path / "root" / "pod" / "container"
    inner.mkdir(parents=True)
    own = tmp_path / "self"
    own.write_text("12:cpu:/x\n0::/pod/container\n")
    assert find_cgroup_limit(tmp_path / "root", own) is None
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert find_cgroup_limit(tmp_path / "root", own) == (inner.parent, 1.5)
    (inner / "cpu.max").write_text("50000 100000\n")
    assert find_cgroup_limit(tmp_path / "root", own) == (inner, 0.5)
    assert find_cgroup_limit(tmp_path / "root", tmp_path / "missing") is None


def test_idle_is_a_percentage() -> None:
    idle = CpuIdle()
    assert 0 <= idle.percent() <= 100
    assert 0 <= idle.percent() <= 100


def test_the_database_clock_is_midway_between_question_and_answer() -> None:
    clock, since_boot = DatabaseClock(), boot_seconds()
    clock.learn(5_000, sent=since_boot - 3.0, received=since_boot - 1.0)
    assert 7_000 <= clock.now_ms() < 12_000


def test_a_step_of_the_wall_clock_does_not_move_the_database_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall = NOW
    monkeypatch.setattr("worker.clock.time.time", lambda: wall)
    clock = DatabaseClock()
    assert clock.now_ms() == NOW * 1000
    clock.learn(5_000, sent=boot_seconds(), received=boot_seconds())
    wall += 3600
    assert 5_000 <= clock.now_ms() < 10_000
    # What others time by the wall clock is still told in the database's time.
    assert -1.0 < (clock.offset_ms + wall * 1000 - clock.now_ms()) / 1000 < 5.0


def test_the_boot_clock_goes_on() -> None:
    assert boot_seconds() <= boot_seconds()


async def test_echo_returns_its_params() -> None:
    assert await echo({"a": [1]}, context()) == {"a": [1]}


@pytest.mark.parametrize("params", [None, {}, {"ms": "1"}, {"ms": -1}, {"ms": True}, {"ms": 1e12}])
async def test_sleep_refuses_what_is_no_time(params: Any) -> None:
    with pytest.raises(Fail) as refusal:
        await sleep(params, context())
    assert refusal.value.code == "invalid_params"


async def test_sleep_sleeps() -> None:
    assert await sleep({"ms": 0}, context()) == {"ms": 0}


async def test_fail_fails_as_many_attempts_as_told() -> None:
    for attempt in (1, 2):
        with pytest.raises(ToldToFail, match="boom"):
            await fail({"message": "boom", "times": 2}, context(attempt))
    assert await fail({"times": 2}, context(3)) == {"attempt": 3}
    with pytest.raises(ToldToFail):
        await fail(None, context(99))


@pytest.mark.parametrize("params", [[], "x", {"times": -1}, {"times": "2"}, {"times": True}])
async def test_fail_refuses_bad_params(params: Any) -> None:
    with pytest.raises(Fail):
        await fail(params, context())


def test_a_run_that_a_dispatcher_stopped_as_overdue_says_so() -> None:
    stopped = cancelled_as("timed_out")
    assert (stopped.status, stopped.code) == (TIMED_OUT.status, TIMED_OUT.code)
    assert "a dispatcher stopped it" in stopped.message


@pytest.mark.parametrize(
    "told",
    [
        {"delivered": True},
        {
            "delivered": False,
            "gone": True,
            "status_code": 410,
            "error": "no \u00e9",
            "latency_ms": 3,
            "retry_after_ms": 2000,
            "not_tried": True,
            "tried_at": 9,
            "answer": "\u2028",
        },
    ],
)
def test_a_try_goes_over_the_wire_with_all_that_its_message_has(told: dict[str, Any]) -> None:
    result = DeliveryResult(delivery_id="d", try_number=2, **told)
    assert json.loads(encode_try(result)) == result.model_dump(by_alias=True)
