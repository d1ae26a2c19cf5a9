"""The worker as a process: its start, its settings, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from oncue.protocol import (
    Outcome,
    OutcomeStatus,
    RejectReason,
    RunResponse,
    WorkerState,
    run_key,
    run_mark,
)
from tests.integration.worker.rig import FakeDispatcher
from tests.support.redis import PrivateValkey
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run


async def send(worker: Any, *runs: Any) -> RunResponse:
    answer = await worker.post("/run", make_request(*runs).model_dump(by_alias=True))
    return RunResponse.model_validate(answer)


async def test_sigterm_lets_runs_finish_refuses_new_ones_and_exits_with_0(
    start_worker: Any, dispatcher: FakeDispatcher
) -> None:
    worker = await start_worker()
    run, late = make_run("w_wait", {"seconds": 8}), make_run("echo")
    await send(worker, run)
    worker.child.signal(signal.SIGTERM)
    await until_async(lambda: dispatcher.beats[-1].state is WorkerState.DRAINING)
    [refused] = (await send(worker, late)).answers
    assert refused.reason is RejectReason.DRAINING
    assert await asyncio.to_thread(worker.child.wait, 60) == 0
    assert dispatcher.outcomes()[run.execution_id].status is OutcomeStatus.SUCCEEDED
    assert dispatcher.beats[-1].capacity == 0


async def test_what_does_not_end_in_time_is_stopped_and_returned(
    start_worker: Any, dispatcher: FakeDispatcher, tmp_path: Path
) -> None:
    worker = await start_worker(ONCUE_GRACE_SECONDS="10")
    pids = tmp_path / "pids"
    runs = {
        "coroutine": make_run("w_wait", {"seconds": 60}),
        "child": make_run("w_child", {"seconds": 60, "pid_file": str(pids)}),
        "thread": make_run("w_block", {"file": str(tmp_path / "begun")}),
        "polite thread": make_run("w_polite"),
    }
    await send(worker, *runs.values())
    await until_async(lambda: pids.exists() and (tmp_path / "begun").exists())
    asked = time.monotonic()
    worker.child.signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.child.wait, 60) == 0
    assert time.monotonic() - asked < 10 + 5  # a machine may stand still meanwhile
    for name, run in runs.items():
        outcome = dispatcher.outcomes()[run.execution_id]
        assert outcome.status is OutcomeStatus.RETURNED, name
        assert outcome.error is not None
        assert outcome.error.code == "worker_shutdown"
        assert outcome.stopping is ("thread" in name)
    assert runs["polite thread"].execution_id in dispatcher.stopped()
    assert runs["thread"].execution_id not in dispatcher.stopped()


async def test_the_process_ends_in_time_even_if_its_loop_is_stuck(
    start_worker: Any, dispatcher: FakeDispatcher
) -> None:
    worker = await start_worker(ONCUE_GRACE_SECONDS="1")
    burn = make_run("w_burn", {"seconds": 30})
    await send(worker, burn)
    worker.child.signal(signal.SIGTERM)
    assert await asyncio.to_thread(worker.child.wait, 25) == 0


async def test_outcomes_that_nobody_takes_do_not_delay_the_end(
    start_worker: Any, dispatcher: FakeDispatcher
) -> None:
    worker = await start_worker(ONCUE_GRACE_SECONDS="2")
    dispatcher.silent = True
    await send(worker, make_run("echo"))
    worker.child.signal(signal.SIGINT)
    assert await asyncio.to_thread(worker.child.wait, 60) == 0


@contextmanager
def child_of_us(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that ends when its standard input does, on a port that the system chose."""
    with subprocess.Popen(
        [sys.executable, "-m", "worker"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={
            **environment,
            "ONCUE_WORKER_PORT": "0",
            "ONCUE_WORKER_NAME": "child-of-us",
            "ONCUE_EXIT_WITH_STDIN": "true",
        },
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_a_worker_told_so_ends_with_its_parent_and_returns_its_runs(
    dispatcher: FakeDispatcher, start_worker: Any, valkey: PrivateValkey, tmp_path: Path
) -> None:
    worker = await start_worker()
    runs = [
        make_run("w_wait", {"seconds": 60}),
        make_run("w_block", {"file": str(tmp_path / "begun")}),
    ]
    with child_of_us(worker.child._environment) as process:
        beat = await until_async(
            lambda: next((one for one in dispatcher.beats if one.name == "child-of-us"), None),
            timeout=60,
        )
        assert not beat.url.endswith(":0")
        async with httpx.AsyncClient(timeout=30) as client:
            body = make_request(*runs).model_dump(by_alias=True)
            assert (await client.post(f"{beat.url}/run", json=body)).status_code == 200
        await until_async((tmp_path / "begun").exists)
        dispatcher.silent = True  # it has gone with the parent
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.to_thread(process.wait, 15) == 0
    with Redis.from_url(valkey.socket_url) as redis:
        for run in runs:
            value = redis.get(run_key("oncue", run.job_id, run.trigger_ts))
            assert isinstance(value, bytes)
            mark = run_mark(beat.boot_id, run.execution_id).encode()
            outcome = Outcome.model_validate_json(value.removeprefix(mark))
            assert outcome.status is OutcomeStatus.RETURNED


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"ONCUE_WORKER_PORT": "http"}, "ONCUE_WORKER_PORT is not usable"),
        ({"ONCUE_WORKER_HOST": "0.0.0.0"}, "ONCUE_INTERNAL_TOKEN must be set"),
        ({"ONCUE_REDIS_URL": "redis+sentinel://a/b"}, "Sentinel and Cluster are not supported"),
        ({"ONCUE_REDIS_URL": "http://a"}, "begins with redis://"),
        ({"ONCUE_WEBHOOK_SECRET": "whsec_tooShort"}, "a webhook secret"),
        ({"ONCUE_EGRESS_ALLOW": "everything"}, "ONCUE_EGRESS_ALLOW is not usable"),
        ({"ONCUE_HANDLERS": "no.such.module"}, "'no.such.module' cannot be imported"),
        ({"ONCUE_WORKER_NAME": "a b"}, "ONCUE_WORKER_NAME is not usable"),
        ({"ONCUE_DISPATCHER_URL": "8080"}, "ONCUE_DISPATCHER_URL is not usable"),
        ({"ONCUE_WORKER_LABELS": "gpu"}, "labels are written as name=value"),
    ],
)
def test_unusable_settings_end_with_one_sentence(
    environment: dict[str, str], sentence: str
) -> None:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("ONCUE_")}
    ended = subprocess.run(
        [sys.executable, "-m", "worker"],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "tooShort" not in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_a_taken_port_ends_with_one_sentence(start_worker: Any) -> None:
    worker = await start_worker()
    environment = {**worker.child._environment}
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "worker"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "cannot listen on 127.0.0.1 port" in ended.stderr


async def test_a_kept_alive_connection_does_not_delay_the_end(
    start_worker: Any, dispatcher: FakeDispatcher
) -> None:
    worker = await start_worker()
    async with httpx.AsyncClient(timeout=30) as client:
        assert (await client.get(worker.url + "/healthz")).status_code == 200
        worker.child.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.child.wait, 15) == 0
