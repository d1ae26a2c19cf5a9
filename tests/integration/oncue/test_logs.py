"""Logs, progress and events through the client and its commands, against a real platform."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from oncue import AsyncClient, Client, Job, LogLine, NotFound, Progress
from tests.support.cli import ONCUE, cli_environment
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Platform
from tests.support.wait import until

HANDLERS = "tests.integration.oncue.handlers_that_speak"
pytestmark = pytest.mark.xdist_group("speaking")


@pytest.fixture(scope="module")
def speaking(module_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Two dispatchers and a worker whose handlers speak."""
    platform = Platform(module_engine, tmp_path_factory.mktemp("speaking"), {}, 2)
    try:
        platform.dispatcher(1)
        platform.dispatcher(2)
        platform.worker(handlers=HANDLERS)
        platform.wait_for_workers(1)
        yield platform
    finally:
        platform.close()


@pytest.fixture
def client(speaking: Platform) -> Iterator[Client]:
    """A client of the first dispatcher."""
    with Client(speaking.url) as opened:
        yield opened


def oncue(platform: Platform, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ONCUE), *arguments],
        capture_output=True,
        text=True,
        env=cli_environment(platform.url),
        timeout=60,
        check=False,
    )


def test_what_a_run_says_is_read_back(client: Client) -> None:
    job = client.wait(client.submit("speak", {"steps": 2}), timeout=60, check=True)
    lines = list(client.follow_logs(job))
    assert [(line.source, line.level, line.message) for line in lines] == [
        ("ctx", "info", "begun"),
        ("stdout", "info", "printed"),
        ("stderr", "warning", "to stderr"),
        ("log", "warning", "logged so"),
        ("ctx", "info", "step 1"),
        ("ctx", "info", "step 2"),
    ]
    assert lines[0].fields == {"customer": 7, "names": ["a", "b"]}
    assert lines[3].fields == {"logger": "shop", "order": 1001}
    assert list(client.logs(job.job_id, page_size=2)) == lines
    assert list(client.logs(job.executions[0].execution_id)) == lines
    progress = client.get(job).progress
    assert progress is not None
    assert (progress.value, progress.text) == (1.0, "step 2")


def test_an_isolated_run_is_read_back_and_its_progress(client: Client) -> None:
    job = client.wait(client.submit("speak_isolated", {}), timeout=60, check=True)
    said = [(line.source, line.message) for line in client.follow_logs(job)]
    assert sorted(said) == [("ctx", "begun"), ("stdout", "past python"), ("stdout", "printed")]
    found = until(lambda: client.get(job).progress)
    assert found.value == 0.5


def test_logs_are_followed_over_attempts(client: Client) -> None:
    job = client.submit("fail_first", max_retry=1, retry_interval=0)
    said = [line.message.split("\n")[0] for line in client.follow_logs(job)]
    assert said == ["attempt 1", "the handler failed", "attempt 2"]
    assert [line.message for line in client.logs(job)] == ["attempt 2"]


def test_no_attempt_since_the_job_was_read_is_left_out(client: Client) -> None:
    submitted = client.submit("fail_first", {"times": 7}, max_retry=7, retry_interval=0)
    ended = client.wait(submitted, timeout=60)
    every = [f"attempt {number}" for number in range(1, 9)]
    assert len(ended.executions) < len(every)
    assert attempts_told(client.follow_logs(submitted)) == every
    newest = client.get(ended)
    assert attempts_told(client.follow_logs(newest)) == every[-1:]
    assert attempts_told(client.follow_logs(newest.job_id)) == every[-1:]
    [listed] = client.list(request_id=submitted.client_request_id)
    assert attempts_told(client.follow_logs(listed)) == every[-1:]


async def test_the_async_client_leaves_no_attempt_out(speaking: Platform) -> None:
    async with AsyncClient(speaking.url) as client:
        job = await client.submit("fail_first", {"times": 6}, max_retry=6, retry_interval=0)
        await client.wait(job, timeout=60)
        told = [line async for line in client.follow_logs(job)]
        assert attempts_told(iter(told)) == [f"attempt {number}" for number in range(1, 8)]


def attempts_told(lines: Iterator[LogLine]) -> list[str]:
    return [line.message for line in lines if line.message.startswith("attempt")]


def test_events_tell_how_a_job_goes(client: Client) -> None:
    job = client.submit("speak", {"steps": 6, "seconds": 0.7})
    events = list(client.events(job))
    assert events[-1].name == "ended"
    # The last progress is told apart from the end, and may come after it.
    assert without_progress(events[-1].job) == without_progress(client.get(job))
    seen = [one.job.progress.value for one in events if one.job.progress is not None]
    assert seen == sorted(seen)
    assert len(set(seen)) >= 2
    assert "progress" in [one.name for one in events]
    assert list(client.events(job, after=events[-1].event_id)) == []
    assert next(client.events(job, after=events[0].event_id)).name == "ended"


def without_progress(job: Job) -> Job:
    runs = tuple(one.model_copy(update={"progress": None}) for one in job.executions)
    return job.model_copy(update={"progress": None, "executions": runs})


async def test_the_async_client_does_the_same(speaking: Platform) -> None:
    async with AsyncClient(speaking.url) as client:
        job = await client.submit("speak", {"steps": 3})
        names = [one.name async for one in client.events(job)]
        assert names[-1] == "ended"
        lines = [line async for line in client.follow_logs(job)]
        assert [line.seq for line in lines] == list(range(1, 8))
        assert [line async for line in client.logs(job, page_size=3)] == lines
        with pytest.raises(NotFound):
            _ = [line async for line in client.follow_logs("nobody")]


class Cutting(httpx.HTTPTransport):
    """Cuts each stream off after some bytes."""

    cuts = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if request.url.path.startswith("/openapi/executions/"):
            stream: Any = response.stream

            def some() -> Iterator[bytes]:
                sent = 0
                for data in stream:
                    yield data[: 700 - sent]
                    sent += len(data)
                    if sent >= 700:
                        stream.close()
                        Cutting.cuts += 1
                        raise httpx.ReadError("cut off by the test")

            class Cut(httpx.SyncByteStream):
                def __iter__(self) -> Iterator[bytes]:
                    return some()

                def close(self) -> None:
                    stream.close()

            response.stream = Cut()
        return response


def test_a_stream_that_is_cut_goes_on_without_gap_or_repeat(speaking: Platform) -> None:
    with Client(speaking.url, transport=Cutting()) as client:
        job = client.submit("speak", {"steps": 30, "seconds": 0.02})
        seqs = [line.seq for line in client.follow_logs(job)]
    assert seqs == list(range(1, 35))
    assert Cutting.cuts > 5


def test_lines_are_read_from_the_other_dispatcher_too(speaking: Platform, client: Client) -> None:
    job = client.submit("speak", {"steps": 3})
    with Client(speaking.dispatcher_urls[1]) as other:
        assert [line.seq for line in other.follow_logs(job)] == list(range(1, 8))


def test_the_command_shows_and_follows_logs(speaking: Platform, client: Client) -> None:
    job = client.submit("speak", {"steps": 2})
    followed = oncue(speaking, "logs", str(job.job_id), "-f")
    assert (followed.returncode, followed.stderr) == (0, "")
    assert [line.split(" ", 1)[1].split()[1:3] for line in followed.stdout.splitlines()][:2] == [
        ["ctx", "begun"],
        ["stdout", "printed"],
    ]
    shown = oncue(speaking, "logs", str(job.job_id), "--json")
    documents = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [one["seq"] for one in documents] == list(range(1, 7))
    assert documents[0]["fields"] == {"customer": 7, "names": ["a", "b"]}
    execution = client.get(job).executions[0].execution_id
    again = oncue(speaking, "logs", str(job.job_id), "--execution", execution, "--json")
    assert again.stdout == shown.stdout


def test_a_wait_on_a_terminal_shows_a_progress_bar(speaking: Platform, client: Client) -> None:
    ours, theirs = pty.openpty()
    params = json.dumps({"steps": 4, "seconds": 1})
    waiting = subprocess.Popen(
        [ONCUE, "submit", "--handler", "speak", "--params", params, "--wait", "--json"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=cli_environment(speaking.url, TERM="xterm"),
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # Linux says so when the other side is closed
        while chunk := os.read(ours, 4096):
            seen += chunk
    os.close(ours)
    out, _ = waiting.communicate(timeout=30)
    job_id = json.loads(out)["jobId"]  # the bar is no part of the output
    # The last progress is told apart from the end, and may come after it.
    until(lambda: (client.get(job_id).progress or Progress(value=0)).value == 1.0)
    assert any(f"{percent}%".encode() in seen for percent in (25, 50, 75))
    assert b"step " in seen


def test_the_command_says_when_there_is_nothing(speaking: Platform, client: Client) -> None:
    job = client.submit("speak", delay=3600)
    shown = oncue(speaking, "logs", str(job.job_id))
    assert (shown.returncode, shown.stdout) == (0, "")
    assert "has not run yet" in shown.stderr
    assert oncue(speaking, "logs", "999999").returncode == 3


def test_lines_outlive_a_dispatcher_s_absence(
    sqlite_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(sqlite_engine)
    dispatcher = platform.dispatcher()
    platform.worker(handlers=HANDLERS)
    platform.wait_for_workers(1)
    job_id = platform.submit("speak", {"steps": 40, "seconds": 0.1})
    until(lambda: platform.job(job_id)["progress"])
    dispatcher.kill()
    dispatcher.start()
    with Client(platform.url) as client:
        assert client.wait(job_id, timeout=60).succeeded
        seqs = [line.seq for line in client.follow_logs(job_id)]
    assert seqs == list(range(1, 45))
