"""`GET /openapi/cron/preview`: what callers see before they submit a schedule."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from oncue import AsyncClient, Invalid
from tests.integration.app.rig import Door, door
from tests.support.engines import Engine, migrated

AFTER = "2026-03-07T12:00:00-05:00"


@pytest.fixture
async def api(sqlite_engine: Engine) -> AsyncIterator[Door]:
    """An API over one engine: a preview asks no database."""
    async with door(migrated(sqlite_engine)) as opened:
        yield opened


async def preview(api: Door, **query: Any) -> httpx.Response:
    return await api.client.get("/openapi/cron/preview", params=query)


async def test_a_preview_tells_when_and_what(api: Door) -> None:
    answer = await preview(
        api, expr="30 2 * * *", timezone="America/New_York", after=AFTER, count=2
    )
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "expr": "30 2 * * *",
        "dialect": "unix",
        "timezone": "America/New_York",
        "description": "At 02:30, every day.",
        "followsRealTime": False,
        "dstGap": "shift",
        "dstFold": "first",
        "after": "2026-03-07T17:00:00.000Z",
        "items": [
            {
                "local": "2026-03-08T03:00:00-04:00",
                "utc": "2026-03-08T07:00:00.000Z",
                "clockChange": "shifted",
            },
            {
                "local": "2026-03-09T02:30:00-04:00",
                "utc": "2026-03-09T06:30:00.000Z",
                "clockChange": None,
            },
        ],
        "nextClockChange": {
            "utc": "2026-03-08T07:00:00.000Z",
            "before": "2026-03-08T02:00:00-05:00",
            "after": "2026-03-08T03:00:00-04:00",
            "kind": "gap",
            "fires": [
                {
                    "local": "2026-03-07T02:30:00-05:00",
                    "utc": "2026-03-07T07:30:00.000Z",
                    "clockChange": None,
                },
                {
                    "local": "2026-03-08T03:00:00-04:00",
                    "utc": "2026-03-08T07:00:00.000Z",
                    "clockChange": "shifted",
                },
                {
                    "local": "2026-03-09T02:30:00-04:00",
                    "utc": "2026-03-09T06:30:00.000Z",
                    "clockChange": None,
                },
            ],
        },
    }


async def test_the_next_clock_change_is_shown_however_far_it_is(api: Door) -> None:
    far = {"timezone": "America/New_York", "after": "2026-07-01T00:00:00Z", "count": 1}

    async def around(expr: str, **choices: str) -> list[tuple[str, str | None]]:
        seen = (await preview(api, expr=expr, **far, **choices)).json()
        fires = seen["nextClockChange"]["fires"]
        return [(one["local"], one["clockChange"]) for one in fires]

    assert await around("30 1 * * *", dstFold="both") == [
        ("2026-11-01T01:30:00-04:00", "first_pass"),
        ("2026-11-01T01:30:00-05:00", "second_pass"),
        ("2026-11-02T01:30:00-05:00", None),
    ]
    assert await around("0 2 * * *") == [
        ("2026-10-31T02:00:00-04:00", None),
        ("2026-11-01T02:00:00-05:00", None),
        ("2026-11-02T02:00:00-05:00", None),
    ]
    # One that is over fires there no more, and one that begins later did not fire before.
    assert await around("0 0 0 1 8 ? 2026") == [("2026-08-01T00:00:00-04:00", None)]
    assert await around("0 0 0 1 1 ? 2027") == [("2027-01-01T00:00:00-05:00", None)]


async def test_a_preview_without_options_is_of_the_next_five_in_utc(api: Door) -> None:
    seen = (await preview(api, expr="0 0 0 ? * 2")).json()
    assert (seen["dialect"], seen["timezone"], len(seen["items"])) == ("quartz", "UTC", 5)
    assert seen["nextClockChange"] is None
    assert all(item["utc"] > seen["after"] for item in seen["items"])


async def test_a_plus_sign_that_was_not_escaped_is_understood(api: Door) -> None:
    answer = await api.client.get(
        "/openapi/cron/preview?expr=0%200%20*%20*%20*&after=2026-01-01T00:00:00+02:00&count=1"
    )
    assert answer.json()["items"][0]["utc"] == "2026-01-01T00:00:00.000Z"


async def test_the_choices_about_clock_changes_are_taken(api: Door) -> None:
    autumn = {"timezone": "America/New_York", "after": "2026-11-01T00:00:00-04:00"}
    both = await preview(api, expr="30 1 * * *", dstFold="both", count=2, **autumn)
    assert [(item["local"], item["clockChange"]) for item in both.json()["items"]] == [
        ("2026-11-01T01:30:00-04:00", "first_pass"),
        ("2026-11-01T01:30:00-05:00", "second_pass"),
    ]
    skip = await preview(
        api, expr="30 2 * * *", dstGap="skip", count=1, timezone="America/New_York", after=AFTER
    )
    assert skip.json()["items"][0]["local"] == "2026-03-09T02:30:00-04:00"


async def test_a_refused_expression_names_its_field(api: Door) -> None:
    answer = await preview(api, expr="0 24 * * *")
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == "cron_invalid"
    assert (problem["field"], problem["position"]) == ("hour", 2)
    assert problem["allowed"].startswith("0 to 23")
    assert problem["errors"] == [{"pointer": "/expr", "detail": problem["detail"]}]


@pytest.mark.parametrize(
    ("query", "code", "pointer"),
    [
        ({}, "validation_failed", "/expr"),
        ({"expr": ""}, "cron_invalid", "/expr"),
        ({"expr": "1" * 200}, "cron_invalid", "/expr"),
        ({"expr": "1" * 2000}, "validation_failed", "/expr"),
        ({"expr": "0 0 31 2 *"}, "cron_invalid", "/expr"),
        ({"expr": "@daily", "dialect": "spring"}, "validation_failed", "/dialect"),
        ({"expr": "@daily", "timezone": "Mars/Olympus"}, "validation_failed", "/timezone"),
        ({"expr": "@daily", "timezone": "Mars/\0"}, "validation_failed", "/timezone"),
        ({"expr": "@daily", "count": "101"}, "validation_failed", "/count"),
        ({"expr": "@daily", "after": "2026-01-01T00:00:00"}, "validation_failed", "/after"),
        ({"expr": "@daily", "after": "9999-12-31T23:59:59-12:00"}, "validation_failed", "/after"),
        ({"expr": "@daily", "dstGap": "jump"}, "validation_failed", "/dstGap"),
        ({"expr": "@daily", "dstFold": "never"}, "validation_failed", "/dstFold"),
        ({"expr": "@daily", "zone": "UTC"}, "validation_failed", "/zone"),
    ],
)
async def test_bad_input_is_refused_with_a_pointer(
    api: Door, query: dict[str, str], code: str, pointer: str
) -> None:
    answer = await preview(api, **query)
    assert answer.status_code == 422
    assert answer.json()["code"] == code
    assert [one["pointer"] for one in answer.json()["errors"]] == [pointer]


async def test_a_preview_needs_a_key_where_keys_are_set(sqlite_engine: Engine) -> None:
    async with door(migrated(sqlite_engine), api_keys="me:a-long-secret") as closed:
        assert (await preview(closed, expr="@daily")).status_code == 401


async def test_the_client_previews(api: Door) -> None:
    transport = api.client._transport
    async with AsyncClient("http://oncue", transport=transport) as client:
        seen = await client.cron_preview(
            "30 2 * * *",
            timezone="America/New_York",
            after=datetime(2026, 3, 7, 17, tzinfo=UTC),
            count=1,
            dst_gap="shift",
        )
        (fire,) = seen.items
        assert (fire.local, fire.clock_change) == ("2026-03-08T03:00:00-04:00", "shifted")
        assert fire.utc == datetime(2026, 3, 8, 7, tzinfo=UTC)
        assert seen.next_clock_change is not None
        assert seen.next_clock_change.kind == "gap"
        assert [one.clock_change for one in seen.next_clock_change.fires] == [None, "shifted", None]
        assert (seen.dialect, seen.description) == ("unix", "At 02:30, every day.")
        with pytest.raises(Invalid) as refused:
            await client.cron_preview("0 24 * * *")
        assert (refused.value.code, refused.value.problem["field"]) == ("cron_invalid", "hour")
        with pytest.raises(TypeError, match="no option 'zone'"):
            await client.cron_preview("@daily", zone="UTC")  # type: ignore[call-arg]
