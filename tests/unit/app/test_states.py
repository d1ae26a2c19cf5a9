"""The table of moves: complete, closed, and the same as its picture in the docs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from app.lifecycle.states import (
    EXECUTION_MOVES,
    JOB_MOVES,
    OPEN_EXECUTIONS,
    TERMINAL_JOBS,
    ExecutionStatus,
    JobKind,
    JobStatus,
    diagram,
    in_list,
    sources,
)

DOCS = Path(__file__).parents[3] / "docs" / "states.md"
_S = JobStatus
STATES_OF = {
    JobKind.TASK: {
        _S.BLOCKED,
        _S.WAITING,
        _S.RUNNING,
        _S.PAUSED,
        _S.SUCCEEDED,
        _S.FAILED,
        _S.CANCELLED,
    },
    JobKind.SCHEDULE: {_S.SCHEDULED, _S.PAUSED, _S.CANCELLED, _S.SUCCEEDED},
    JobKind.GROUP: {_S.RUNNING, _S.SUCCEEDED, _S.FAILED, _S.CANCELLED},
}
REOPENED = {(_S.FAILED, _S.WAITING), (_S.CANCELLED, _S.WAITING)}


def edges(kind: JobKind) -> set[tuple[JobStatus, JobStatus]]:
    return {
        (move.source, move.target)
        for move in JOB_MOVES
        if move.kind is kind and move.source is not None
    }


def test_the_numbers_that_are_stored_are_those_of_the_contract() -> None:
    words = "WAITING RUNNING SUCCEEDED FAILED PAUSED CANCELLED BLOCKED SCHEDULED"
    assert " ".join(status.name for status in sorted(JobStatus)) == words
    assert [int(status) for status in sorted(JobStatus)] == list(range(8))


@pytest.mark.parametrize("kind", JobKind)
def test_every_state_of_a_kind_is_reached_and_no_other(kind: JobKind) -> None:
    reached = {move.target for move in JOB_MOVES if move.kind is kind}
    assert reached == STATES_OF[kind]
    assert {source for source, _ in edges(kind)} <= reached


@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [
        (kind, source, target)
        for kind in JobKind
        for source, target in itertools.product(TERMINAL_JOBS, JobStatus)
    ],
)
def test_nothing_leaves_a_terminal_state_but_a_callers_retry(
    kind: JobKind, source: JobStatus, target: JobStatus
) -> None:
    legal = (source, target) in edges(kind)
    assert legal == (kind is JobKind.TASK and (source, target) in REOPENED)


def test_only_reopen_starts_from_a_terminal_state() -> None:
    assert {move.name for move in JOB_MOVES if move.source in TERMINAL_JOBS} == {"reopen"}


@pytest.mark.parametrize("kind", JobKind)
def test_an_end_can_be_reached_from_every_state(kind: JobKind) -> None:
    ending = set(TERMINAL_JOBS)
    for _ in JobStatus:
        ending |= {source for source, target in edges(kind) if target in ending}
    assert STATES_OF[kind] <= ending


def test_an_execution_ends_once() -> None:
    ends = set(ExecutionStatus) - OPEN_EXECUTIONS
    assert {source for source, _ in EXECUTION_MOVES} == OPEN_EXECUTIONS
    assert {target for _, target in EXECUTION_MOVES} == ends | {ExecutionStatus.RUNNING}


def test_a_guard_lists_the_sources_of_its_move() -> None:
    assert in_list(sources("claim", JobKind.TASK)) == "0"
    assert in_list(sources("cancel", JobKind.TASK)) == "0, 1, 4, 6"


def test_a_move_that_is_not_in_the_table_has_no_guard() -> None:
    with pytest.raises(KeyError):
        sources("claim", JobKind.GROUP)


def test_the_picture_in_the_docs_shows_these_moves() -> None:
    assert diagram() in DOCS.read_text()
