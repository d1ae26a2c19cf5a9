"""A schedule from the command line to its runs, through a real platform."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from oncue import AsyncClient, Client, Job
from tests.support.cli import oncue as command
from tests.support.processes import Platform
from tests.support.wait import until


def test_a_schedule_runs_and_is_operated_by_the_client(platform: Platform) -> None:
    with Client(platform.url) as oncue:
        made = oncue.submit("record", {"ms": 1}, interval=0.2, overlap_policy="allow", max_fires=5)
        assert (made.status, made.succeeded) == ("SCHEDULED", False)
        assert made.schedule is not None
        assert made.schedule.interval_ms == 200
        ended = oncue.wait(made, timeout=30)
        assert ended.succeeded
        assert ended.schedule is not None
        assert ended.schedule.fires == 5
        until(lambda: len(platform.record()) == 10, what="five runs")
        cron = oncue.submit("record", cron="* * * * *", timezone="Asia/Tokyo")
        now = datetime.now(UTC)
        dry = oncue.backfill(cron, now - timedelta(minutes=5, seconds=30), now, dry_run=True)
        assert (dry.status, dry.total) == ("DRY_RUN", len(dry.nominal_times or ()))
        done = oncue.backfill(cron, now - timedelta(minutes=5, seconds=30), now, max_concurrent=2)
        assert done.total in {5, 6}
        paused = oncue.pause(cron)
        assert paused.status == "PAUSED"
        assert oncue.resume(cron, missed="catchUp").status == "SCHEDULED"
        assert list(oncue.skips(cron)) == []

        def children() -> list[dict[str, object]]:
            return list(platform.get(f"/openapi/jobs/{cron.job_id}/children")["items"])

        until(lambda: len(children()) >= (done.total or 0), 30, what="the backfill")
        until(lambda: all(one["status"] == "SUCCEEDED" for one in children()), 30, what="its runs")
        oncue.cancel(cron)


def test_each_run_is_told_the_time_that_it_stands_for(platform: Platform) -> None:
    with Client(platform.url) as oncue:
        assert oncue.wait(oncue.submit("nominal"), timeout=30).result is None
        every = oncue.submit("nominal", interval=0.2, max_fires=2, overlap_policy="allow")
        oncue.wait(every, timeout=30)
        month = oncue.submit("nominal", cron="0 9 1 * *", timezone="Europe/Berlin")
        begin = datetime(2025, 12, 1, tzinfo=UTC)
        oncue.backfill(month, begin, begin + timedelta(days=90), max_concurrent=3)

        def ended(schedule: Job, count: int) -> list[tuple[datetime | None, str]] | None:
            made = [oncue.get(one) for one in oncue.children(schedule)]
            told = [(one.nominal_time, one.result) for one in made if one.succeeded]
            return told if len(told) == count else None

        fires = until(lambda: ended(every, 2), 30, what="the fires")
        filled = until(lambda: ended(month, 3), 30, what="the backfill")
        assert [at and at.isoformat() for at, _ in fires] == [
            at.isoformat() for at in (datetime.fromisoformat(told) for _, told in fires)
        ]
        assert [told for _, told in filled] == [
            *("2026-02-01T08:00:00+00:00", "2026-01-01T08:00:00+00:00"),
            "2025-12-01T08:00:00+00:00",
        ]
        oncue.cancel(month)


async def test_the_client_to_await_has_the_same_methods(platform: Platform) -> None:
    async with AsyncClient(platform.url) as oncue:
        made = await oncue.submit("echo", cron="0 0 1 1 *")
        now = datetime.now(UTC)
        dry = await oncue.backfill(made, now - timedelta(days=800), now, dry_run=True)
        assert dry.total in {2, 3}
        await oncue.pause(made)
        assert (await oncue.resume(made, missed="skip")).status == "SCHEDULED"
        assert [one async for one in oncue.skips(made)] == []


def test_a_schedule_from_the_command_line(platform: Platform) -> None:
    made = command(
        "submit", "--handler", "echo", "--cron", "0 9 * * MON", "--timezone",
        "Europe/Berlin", "--overlap", "queue", "--misfire", "all", "--misfire-spacing", "30s",
        "--jitter", "5m", "--json", url=platform.url,
    )  # fmt: skip
    schedule = json.loads(made.out)
    assert schedule["schedule"]["misfireSpacingMs"] == 30_000
    assert schedule["schedule"]["jitterMs"] == 300_000
    number = str(schedule["jobId"])
    shown = command("get", number, url=platform.url)
    assert "0 9 * * MON (unix, Europe/Berlin)" in shown.out
    dry = command(
        "backfill", number, "--from", "2026-01-01T00:00:00Z", "--to",
        "2026-02-01T00:00:00Z", "--dry-run", url=platform.url,
    )  # fmt: skip
    assert "DRY_RUN: 4 fires" in dry.out
    assert "2026-01-05 08:00:00Z" in dry.out
    command("pause", number, url=platform.url)
    command("resume", number, "--catch-up", url=platform.url)
    assert command("skips", number, "--json", url=platform.url).out.strip() == "[]"
    every = command(
        "submit", "--handler", "echo", "--interval", "250ms", "--json", url=platform.url
    )
    assert json.loads(every.out)["schedule"]["intervalMs"] == 250
    refused = command("submit", "--handler", "echo", "--interval", "soon", url=platform.url)
    assert (refused.code, refused.out) == (2, "")
    command("cancel", str(json.loads(every.out)["jobId"]), url=platform.url)
