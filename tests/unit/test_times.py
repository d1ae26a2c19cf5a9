"""The times of the platform that must stand in an order, whoever changes one of them."""

from __future__ import annotations

from app.callbacks.handover import OFFER_SECONDS
from app.dispatch.probe import PROBE_SECONDS
from app.lifecycle.moves.owe import DELIVERY_LEASE_MS
from app.plumbing.database import IDLE_TRANSACTION_SECONDS, LOCK_WAIT_SECONDS
from app.plumbing.http import ANSWER_SECONDS
from app.settings import Settings
from oncue.protocol import LATEST_RUN_SECONDS, LEASE_SECONDS, TOMBSTONE_SECONDS
from worker import heartbeat
from worker.dispatchers import NEXT_SECONDS, REQUEST_TIMEOUT_SECONDS
from worker.lease import REDIS_TIMEOUT_SECONDS
from worker.liveness import SILENCE_SECONDS, STOP_SECONDS, TICK_SECONDS
from worker.renew import RENEW_SECONDS
from worker.settings import WorkerSettings

LOCK_SECONDS = Settings.model_fields["lock_seconds"].default


def test_a_worker_has_stopped_its_runs_before_anybody_may_call_it_dead() -> None:
    assert SILENCE_SECONDS + TICK_SECONDS + STOP_SECONDS < LEASE_SECONDS


def test_a_lease_outlives_a_renewal_that_fails_and_its_repeat() -> None:
    assert RENEW_SECONDS + 2 * REDIS_TIMEOUT_SECONDS < SILENCE_SECONDS


def test_a_paused_dispatcher_silences_no_beat_for_long() -> None:
    assert heartbeat.BEAT_SECONDS + heartbeat.REQUEST_TIMEOUT_SECONDS < SILENCE_SECONDS


def test_a_run_that_waited_is_refused_before_its_worker_may_be_dead() -> None:
    assert LATEST_RUN_SECONDS < LEASE_SECONDS


def test_a_tombstone_outlives_every_send() -> None:
    assert ANSWER_SECONDS + LATEST_RUN_SECONDS + LEASE_SECONDS < TOMBSTONE_SECONDS / 10


def test_a_delivery_is_handed_to_nobody_else_while_its_try_may_still_go_on() -> None:
    try_seconds = WorkerSettings.model_fields["callback_timeout_seconds"].default
    way_there_and_back = OFFER_SECONDS + try_seconds + REQUEST_TIMEOUT_SECONDS
    assert way_there_and_back + heartbeat.BEAT_SECONDS < DELIVERY_LEASE_MS / 1000


def test_the_locks_of_a_vanished_holder_are_free_when_its_dispatch_lock_is() -> None:
    assert IDLE_TRANSACTION_SECONDS < LOCK_SECONDS
    # And who waits for them does not give up before.
    assert LOCK_WAIT_SECONDS * 12 > IDLE_TRANSACTION_SECONDS


def test_slots_are_known_to_be_free_within_10_seconds_of_a_dispatchers_pause() -> None:
    assert LOCK_SECONDS + 1 + NEXT_SECONDS < 10


def test_one_probe_fits_between_two_looks_of_a_lease() -> None:
    assert PROBE_SECONDS < LEASE_SECONDS / 3
