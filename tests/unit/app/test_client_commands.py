"""What the client commands refuse before anything is sent."""

from __future__ import annotations

import os
import signal
import subprocess
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from app.cli import app
from app.client.show import print_table, refusal
from app.client.talk import BAD_USAGE
from oncue import ApiError
from tests.support.cli import ONCUE

PLAIN_AND_SECRET = ("--callback-header", "X=1", "--callback-secret-header", "X=2")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("submit",), "--handler"),
        (("submit", "--handler", "echo", "--params", "{bad"), "--params is not JSON"),
        (("submit", "--handler", "echo", "--params", "NaN"), "NaN is not JSON"),
        (("trigger", "7", "--params", "1e999"), "1e999 is too large a number"),
        (("submit", "--handler", "echo", "--params", "@/no/such/file"), "No such file"),
        (("submit", "--handler", "echo", "--run-at", "2030-01-01T00:00:00"), "with an offset"),
        (("submit", "--handler", "echo", "--label", "x"), "NAME=VALUE"),
        (("submit", "--handler", "e", "--label", "x=1", "--label", "x=2"), "x is given twice"),
        (
            ("submit", "--handler", "e", "--callback-header", "X=1", "--callback-header", "X=2"),
            "X is given twice",
        ),
        (("submit", "--handler", "e", *PLAIN_AND_SECRET), "X is given twice"),
        (("submit", "--handler", "echo", "--timeout", "5"), "--timeout is for --wait"),
        (("submit", "--handler", "echo", "--request-id", ""), "must not be empty"),
        (
            ("submit", "--handler", "e", "--delay", "1", "--run-at", "2030-01-01T00:00:00Z"),
            "not both",
        ),
        (("get", "seven"), "integer"),
        (("get", "7", "--url", "nowhere"), "http or https URL"),
        (("get",), "give the job's id or --client-request-id"),
        (("get", "7", "--client-request-id", "x"), "give the job's id or --client-request-id"),
        (("trigger", "7", "--params", "{bad"), "--params is not JSON"),
        (("cancel", "7", "--where", "status=WAITING"), "not both"),
        (("list", "--created-from", "yesterday"), "with an offset"),
        (("keys", "create", "--role", "read"), "give its name once"),
        (("keys", "create", "a", "--name", "b"), "give its name once"),
    ],
)
def test_bad_usage_ends_with_2(words: tuple[str, ...], why: str) -> None:
    told = CliRunner().invoke(app, words, env={"ONCUE_URL": "http://127.0.0.1:1"})
    assert (told.exit_code, told.stdout) == (BAD_USAGE, "")
    assert why in told.stderr


def test_output_that_nobody_reads_is_not_a_job_that_ended_otherwise() -> None:
    said, unread = os.pipe()
    os.close(said)
    command = [str(ONCUE), "cron-preview", "* * * * *"]
    with os.fdopen(unread, "wb") as gone:
        told = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, check=False)
    assert (told.returncode, told.stderr) == (128 + signal.SIGPIPE, b"")


def test_states_are_not_folded_on_a_narrow_terminal() -> None:
    said = StringIO()
    console = Console(file=said, width=30, force_terminal=True, color_system=None)
    print_table(console, ("WORKER", "STATE", "HANDLERS"), [("a-long-name", "DRAINING", "one two")])
    assert "DRAINING" in said.getvalue()


def test_every_fault_of_a_refused_request_is_told() -> None:
    faults = [{"pointer": "/params/n", "detail": "is required"}, {"pointer": "", "detail": "no"}]
    error = ApiError("params_invalid", 422, "n is required and 1 more", {"errors": faults})
    assert refusal(error) == "params/n: is required; the body: no (params_invalid)"
    assert refusal(ApiError("a", 422, "b", {"errors": faults[:1]})) == "b (a)"
