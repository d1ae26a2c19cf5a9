"""Retention goes gently: small steps, a rest after each, and back when others are slow."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.jobs.dropped_files import DroppedFiles
from app.jobs.pace import FEWEST, LONGEST_REST_SECONDS, MOST, REST, Pace
from app.lifecycle.keep import DAY_MS, default_keeps, keep_classes, shortest_keep_days
from app.lifecycle.states import JobStatus
from app.plumbing.tempo import Tempo
from app.settings import Settings

NOON = 1_800_000_000_000


def test_quick_steps_grow_and_slow_ones_shrink_and_each_is_followed_by_a_rest() -> None:
    pace = Pace()
    for _ in range(50):
        assert pace.rest_after(0.01, strained=False) == pytest.approx(REST * 0.01)
    assert pace.batch == MOST
    for _ in range(50):
        assert pace.rest_after(0.2, strained=False) == pytest.approx(REST * 0.2)
    assert pace.batch == FEWEST
    assert pace.rest_after(3600, strained=False) == LONGEST_REST_SECONDS


def test_while_others_are_slow_it_rests_longer_and_longer() -> None:
    pace = Pace()
    rests = [pace.rest_after(0.01, strained=True) for _ in range(20)]
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_REST_SECONDS
    assert pace.batch == FEWEST
    assert pace.rest_after(0.01, strained=False) == pytest.approx(REST * 0.01)


def test_slow_is_what_takes_twice_as_long_as_usual_and_long_enough_to_matter() -> None:
    tempo = Tempo(floor_seconds=0.02)
    found = [tempo.is_slow]
    for seconds, times in ((0.004, 100), (0.015, 20), (0.05, 20), (0.004, 20)):
        for _ in range(times):
            tempo.note(seconds)
        found.append(tempo.is_slow)
    assert found == [False, False, False, True, False]


def test_states_that_are_kept_equally_long_are_one_class() -> None:
    defaults = default_keeps(30, {"FAILED": 90})
    assert [(set(one.statuses), one.keep_ms // DAY_MS) for one in keep_classes(defaults, {})] == [
        ({JobStatus.SUCCEEDED, JobStatus.CANCELLED}, 30),
        ({JobStatus.FAILED}, 90),
    ]
    own = keep_classes(defaults, {JobStatus.SUCCEEDED: 7 * DAY_MS, JobStatus.FAILED: 30 * DAY_MS})
    assert [(set(one.statuses), one.keep_ms // DAY_MS) for one in own] == [
        ({JobStatus.SUCCEEDED}, 7),
        ({JobStatus.FAILED, JobStatus.CANCELLED}, 30),
    ]
    assert shortest_keep_days(30, {"FAILED": 0.5}) == 0.5
    assert shortest_keep_days(30, {}) == 1.0


def test_the_setting_names_states_and_days() -> None:
    def settings(text: str) -> Settings:
        return Settings(_env_file=None, retention=text)  # type: ignore[arg-type]

    found = settings(" succeeded=7d, FAILED=90.5 ").retention
    assert found == {"SUCCEEDED": 7.0, "FAILED": 90.5}
    assert settings("").retention == {}
    for wrong in ("WAITING=7", "SUCCEEDED=0", "SUCCEEDED", "SUCCEEDED=7,succeeded=8", "FAILED=1w"):
        with pytest.raises(ValueError, match="retention"):
            settings(wrong)


def lines(path: Path) -> list[int]:
    return [json.loads(line)["jobId"] for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_what_could_not_be_flushed_leaves_no_trace_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = DroppedFiles(tmp_path)
    path = files.keep([{"jobId": 1}, {"jobId": 2}], NOON)
    with monkeypatch.context() as patch:

        def full(_descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            files.keep([{"jobId": 3}], NOON)
    assert files.keep([{"jobId": 3}], NOON) == path
    assert lines(path) == [1, 2, 3]
    tomorrow = files.keep([{"jobId": 4}], NOON + DAY_MS)
    assert (tomorrow != path, lines(tomorrow)) == (True, [4])
    # Another process has a file of its own: a member that it broke off spoils no other's.
    assert DroppedFiles(tmp_path).keep([{"jobId": 5}], NOON) not in (path, tomorrow)


_FULL_DISK = """
import json, os, resource, sys
from pathlib import Path
from app.jobs.dropped_files import DroppedFiles

directory, count, room = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
files = DroppedFiles(directory)
size = files.keep([{"jobId": 1}], 0).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))
try:
    files.keep([{"jobId": 2, "rows": os.urandom(count).hex()}], 0)
except OSError as error:
    print(error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(files.keep([{"jobId": 3}], 0))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of a file's size")
@pytest.mark.parametrize(("count", "room"), [(500, 0), (500, 300), (4000, 3500), (100_000, 50_000)])
def test_what_only_a_part_of_fitted_on_the_disk_leaves_no_trace_in_the_file(
    tmp_path: Path, count: int, room: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path), str(count), str(room)],
        capture_output=True,
        text=True,
        check=True,
    )
    number, path = done.stdout.split()
    assert int(number) == errno.EFBIG
    assert lines(Path(path)) == [1, 3]
