"""Retries and time-outs over real processes: as many as the job says, as far apart as it says."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from tests.support.engines import Engine
from tests.support.processes import ROOT, NewPlatform, Platform
from tests.support.wait import until


def gaps(job: dict[str, Any]) -> list[float]:
    """Seconds between the end of each attempt and the next one's trigger time."""
    runs = job["executions"][::-1]
    return [
        (
            datetime.fromisoformat(later["triggerTime"])
            - datetime.fromisoformat(earlier["finishedAt"])
        ).total_seconds()
        for earlier, later in pairwise(runs)
    ]


@pytest.fixture(scope="module")
def handlers_module(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A module of handlers that end as retries need them to."""
    directory = tmp_path_factory.mktemp("handlers")
    (directory / "ending_handlers.py").write_text(
        "from oncue import Fail, Retry, handler\n"
        "@handler('give_up')\n"
        "def give_up(params): raise Fail('enough', code='enough')\n"
        "@handler('come_again')\n"
        "def come_again(params, ctx):\n"
        "    if ctx.attempt == 1: raise Retry('later', after=0.5)\n"
        "    return ctx.attempt\n"
    )
    return str(directory)


@pytest.fixture
def retrying(engine: Engine, new_platform: NewPlatform, handlers_module: str) -> Platform:
    """A platform whose worker also has those handlers."""
    platform = new_platform(engine)
    platform.dispatcher(wait=False)
    platform.worker(
        handlers="tests.support.handlers,ending_handlers",
        environment={"PYTHONPATH": f"{handlers_module}:{ROOT}"},
    )
    platform.wait_for_workers(1)
    return platform


def test_attempts_intervals_and_ends_are_as_the_jobs_say(retrying: Platform) -> None:
    quick = {"retryIntervalSeconds": 0.3}
    ids = {
        "fixed": retrying.submit("fail", {"message": "no"}, maxRetry=2, **quick),
        "exponential": retrying.submit(
            "fail", {"times": 3}, maxRetry=5, retryBackoff="exponential", **quick
        ),
        "never": retrying.submit("fail", maxRetry=0, **quick),
        "fail": retrying.submit("give_up", maxRetry=5, **quick),
        "retry": retrying.submit("come_again", maxRetry=1, retryIntervalSeconds=60),
        "unstorable": retrying.submit("unstorable", maxRetry=5, **quick),
        "too long": retrying.submit("big", {"bytes": 70_000}, maxRetry=5, **quick),
        "large": retrying.submit("big", {"bytes": 65_000}, maxRetry=0),
        "big integer": retrying.submit("echo", 123456789012345678901234567890, maxRetry=0),
    }
    jobs = {name: retrying.ended(job_id) for name, job_id in ids.items()}
    ends = {
        name: (job["status"], job["attempt"], (job["error"] or {}).get("code"))
        for name, job in jobs.items()
    }
    assert ends == {
        "fixed": ("FAILED", 3, "handler_error"),
        "exponential": ("SUCCEEDED", 4, None),
        "never": ("FAILED", 1, "handler_error"),
        "fail": ("FAILED", 1, "enough"),
        "retry": ("SUCCEEDED", 2, None),
        "unstorable": ("FAILED", 1, "result_unstorable"),
        "too long": ("FAILED", 1, "result_too_large"),
        "large": ("SUCCEEDED", 1, None),
        "big integer": ("SUCCEEDED", 1, None),
    }
    assert jobs["big integer"]["result"] == 123456789012345678901234567890
    assert jobs["large"]["result"] == "x" * 65_000
    assert [one["attempt"] for one in jobs["fixed"]["executions"]] == [3, 2, 1]
    first, second, third = gaps(jobs["exponential"])
    waited = [*((0.25, gap) for gap in gaps(jobs["fixed"]))]
    waited += [(0.25, first), (0.55, second), (1.15, third), (0.45, gaps(jobs["retry"])[0])]
    # `finishedAt` is when the worker's report was written, whenever that came.
    assert all(least < gap < least + 30 for least, gap in waited), waited


def test_every_kind_of_handler_is_stopped_at_its_timeout(retrying: Platform) -> None:
    kinds = ("record", "record_thread", "record_process")
    ids = [
        retrying.submit(kind, {"ms": 60_000}, timeoutMs=700, maxRetry=1, retryIntervalSeconds=0)
        for kind in kinds
    ]
    for kind, job_id in zip(kinds, ids, strict=True):
        job = retrying.ended(job_id)
        assert (job["status"], job["error"]["code"]) == ("FAILED", "timeout"), kind
        assert [one["status"] for one in job["executions"]] == ["TIMED_OUT"] * 2
        assert [one["attempt"] for one in job["executions"]] == [2, 1]
    until(lambda: retrying.get("/openapi/workers")["items"][0]["active"] == 0)
