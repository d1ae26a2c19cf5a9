"""`oncue drain`: a worker takes no more runs, finishes what it has, and says when it is done."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from oncue.testing import Platform
from tests.support.cli import ONCUE, Told, cli_environment, oncue
from tests.support.ports import free_port
from tests.support.wait import until

OK, REFUSED, NOT_REACHED, TIMED_OUT = 0, 3, 4, 5


class Holding:
    """A handler that runs until it is let go."""

    def __init__(self) -> None:
        self.running, self.let_go = threading.Event(), threading.Event()

    def __call__(self, params: Any) -> str:
        self.running.set()
        self.let_go.wait(60)
        return "done"


@contextmanager
def holding() -> Iterator[tuple[Platform, Holding]]:
    handler = Holding()
    with Platform({"hold": handler}) as platform:
        try:
            yield platform, handler
        finally:
            handler.let_go.set()


def token_of(platform: Platform) -> dict[str, str]:
    # As workers and dispatchers may have it: the first of two is sent.
    return {"ONCUE_INTERNAL_TOKEN": f"{platform._environment['ONCUE_INTERNAL_TOKEN']},older"}


def drain(platform: Platform, *words: str) -> Told:
    return oncue("drain", *words, url=platform.url, variables=token_of(platform))


def test_a_drained_worker_finishes_what_it_has_and_takes_nothing_new() -> None:
    with holding() as (platform, handler):
        job = platform.client.submit("hold")
        assert handler.running.wait(30)
        told = drain(platform, "worker")
        assert (told.code, told.err) == (OK, "")
        assert told.out == "worker takes no more runs; 1 run goes on\n"
        until(lambda: [one.state for one in platform.client.workers()] == ["DRAINING"])
        late = platform.client.submit("hold")

        told = drain(platform, "worker", "--wait", "--timeout", "0.1")
        assert told.code == TIMED_OUT
        assert told.err == "oncue: worker takes no more runs; 1 run goes on\n"

        waiting = subprocess.Popen(
            [ONCUE, "drain", "worker", "--wait", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            env=cli_environment(platform.url, **token_of(platform)),
        )
        handler.let_go.set()
        out, _ = waiting.communicate(timeout=30)
        assert waiting.returncode == OK
        (one,) = json.loads(out)
        assert (one["worker"], one["state"], one["active"], one["unreported"]) == (
            *("worker", "DRAINING", 0, 0),
        )
        assert platform.client.wait(job, timeout=30).result == "done"
        assert platform.client.get(late).status == "WAITING"
        assert platform.client.get(late).attempt == 0


def test_an_address_needs_no_dispatcher_and_a_repeat_is_fine() -> None:
    with holding() as (platform, _):
        (worker,) = platform.client.workers()
        for _ in range(2):
            told = oncue(
                "drain", worker.url, url="http://127.0.0.1:1", variables=token_of(platform)
            )
            assert (told.code, told.err) == (OK, "")
            assert told.out.endswith("holds nothing: it can be stopped\n")


def test_refusals_are_one_sentence_and_drain_nobody() -> None:
    with holding() as (platform, _):
        told = drain(platform, "worker", "nobody")
        assert (told.code, told.out) == (REFUSED, "")
        assert told.err == "oncue: no live worker is named 'nobody' (there are: worker)\n"

        wrong = {"ONCUE_INTERNAL_TOKEN": "wrong"}
        told = oncue("drain", "worker", url=platform.url, variables=wrong)
        assert (told.code, told.out) == (REFUSED, "")
        assert "set ONCUE_INTERNAL_TOKEN" in told.err
        (worker,) = platform.client.workers()
        told = oncue("drain", worker.url, url=platform.url)
        assert (told.code, told.out) == (REFUSED, "")
        assert "set ONCUE_INTERNAL_TOKEN" in told.err

        told = drain(platform, platform.url)
        assert (told.code, told.out) == (REFUSED, "")
        assert "is not a worker" in told.err

        told = drain(platform, f"http://127.0.0.1:{free_port()}")
        assert (told.code, told.out) == (NOT_REACHED, "")
        assert "does not answer" in told.err
        assert [one.state for one in platform.client.workers()] == ["UP"]


def test_without_the_token_the_dispatcher_is_asked_and_keeps_it_on_record() -> None:
    with holding() as (platform, _):
        told = oncue("drain", "worker", "--wait", "--timeout", "30", url=platform.url)
        assert (told.code, told.err) == (OK, "")
        assert told.out == "worker takes no more runs and holds nothing: it can be stopped\n"
        assert [one.action for one in platform.client.audit()] == ["worker.drain"]


@pytest.mark.parametrize("words", [(), ("--timeout", "5", "worker")])
def test_bad_usage_sends_nothing(words: tuple[str, ...]) -> None:
    told = oncue("drain", *words, url="http://127.0.0.1:1")
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
