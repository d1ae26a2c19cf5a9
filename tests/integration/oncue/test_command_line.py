"""What holds for every command: help, completion, sentences instead of tracebacks, exit codes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import typer.models

from app.cli import app
from app.client.talk import commands
from oncue import __version__
from oncue.testing import Platform
from tests.support.cli import ONCUE, cli_environment, oncue
from tests.support.processes import ROOT
from tests.support.wait import until
from tools.reference import EXIT_CODES

NOWHERE = "http://127.0.0.1:1"
COMMANDS = typer.main.get_group(app).commands


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_of_a_command_has_examples_and_a_text_for_each_parameter(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    assert (command.epilog or "").startswith("Examples:")
    assert f"oncue {name}" in (command.epilog or "")
    assert [one.name for one in command.params if not getattr(one, "help", None)] == []


EXAMPLES = [
    example for command in COMMANDS.values() for example in (command.epilog or "").split("\n\n")[1:]
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_in_a_help_is_understood(example: str) -> None:
    words = shlex.split(example)
    while "=" in words[0]:
        del words[0]
    program, name, *rest = words
    assert program == "oncue"
    COMMANDS[name].make_context(name, rest)  # reads the flags, runs nothing


def test_every_command_of_a_caller_and_every_exit_code_is_explained() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert [one.name for one in commands.registered_commands if f"`{named(one)}" not in page] == []
    assert [code for code, _ in EXIT_CODES if f"| {code} |" not in page] == []


def named(command: typer.models.CommandInfo) -> str:
    assert command.callback is not None
    return command.name or command.callback.__name__


@pytest.mark.parametrize(
    "words",
    [
        ("bogus",),
        ("get",),
        ("get", "x"),
        ("get", "0"),
        ("submit",),
        ("submit", "--handler", "echo", "--bogus"),
        ("list", "--limit", "0"),
        ("cancel",),
        ("cancel", "7", "--where", "status=FAILED"),
        ("cancel", "7", "--yes"),
        ("bulk", "--wait"),
        ("dispatcher", "--port", "99999"),
    ],
)
def test_bad_usage_is_one_sentence_that_names_the_help(words: tuple[str, ...]) -> None:
    told = oncue(*words, url=NOWHERE)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith("oncue: ")
    assert told.err.endswith(" --help`\n")
    assert told.err.count("\n") == 1


def test_no_command_shows_the_help_and_the_version_is_told() -> None:
    told = oncue(url=NOWHERE)
    assert told.code == 2
    assert all(name in told.out for name in COMMANDS)
    assert oncue("--version", url=NOWHERE).out == f"oncue {__version__}\n"


def test_a_fault_is_one_sentence_and_its_traceback_can_be_had(tmp_path: Path) -> None:
    program = (
        "import sys, app.cli, oncue.client\n"
        "oncue.client.Client.get = lambda *_: 1 / 0\n"
        "sys.argv = ['oncue', 'get', '1']\n"
        "app.cli.main()\n"
    )
    for variables, last, code in (
        ({}, "oncue: a fault of oncue: ZeroDivisionError: division by zero (ONCUE_TRACE", 70),
        ({"ONCUE_TRACEBACK": "1"}, "Traceback (most recent call last)", 1),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=cli_environment(NOWHERE, **variables),
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith(last)


def test_an_interrupt_ends_with_130_and_without_a_traceback(tmp_path: Path) -> None:
    fifo = tmp_path / "params"
    os.mkfifo(fifo)
    running = subprocess.Popen(
        [ONCUE, "submit", "--handler", "echo", "--params", f"@{fifo}"],
        stderr=subprocess.PIPE,
        text=True,
        env=cli_environment(NOWHERE),
    )
    # Opening its other end returns when the command has opened this one, and now reads.
    with fifo.open("w"):
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=30)
    assert (running.returncode, "Traceback" in err) == (130, False)


def test_a_reader_that_goes_away_is_no_fault() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{ONCUE} settings | head -1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
        env=cli_environment(NOWHERE),
        timeout=60,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("ONCUE_DATABASE_URL=")


def test_settings_are_told_for_both_processes_and_keep_secrets(tmp_path: Path) -> None:
    variables = {
        "ONCUE_API_KEYS": "me:a-hushed-key",
        "ONCUE_INTERNAL_TOKEN": "a-hushed-token",
        "ONCUE_WEBHOOK_SECRET": "whsec_" + "c2VjcmV0" * 4,
        "ONCUE_REDIS_URL": "redis://user:a-hushed-word@db:6379/0",
        "ONCUE_WORKER_LABELS": "zone=a",
    }
    told = oncue("settings", "--json", url=NOWHERE, variables=variables)
    assert (told.code, told.err) == (0, "")
    assert "hushed" not in told.out
    assert "c2VjcmV0" not in told.out
    listed = json.loads(told.out)
    values: dict[str, str] = {}
    for process in ("dispatcher", "worker"):
        values = {one["variable"]: one["value"] for one in listed[process]}
        assert values["ONCUE_INTERNAL_TOKEN"] == "(set)"
        assert values["ONCUE_REDIS_URL"] in (
            *("redis://user:***@db:6379/0", "redis://***@db:6379/0"),
        )
        assert all(one["description"] for one in listed[process])
    assert values["ONCUE_WORKER_LABELS"] == "zone=a"
    shown = oncue("settings", url=NOWHERE, variables=variables)
    assert "ONCUE_WORKER_LABELS=zone=a\n" in shown.out

    wrong = oncue("settings", url=NOWHERE, variables={"ONCUE_WORKER_CAPACITY": "many"})
    assert wrong.code == 2
    assert wrong.err.startswith("oncue: ONCUE_WORKER_CAPACITY is not usable: ")
    assert "ONCUE_DATABASE_URL=" in wrong.out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_and_installed(shell: str, tmp_path: Path) -> None:
    # The shell that is named, and not the one that happens to run the tests.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    environment = cli_environment(NOWHERE, HOME=str(tmp_path), **named)
    shown = subprocess.run(
        [ONCUE, "--show-completion", shell],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=60,
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "_ONCUE_COMPLETE" in shown.stdout
    installed = subprocess.run(
        [ONCUE, "--install-completion", shell],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=60,
    )
    assert installed.returncode == 0, installed.stderr
    written = [one for one in tmp_path.rglob("*") if one.is_file()]
    assert any("_ONCUE_COMPLETE" in one.read_text() for one in written)


def test_a_missing_key_is_asked_for_and_tables_end_where_their_text_does() -> None:
    with Platform({}, settings={"ONCUE_API_KEYS": "me:a-key-of-mine"}) as platform:
        told = oncue("workers", url=platform.url)
        assert (told.code, told.out) == (3, "")
        assert told.err.startswith("oncue: set ONCUE_API_KEY ")
        for words in (("workers",), ("handlers",), ("submit", "--handler", "echo", "--wait")):
            told = oncue(*words, url=platform.url, variables={"ONCUE_API_KEY": "a-key-of-mine"})
            assert told.code == 0
            assert [line for line in told.out.splitlines() if line != line.rstrip()] == []


def complete(words: list[str], url: str) -> list[str]:
    """Ask as bash does when Tab is pressed behind the last word."""
    done = subprocess.run(
        [ONCUE],
        capture_output=True,
        text=True,
        check=False,
        env=cli_environment(
            url,
            _ONCUE_COMPLETE="complete_bash",
            COMP_WORDS=" ".join(["oncue", *words]),
            COMP_CWORD=str(len(words)),
        ),
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.split()


def offered(words: list[str], url: str) -> list[str]:
    """Return what is offered once the server answers within the second that a shell waits."""
    return until(lambda: complete(words, url), what="something to be offered")


def test_handlers_jobs_workers_and_states_are_completed() -> None:
    with Platform({"send-invoice": lambda params: params}) as platform:
        job = platform.client.submit("send-invoice")
        assert offered(["submit", "--handler", "send"], platform.url) == ["send-invoice"]
        assert offered(["cancel", ""], platform.url) == [str(job.job_id)]
        assert offered(["drain", "wor"], platform.url) == ["worker"]
    assert complete(["list", "--status", "FA"], NOWHERE) == ["FAILED"]
    assert complete(["dra"], NOWHERE) == ["drain"]
    # A server that is not there offers nothing, and says nothing.
    assert complete(["submit", "--handler", "send"], NOWHERE) == []


@pytest.mark.parametrize(
    ("instruction", "variables"),
    [
        ("complete_zsh", {"_TYPER_COMPLETE_ARGS": "oncue list --status FA"}),
        (
            "complete_fish",
            {
                "_TYPER_COMPLETE_ARGS": "oncue list --status FA",
                "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            },
        ),
    ],
)
def test_zsh_and_fish_are_answered_too(instruction: str, variables: dict[str, str]) -> None:
    done = subprocess.run(
        [ONCUE],
        capture_output=True,
        text=True,
        check=False,
        env=cli_environment(NOWHERE, _ONCUE_COMPLETE=instruction, **variables),
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "FAILED" in done.stdout


def test_migrate_says_which_database_it_brought_up_to_date(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"
    told = oncue("migrate", url="", variables={"ONCUE_DATABASE_URL": url})
    assert (told.code, told.err) == (0, "")
    assert told.out.endswith(f"up to date in {url}\n")
