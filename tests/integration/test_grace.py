"""SIGTERM ends a dispatcher in its time whatever the database does, and callers may come back."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx

from tests.faults.signs import metric
from tests.support.processes import Platform
from tests.support.wait import until


def test_a_commit_that_hangs_neither_keeps_the_process_nor_costs_the_caller_an_error(
    sqlite_platform: Platform,
) -> None:
    """The file is locked, by a process that was stopped within a write, say."""
    dispatcher = sqlite_platform.dispatcher(environment={"ONCUE_GRACE_SECONDS": "4"})
    path = sqlite_platform.engine.database_url.removeprefix("sqlite+aiosqlite:///")

    def submit(name: str) -> httpx.Response:
        body = {"clientRequestId": name, "jobName": name, "jobHandler": "echo"}
        return sqlite_platform.http.post("/openapi/jobs", json=body)

    assert submit("before").status_code == 202  # the queue is there: only the commits wait
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as other,
        ThreadPoolExecutor(2) as callers,
    ):
        other.execute("BEGIN IMMEDIATE")
        sent = [callers.submit(submit, name) for name in ("one", "two")]
        # The second waits for the commit of the first.
        until(lambda: metric(dispatcher.url, "oncue_submit_backlog") == 1, what="both to wait")
        assert dispatcher.terminate(30) == 0
        answers = [one.result() for one in sent]
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert answer.json()["code"] in ("not_ready", "database_unavailable")
