"""The buffers of lines: bounded for each run and over all, and nothing left out in silence."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncue.output import HEAD_BYTES, LINE_OVERHEAD_BYTES, TAIL_BYTES
from worker.log_buffer import Line, LogBuffers, RunLog


class Told:
    """What the buffers tell their owner."""

    def __init__(self, memory_bytes: int = 2**30) -> None:
        self.wakes: list[bool] = []
        self.dropped = 0
        self.buffers = LogBuffers(
            lambda: 1000, changed=self.wakes.append, dropped=self._drop, memory_bytes=memory_bytes
        )

    def _drop(self, lines: int) -> None:
        self.dropped += lines


def everything(log: RunLog) -> list[Line]:
    """Take all that a log has."""
    lines: list[Line] = []
    while taken := log.take(2**30, 1000).lines:
        lines += taken
    return lines


def dropped_in(line: Line) -> int:
    """How many lines a marker stands for."""
    return int(json.loads(line.fields or "{}")["droppedLines"]) if line.source == "oncue" else 0


def check_numbers(lines: list[Line], total: int) -> None:
    """Every number from 1 to the last is there, or counted by a marker in its place."""
    expected = 1
    for line in lines:
        expected += dropped_in(line) or 1
        assert line.seq == expected - 1
    assert expected - 1 == total


def test_the_first_and_the_last_half_stay() -> None:
    told = Told()
    log = told.buffers.open("e")
    size = LINE_OVERHEAD_BYTES + 1000
    for number in range(5000):
        log.add("info", "stdout", f"{number:<1000}")
    lines = everything(log)
    (marker,) = [line for line in lines if line.source == "oncue"]
    place = lines.index(marker)
    assert place == HEAD_BYTES // size
    assert len(lines) - place - 1 == TAIL_BYTES // size
    assert dropped_in(marker) == told.dropped == 5000 - len(lines) + 1
    assert json.loads(marker.fields or "")["droppedBytes"] == told.dropped * size
    check_numbers(lines, 5000)
    assert told.buffers.memory == 0


@given(
    st.lists(
        st.one_of(st.integers(0, 200_000), st.sampled_from(["take", "room", "progress"])),
        max_size=40,
    )
)
def test_whatever_happens_every_line_is_there_or_counted(steps: list[int | str]) -> None:
    told = Told()
    log = told.buffers.open("e")
    lines: list[Line] = []
    for step in steps:
        if step == "take":
            lines += log.take(64 * 1024, 50).lines
        elif step == "room":
            log.drop_half()
        elif step == "progress":
            log.progress(0.5, "")
        else:
            log.add("info", "ctx", "x" * int(step))
    log.close()
    last = log.take(2**30, 10**6)
    lines += last.lines
    check_numbers(lines, log.said)
    assert last.complete
    assert not log.has_news
    assert told.buffers.memory == 0
    assert all(len(line.message) <= 16 * 1024 for line in lines)


def test_the_largest_log_gives_room_when_all_together_are_too_large() -> None:
    told = Told(memory_bytes=300_000)
    small = [told.buffers.open(f"small {number}") for number in range(10)]
    large = told.buffers.open("large")
    for log in small:
        log.add("info", "stdout", "x" * 1000)
    for _ in range(1000):
        large.add("info", "stdout", "x" * 1000)
        assert told.buffers.memory <= 300_000
    assert told.dropped > 500
    for log in small:
        assert len(everything(log)) == 1
    check_numbers(everything(large), 1000)


def test_very_many_small_logs_are_bounded_too() -> None:
    told = Told(memory_bytes=100_000)
    logs = [told.buffers.open(str(number)) for number in range(500)]
    for log in logs:
        log.add("info", "stdout", "one")
        log.close()
        assert told.buffers.memory <= 100_000
    assert told.buffers.waiting < 200


def test_written_text_becomes_lines_and_writers_do_not_mix() -> None:
    log = Told().buffers.open("e")
    log.write("stdout", "a", by=1)
    log.write("stdout", "b", by=2)
    log.write("stderr", "c\r\n", by=1)
    log.write("stdout", "1\n\nx", by=1)
    log.write("stdout", "2\n", by=2)
    log.close()
    lines = everything(log)
    assert [(line.source, line.message) for line in lines] == [
        ("stderr", "c"),
        ("stdout", "a1"),
        ("stdout", ""),
        ("stdout", "b2"),
        ("stdout", "x"),
    ]


@pytest.mark.parametrize(
    "text", ["x" * 50_000, "ü" * 20_000, "\U0001f600" * 10_000, "\ud800" * 9000]
)
@pytest.mark.parametrize("step", [1000, 16_384, 60_000])
def test_long_text_is_cut_between_characters_however_it_comes(text: str, step: int) -> None:
    log = Told().buffers.open("e")
    for start in range(0, len(text), step):
        log.write("stdout", text[start : start + step])
    log.write("stdout", "\nnext\n")
    *pieces, following = everything(log)
    assert "".join(one.message for one in pieces) == text.encode("utf-8", "replace").decode()
    assert all(len(one.message.encode()) <= 16 * 1024 for one in pieces)
    labels = [json.loads(one.fields or "") for one in pieces] if len(pieces) > 1 else []
    assert [one["part"] for one in labels] == list(range(1, len(labels) + 1))
    assert [one["more"] for one in labels] == [True] * (len(labels) - 1) + [False] * bool(labels)
    assert (following.message, following.fields) == ("next", None)


@pytest.mark.parametrize("said", ["x", "\u00e9", "\U0001f600"])
def test_a_huge_message_is_cut_in_time_that_grows_with_its_length(said: str) -> None:
    """All runs of a worker share one lock: 16 MiB held it for seconds, 150 for minutes."""

    def seconds(size: int) -> float:
        log = Told().buffers.open("e1")
        begun = time.process_time()
        log.add("info", "ctx", said * (size // len(said.encode())))
        return time.process_time() - begun

    small = max(min(seconds(2**20) for _ in range(5)), 0.001)
    assert min(seconds(32 * 2**20) for _ in range(3)) < 32 * small * 8


def test_nobody_waits_for_the_end_of_a_huge_text() -> None:
    """A text of many lines is taken a piece at a time, and between two others have their turn."""
    told = Told()
    log = told.buffers.open("e1")
    taken: list[int] = []

    class Noting:
        def __init__(self) -> None:
            self.lock = told.buffers.lock

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            taken.append(log.said)
            self.lock.release()

    told.buffers.lock = Noting()  # type: ignore[assignment]
    log.write("stdout", "line\n" * 100_000)
    assert taken[-1] == 100_000
    assert max(now - before for before, now in pairwise([0, *taken])) < 20_000


def test_only_the_newest_progress_counts_and_its_time_grows() -> None:
    log = Told().buffers.open("e")
    times = []
    for number in range(5):
        log.progress(number / 10, "first")
        log.progress(number / 5, "second")
        progress = log.take(1000, 10).progress
        assert progress is not None
        assert (progress.value, progress.text) == (number / 5, "second")
        times.append(progress.at)
    assert times == sorted(set(times))


def test_a_log_wakes_its_owner_once_until_it_is_asked() -> None:
    told = Told()
    log = told.buffers.open("e")
    for _ in range(100):
        log.add("info", "ctx", "x")
    assert told.wakes == [False]
    assert told.buffers.next() is log
    log.close()
    assert told.wakes == [False, True]


def test_a_quiet_run_wakes_nobody() -> None:
    told = Told()
    told.buffers.open("e").close()
    assert told.wakes == []
