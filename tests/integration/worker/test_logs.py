"""What handlers say reaches a dispatcher: each run's own, bounded, and never in anybody's way."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from oncue.output import HEAD_BYTES, LINE_OVERHEAD_BYTES, TAIL_BYTES
from oncue.protocol import CancelRequest, LogLine, OutcomeStatus
from tests.integration.worker.conftest import OpenWorker
from tests.integration.worker.rig import FakeDispatcher
from tests.support.wait import until_async
from tests.unit.worker.runs import make_request, make_run

KINDS = ("w_speak", "w_speak_thread", "w_speak_child")


async def test_runs_that_speak_at_once_do_not_mix(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    runs = [
        make_run(kind, {"name": f"{kind}-{number}", "times": 20})
        for kind in KINDS
        for number in range(3)
    ]
    async with open_worker() as parts:
        await parts.intake.take(make_request(*runs))
        for run in runs:
            await until_async(partial(dispatcher.is_complete, run.execution_id), 30)
    for run in runs:
        name, said = run.params["name"], dispatcher.said(run.execution_id)
        own = [one for one in said if one[1].startswith(f"{name} ")]
        others = [one for one in said if one not in own]
        ways = [("ctx", "ctx"), ("stdout", "stdout"), ("log", "log")]
        if run.job_handler == "w_speak":
            ways += [("stderr", "stderr"), ("stdout", "thread")]
        for source, word in ways:
            told = [text for where, text in own if where == source and f" {word} " in text]
            assert told == [f"{name} {word} {number}" for number in range(20)], (run, source)
        assert len(own) == 20 * len(ways)
        if run.job_handler == "w_speak_child":
            assert sorted(others) == [("stdout", "a program"), ("stdout", "past python")]
            assert dispatcher.progress(run.execution_id)[-1] == (0.5, "half")
        else:
            assert others == []
        seqs = [line.seq for line in dispatcher.lines(run.execution_id)]
        assert seqs == list(range(1, len(seqs) + 1))
    speaker = runs[0]
    assert dispatcher.progress(speaker.execution_id)[-1] == (0.95, "w_speak-0")
    first, *_ = dispatcher.lines(speaker.execution_id)
    assert (first.level, first.fields) == ("debug", {"number": 0})


async def test_a_child_that_is_killed_keeps_its_last_words(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, tmp_path: Path
) -> None:
    run = make_run("w_last_words", {"file": str(tmp_path / "said")})
    async with open_worker() as parts:
        await parts.intake.take(make_request(run))
        await until_async((tmp_path / "said").exists, 30)
        parts.intake.cancel(CancelRequest(term=1, execution_ids=[run.execution_id]))
        await until_async(lambda: dispatcher.is_complete(run.execution_id))
    assert dispatcher.said(run.execution_id) == [
        ("ctx", "before the end"),
        ("stdout", "last words"),
    ]


async def test_a_run_that_says_nothing_causes_no_request(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    quiet = [make_run("echo", 1), make_run("w_child_async", 1), make_run("w_wait", {"seconds": 1})]
    async with open_worker() as parts:
        await parts.intake.take(make_request(*quiet))
        await until_async(lambda: len(dispatcher.outcomes()) == 3, 30)
        await parts.executor.wait_last_words()
        await parts.shipper.wait_empty()
        assert parts.shipper.buffers.memory == 0
    assert dispatcher.logs_asked == 0


async def test_a_failure_s_traceback_is_a_line_of_its_run(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    run, refused = make_run("w_raise", {"kind": "value"}), make_run("w_raise", {"kind": "fail"})
    async with open_worker() as parts:
        await parts.intake.take(make_request(run, refused))
        await until_async(lambda: dispatcher.is_complete(run.execution_id))
        await until_async(lambda: len(dispatcher.outcomes()) == 2)
    (line,) = dispatcher.lines(run.execution_id)
    assert (line.level, line.source) == ("error", "log")
    assert "Traceback" in line.message
    assert "ValueError" in line.message
    assert dispatcher.lines(refused.execution_id) == []


async def test_an_outcome_does_not_wait_for_its_lines(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    dispatcher.logs_status = 503
    run = make_run("w_speak", {"name": "a", "times": 3})
    async with open_worker() as parts:
        await parts.intake.take(make_request(run))
        await until_async(lambda: dispatcher.outcome(run.execution_id))
        await until_async(lambda: dispatcher.logs_asked >= 2)
        assert dispatcher.shipments == []
        dispatcher.logs_status = 200
        await until_async(lambda: dispatcher.is_complete(run.execution_id))
    assert len(dispatcher.said(run.execution_id)) == 15


async def test_lines_wait_for_a_dispatcher_and_old_ones_without_the_address_are_left_alone(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    dispatcher.logs_status = 404
    run = make_run("w_speak", {"name": "a", "times": 3})
    async with open_worker() as parts:
        await parts.intake.take(make_request(run))
        await until_async(lambda: dispatcher.logs_asked == 1)
        more = make_run("w_speak", {"name": "b", "times": 3})
        await parts.intake.take(make_request(more))
        await until_async(lambda: dispatcher.outcome(more.execution_id))
        await parts.shipper.wait_empty()  # does not wait for what nobody takes
        assert dispatcher.logs_asked == 1
        dispatcher.logs_status = 200
        parts.shipper.dispatcher_is_back()
        for one in (run, more):
            await until_async(partial(dispatcher.is_complete, one.execution_id))
            assert len(dispatcher.said(one.execution_id)) == 15


async def test_lines_that_are_refused_are_dropped_and_nobody_else_s(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    bad, good = (make_run("w_speak", {"name": name, "times": 3}) for name in ("bad", "good"))
    dispatcher.refuses = [bad.execution_id]
    async with open_worker() as parts:
        await parts.intake.take(make_request(bad, good))
        await until_async(lambda: dispatcher.is_complete(good.execution_id))
        await parts.shipper.wait_empty()
        assert parts.shipper.backlog == 0
    assert len(dispatcher.said(good.execution_id)) == 15


async def test_a_handler_that_prints_in_a_tight_loop_is_bounded_and_hurts_nobody(
    open_worker: OpenWorker, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.heartbeat.BEAT_SECONDS", 0.5)
    flood = make_run("w_flood", {"seconds": 8})
    others = [make_run("w_speak", {"name": "a", "times": 2}) for _ in range(5)]
    async with open_worker() as parts:
        await parts.intake.take(make_request(flood))
        beats = len(dispatcher.beats)
        for other in others:
            await parts.intake.take(make_request(other))
            await until_async(partial(dispatcher.outcome, other.execution_id), 6)
        assert parts.shipper.buffers.memory < 8 * 1024 * 1024
        outcome = await until_async(lambda: dispatcher.outcome(flood.execution_id))
        assert len(dispatcher.beats) - beats >= 4
        await until_async(lambda: dispatcher.is_complete(flood.execution_id))
    lines = dispatcher.lines(flood.execution_id)
    assert outcome.result > 5_000
    told = sum(line.fields["droppedLines"] for line in lines if line.fields)
    kept = [line for line in lines if line.source != "oncue"]
    assert len(kept) + told == outcome.result
    assert kept[-1].message.startswith(f"{outcome.result - 1} ")
    assert kept[0].message.startswith("0 ")
    last = kept[-1].seq
    size = LINE_OVERHEAD_BYTES + 106
    tail = [line for line in kept if line.seq > last - (TAIL_BYTES // size) + 200]
    assert [line.seq for line in tail] == list(range(tail[0].seq, last + 1))
    head = [line for line in kept if line.seq <= HEAD_BYTES // size]
    assert [line.seq for line in head] == list(range(1, len(head) + 1))
    shipped = sum(len(one.model_dump_json()) for one in dispatcher.shipments)
    assert shipped < 5 * 1024 * 1024


async def test_long_lines_are_cut_and_say_so(
    open_worker: OpenWorker, dispatcher: FakeDispatcher
) -> None:
    run = make_run("w_long_line")
    async with open_worker() as parts:
        await parts.intake.take(make_request(run))
        await until_async(lambda: dispatcher.is_complete(run.execution_id))
    lines = dispatcher.lines(run.execution_id)
    whole: list[list[LogLine]] = []
    for line in lines:
        assert line.fields is not None
        assert len(line.message.encode()) <= 16 * 1024
        if line.fields["part"] == 1:
            whole.append([])
        whole[-1].append(line)
        assert line.fields["part"] == len(whole[-1])
    for parts_of_one in whole:
        more: list[Any] = [line.fields["more"] for line in parts_of_one if line.fields]
        assert more == [True] * (len(more) - 1) + [False]
    assert ["".join(line.message for line in one) for one in whole] == [
        "ü" * 20_000,
        "y" * 40_000,
        "z" * 50_000,
    ]
    assert whole[0][0].fields == {"order": 1, "part": 1, "more": True}


async def test_lines_are_flushed_at_the_orderly_end(
    start_worker: Any, dispatcher: FakeDispatcher
) -> None:
    worker = await start_worker()
    run = make_run("w_speak", {"name": "a", "times": 50})
    body = make_request(run).model_dump(by_alias=True)
    assert (await worker.post("/run", body))["answers"][0]["answer"] == "accepted"
    await asyncio.to_thread(worker.child.terminate, 20)
    assert dispatcher.outcomes()[run.execution_id].status is OutcomeStatus.SUCCEEDED
    assert len(dispatcher.said(run.execution_id)) == 250
    assert dispatcher.is_complete(run.execution_id)
