"""A worker that nobody hears stops its runs in time; one that is still heard goes on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from oncue.protocol import LEASE_SECONDS, OutcomeStatus
from tests.integration.worker.rig import FakeDispatcher
from tests.support.redis import PrivateValkey
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run
from worker.liveness import EXIT_CODE

PAUSE_SECONDS = 5


@pytest.fixture
def steady_valkey() -> Iterator[PrivateValkey]:
    server = PrivateValkey()
    server.start()
    yield server
    server.remove()


@pytest.fixture
async def steady_dispatcher() -> AsyncIterator[FakeDispatcher]:
    fake = FakeDispatcher()
    await fake.start()
    yield fake
    await fake.stop()


async def test_silence_of_both_channels_stops_runs_in_time_and_of_one_does_not(
    start_worker: Any,
    dispatcher: FakeDispatcher,
    valkey: PrivateValkey,
    steady_dispatcher: FakeDispatcher,
    steady_valkey: PrivateValkey,
    tmp_path: Path,
) -> None:
    """Four workers at once, because the rule takes 12 s to fire.

    `cut` loses both channels and has a run that can be cancelled, `stuck` one that cannot;
    `beating` loses only Redis, `leased` only its dispatcher.
    """
    both = f"{dispatcher.url},{steady_dispatcher.url}"
    cut = await start_worker(ONCUE_WORKER_NAME="cut")
    stuck = await start_worker(ONCUE_WORKER_NAME="stuck")
    beating = await start_worker(ONCUE_WORKER_NAME="beating", ONCUE_DISPATCHER_URL=both)
    leased = await start_worker(
        ONCUE_WORKER_NAME="leased", ONCUE_REDIS_URL=steady_valkey.socket_url
    )
    notes = {name: tmp_path / name for name in ("cut", "stuck", "beating", "leased")}
    runs = {
        name: make_run("w_block" if name == "stuck" else "w_note", {"file": str(note)})
        for name, note in notes.items()
    }
    for name, worker in (("cut", cut), ("stuck", stuck), ("beating", beating), ("leased", leased)):
        body = make_request(runs[name].model_copy(update={"timeout_ms": 600_000}))
        await worker.post("/run", body.model_dump(by_alias=True))
    await until_async(lambda: all(note.exists() for note in notes.values()))

    dispatcher.silent = True
    valkey.freeze()
    silent_since = time.monotonic()
    await until_async(lambda: stuck.child.exit_code is not None, timeout=LEASE_SECONDS + 30)
    exited_after = time.monotonic() - silent_since
    assert stuck.child.exit_code == EXIT_CODE
    # The rule alone is tried with a clock of its own; this machine may stand still meanwhile.
    assert exited_after < LEASE_SECONDS + PAUSE_SECONDS

    def last_note() -> float:
        return float(notes["cut"].read_text().split()[-1])

    await until_async(lambda: time.monotonic() - last_note() > 0.5)
    assert last_note() - silent_since < LEASE_SECONDS + PAUSE_SECONDS
    assert cut.child.running
    for name in ("beating", "leased"):
        lines = len(notes[name].read_text().split())
        await until_async(
            lambda name=name, lines=lines: len(notes[name].read_text().split()) > lines  # type: ignore[misc]
        )

    valkey.thaw()
    dispatcher.silent = False
    outcome = await until_async(lambda: dispatcher.outcome(runs["cut"].execution_id))
    assert outcome.status is OutcomeStatus.RETURNED
    assert outcome.error is not None
    assert outcome.error.code == "worker_cut_off"
    assert dispatcher.outcome(runs["leased"].execution_id) is None
    assert steady_dispatcher.outcome(runs["beating"].execution_id) is None
