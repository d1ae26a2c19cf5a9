"""What `ctx.log` and `ctx.progress` take and refuse."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from oncue import Context, handler
from oncue.testing import LoggedLine, Recorder, run_handler, run_handler_async


@handler("output-speaks")
def speaks(params: Any, ctx: Context) -> None:
    """Log and make progress."""
    names = ["a"]
    ctx.log("hello", "warning", names=names, message_of="x")
    names.append("b")
    for number in range(3):
        ctx.progress(number / 2, f"{number}")


def context(**fields: Any) -> Context:
    given: dict[str, Any] = {"job_id": 1, "execution_id": "e", "handler": "h", "job_name": "n"}
    given |= {"attempt": 1, "max_attempts": 1, "trigger_ts": 0, "deadline_ms": 0}
    return Context(**given | fields)


async def test_a_recorder_keeps_what_a_handler_says() -> None:
    for run in ("sync", "async"):
        output = Recorder()
        if run == "sync":
            run_handler("output-speaks", output=output)
        else:
            await run_handler_async(speaks, output=output)
        fields = {"names": ["a"], "message_of": "x"}
        assert output.lines == [LoggedLine("hello", "warning", fields)]
        assert output.steps == [(0.0, "0"), (0.5, "1"), (1.0, "2")]


def test_without_an_output_lines_go_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        context().log("100% sure", "error", order=7)
        context().progress(0.5)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", '100% sure {"order": 7}')


@pytest.mark.parametrize(
    ("arguments", "fields", "error"),
    [
        ((b"bytes",), {}, TypeError),
        (("text", "loud"), {}, ValueError),
        (("text",), {"one": object()}, ValueError),
        (("text",), {"one": float("nan")}, ValueError),
        (("text",), {"one": "\ud800"}, ValueError),
        (("text",), {"one": "x" * 5000}, ValueError),
    ],
)
def test_wrong_arguments_of_log_raise(arguments: Any, fields: Any, error: Any) -> None:
    output = Recorder()
    with pytest.raises(error):
        context(output=output).log(*arguments, **fields)
    assert output.lines == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((1.01,), ValueError),
        ((-0.1,), ValueError),
        ((float("nan"),), ValueError),
        ((True,), TypeError),
        (("0.5",), TypeError),
        ((0.5, 7), TypeError),
        ((0.5, "x" * 201), ValueError),
    ],
)
def test_wrong_arguments_of_progress_raise(arguments: Any, error: Any) -> None:
    output = Recorder()
    with pytest.raises(error):
        context(output=output).progress(*arguments)
    assert output.steps == []
