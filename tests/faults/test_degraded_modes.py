"""Every degraded mode, brought about for real: what goes on, and what the platform says of it.

The table in docs/operating.md is this file in words.
"""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
import redis

from tests.faults.links import Mode
from tests.faults.scene import Scene, scene
from tests.faults.signs import NotExported, metric, readiness, said
from tests.support.engines import Engine
from tests.support.processes import NewPlatform, Service
from tests.support.wait import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
SUCCEEDED, CANCELLED = 2, 5
TERMINATED = 128 + signal.SIGTERM


def test_redis_down(tmp_path: Path) -> None:
    with scene(tmp_path, workers=1) as one:
        running = one.submit("fault_async", 3_000)
        one.started(running)
        one.cluster.kill("redis")
        waits = one.submit("fault_async", 0)
        one.noted(running, "returned")
        until(lambda: one.row(running)["status"] == SUCCEEDED, what="the report to be taken")
        seen(one, "dispatcher-1", 'oncue_part_up{part="redis"}', 0, "redis_away")
        seen(one, "worker-1", "oncue_worker_lease_renewal_failures_total", None, RENEWAL_FAILS)
        assert refuses(one, "dispatcher-1", "redis")
        assert readiness(url(one, "worker-1"))[1]["missing"] == ["redis"]
        # It may be claimed, for as long as the lock may still be held; but without a lease
        # no worker begins it.
        assert one.cluster.starts(waits) == []
        one.cluster.restart("redis")
        one.started(waits)
        seen(one, "dispatcher-1", 'oncue_part_up{part="redis"}', 1, "redis_back")
        until(one.platform.services["dispatcher-1"].ready, what="readiness")
        assert one.settled().violations == []


def test_redis_flushed(tmp_path: Path) -> None:
    with scene(tmp_path, dispatchers=2, workers=1) as one:
        running = one.submit("fault_async", 5_000)
        one.started(running)
        until(lambda: has_canary(one), what="the key by which a flush is seen")
        for name in one.cluster.dispatchers:
            looks_twice(one, name)
        one.cluster.flush()
        for name in one.cluster.dispatchers:
            seen(one, name, "oncue_redis_flushes_total", 1, "redis_flushed")
            assert readiness(url(one, name))[0] == 200
        one.started(one.submit("fault_async", 0))
        assert one.settled().violations == []
        assert len(one.cluster.starts(running)) == 1


def test_database_down(tmp_path: Path) -> None:
    with scene(tmp_path, workers=1) as one:
        running = one.submit("fault_async", 1_500)
        one.started(running)
        one.cluster.kill("mariadb")
        one.noted(running, "returned")
        refused = submission(one)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["code"] == "database_unavailable"
        seen(one, "dispatcher-1", 'oncue_part_up{part="database"}', 0, "database_away")
        seen(one, "worker-1", "oncue_worker_reports_unacknowledged", 1, REPORTS_WAIT)
        assert refuses(one, "dispatcher-1", "database")
        until(
            lambda: readiness(url(one, "worker-1"))[1]["missing"] == ["dispatcher"],
            20,
            what="the worker to miss a dispatcher that commits its beats",
        )
        one.cluster.restart("mariadb")
        until(lambda: one.row(running)["status"] == SUCCEEDED, 20, what="the kept outcome")
        seen(one, "dispatcher-1", 'oncue_part_up{part="database"}', 1, "database_back")
        seen(one, "worker-1", "oncue_worker_reports_unacknowledged", 0)
        for name in ("dispatcher-1", "worker-1"):
            until(one.platform.services[name].ready, 20, what=f"{name} to be ready again")
        assert one.settled().violations == []
        assert len(one.cluster.starts(running)) == 1


def test_database_slow(tmp_path: Path) -> None:
    with scene(tmp_path, workers=1) as one:
        one.started(one.submit("fault_async", 0))
        one.http.timeout = 60  # a submission is several answers, and may want a new connection
        with one.cluster.broken("dispatcher-1>mariadb", Mode.SLOW, 0.27):
            job_id = one.submit("fault_async", 0)
            one.started(job_id)
            until(lambda: one.row(job_id)["status"] == SUCCEEDED, 60, what="the slow end")
            seen(one, "dispatcher-1", 'oncue_part_up{part="database"}', 1, "database_slow")
            until(lambda: metric(url(one, "dispatcher-1"), SLOWNESS) > 0.5, what="the figure")
            # A new connection is many answers: it is ready again once it has those it needs.
            until(lambda: readiness(url(one, "dispatcher-1"))[0] == 200, 30, what="readiness")
        seen(one, "dispatcher-1", 'oncue_part_up{part="database"}', 1, "database_back")
        assert one.settled().violations == []


def test_dispatcher_paused_and_resumed(tmp_path: Path) -> None:
    with scene(tmp_path, dispatchers=2, workers=1) as one:
        active, other = one.sides()
        before = metric(url(one, active), "oncue_dispatch_term")
        with one.cluster.froze(active):
            job_id = one.submit("fault_async", 0, via=other)
            one.started(job_id)
            # By then it is known to both that the lock has another holder.
            until(lambda: metric(url(one, other), "oncue_dispatch_lock_held"), what="a new holder")
        after = metric(url(one, other), "oncue_dispatch_term")
        assert after > before
        seen(one, active, "oncue_dispatch_lock_held", 0, "lock_lost")
        seen(one, active, "oncue_dispatch_lock_lost_total", 1)
        seen(one, active, "oncue_process_paused_seconds_total", None, "process_was_paused")
        until(one.platform.services[active].ready, what="readiness")
        # What it might have sent before it noticed: workers know the later term by their beats.
        worker = url(one, "worker-1")
        until(lambda: run_of_term(one, int(before)).status_code == 409, 20, what="a refusal")
        seen(one, "worker-1", "oncue_worker_stale_terms_refused_total", None, LOWER_TERM)
        assert readiness(worker)[0] == 200
        assert one.settled().violations == []


def test_dispatcher_vanished_with_row_locks_held(tmp_path: Path) -> None:
    plants = dict.fromkeys(("dispatcher-1", "dispatcher-2"), "stop_in_claim")
    with scene(tmp_path, dispatchers=2, workers=1, plants=plants) as one:
        active, other = one.sides()
        one.cluster.trap(active).touch()
        caught = one.submit("fault_async", 0, via=other)
        process = psutil.Process(one.platform.services[active].child.pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED, 20, what=f"{active} to be stopped")
        # Who wants the very row waits for its lock, which MariaDB frees after 5 s.
        with httpx.Client(base_url=url(one, other), timeout=30, trust_env=False) as caller:
            assert caller.post(f"/openapi/jobs/{caught}/cancel").status_code == 200
        seen(one, other, 'oncue_database_retries_total{kind="lock_wait"}', None, "database_retry")
        assert readiness(url(one, other))[0] == 200
        one.started(one.submit("fault_async", 0, via=other), timeout=10)
        process.resume()
        until(one.platform.services[active].ready, 20, what="readiness")
        assert (one.row(caught)["status"], one.cluster.starts(caught)) == (CANCELLED, [])


@pytest.mark.parametrize("seconds", [1.5, -1.5, 6.0, -6.0, 3600.0, -3600.0])
def test_clock_skew(tmp_path: Path, seconds: float) -> None:
    with scene(tmp_path, dispatchers=2, workers=1) as one:
        active, other = one.sides()
        refuses_to_dispatch = abs(seconds) > 5
        one.cluster.shift_clock(active, seconds)
        until(
            lambda: abs(metric(url(one, active), "oncue_clock_skew_seconds") - seconds) < 0.5,
            10,
            what="the skew to be exported",
        )
        line = until(lambda: said(log(one, active), "clock_skew"), what="the skew to be logged")[-1]
        assert line["may_dispatch"] is not refuses_to_dispatch
        if refuses_to_dispatch:
            seen(one, active, "oncue_dispatch_lock_held", 0, "lock_lost")
            seen(one, other, "oncue_dispatch_lock_held", 1, "lock_held")
            assert refuses(one, active, "clock")
        else:
            assert metric(url(one, active), "oncue_dispatch_lock_held") == 1
            assert readiness(url(one, active))[0] == 200
        # Both doors serve, and the database's clock alone says what is due.
        soon = one.submit("fault_async", 0, via=active)
        one.started(soon)
        later = one.submit("of_no_worker", 0, via=active)
        if not refuses_to_dispatch:
            until(lambda: "clock_skew" in reasons(one, later), what="the skew to be shown")
        one.cancel(later)
        one.cluster.shift_clock(active, 0)
        until(one.platform.services[active].ready, 20, what="readiness")
        assert one.settled().violations == []
        assert one.cluster.starts(later) == []


def test_a_worker_whose_clock_is_an_hour_off(tmp_path: Path) -> None:
    """Workers take no time from their own clock: they learn the database's by their beats."""
    with scene(tmp_path, workers=1) as one:
        one.cluster.shift_clock("worker-1", 3600)
        until(
            lambda: metric(url(one, "worker-1"), "oncue_worker_clock_offset_seconds") < -3599,
            20,
            what="the offset to be exported",
        )
        until(lambda: said(log(one, "worker-1"), "the clock is off"), what="the worker to tell it")
        job_id = one.submit("fault_async", 500)
        one.started(job_id)
        assert one.settled().violations == []
        row = one.row(job_id)
        assert abs(row["finished_at"] - row["created_at"]) < 60_000


def test_mixed_versions(tmp_path: Path) -> None:
    """The database has the next release's schema, which still takes this code."""
    with scene(tmp_path, workers=1) as one:
        execute(one, "UPDATE schema_revision SET revision = revision + 1")
        one.cluster.terminate("dispatcher-1")
        one.cluster.restart("dispatcher-1", wait=True)
        dispatcher = url(one, "dispatcher-1")
        of_database = metric(dispatcher, 'oncue_schema_revision{of="database"}')
        assert of_database == metric(dispatcher, 'oncue_schema_revision{of="code"}') + 1
        assert said(log(one, "dispatcher-1"), "schema_is_newer")[-1]["database"] == of_database
        assert readiness(dispatcher)[0] == 200
        one.started(one.submit("fault_async", 0))
        version = one.platform.get("/openapi/workers")["items"][0]["version"]
        seen(one, "dispatcher-1", f'oncue_workers_of_version{{version="{version}"}}', 1)
        assert one.settled().violations == []


def test_database_away_at_the_start(mariadb_engine: Engine, new_platform: NewPlatform) -> None:
    platform = new_platform(mariadb_engine)
    nowhere = {"ONCUE_DATABASE_URL": "mysql+aiomysql://nobody:secret@127.0.0.1:9/nothing"}
    waiting = platform.dispatcher(environment=nowhere, wait=False)
    until(lambda: readiness(waiting.url)[0] == 503, what="the door to be open")
    assert readiness(waiting.url)[1]["parts"]["database"] != "ok"
    with httpx.Client(base_url=waiting.url, timeout=10, trust_env=False) as caller:
        assert caller.get("/healthz").status_code == 200
        refused = caller.get("/openapi/jobs")
    assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
    assert refused.headers["retry-after"]
    (line,) = said(waiting.child.log, "database_away_at_start")
    assert "secret" not in line["database"]
    until(lambda: said(waiting.child.log, "start_waits"), what="the wait to be logged")
    assert metric(waiting.url, 'oncue_part_up{part="database"}') == 0
    assert waiting.terminate(10) == 0


def test_a_dispatcher_that_waited_for_its_database_serves_once_it_is_there(tmp_path: Path) -> None:
    with scene(tmp_path, workers=1) as one:
        one.cluster.kill("dispatcher-1")
        one.cluster.kill("mariadb")
        one.cluster.restart("dispatcher-1")
        dispatcher = one.platform.services["dispatcher-1"]
        until(lambda: readiness(dispatcher.url)[0] == 503, 20, what="the door to be open")
        assert submission(one).status_code == 503
        one.cluster.restart("mariadb")
        dispatcher.wait_ready(20)
        one.started(one.submit("fault_async", 0))
        assert one.settled().violations == []


def test_a_database_that_refuses_ends_the_start(
    mariadb_engine: Engine, new_platform: NewPlatform
) -> None:
    """Waiting would mend no wrong password."""
    platform = new_platform(mariadb_engine)
    wrong = mariadb_engine.database_url.replace("://", "://other", 1)
    refused = platform.dispatcher(environment={"ONCUE_DATABASE_URL": wrong}, wait=False)
    assert refused.child.wait(30) == 2
    assert "cannot be used" in refused.child.log_tail()


@pytest.mark.parametrize("kind", ["dispatcher", "worker"])
def test_sigterm_in_the_first_moments_of_a_start_is_no_crash(
    sqlite_engine: Engine, new_platform: NewPlatform, kind: str
) -> None:
    platform = new_platform(sqlite_engine)
    for _ in range(5):
        node: Service = getattr(platform, kind)(wait=False)
        # As soon as the process has its own word about the signal, whatever else it has begun.
        until(partial(handles_sigterm, node.child.pid), what="a handler of SIGTERM")
        assert node.terminate(20) in (0, TERMINATED)


SLOWNESS = 'oncue_part_answer_seconds{part="database"}'
RENEWAL_FAILS = "leases cannot be renewed"
REPORTS_WAIT = "reports are not acknowledged"
LOWER_TERM = "a lower term is refused"


def seen(one: Scene, node: str, series: str, value: float | None, line: str = "") -> None:
    """Wait until a node exports a value (None: any but 0) and has logged a line."""

    def exported() -> bool:
        try:
            found = metric(url(one, node), series)
        except NotExported:
            return False
        return found == value if value is not None else found > 0

    until(exported, 20, what=f"{series} of {node} to be {value}")
    if line:
        until(lambda: said(log(one, node), line), what=f"{node} to log {line}")


def refuses(one: Scene, node: str, part: str) -> bool:
    """Wait until a dispatcher is not ready, for want of this part alone."""

    def found() -> bool:
        status, body = readiness(url(one, node))
        missing = [name for name, state in body["parts"].items() if state != "ok"]
        return (status, missing) == (503, [part])

    return until(found, what=f"{node} to miss {part} alone")


def reasons(one: Scene, job_id: int) -> list[str]:
    told = one.platform.get(f"/openapi/jobs/{job_id}/explain")
    return [reason["code"] for reason in told["reasons"]]


def has_canary(one: Scene) -> bool:
    with redis.Redis(port=one.cluster.servers.redis.port) as client:
        return bool(client.exists(f"{one.cluster.engine.redis_prefix}:canary"))


def looks_twice(one: Scene, node: str) -> None:
    """Wait until a dispatcher has asked Redis twice from now on."""
    taken: set[float] = set()

    def seen_three() -> bool:
        taken.add(metric(url(one, node), 'oncue_part_answer_seconds{part="redis"}'))
        return len(taken) >= 3

    until(seen_three, what="two looks at Redis")


def run_of_term(one: Scene, term: int) -> httpx.Response:
    token = one.platform.internal_token
    return one.http.post(
        f"{url(one, 'worker-1')}/run",
        json={"protocol": 1, "term": term, "runs": []},
        headers={"Authorization": f"Bearer {token}"},
    )


def submission(one: Scene) -> httpx.Response:
    body = {"clientRequestId": "refused", "jobName": "refused", "jobHandler": "fault_async"}
    return one.http.post(f"{url(one, 'dispatcher-1')}/openapi/jobs", json=body)


def handles_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1))


def execute(one: Scene, statement: str) -> None:
    name = one.cluster.engine.database_url.rsplit("/", 1)[1]
    with one.cluster.servers.mariadb.connect(name) as connection:
        connection.cursor().execute(statement)


def url(one: Scene, node: str) -> str:
    return one.platform.services[node].url


def log(one: Scene, node: str) -> Path:
    return one.platform.services[node].child.log
