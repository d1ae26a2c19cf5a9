"""The client commands as processes: what they print, and how they end."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from tests.support.cli import ONCUE, cli_environment, oncue
from tests.support.ports import free_port
from tests.support.processes import Platform
from tests.support.wait import until

pytestmark = pytest.mark.xdist_group("sdk")

OK, JOB_NOT_SUCCEEDED, REFUSED, NOT_REACHED, TIMED_OUT, INTERRUPTED = 0, 1, 3, 4, 5, 130


def test_submit_with_wait_prints_the_ended_job(sdk_platform: Platform) -> None:
    told = oncue(
        *("submit", "--handler", "echo", "--params", '{"a": "é"}', "--wait", "--json"),
        url=sdk_platform.url,
    )
    assert (told.code, told.err) == (OK, "")
    job = json.loads(told.out)
    assert (job["status"], job["result"], job["jobName"]) == ("SUCCEEDED", {"a": "é"}, "echo")
    assert sdk_platform.job(job["jobId"]) == job  # the same document as the API's

    shown = oncue("get", str(job["jobId"]), url=sdk_platform.url)
    assert shown.code == OK
    assert "SUCCEEDED" in shown.out
    assert '{"a": "é"}' in shown.out
    assert "worker-1" in shown.out
    assert "\x1b" not in shown.out


def test_params_come_from_a_file_or_standard_input(sdk_platform: Platform, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text('{"from": "file"}')
    for params, given, expected in (
        (f"@{tmp_path / 'params.json'}", "", {"from": "file"}),
        ("-", '{"from": "stdin"}', {"from": "stdin"}),
        ("null", "", None),
    ):
        told = oncue(
            *("submit", "--handler", "echo", "--params", params, "--json"),
            url=sdk_platform.url,
            given=given,
        )
        assert json.loads(told.out)["params"] == expected


def test_a_job_that_fails_ends_the_command_with_1(sdk_platform: Platform) -> None:
    words = ("submit", "--handler", "fail", "--params", '{"message": "boom"}', "--max-retry", "0")
    told = oncue(*words, "--wait", url=sdk_platform.url)
    assert told.code == JOB_NOT_SUCCEEDED
    assert "boom" in told.out
    assert oncue(*words, url=sdk_platform.url).code == OK  # it was only submitted


def test_a_wait_that_times_out_ends_with_5_and_shows_the_job(sdk_platform: Platform) -> None:
    told = oncue(
        *("submit", "--handler", "echo", "--delay", "60", "--wait", "--timeout", "0.2", "--json"),
        url=sdk_platform.url,
    )
    assert told.code == TIMED_OUT
    job_id = json.loads(told.out)["jobId"]
    assert told.err == f"oncue: job {job_id} is still WAITING after 0.2 s\n"
    again = oncue("get", str(job_id), "--wait", "--timeout", "0", url=sdk_platform.url)
    assert again.code == TIMED_OUT


def test_a_job_that_no_worker_can_run_is_warned_of(sdk_platform: Platform) -> None:
    told = oncue("submit", "--handler", "nobody", url=sdk_platform.url)
    assert told.code == OK
    assert "No live worker offers the handler 'nobody'" in told.out


def test_workers_and_handlers_are_listed(sdk_platform: Platform) -> None:
    (worker,) = json.loads(oncue("workers", "--json", url=sdk_platform.url).out)
    assert worker["name"] == "worker-1"
    assert "worker-1" in oncue("workers", url=sdk_platform.url).out
    names = [
        one["name"] for one in json.loads(oncue("handlers", "--json", url=sdk_platform.url).out)
    ]
    table = oncue("handlers", url=sdk_platform.url).out.splitlines()
    assert table[0].split() == ["HANDLER", "WORKERS", "ISOLATION", "DESCRIPTION"]
    assert [line.split()[0] for line in table[1:]] == names


def test_a_refusal_ends_with_3_and_one_sentence(sdk_platform: Platform) -> None:
    told = oncue("get", str(2**62), url=sdk_platform.url)
    assert (told.code, told.out) == (REFUSED, "")
    assert told.err.startswith("oncue: ")
    assert told.err.endswith("(job_not_found)\n")
    assert told.err.count("\n") == 1


def test_bad_usage_ends_with_2_and_sends_nothing() -> None:
    told = oncue("submit", "--handler", "echo", "--params", "{bad", url="http://127.0.0.1:1")
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("oncue: --params is not JSON: ")
    assert told.err.count("\n") == 1


def test_a_server_that_is_not_there_ends_with_4_and_tells_how_to_repeat() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    told = oncue("submit", "--handler", "echo", "--request-id", "mine", url=url)
    assert (told.code, told.out) == (NOT_REACHED, "")
    assert f"{url} cannot be reached" in told.err
    assert told.err.endswith("repeat it with --request-id mine\n")


def test_an_interrupted_wait_says_that_the_job_goes_on(sdk_platform: Platform) -> None:
    waiting = subprocess.Popen(
        [ONCUE, "submit", "--handler", "record", "--params", '{"ms": 3000}', "--wait"],
        stderr=subprocess.PIPE,
        text=True,
        env=cli_environment(sdk_platform.url),
    )
    before = {line.job_id for line in sdk_platform.record()}
    until(lambda: {line.job_id for line in sdk_platform.record()} - before, what="the job to run")
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=30)
    assert waiting.returncode == INTERRUPTED
    assert err.startswith("oncue: interrupted; job ")
    assert err.endswith(" goes on\n")


def test_a_wait_on_a_terminal_tells_how_the_job_stands(sdk_platform: Platform) -> None:
    ours, theirs = pty.openpty()
    waiting = subprocess.Popen(
        [ONCUE, "submit", "--handler", "sleep", "--params", '{"ms": 1500}', "--wait", "--json"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=cli_environment(sdk_platform.url, TERM="xterm"),
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # Linux says so when the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(ours)
    out, _ = waiting.communicate(timeout=30)
    assert waiting.returncode == OK
    assert json.loads(out)["status"] == "SUCCEEDED"  # the line is no part of the output
    assert b"is RUNNING, attempt 1 of 4" in seen


class FakeServer(ThreadingHTTPServer):
    """Answers everything with one document and notes method, path, query and key."""

    def __init__(self, document: Any) -> None:
        self.noted: list[tuple[str, str, dict[str, str], str | None]] = []
        noted = self.noted

        class Answering(BaseHTTPRequestHandler):
            def answer(self) -> None:
                parts = urlsplit(self.path)
                key = self.headers.get("Authorization")
                noted.append((self.command, parts.path, dict(parse_qsl(parts.query)), key))
                body = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer  # noqa: N815 - the names that http.server calls

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - its name
                """Say nothing."""

        super().__init__(("127.0.0.1", 0), Answering)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


JOB = {
    "jobId": 7,
    "jobName": "\x1b[31mred\u202e",
    "jobHandler": "echo",
    "status": "FAILED",
    "createdAt": "2030-01-01T00:00:00.000Z",
}


def serving(document: Any) -> Iterator[FakeServer]:
    with FakeServer(document) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def one_job() -> Iterator[FakeServer]:
    yield from serving(JOB)


@pytest.fixture
def many_jobs() -> Iterator[FakeServer]:
    yield from serving({"items": [JOB, JOB], "nextCursor": "more"})


@pytest.mark.parametrize("verb", ["cancel", "retry", "pause", "resume"])
def test_a_verb_is_a_post_with_the_key(one_job: FakeServer, verb: str) -> None:
    told = oncue(verb, "7", "--json", url=one_job.url, variables={"ONCUE_API_KEY": "k"})
    assert told.code == OK
    assert json.loads(told.out)["jobId"] == 7
    assert one_job.noted == [("POST", f"/openapi/jobs/7/{verb}", {}, "Bearer k")]


def test_list_sends_its_filters_and_reads_no_more_pages_than_it_shows(
    many_jobs: FakeServer,
) -> None:
    told = oncue(
        *("list", "--status", "failed", "--created-from", "2030-01-01T00:00:00+01:00"),
        *("--limit", "3", "--json"),
        url=many_jobs.url,
    )
    assert told.code == OK
    assert [job["jobId"] for job in json.loads(told.out)] == [7, 7, 7]
    query = {"status": "FAILED", "createdFrom": "2029-12-31T23:00:00.000Z", "limit": "3"}
    assert many_jobs.noted == [
        ("GET", "/openapi/jobs", query, None),
        ("GET", "/openapi/jobs", {**query, "cursor": "more"}, None),
    ]


def test_a_list_for_people_says_when_there_is_more(many_jobs: FakeServer) -> None:
    told = oncue("list", "--label", "team=a", "--limit", "1", url=many_jobs.url)
    assert told.code == OK
    assert told.out.splitlines()[1].split()[:3] == ["7", "FAILED", "echo"]
    assert told.err == "Only the newest 1: --limit shows more.\n"
    assert many_jobs.noted[0][2] == {"label": "team=a", "limit": "1"}


def test_names_cannot_play_tricks_with_the_terminal(one_job: FakeServer) -> None:
    told = oncue("get", "7", url=one_job.url)
    assert "\\x1b[31mred\\u202e" in told.out
    assert "\x1b" not in told.out


OPERATION = {
    "operationId": "op-1",
    "action": "cancel",
    "filter": {"handler": "x"},
    "status": "SUCCEEDED",
    "matched": 3,
    "examined": 3,
    "changed": 2,
    "refused": {"verb_not_possible": 1},
}


@pytest.fixture
def one_operation() -> Iterator[FakeServer]:
    yield from serving(OPERATION)


@pytest.mark.parametrize(
    "words",
    [
        ("cancel",),
        ("cancel", "7", "--where", "status=FAILED"),
        ("cancel", "7", "--yes"),
        ("cancel", "--where", "moon=full", "--yes"),
        ("cancel", "--where", "status", "--yes"),
        ("cancel", "--where", "label=x", "--yes"),
        ("cancel", "--where", "handler=a", "--where", "handler=b", "--yes"),
        ("cancel", "--where", "created-from=yesterday", "--yes"),
        ("cancel", "--where", "handler=x", "--yes", "--timeout", "3"),
        ("cancel", "--where", "handler=x"),
        ("bulk", "--wait"),
    ],
)
def test_a_bulk_command_that_is_not_clear_sends_nothing(
    one_operation: FakeServer, words: tuple[str, ...]
) -> None:
    told = oncue(*words, url=one_operation.url)
    assert (told.code, told.out) == (2, ""), told
    assert told.err.startswith("oncue: ")
    assert told.err.count("\n") == 1
    assert one_operation.noted == []


def test_many_jobs_are_changed_with_where(sdk_platform: Platform) -> None:
    url, label = sdk_platform.url, f"team={sdk_platform.internal_token}"
    for _ in range(3):
        told = oncue(*("submit", "--handler", "echo", "--delay", "3600", "--label", label), url=url)
        assert told.code == OK
    where = ("--where", f"label={label}", "--where", "status=waiting")
    assert oncue("pause", *where, "--dry-run", url=url).out == "3 jobs would be paused\n"
    counted = json.loads(oncue("pause", *where, "--dry-run", "--json", url=url).out)
    assert (counted["matched"], counted["matchedIsMinimum"]) == (3, False)

    words = ("pause", *where, "--yes", "--wait", "--timeout", "30", "--rate", "50")
    told = oncue(*words, "--request-id", "p", "--json", url=url)
    assert (told.code, told.err) == (OK, "")
    operation = json.loads(told.out)
    assert (operation["status"], operation["changed"]) == ("SUCCEEDED", 3)
    again = json.loads(oncue(*words, "--request-id", "p", "--json", url=url).out)
    assert again == operation

    shown = oncue("bulk", operation["operationId"], "--wait", url=url)
    assert shown.code == OK
    assert f"label={label}" in shown.out
    assert operation["operationId"] in oncue("bulk", url=url).out
    refused = oncue("bulk", operation["operationId"], "--cancel", url=url)
    assert (refused.code, refused.err.endswith("(operation_ended)\n")) == (REFUSED, True)
    told = oncue("cancel", *where[:2], "--yes", "--wait", url=url)
    assert told.code == OK
    assert sdk_platform.get(f"/openapi/jobs?label={label}&limit=1")["items"][0]["status"] == (
        "CANCELLED"
    )


@pytest.mark.parametrize(("answer", "code", "sent"), [("y\n", OK, 2), ("n\n", 2, 1)])
def test_on_a_terminal_a_bulk_command_asks_first(
    one_operation: FakeServer, answer: str, code: int, sent: int
) -> None:
    ours, theirs = pty.openpty()
    asking = subprocess.Popen(
        [ONCUE, "cancel", "--where", "handler=x", "--json", "--wait"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=cli_environment(one_operation.url, TERM="xterm"),
    )
    os.close(theirs)
    seen = os.read(ours, 4096)
    while b"cancel 3 jobs? [y/N]:" not in seen:
        seen += os.read(ours, 4096)
    os.write(ours, answer.encode())
    out, _ = asking.communicate(timeout=30)
    os.close(ours)
    assert asking.returncode == code, seen
    methods = [(method, path) for method, path, _, _ in one_operation.noted]
    assert methods[:sent] == [("POST", "/openapi/bulk")] * sent
    assert ("POST", "/openapi/bulk") not in methods[sent:]
    assert (json.loads(out)["operationId"] if out else None) == ("op-1" if code == OK else None)
