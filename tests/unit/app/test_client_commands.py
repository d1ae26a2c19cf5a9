"""What the client commands refuse before anything is sent."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from app.cli import app
from app.client_commands import BAD_USAGE


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("submit",), "--handler"),
        (("submit", "--handler", "echo", "--params", "{bad"), "--params is not JSON"),
        (("submit", "--handler", "echo", "--params", "NaN"), "NaN is not JSON"),
        (("submit", "--handler", "echo", "--params", "@/no/such/file"), "No such file"),
        (("submit", "--handler", "echo", "--run-at", "2030-01-01T00:00:00"), "with an offset"),
        (("submit", "--handler", "echo", "--label", "x"), "NAME=VALUE"),
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
        (("list", "--created-from", "yesterday"), "with an offset"),
    ],
)
def test_bad_usage_ends_with_2(words: tuple[str, ...], why: str) -> None:
    told = CliRunner().invoke(app, words, env={"ONCUE_URL": "http://127.0.0.1:1"})
    assert (told.exit_code, told.stdout) == (BAD_USAGE, "")
    assert why in told.stderr
