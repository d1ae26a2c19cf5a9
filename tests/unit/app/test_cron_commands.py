"""`oncue cron-preview`, which needs no server."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from app.cli import app

NEW_YORK = ("--timezone", "America/New_York", "--after", "2026-03-07T12:00:00-05:00")


def told(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(
        app, ["cron-preview", *words], env={"ONCUE_URL": "http://127.0.0.1:1"}
    )
    return result.exit_code, result.stdout, result.stderr


def test_json_is_a_list_of_instants_with_their_offset() -> None:
    code, out, err = told("30 2 * * *", *NEW_YORK, "--count", "2", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == ["2026-03-08T03:00:00-04:00", "2026-03-09T02:30:00-04:00"]


def test_people_get_the_sentence_the_change_and_a_table() -> None:
    code, out, err = told("30 2 * * *", *NEW_YORK, "--count", "1")
    assert (code, err) == (0, "")
    assert "At 02:30, every day. (unix, America/New_York)" in out
    assert "from 2026-03-08T02:00:00-05:00 to 2026-03-08T03:00:00-04:00" in out
    assert "2026-03-08 07:00:00Z" in out
    assert "shifted" in out


def test_a_clock_change_that_the_fires_do_not_reach_is_shown_beside_them() -> None:
    far = ("--timezone", "America/New_York", "--after", "2026-07-01T00:00:00-04:00")
    _, out, _ = told("30 1 * * *", *far, "--count", "1", "--dst-fold", "both")
    fires, around = out.split("Around the clock change:")
    assert "2026-07-01T01:30:00-04:00" in fires
    assert "second pass" not in fires
    assert "2026-11-01T01:30:00-05:00" in around
    assert "second pass" in around
    _, near, _ = told("* * * * *", "--timezone", "UTC")
    assert "Around" not in near


def test_the_choices_about_clock_changes_are_taken() -> None:
    skipped = told("30 2 * * *", *NEW_YORK, "--count", "1", "--json", "--dst-gap", "skip")
    assert json.loads(skipped[1]) == ["2026-03-09T02:30:00-04:00"]
    autumn = ("--timezone", "America/New_York", "--after", "2026-11-01T00:00:00-04:00")
    second = told("30 1 * * *", *autumn, "--count", "1", "--json", "--dst-fold", "second")
    assert json.loads(second[1]) == ["2026-11-01T01:30:00-05:00"]


def test_an_expression_that_is_over_has_no_fires() -> None:
    assert told("0 0 0 1 1 ? 2020", "--after", "2026-01-01T00:00:00Z", "--json") == (0, "[]\n", "")
    assert (
        "does not fire any more" in told("0 0 0 1 1 ? 2020", "--after", "2026-01-01T00:00:00Z")[1]
    )


def test_without_after_the_next_fires_are_in_the_future() -> None:
    code, out, _ = told("* * * * * *", "--count", "100", "--json")
    assert code == 0
    assert len(set(json.loads(out))) == 100


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("0 0 31 2 *",), "no day from 1970 to 2199"),
        (("0 24 * * *",), "hour (field 2): 24 is out of range"),
        (("0 0 0 1 * MON", "--dialect", "quartz"), "exactly one"),
        (("0 0 * * *", "--dialect", "Quartz"), "--dialect is unix or quartz"),
        (("0 0 * * *", "--timezone", "Mars/Olympus"), "IANA"),
        (("0 0 * * *", "--after", "2026-03-07T12:00:00"), "with an offset"),
        (("0 0 * * *", "--after", "soon"), "with an offset"),
        (("0 0 * * *", "--after", "9999-12-31T23:59:59-12:00"), "1970 to 2200"),
        (("0 0 * * *", "--count", "0"), "1 to 100"),
        (("0 0 * * *", "--count", "101"), "1 to 100"),
        (("0 0 * * *", "--dst-gap", "jump"), "shift or skip"),
        (("0 0 * * *", "--dst-fold", "never"), "first, both or second"),
    ],
)
def test_what_is_refused_ends_with_2_and_one_sentence(words: tuple[str, ...], why: str) -> None:
    code, out, err = told(*words)
    assert (code, out) == (2, "")
    assert err.startswith("oncue: ")
    assert len(err.strip().splitlines()) == 1
    assert why in err
