"""`oncue.testing.Platform`: the real platform inside the process of a test, and gone after it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import structlog

import tests.support.handlers as handlers_module
from oncue import Client, Context, NotFound, handler, sign_webhook
from oncue.handlers import REGISTRY
from oncue.testing import AsyncPlatform, Platform, PlatformUnavailable
from tests.support.child import is_running
from tests.support.processes import ROOT
from tests.support.wait import until

SECONDS = 30
NAME = "the greeting"


@handler(NAME)
def greeting(params: Any, ctx: Context) -> Any:
    """Say what `phrase` is now: a test may patch it."""
    return {"text": f"{phrase()}, {params['name']}", "attempt": ctx.attempt}


def phrase() -> str:
    return "Hello"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What every test here promises beside its own."""
    # What was there before may end meanwhile.
    homes, threads, children = found_homes(), set(threading.enumerate()), our_children()
    yield
    until(lambda: set(threading.enumerate()) <= threads, 30, what="the threads to end")
    until(lambda: our_children() <= children, 30, what="the child processes to end")
    until(lambda: found_homes() <= homes, 30, what="the directories to go")
    assert not structlog.is_configured()


def found_homes() -> set[Path]:
    """Directories of platforms whose owner this process is."""
    return {
        one
        for one in Path(tempfile.gettempdir()).glob("oncue-*")
        if (one / "oncue.db").exists() and is_open_here(one / "oncue.db")
    }


def is_open_here(path: Path) -> bool:
    return str(path) in {one.path for one in psutil.Process().open_files()}


def our_children() -> set[psutil.Process]:
    found = set()
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile
            if one.status() != psutil.STATUS_ZOMBIE:
                found.add(one)
    return found


def test_a_job_runs_here_and_its_webhook_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "phrase", lambda: "Moin")
    with Platform([greeting]) as platform:
        job = platform.client.submit(NAME, {"name": "Ada"}, callback_url=platform.webhooks.url)
        ended = platform.client.wait(job, timeout=SECONDS, check=True)
        assert ended.result == {"text": "Moin, Ada", "attempt": 1}
        delivery = platform.webhooks.wait(job, timeout=SECONDS)
        assert (delivery.type, delivery.job_id) == ("job.succeeded", job.job_id)
        assert delivery.data["result"] == ended.result
        assert platform.webhooks.refused == ()
        # Code under test finds it by its environment.
        for name, value in platform.environment.items():
            monkeypatch.setenv(name, value)
        with Client() as found:
            assert found.get(job) == ended
    with pytest.raises(RuntimeError, match="does not run"):
        _ = platform.client


async def test_the_same_for_async_tests() -> None:
    seen = []

    async def note(params: Any) -> int:
        await asyncio.sleep(0)
        seen.append(params)
        return len(seen)

    async with AsyncPlatform({"note": note}) as platform:
        job = await platform.client.submit("note", [1], callback_url=platform.webhooks.url)
        ended = await platform.client.wait(job, timeout=SECONDS, check=True)
        assert (ended.result, seen) == (1, [[1]])
        delivery = await platform.webhooks.wait(job, kind="job.succeeded", timeout=SECONDS)
        assert platform.webhooks.deliveries == (delivery,)
        offered = [one.name async for one in platform.client.handlers()]
    assert offered == ["echo", "fail", "http", "note", "sleep"]


def test_platforms_are_apart_and_may_run_at_once() -> None:
    with Platform({"who": lambda _: "first"}) as first, Platform({"who": lambda _: 2}) as second:
        jobs = [(one, one.client.submit("who")) for one in (first, second)]
        results = [one.client.wait(job, timeout=SECONDS).result for one, job in jobs]
        assert results == ["first", 2]
        assert first.webhook_secret != second.webhook_secret
        with pytest.raises(NotFound):
            second.client.get(2)


def test_a_failing_job_is_retried_and_told(caplog: pytest.LogCaptureFixture) -> None:
    attempts = []

    def stumble(params: Any, ctx: Context) -> str:
        attempts.append(ctx.attempt)
        if ctx.attempt < 3:
            raise ValueError("not yet")
        return "at last"

    with Platform({"stumble": stumble}) as platform:
        job = platform.client.submit("stumble", max_retry=2, retry_interval=0)
        assert platform.client.wait(job, timeout=SECONDS).result == "at last"
        job = platform.client.submit(
            "fail", {"message": "boom"}, max_retry=0, callback_url=platform.webhooks.url + "deep"
        )
        told = platform.webhooks.wait(job, kind="job.failed", timeout=SECONDS)
    assert attempts == [1, 2, 3]
    assert (told.path, told.data["error"]["message"]) == ("/deep", "ToldToFail: boom")
    # Its logs go where a test's logs go.
    assert caplog.text.count("ValueError: not yet") == 2


def test_a_module_and_a_child_process() -> None:
    with Platform([handlers_module]) as platform:
        offered = {one.name for one in platform.client.handlers()}
        assert {"record", "record_process"} <= offered
        assert NAME not in offered
        job = platform.client.submit("record_process", {"ms": 1}, max_retry=0)
        assert platform.client.wait(job, timeout=SECONDS, check=True).result == {"attempt": 1}


def test_what_runs_is_stopped_at_the_end() -> None:
    ended = threading.Event()

    def patient(params: Any, ctx: Context) -> None:
        ctx.cancel_event.wait(60)
        ended.set()

    with Platform({"patient": patient}) as platform:
        job = platform.client.submit("patient")
        until(lambda: platform.client.get(job).status == "RUNNING", what="the run")
        began = time.monotonic()
    assert ended.is_set()
    assert time.monotonic() - began < 20


def test_a_deaf_thread_is_named() -> None:
    release, running = threading.Event(), threading.Event()

    def deaf(params: Any) -> None:
        running.set()
        release.wait(60)

    platform = Platform({"deaf": deaf}).start()
    try:
        platform.client.submit("deaf")
        assert running.wait(SECONDS)
        with pytest.warns(RuntimeWarning, match="threads of deaf go on"):
            platform.close()
    finally:
        release.set()


def test_neither_the_environment_nor_a_dotenv_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("ONCUE_PORT=nonsense\nONCUE_WORKER_CAPACITY=nonsense\n")
    for name in ("DATABASE_URL", "REDIS_URL", "WEBHOOK_SECRET", "HANDLERS", "API_KEYS", "URL"):
        monkeypatch.setenv(f"ONCUE_{name}", "nonsense")
    monkeypatch.setenv("ONCUE_API_KEY", "a key")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Platform({}, capacity=3) as platform:
        (worker,) = platform.client.workers()
        assert (worker.name, worker.capacity) == ("worker", 3)


def test_settings_are_passed_on_and_checked() -> None:
    with Platform(
        {}, settings={"ONCUE_WORKER_NAME": "w", "ONCUE_API_KEYS": "me:a-key-of-mine"}
    ) as platform:
        with pytest.raises(Exception, match="unauthorized"):
            list(platform.client.workers())
        with Client(platform.url, api_key="a-key-of-mine") as client:
            assert [one.name for one in client.workers()] == ["w"]
    for settings, why in (
        ({"ONCUE_API_KEYS": "me:k"}, "ONCUE_API_KEYS is name:key"),
        ({"ONCUE_WORKER_CAPACTY": "3"}, "no setting ONCUE_WORKER_CAPACTY"),
        ({"ONCUE_GRACE_SECONDS": "soon"}, "ONCUE_GRACE_SECONDS: "),
        ({"ONCUE_WORKER_LABELS": "x"}, "ONCUE_WORKER_LABELS: labels are"),
    ):
        with pytest.raises(ValueError, match=why):
            Platform({}, settings=settings).start()


def test_handlers_that_cannot_be_offered_are_refused() -> None:
    name = uuid.uuid4().hex

    @handler(name, isolation="process")
    def local(params: Any) -> None: ...

    try:
        for wrong, why in (
            ([local], "define it at the top level"),
            ([phrase], "phrase is no handler"),
            ([tempfile], "registers no handler"),
            (NAME, "is a list"),
        ):
            with pytest.raises(ValueError, match=why):
                Platform(wrong)
    finally:
        del REGISTRY[name]


def test_a_forged_webhook_is_refused_and_a_missing_one_explained() -> None:
    with Platform({}) as platform:
        url = platform.webhooks.url
        forged = sign_webhook("whsec_" + "A" * 44, "id", int(time.time()), b"{}")
        with httpx.Client(trust_env=False) as http:
            assert http.post(url, headers=forged, content=b"{}").status_code == 400
            assert http.post(url, content=b"{}").status_code == 400
        with pytest.raises(TimeoutError, match=r"no job\.failed of job 7 .*no webhook signature"):
            platform.webhooks.wait(7, kind="job.failed", timeout=0)


def test_a_killed_test_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, psutil\n"
        "from oncue.testing import Platform\n"
        "platform = Platform({}).start()\n"
        "print([one.pid for one in psutil.Process().children(recursive=True)], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    children = [int(pid) for pid in done.stdout.strip("[]\n").split(",")]
    assert len(children) >= 2
    until(lambda: not any(is_running(pid) for pid in children), what="the children to end")
    until(lambda: not list(tmp_path.glob("oncue-*")), what="the directory to go")


def test_a_platform_that_nobody_closed_lets_the_interpreter_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from oncue.testing import Platform; p = Platform({}).start()"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    until(lambda: not list(tmp_path.glob("oncue-*")), what="the directory to go")


def test_without_the_server_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "app.in_process", None)
    with pytest.raises(PlatformUnavailable, match=r"pip install 'oncue\[server\]'"):
        Platform({}).start()


def test_the_fixture_is_a_platform_with_the_handlers_of_the_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["oncue.pytest_plugin"]\n')
    (tmp_path / "test_mine.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def oncue_handlers():\n"
        "    return {'twice': lambda params: 2 * params, 'say': lambda params: print(params)}\n"
        "def test_twice(oncue_platform):\n"
        "    job = oncue_platform.client.submit('twice', 21)\n"
        "    assert oncue_platform.client.wait(job, timeout=30).result == 42\n"
        "def test_say(oncue_platform):\n"
        "    job = oncue_platform.client.submit('say', 'hello')\n"
        "    said = [one.message for one in oncue_platform.client.follow_logs(job)]\n"
        "    assert said == ['hello']\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:asyncio",
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
