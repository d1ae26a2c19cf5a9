"""The callbacks of a job are shown, and any of them is delivered again on demand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.lifecycle.moves.deliver import give_back, note_tries, take_due
from app.lifecycle.moves.tell_start import tell_starts
from app.lifecycle.states import DeliveryStatus, ExecutionStatus
from app.plumbing.times import rfc3339
from oncue.protocol import LATEST_TIME, DeliveryResult
from tests.integration.app.rig import (
    Door,
    change,
    claimed,
    door,
    ending,
    new_term,
    rows_of,
    running_job,
    settled,
    value_of,
)
from tests.support.engines import Engine

URL = "http://127.0.0.1:9/hook"


@pytest.fixture
async def api(migrated_engine: Engine) -> AsyncIterator[Door]:
    """An API over each engine."""
    async with door(migrated_engine) as opened:
        yield opened


async def page_of(api: Door, job_id: int, query: str = "") -> dict[str, Any]:
    answer = await api.client.get(f"/openapi/jobs/{job_id}/callbacks{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_each_end_of_a_job_shows_its_callback_newest_first(api: Door) -> None:
    database = api.database
    run = await running_job(database, max_retry=0, callback_url=URL)
    for number in range(3):
        if number:
            await api.client.post(f"/openapi/jobs/{run.job_id}/retry")
            (run,) = await claimed(database, [run.job_id], term=await new_term(database))
        await settled(database, ending(run, ExecutionStatus.FAILED, error_code="e"))
    first = await page_of(api, run.job_id, "?limit=2")
    second = await page_of(api, run.job_id, f"?limit=2&cursor={first['nextCursor']}")
    items = first["items"] + second["items"]
    assert second["nextCursor"] is None
    assert len({one["deliveryId"] for one in items}) == 3
    assert [one["createdAt"] for one in items] == sorted(
        (one["createdAt"] for one in items), reverse=True
    )
    needed = {"event": "job.failed", "url": URL, "status": "PENDING", "tries": 1, "endedAt": None}
    assert all(one | needed == one for one in items)
    assert (await api.client.get("/openapi/jobs/999/callbacks")).status_code == 404


@pytest.mark.parametrize("status", DeliveryStatus)
async def test_a_callback_is_delivered_again_with_the_same_id_whatever_became_of_it(
    api: Door, status: DeliveryStatus
) -> None:
    database = api.database
    run = await running_job(database, callback_url=URL)
    await settled(database, ending(run, ExecutionStatus.SUCCEEDED, result="1"))
    await change(
        database,
        "UPDATE callback_delivery SET status = :status, tries = 12, ended_at = 5, "
        "next_try_at = 9000000000000, created_at = 1",
        status=int(status),
    )
    await change(
        database,
        "INSERT INTO callback_try (job_id, delivery_key, try_number, tried_at, worker_id, "
        "delivered, latency_ms) SELECT job_id, id, 12, 1, 'w', 0, 1 FROM callback_delivery",
    )
    (known,) = (await page_of(api, run.job_id))["items"]
    owed: list[Any] = []
    api.parts.ground.bus.subscribe("owed", owed.append)
    answer = await api.client.post(f"/openapi/callbacks/{known['deliveryId']}/redeliver")
    assert answer.status_code == 200
    again = answer.json()
    assert (again["deliveryId"], again["status"], again["endedAt"]) == (
        known["deliveryId"],
        "PENDING",
        None,
    )
    assert owed == [[await value_of(database, "SELECT next_try_at FROM callback_delivery")]]
    (taken,) = await database.write(
        lambda connection: take_due(connection, database, {"127.0.0.1:9": ["w#boot"]}, limit=5)
    )
    assert (taken.delivery.delivery_id, taken.delivery.try_number) == (known["deliveryId"], 13)
    assert json.loads(taken.delivery.body)["data"]["jobId"] == run.job_id
    result = DeliveryResult(
        delivery_id=known["deliveryId"], try_number=13, delivered=False, status_code=500, error="no"
    )
    await database.write(
        lambda connection: note_tries(
            connection, database, [result], worker_id="w#boot", schedule_seconds=(5.0, 15.0)
        )
    )
    (last,) = (await page_of(api, run.job_id))["items"]
    assert (last["status"], last["lastStatusCode"], last["lastError"]) == ("EXHAUSTED", 500, "no")


@pytest.mark.parametrize("refused", [False, True])
async def test_a_redelivery_outlives_the_failure_of_the_try_that_was_under_way(
    api: Door, refused: bool
) -> None:
    database = api.database
    run = await running_job(database, callback_url=URL)
    (settlement,) = await settled(database, ending(run, ExecutionStatus.SUCCEEDED))
    assert settlement.delivery is not None
    delivery_id = settlement.delivery.delivery_id
    await api.client.post(f"/openapi/callbacks/{delivery_id}/redeliver")
    if refused:
        # Its worker does not take it again while it tries it.
        hosts = {"127.0.0.1:9": ["w#boot"]}
        await database.write(lambda connection: take_due(connection, database, hosts, limit=5))
        await database.write(
            lambda connection: give_back(connection, database, "w#boot", [delivery_id], pause_ms=9)
        )
    due = await value_of(database, "SELECT next_try_at FROM callback_delivery")
    failed = DeliveryResult(delivery_id=delivery_id, try_number=1, delivered=False, error="no")

    async def note(result: DeliveryResult) -> None:
        await database.write(
            lambda connection: note_tries(
                connection, database, [result], worker_id="w#boot", schedule_seconds=(5.0,)
            )
        )

    await note(failed)
    (row,) = (await page_of(api, run.job_id))["items"]
    assert (row["status"], len(row["history"])) == ("PENDING", 1)
    assert await value_of(database, "SELECT next_try_at FROM callback_delivery") == due
    await note(failed.model_copy(update={"delivered": True}))
    assert (await page_of(api, run.job_id))["items"][0]["status"] == "DELIVERED"


async def test_a_success_that_is_told_again_does_not_undo_a_redelivery(api: Door) -> None:
    database = api.database
    run = await running_job(database, callback_url=URL)
    (settlement,) = await settled(database, ending(run, ExecutionStatus.SUCCEEDED))
    assert settlement.delivery is not None
    delivery_id = settlement.delivery.delivery_id
    done = DeliveryResult(delivery_id=delivery_id, try_number=1, delivered=True, status_code=200)

    async def note(*results: DeliveryResult) -> str:
        await database.write(
            lambda connection: note_tries(
                connection, database, results, worker_id="w#boot", schedule_seconds=(5.0,)
            )
        )
        found: str = (await page_of(api, run.job_id))["items"][0]["status"]
        return found

    assert await note(done) == "DELIVERED"
    await api.client.post(f"/openapi/callbacks/{delivery_id}/redeliver")
    # Its answer was lost: the worker tells of its try once more.
    assert await note(done) == "PENDING"
    hosts = {"127.0.0.1:9": ["v#boot"]}
    (again,) = await database.write(
        lambda connection: take_due(connection, database, hosts, limit=5)
    )
    assert again.delivery.try_number == 2
    # News of a try whose lease ran out is news all the same.
    assert await note(done, done.model_copy(update={"try_number": 2})) == "DELIVERED"


class Told:
    """One callback of a job, and what is told of its tries."""

    def __init__(self, api: Door, job_id: int, delivery_id: str) -> None:
        self.api, self.job_id, self.delivery_id = api, job_id, delivery_id

    def result(self, number: int, **fields: Any) -> DeliveryResult:
        given: dict[str, Any] = {"delivered": True, "status_code": 200, **fields}
        return DeliveryResult(delivery_id=self.delivery_id, try_number=number, **given)

    async def note(self, *results: DeliveryResult, worker: str = "w#boot") -> None:
        database = self.api.database
        await database.write(
            lambda connection: note_tries(
                connection, database, results, worker_id=worker, schedule_seconds=(0.0, 5.0)
            )
        )

    async def send_again(self, worker: str = "w#boot") -> None:
        """Have it delivered again, by this worker."""
        await self.api.client.post(f"/openapi/callbacks/{self.delivery_id}/redeliver")
        database = self.api.database
        await database.write(
            lambda connection: take_due(connection, database, {"127.0.0.1:9": [worker]}, limit=5)
        )

    async def shown(self) -> dict[str, Any]:
        (found,) = (await page_of(self.api, self.job_id))["items"]
        return dict(found)

    async def rows(self) -> int:
        """How many tries have a row of their own."""
        return int(await value_of(self.api.database, "SELECT COUNT(*) FROM callback_try"))


async def told(api: Door, **fields: Any) -> Told:
    run = await running_job(api.database, callback_url=URL, **fields)
    (settlement,) = await settled(api.database, ending(run, ExecutionStatus.SUCCEEDED))
    assert settlement.delivery is not None
    return Told(api, run.job_id, settlement.delivery.delivery_id)


async def test_a_success_at_once_needs_no_row_and_is_shown_as_any_try_is(api: Door) -> None:
    one = await told(api)
    await one.note(one.result(1, status_code=204, latency_ms=7, answer="it's \u00e9"))
    shown = await one.shown()
    (first,) = shown["history"]
    assert await one.rows() == 0
    assert (shown["status"], shown["tries"], shown["lastStatusCode"]) == ("DELIVERED", 1, 204)
    assert shown["createdAt"] <= first["at"] <= shown["endedAt"]
    assert {name: value for name, value in first.items() if name != "at"} == {
        "try": 1,
        "workerId": "w#boot",
        "delivered": True,
        "statusCode": 204,
        "latencyMs": 7,
        "error": None,
        "answer": "it's \u00e9",
    }


@pytest.mark.parametrize("delivered", [True, False])
async def test_the_record_of_a_success_outlives_redeliveries(api: Door, delivered: bool) -> None:
    one = await told(api)
    await one.note(one.result(1, answer="first"))
    (first,) = (await one.shown())["history"]
    await one.send_again("v#boot")
    assert (await one.shown())["history"] == [first]
    await one.note(one.result(2, delivered=delivered, answer="second"), worker="v#boot")
    history = (await one.shown())["history"]
    assert history[1:] == [first]
    assert (history[0]["try"], history[0]["workerId"], history[0]["answer"]) == (
        2,
        "v#boot",
        "second",
    )
    # What is told once more changes none of them.
    await one.note(one.result(1, answer="told again"))
    await one.note(one.result(2, delivered=delivered, answer="again"), worker="v#boot")
    assert (await one.shown())["history"] == history
    assert await one.rows() == 1


async def test_one_report_has_successes_repeats_and_failures(api: Door) -> None:
    first, again, failed, late = [await told(api) for _ in range(4)]
    await again.note(again.result(1))
    await late.send_again("v#boot")
    await first.note(
        failed.result(1, delivered=False, status_code=503, error="no"),
        first.result(1),
        again.result(1),
        late.result(1),
    )
    shown = [await one.shown() for one in (first, again, failed, late)]
    assert [one["status"] for one in shown] == ["DELIVERED", "DELIVERED", "PENDING", "DELIVERED"]
    assert [len(one["history"]) for one in shown] == [1] * 4
    # The last was no longer its newest try.
    assert await first.rows() == 2


@pytest.mark.parametrize("tried_at", [1, LATEST_TIME])
@pytest.mark.parametrize("status_code", [200, 503])
async def test_no_try_was_before_its_callback_or_is_yet_to_come(
    api: Door, tried_at: int, status_code: int
) -> None:
    one = await told(api)
    await one.note(
        one.result(
            1, tried_at=tried_at, status_code=status_code, delivered=status_code < 300, latency_ms=9
        )
    )
    shown = await one.shown()
    now = await value_of(api.database, f"SELECT {api.database.now_ms}")
    assert shown["createdAt"] <= shown["history"][0]["at"] <= rfc3339(now)


@pytest.mark.parametrize("bad", [{"tryNumber": "first"}, {"latencyMs": 2**40}, 7])
async def test_a_try_that_cannot_be_read_keeps_no_other_from_being_noted(
    api: Door, bad: Any
) -> None:
    good, other = await told(api), await told(api)
    report = [json.loads(one.result(1).model_dump_json(by_alias=True)) for one in (good, other)]
    report[1] = report[1] | bad if isinstance(bad, dict) else bad
    answer = await api.report(tries=report)
    assert answer["acknowledgedTries"] == [good.delivery_id]
    shown = [(await one.shown())["status"] for one in (good, other)]
    assert shown == ["DELIVERED", "PENDING"]


@pytest.mark.parametrize("answer", ["what was sent", "", None])
async def test_an_answer_to_what_was_secret_is_masked(api: Door, answer: str | None) -> None:
    one = await told(api)
    await change(api.database, 'UPDATE callback_delivery SET headers = \'{"A":{"sealed":"x"}}\'')
    await one.note(one.result(1, answer=answer))
    ((first,), rows) = (await one.shown())["history"], await one.rows()
    assert (first["answer"], rows) == (answer and "********", 0)


async def test_a_success_that_an_older_dispatcher_has_given_a_row_too_is_shown_once(
    api: Door,
) -> None:
    one = await told(api)
    await one.note(one.result(1))
    await change(
        api.database,
        "INSERT INTO callback_try (job_id, delivery_key, try_number, tried_at, worker_id, "
        "delivered, latency_ms) SELECT job_id, id, 1, 1, 'w#boot', 1, 0 FROM callback_delivery",
    )
    assert len((await one.shown())["history"]) == 1


async def test_a_repeated_end_is_given_its_own_callback_not_that_of_the_start(api: Door) -> None:
    database = api.database
    run = await running_job(database, callback_url=URL, callback_events="started,succeeded")
    await database.write(
        lambda connection: tell_starts(connection, database, {run.job_id: run.execution_id})
    )
    await change(database, "UPDATE callback_delivery SET owner_worker_id = 'w#boot'")
    end = ending(run, ExecutionStatus.SUCCEEDED)
    (first,) = await settled(database, end)
    (again,) = await settled(database, end)
    assert first.delivery is not None
    assert again.delivery is not None
    assert again.delivery.delivery_id == first.delivery.delivery_id


async def test_tries_of_which_nobody_told_an_end_use_up_nothing_of_the_schedule(api: Door) -> None:
    """Workers that took a callback and were lost have not called its receiver, for all we know."""
    database = api.database
    run = await running_job(database, callback_url=URL)
    await settled(database, ending(run, ExecutionStatus.SUCCEEDED))
    hosts = {"127.0.0.1:9": ["w#boot"]}
    tries = []
    for _ in range(5):
        await change(database, "UPDATE callback_delivery SET next_try_at = 1")
        tries += await database.write(
            lambda connection: take_due(connection, database, hosts, limit=5)
        )
    taken = tries[-1]
    assert (len(tries), taken.delivery.try_number) == (5, 6)
    shown = []
    for number in (6, 7):
        failed = DeliveryResult(
            delivery_id=taken.delivery.delivery_id,
            try_number=number,
            delivered=False,
            status_code=503,
        )
        await database.write(
            lambda connection, failed=failed: note_tries(  # type: ignore[misc]
                connection, database, [failed], worker_id="w#boot", schedule_seconds=(0.0, 1.0)
            )
        )
        shown.append((await page_of(api, run.job_id))["items"][0]["status"])
        await change(database, "UPDATE callback_delivery SET next_try_at = 1, created_at = 1")
        await database.write(lambda connection: take_due(connection, database, hosts, limit=5))
    assert shown == ["PENDING", "EXHAUSTED"]


async def test_a_receiver_that_asks_for_two_seconds_has_them_and_all_tries_still(api: Door) -> None:
    database = api.database
    run = await running_job(database, callback_url=URL)
    (settlement,) = await settled(database, ending(run, ExecutionStatus.SUCCEEDED))
    assert settlement.delivery is not None
    schedule = (0.0, 5.0, 300.0)

    async def fail(number: int, retry_after_ms: int | None) -> tuple[int, int, int]:
        """Have a try fail; return how the callback stands, and its pause at least and at most."""
        await change(
            database,
            "UPDATE callback_delivery SET tries = :number, owner_worker_id = 'w#boot', "
            "next_try_at = 9000000000000",
            number=number,
        )
        result = DeliveryResult(
            delivery_id=settlement.delivery.delivery_id if settlement.delivery else "",
            try_number=number,
            delivered=False,
            status_code=503,
            retry_after_ms=retry_after_ms,
        )
        before = await value_of(database, f"SELECT {database.now_ms}")
        await database.write(
            lambda connection: note_tries(
                connection, database, [result], worker_id="w#boot", schedule_seconds=schedule
            )
        )
        after = await value_of(database, f"SELECT {database.now_ms}")
        (row,) = await rows_of(database, "SELECT status, next_try_at FROM callback_delivery")
        return row["status"], row["next_try_at"] - after, row["next_try_at"] - before

    for number in range(1, 6):
        status, least, most = await fail(number, 2000)
        assert status == DeliveryStatus.PENDING, "more tries than the schedule has, but no time yet"
        assert least <= 2000 <= most
    # Without a word from the receiver the schedule goes on from where its time is.
    aged = f"UPDATE callback_delivery SET created_at = {database.now_ms} - 60000"
    await change(database, aged)
    status, _, most = await fail(6, None)
    assert (status, most >= 240_000) == (DeliveryStatus.PENDING, True)
    await change(database, "UPDATE callback_delivery SET created_at = 1")
    assert (await fail(7, 2000))[0] == DeliveryStatus.EXHAUSTED


async def test_a_callback_that_is_not_there_cannot_be_delivered(api: Door) -> None:
    answer = await api.client.post("/openapi/callbacks/nothing/redeliver")
    assert (answer.status_code, answer.json()["code"]) == (404, "callback_not_found")
