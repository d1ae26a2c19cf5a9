"""The client commands as processes: what they print, and how they end."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.support.cli import ONCUE, cli_environment, oncue
from tests.support.engines import Engine
from tests.support.ports import free_port
from tests.support.processes import NewPlatform, Platform
from tests.support.receiver import Receiver
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
        *("submit", "--handler", "echo", "--delay", "3600", "--wait", "--timeout", "0.2", "--json"),
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


def test_jobs_are_counted(sdk_platform: Platform) -> None:
    before = json.loads(oncue("counts", "--json", url=sdk_platform.url).out)
    counts = {one["status"]: one["count"] for one in before["items"]}
    assert counts.keys() >= {"WAITING", "RUNNING", "SUCCEEDED", "FAILED"}
    assert oncue("submit", "--handler", "record", "--wait", url=sdk_platform.url).code == 0
    table = oncue("counts", url=sdk_platform.url).out.splitlines()
    assert table[0].split() == ["STATUS", "JOBS"]
    assert f"SUCCEEDED        {counts['SUCCEEDED'] + 1}" in [line.rstrip() for line in table]


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
    before = {line.job_id for line in sdk_platform.record()}
    # With a delay its answer is there long before it runs.
    words = ("--handler", "record", "--params", '{"ms": 20000}', "--delay", "3", "--wait")
    waiting = subprocess.Popen(
        [ONCUE, "submit", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=cli_environment(sdk_platform.url),
    )
    (job_id,) = until(
        lambda: {line.job_id for line in sdk_platform.record()} - before, what="the job to run"
    )
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=30)
    assert waiting.returncode == INTERRUPTED
    assert err.startswith("oncue: interrupted; job ")
    assert err.endswith(" goes on\n")
    assert oncue("cancel", str(job_id), url=sdk_platform.url).code == OK


def test_a_wait_on_a_terminal_tells_how_the_job_stands(sdk_platform: Platform) -> None:
    ours, theirs = pty.openpty()
    waiting = subprocess.Popen(
        [ONCUE, "submit", "--handler", "sleep", "--params", '{"ms": 8000}', "--wait", "--json"],
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


def submitted(platform: Platform, *words: str) -> int:
    """Submit a job that waits for an hour, and return its id."""
    told = oncue(
        *("submit", "--handler", "echo", "--delay", "3600", "--json"), *words, url=platform.url
    )
    return int(json.loads(told.out)["jobId"])


def test_every_verb_shows_the_job_as_it_is_then(sdk_platform: Platform) -> None:
    job_id = submitted(sdk_platform, "--params", "1")
    for verb, possible in (
        ("pause", {"PAUSED"}),
        ("resume", {"WAITING"}),
        ("cancel", {"CANCELLED"}),
        ("retry", {"WAITING", "RUNNING", "SUCCEEDED"}),  # it is due at once
    ):
        told = oncue(verb, str(job_id), "--json", url=sdk_platform.url)
        assert (told.code, told.err) == (OK, "")
        assert json.loads(told.out)["status"] in possible
    refused = oncue("resume", str(job_id), url=sdk_platform.url)
    assert refused.code == REFUSED
    assert refused.err.endswith("(verb_not_possible)\n")


def test_a_job_of_later_is_triggered_with_other_params(sdk_platform: Platform) -> None:
    job_id = submitted(sdk_platform, "--params", "1")
    told = oncue("trigger", str(job_id), "--params", '{"a": 2}', "--json", url=sdk_platform.url)
    assert (told.code, json.loads(told.out)["params"]) == (OK, {"a": 2})
    assert sdk_platform.ended(job_id)["result"] == {"a": 2}
    again = oncue("trigger", str(job_id), url=sdk_platform.url)
    assert again.code == REFUSED
    assert "submit a new job" in again.err
    other = submitted(sdk_platform, "--params", "1")
    assert oncue("trigger", str(other), url=sdk_platform.url).code == OK
    assert sdk_platform.ended(other)["result"] == 1


def test_a_schedule_that_is_triggered_twice_with_one_request_id_makes_one_job(
    sdk_platform: Platform,
) -> None:
    told = oncue("submit", "--handler", "echo", "--interval", "1h", "--json", url=sdk_platform.url)
    schedule = json.loads(told.out)["jobId"]
    request_id = uuid.uuid4().hex
    one, again = (
        oncue("trigger", str(schedule), "--request-id", request_id, "--json", url=sdk_platform.url)
        for _ in range(2)
    )
    assert (one.code, again.code) == (OK, OK)
    made = json.loads(one.out)
    assert made["clientRequestId"] == request_id
    assert made["jobId"] == json.loads(again.out)["jobId"] != schedule
    other = oncue("trigger", str(schedule), "--json", url=sdk_platform.url)
    assert json.loads(other.out)["jobId"] != made["jobId"]
    oncue("cancel", str(schedule), url=sdk_platform.url)


def test_a_schedule_is_cancelled_with_what_it_has_made(sdk_platform: Platform) -> None:
    words = ("submit", "--handler", "fail", "--interval", "1h", "--retry-interval", "3600")
    schedule = json.loads(oncue(*words, "--json", url=sdk_platform.url).out)["jobId"]
    made = json.loads(oncue("trigger", str(schedule), "--json", url=sdk_platform.url).out)["jobId"]
    told = oncue("cancel", str(schedule), "--children", url=sdk_platform.url)
    assert told.code == OK, told.err
    assert sdk_platform.job(made)["status"] == "CANCELLED"
    many = ("cancel", "--children", "--where", "handler=none", "--yes")
    assert oncue(*many, url=sdk_platform.url).code == 2


def test_a_job_is_found_by_its_request_id(sdk_platform: Platform) -> None:
    request_id = uuid.uuid4().hex
    job_id = submitted(sdk_platform, "--request-id", request_id)
    told = oncue("get", "--client-request-id", request_id, "--json", url=sdk_platform.url)
    assert json.loads(told.out) == sdk_platform.job(job_id)
    nobody = oncue("get", "--client-request-id", "nobody's", url=sdk_platform.url)
    assert (nobody.code, nobody.out) == (REFUSED, "")
    assert "no job has the clientRequestId" in nobody.err


def test_a_job_is_explained_for_people_and_for_scripts(sdk_platform: Platform) -> None:
    job_id = sdk_platform.submit("fail", {"message": "boom"}, maxRetry=0)
    sdk_platform.ended(job_id)
    told = oncue("explain", str(job_id), "--json", url=sdk_platform.url)
    assert told.code == OK
    found = json.loads(told.out)
    assert found | {"at": ""} == sdk_platform.get(f"/openapi/jobs/{job_id}/explain") | {"at": ""}

    shown = oncue("explain", str(job_id), url=sdk_platform.url)
    assert (shown.code, shown.err) == (OK, "")
    lines = shown.out.splitlines()
    assert lines[0].startswith(f"Job {job_id} is FAILED. It failed: ")
    assert lines[0].endswith("(ended_failed)")
    assert any(found["attempts"][0]["story"] in line for line in lines)
    assert lines[-1] == "Possible now: retry."


def test_attempts_and_callbacks_are_listed(sdk_platform: Platform, receiver: Receiver) -> None:
    job_id = sdk_platform.submit("echo", callbackUrl=receiver.url())
    sdk_platform.ended(job_id)
    receiver.wait_for(1)
    attempts = json.loads(oncue("executions", str(job_id), "--json", url=sdk_platform.url).out)
    assert attempts == sdk_platform.get(f"/openapi/jobs/{job_id}/executions")["items"]
    table = oncue("executions", str(job_id), url=sdk_platform.url).out.splitlines()
    assert table[1].split()[:3] == ["1", "SUCCEEDED", "worker-1"]

    path = f"/openapi/jobs/{job_id}/callbacks"
    until(lambda: sdk_platform.get(path)["items"][0]["status"] == "DELIVERED")
    (callback,) = json.loads(oncue("callbacks", str(job_id), "--json", url=sdk_platform.url).out)
    again = oncue("redeliver", callback["deliveryId"], url=sdk_platform.url)
    assert again.out.splitlines()[1].split()[0] == callback["deliveryId"]
    first, second = receiver.wait_for(2)
    assert first.headers["webhook-id"] == second.headers["webhook-id"] == callback["deliveryId"]
    listed = oncue("callbacks", str(job_id), url=sdk_platform.url)
    assert receiver.url() in listed.out
    assert oncue("redeliver", "no-such", url=sdk_platform.url).code == REFUSED


def test_a_list_takes_its_filters_and_says_when_there_is_more(sdk_platform: Platform) -> None:
    team = uuid.uuid4().hex
    made = [submitted(sdk_platform, "--label", f"team={team}") for _ in range(3)]
    told = oncue(
        *("list", "--label", f"team={team}", "--created-from", "2020-01-01T00:00:00+01:00"),
        *("--limit", "3", "--json"),
        url=sdk_platform.url,
    )
    assert [job["jobId"] for job in json.loads(told.out)] == made[::-1]
    shown = oncue("list", "--label", f"team={team}", "--limit", "2", url=sdk_platform.url)
    assert shown.err == "Only the newest 2: --limit shows more.\n"
    assert shown.out.splitlines()[1].split()[:3] == [str(made[2]), "WAITING", "echo"]
    whole = oncue("list", "--label", f"team={team}", "--limit", "3", url=sdk_platform.url)
    assert whole.err == ""
    none = oncue("list", "--label", f"team={team}", "--status", "failed", url=sdk_platform.url)
    assert none.code == REFUSED


def test_names_cannot_play_tricks_with_the_terminal(sdk_platform: Platform) -> None:
    job_id = sdk_platform.submit("fail", {"message": "\x1b[31mred\u202e"}, maxRetry=0)
    sdk_platform.ended(job_id)
    for command in ("get", "explain", "executions"):
        told = oncue(command, str(job_id), url=sdk_platform.url)
        assert "\\x1b[31mred\\u202e" in told.out, command
        assert "\x1b" not in told.out


def test_the_key_is_taken_from_the_environment_or_a_flag(
    sqlite_engine: Engine, new_platform: NewPlatform
) -> None:
    guarded = new_platform(sqlite_engine, environment={"ONCUE_API_KEYS": "me:a-long-key"})
    guarded.dispatcher()
    refused = oncue("list", url=guarded.url)
    assert refused.code == REFUSED
    assert refused.err.endswith("(unauthorized)\n")
    with_flag = oncue("list", "--api-key", "a-long-key", "--json", url=guarded.url)
    with_variable = oncue(
        "list", "--json", url=guarded.url, variables={"ONCUE_API_KEY": "a-long-key"}
    )
    for told in (with_flag, with_variable):
        assert (told.code, told.out) == (OK, "[]\n")


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
def test_a_bulk_command_that_is_not_clear_sends_nothing(words: tuple[str, ...]) -> None:
    told = oncue(*words, url="http://127.0.0.1:1")  # whatever is sent there ends with another code
    assert (told.code, told.out) == (2, ""), told
    assert told.err.startswith("oncue: ")
    assert told.err.count("\n") == 1


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


@pytest.mark.parametrize(
    ("answer", "code", "status"), [("y\n", OK, "CANCELLED"), ("n\n", 2, "WAITING")]
)
def test_on_a_terminal_a_bulk_command_asks_first(
    sdk_platform: Platform, answer: str, code: int, status: str
) -> None:
    label = f"team={uuid.uuid4().hex}"
    made = [submitted(sdk_platform, "--label", label) for _ in range(3)]
    ours, theirs = pty.openpty()
    asking = subprocess.Popen(
        [ONCUE, "cancel", "--where", f"label={label}", "--json", "--wait"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=cli_environment(sdk_platform.url, TERM="xterm"),
    )
    os.close(theirs)
    seen = os.read(ours, 4096)
    while b"cancel 3 jobs? [y/N]:" not in seen:
        seen += os.read(ours, 4096)
    os.write(ours, answer.encode())
    out, _ = asking.communicate(timeout=30)
    os.close(ours)
    assert asking.returncode == code, seen
    assert (json.loads(out)["changed"] if out else None) == (3 if code == OK else None)
    assert {sdk_platform.job(job_id)["status"] for job_id in made} == {status}
