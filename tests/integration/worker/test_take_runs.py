"""What a worker answers to `/run` and `/cancel`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from redis import Redis

from oncue.protocol import (
    GIVEN_UP,
    Answer,
    CancelRequest,
    OutcomeStatus,
    RejectReason,
    Run,
    RunAnswer,
    RunRequest,
    RunResponse,
    Seat,
    run_key,
    run_mark,
)
from tests.integration.worker.conftest import OpenWorker
from tests.integration.worker.rig import FakeDispatcher
from tests.support.redis import PrivateValkey
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run
from worker.clock import boot_seconds
from worker.held import StaleTerm
from worker.lease import LeaseUnavailable, Wanted
from worker.parts import Parts
from worker.run import RunsTooOld


async def take(parts: Parts, *runs: Run, term: int = 1) -> list[RunAnswer]:
    answer = await parts.intake.take(make_request(*runs, term=term))
    return RunResponse.model_validate_json(answer).answers


async def test_a_run_is_accepted_run_and_reported(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    run = make_run("echo", {"n": 2**70, "text": "ü"})
    async with open_worker() as parts:
        [answer] = await take(parts, run)
        assert answer.answer is Answer.ACCEPTED
        outcome = await until_async(lambda: dispatcher.outcome(run.execution_id))
    assert outcome.status is OutcomeStatus.SUCCEEDED
    assert outcome.result == {"n": 2**70, "text": "ü"}
    assert outcome.accepted_at is not None
    assert outcome.started_at is not None
    assert outcome.finished_at is not None
    assert outcome.accepted_at <= outcome.started_at <= outcome.finished_at


async def test_the_same_run_sent_again_is_a_duplicate_while_held_and_after_its_end(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    dispatcher.acknowledges = lambda _: False
    run = make_run("w_wait", {"seconds": 0.05})
    async with open_worker() as parts:
        await take(parts, run)
        [held] = await take(parts, run)
        assert (held.answer, held.owner_execution_id) == (Answer.DUPLICATE, run.execution_id)
        assert held.outcome is None
        await until_async(lambda: parts.held.unacknowledged)
        [unacknowledged] = await take(parts, run)
        assert unacknowledged.outcome is not None
        dispatcher.acknowledges = lambda _: True
        await until_async(lambda: not parts.held.unacknowledged)
        [finished] = await take(parts, run)
        assert finished.answer is Answer.DUPLICATE
        assert finished.outcome is not None
        assert finished.outcome.status is OutcomeStatus.SUCCEEDED


async def test_a_request_that_waited_too_long_starts_nothing(open_worker: OpenWorker) -> None:
    run = make_run("w_wait", {"seconds": 60})
    async with open_worker() as parts:
        now = parts.clock.now_ms()
        late = make_request(run).model_copy(update={"sent_at": now - 11_000})
        with pytest.raises(RunsTooOld):
            await parts.intake.take(late)
        assert not parts.held.live
        await parts.intake.take(late.model_copy(update={"sent_at": now}))
        assert list(parts.held.live) == [run.execution_id]


async def test_a_lease_that_was_granted_before_a_long_freeze_is_not_begun_on(
    open_worker: OpenWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("w_wait", {"seconds": 60})
    async with open_worker() as parts:
        granted = parts.leases.take

        async def take_and_freeze(wanted: Sequence[Wanted]) -> list[bytes]:
            values = await granted(wanted)
            monkeypatch.setattr("worker.run.boot_seconds", lambda: boot_seconds() + 30)
            return values

        monkeypatch.setattr(parts.leases, "take", take_and_freeze)
        with pytest.raises(LeaseUnavailable):
            await take(parts, run)
        assert not parts.held.live
        monkeypatch.undo()
        [answer] = await take(parts, run)
        assert answer.answer is Answer.ACCEPTED


async def test_an_attempt_that_was_given_up_is_not_begun(
    open_worker: OpenWorker, valkey: PrivateValkey
) -> None:
    run = make_run("w_wait", {"seconds": 60})
    async with open_worker() as parts:
        key = run_key(parts.settings.redis_prefix, run.job_id, run.trigger_ts)
        with Redis.from_url(valkey.socket_url) as redis:
            redis.set(key, run_mark(GIVEN_UP, GIVEN_UP))
        [answer] = await take(parts, run)
        # Another owner than itself: its dispatcher returns it, and makes another attempt.
        assert (answer.answer, answer.owner_execution_id) == (Answer.DUPLICATE, GIVEN_UP)
        assert not parts.held.live


async def test_another_execution_of_a_held_attempt_is_told_its_owner(
    open_worker: OpenWorker,
) -> None:
    run = make_run("w_wait", {"seconds": 60})
    other = make_run("w_wait", {"seconds": 60}, job_id=run.job_id)
    async with open_worker() as parts:
        await take(parts, run)
        [answer] = await take(parts, other)
    assert answer.answer is Answer.DUPLICATE
    assert answer.execution_id == other.execution_id
    assert answer.owner_execution_id == run.execution_id


async def test_an_attempt_leased_or_finished_by_another_worker_is_not_run(
    open_worker: OpenWorker, valkey: PrivateValkey
) -> None:
    leased, finished, unknown = make_run("echo"), make_run("echo"), make_run("nobody")
    redis = Redis.from_url(valkey.socket_url)
    outcome = (
        f'{{"executionId":"x-2","jobId":{finished.job_id},'
        f'"triggerTs":{finished.trigger_ts},"status":"failed"}}'
    )
    for run, value in (
        (leased, run_mark("boot", "x-1")),
        (finished, run_mark("boot", "x-2") + outcome),
        (unknown, run_mark("boot", "x-3")),
    ):
        redis.set(run_key("oncue", run.job_id, run.trigger_ts), value)
    redis.close()
    async with open_worker() as parts:
        answers = await take(parts, leased, finished, unknown)
        assert not parts.held.live
    assert [one.answer for one in answers] == [Answer.DUPLICATE] * 3
    assert [one.owner_execution_id for one in answers] == ["x-1", "x-2", "x-3"]
    assert answers[0].outcome is None
    assert answers[1].outcome is not None
    assert answers[1].outcome.status is OutcomeStatus.FAILED


async def test_one_run_in_many_requests_at_once_starts_once(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    run = make_run("w_wait", {"seconds": 0.1})
    rival = make_run("w_wait", {"seconds": 0.1}, job_id=run.job_id)
    async with open_worker() as parts:
        answers = await asyncio.gather(
            *(take(parts, run, rival, run) for _ in range(8)), take(parts, rival)
        )
        flat = [one for many in answers for one in many]
        assert [one.answer for one in flat].count(Answer.ACCEPTED) == 1
        assert {one.owner_execution_id for one in flat if one.answer is not Answer.ACCEPTED} == {
            run.execution_id
        }
        await until_async(lambda: dispatcher.outcome(run.execution_id))
    assert len(dispatcher.outcomes()) == 1


async def test_capacity_holds_over_requests_at_once(open_worker: OpenWorker) -> None:
    async with open_worker(worker_capacity=5) as parts:
        answers = await asyncio.gather(
            *(
                take(parts, *(make_run("w_wait", {"seconds": 60}) for _ in range(3)))
                for _ in range(6)
            )
        )
        flat = [one for many in answers for one in many]
        assert len(parts.held.live) == 5
    assert [one.answer for one in flat].count(Answer.ACCEPTED) == 5
    assert {one.reason for one in flat if one.answer is Answer.REJECTED} == {RejectReason.FULL}


async def test_limits_are_named(open_worker: OpenWorker) -> None:
    async with open_worker() as parts:
        [unknown] = await take(parts, make_run("nobody-offers-this"))
        parts.drain()
        [draining] = await take(parts, make_run("echo"))
    assert unknown.reason is RejectReason.UNKNOWN_HANDLER
    assert draining.reason is RejectReason.DRAINING


async def test_a_late_copy_of_a_run_rejected_as_full_finds_no_slot_though_one_is_free(
    open_worker: OpenWorker,
) -> None:
    first, rejected = make_run("w_wait", {"seconds": 60}), make_run("echo")
    async with open_worker(worker_capacity=1) as parts:
        await take(parts, first)
        [answer] = await take(parts, rejected)
        assert answer.reason is RejectReason.FULL
        parts.intake.cancel(CancelRequest(term=1, execution_ids=[first.execution_id]))
        await until_async(lambda: not parts.held.live)
        [late, other] = await take(parts, rejected, make_run("echo"))
    assert (late.answer, late.reason) == (Answer.REJECTED, RejectReason.FULL)
    assert other.answer is Answer.ACCEPTED


@pytest.mark.parametrize(
    "reason", [RejectReason.FULL, RejectReason.DRAINING, RejectReason.UNKNOWN_HANDLER]
)
async def test_a_rejection_holds_after_its_reason_has_gone(
    open_worker: OpenWorker, monkeypatch: pytest.MonkeyPatch, reason: RejectReason
) -> None:
    run = make_run("echo")
    async with open_worker() as parts:
        with monkeypatch.context() as patch:
            patch.setattr(parts.intake, "_limit", lambda _: reason)
            await take(parts, run)
        [late] = await take(parts, run)
        assert not parts.held.live
    assert (late.answer, late.reason) == (Answer.REJECTED, reason)


async def test_a_run_rejected_by_a_drain_while_the_lease_is_taken_stays_so(
    open_worker: OpenWorker, valkey: PrivateValkey
) -> None:
    run = make_run("echo")
    async with open_worker() as parts:
        valkey.freeze()
        taking = asyncio.ensure_future(take(parts, run))
        await until_async(lambda: parts.held.live)
        parts.drain()
        valkey.thaw()
        [answer] = await taking
        parts.held.draining = False
        [late] = await take(parts, run)
    assert answer.reason is late.reason is RejectReason.DRAINING


@pytest.mark.parametrize("slow_copy_ends_first", [True, False])
async def test_two_copies_of_which_one_found_no_slot_agree(
    open_worker: OpenWorker, monkeypatch: pytest.MonkeyPatch, slow_copy_ends_first: bool
) -> None:
    first, run = make_run("w_wait", {"seconds": 30}), make_run("w_wait", {"seconds": 30})
    async with open_worker(worker_capacity=1) as parts:
        await take(parts, first)
        gates = [asyncio.Event(), asyncio.Event()]
        waiting = iter(gates)
        ask = parts.leases.take

        async def ask_and_wait(wanted: Sequence[Wanted]) -> list[bytes]:
            values = await ask(wanted)
            await next(waiting).wait()
            return values

        monkeypatch.setattr(parts.leases, "take", ask_and_wait)
        slow = asyncio.ensure_future(take(parts, run))
        await asyncio.sleep(0)
        parts.intake.cancel(CancelRequest(term=1, execution_ids=[first.execution_id]))
        await until_async(lambda: not parts.held.live)
        quick = asyncio.ensure_future(take(parts, run))
        await until_async(lambda: parts.held.live)
        order = (slow, quick) if slow_copy_ends_first else (quick, slow)
        for copy in order:
            gates[0 if copy is slow else 1].set()
            await copy
        answers = {copy.result()[0].answer for copy in order}
        if slow_copy_ends_first:
            assert answers == {Answer.REJECTED}
            assert not parts.held.live
        else:
            assert answers == {Answer.ACCEPTED, Answer.DUPLICATE}
            assert list(parts.held.live) == [run.execution_id]


async def test_a_cancel_stops_what_is_held_and_refuses_what_is_not(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    held, later = make_run("w_wait", {"seconds": 30}), make_run("echo")
    async with open_worker() as parts:
        await take(parts, held)
        answer = parts.intake.cancel(
            CancelRequest(term=1, execution_ids=[held.execution_id, later.execution_id])
        )
        assert (answer.stopped, answer.unknown) == ([held.execution_id], [later.execution_id])
        [refused] = await take(parts, later)
        assert refused.reason is RejectReason.CANCELLED
        outcome = await until_async(lambda: dispatcher.outcome(held.execution_id))
    assert outcome.status is OutcomeStatus.CANCELLED
    assert not outcome.stopping


async def test_a_cancel_while_the_lease_is_taken_wins(
    open_worker: OpenWorker, valkey: PrivateValkey
) -> None:
    run = make_run("w_wait", {"seconds": 30})
    async with open_worker() as parts:
        valkey.freeze()
        taking = asyncio.ensure_future(take(parts, run))
        await until_async(lambda: parts.held.live)
        parts.intake.cancel(CancelRequest(term=1, execution_ids=[run.execution_id]))
        valkey.thaw()
        [answer] = await taking
        assert answer.reason is RejectReason.CANCELLED
        assert not parts.held.live
        with Redis.from_url(valkey.socket_url) as redis:
            key = run_key("oncue", run.job_id, run.trigger_ts)
            await until_async(lambda: redis.get(key) is None)


async def test_an_older_term_is_refused_however_the_newer_one_was_seen(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    dispatcher.term = 7
    async with open_worker() as parts:
        with pytest.raises(StaleTerm):
            await take(parts, make_run("echo"), term=6)
        await take(parts, term=8)
        with pytest.raises(StaleTerm):
            parts.intake.cancel(CancelRequest(term=7, execution_ids=[]))


async def test_terms_of_partitions_are_told_apart(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    dispatcher.term = 7

    def seated(partition: int, term: int) -> RunRequest:
        return RunRequest(term=0, seat=Seat(partition=partition, term=term), runs=[])

    async with open_worker() as parts:
        answer = RunResponse.model_validate_json(await parts.intake.take(seated(1, 2)))
        assert answer.seats
        await parts.intake.take(seated(2, 1))
        await parts.intake.take(seated(1, 3))
        with pytest.raises(StaleTerm):
            await parts.intake.take(seated(1, 2))
        await take(parts, term=7)
        with pytest.raises(StaleTerm):
            await take(parts, term=6)


async def test_a_worker_that_knows_no_partitions_refuses_a_seat(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    dispatcher.term = 7
    body = RunRequest(term=0, seat=Seat(partition=1, term=9), runs=[]).model_dump(by_alias=True)
    async with open_worker() as parts:
        # As one of the last release reads it: what it does not know is not there.
        with pytest.raises(StaleTerm):
            await parts.intake.take(RunRequest.model_validate({**body, "seat": None}))
        await take(parts, term=7)


async def test_without_redis_nothing_starts_and_the_repeat_does(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, valkey: PrivateValkey
) -> None:
    run = make_run("echo", 1)
    async with open_worker() as parts:
        valkey.kill()
        with pytest.raises(LeaseUnavailable):
            await take(parts, run)
        with pytest.raises(LeaseUnavailable):
            await take(parts)  # which is how a dispatcher asks whether work could be sent
        assert not parts.held.live
        valkey.start()
        [answer] = await take(parts, run)
        assert answer.answer is Answer.ACCEPTED
        await until_async(lambda: dispatcher.outcome(run.execution_id))


async def test_a_frozen_redis_refuses_too_and_its_late_lease_is_still_mine(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, valkey: PrivateValkey
) -> None:
    run = make_run("echo", 1)
    async with open_worker() as parts:
        await take(parts, make_run("echo"))  # the connection and the script are there
        valkey.freeze()
        with pytest.raises(LeaseUnavailable):
            await take(parts, run)
        valkey.thaw()
        [answer] = await take(parts, run)
        assert answer.answer is Answer.ACCEPTED
        await until_async(lambda: dispatcher.outcome(run.execution_id))


async def test_every_load_is_newer_than_the_one_before(open_worker: OpenWorker) -> None:
    seen: list[Any] = []
    async with open_worker() as parts:
        for _ in range(3):
            answer = await parts.intake.take(make_request(make_run("w_wait", {"seconds": 60})))
            seen.append(RunResponse.model_validate_json(answer).load)
    assert [load.active for load in seen] == [1, 2, 3]
    assert [load.seq for load in seen] == sorted({load.seq for load in seen})
