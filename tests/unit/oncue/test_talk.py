"""Conversations with the server, without a server, a clock or a pause."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import pytest

from oncue import (
    ApiError,
    Conflict,
    Invalid,
    Job,
    JobFailed,
    NewJob,
    NotFound,
    Retries,
    Unauthorized,
    Unavailable,
    WaitTimeout,
)
from oncue._talk import POLL_SECONDS, Heard, Pause, Send, Talk, Talks

Value = TypeVar("Value")
URL = "http://oncue.test"


def job_of(status: str = "WAITING", **fields: Any) -> dict[str, Any]:
    return {"jobId": 7, "jobName": "n", "jobHandler": "echo", "status": status, **fields}


def answer(status: int, document: Any, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json=document, headers=named)


def problem(status: int, code: str, **headers: str) -> httpx.Response:
    return answer(status, {"code": code, "detail": "because", "status": status}, **headers)


class Stage:
    """Plays the server, the clock and the dice; notes what was sent and how long was paused."""

    def __init__(self, *script: httpx.Response | httpx.RequestError) -> None:
        self.script = list(script)
        self.sent: list[Send] = []
        self.pauses: list[float] = []
        self.now = 1000.0
        self.each_request_takes = 0.0

    def talks(self, **bounds: Any) -> Talks:
        return Talks(URL, Retries(**bounds), clock=lambda: self.now, dice=lambda: 1.0)

    def play(self, talk: Talk[Value]) -> Value:
        heard: Heard = None
        while True:
            try:
                step = talk.send(heard)
            except StopIteration as end:
                assert not self.script, "the server had more to say"
                value: Value = end.value
                return value
            if isinstance(step, Pause):
                self.pauses.append(step.seconds)
                self.now += step.seconds
                heard = None
            else:
                self.sent.append(step)
                self.now += step.seconds or self.each_request_takes
                heard = self.script.pop(0)


TRANSIENT: list[Callable[[], httpx.Response | httpx.RequestError]] = [
    lambda: httpx.ConnectError("refused"),
    lambda: httpx.ReadTimeout("silence"),
    lambda: httpx.RemoteProtocolError("gone"),
    lambda: problem(429, "too_many_requests"),
    lambda: httpx.Response(502, text="<html>"),
    lambda: problem(503, "database_unavailable"),
    lambda: httpx.Response(504),
]


@pytest.mark.parametrize("failure", TRANSIENT)
def test_a_submission_is_repeated_with_the_very_same_body(
    failure: Callable[[], httpx.Response | httpx.RequestError],
) -> None:
    stage = Stage(failure(), failure(), answer(202, job_of()))
    job = stage.play(stage.talks().submit(NewJob("echo", {"a": 1})))
    assert (job.job_id, job.status) == (7, "WAITING")
    bodies = {sent.body for sent in stage.sent}
    assert len(stage.sent) == 3
    assert len(bodies) == 1
    assert json.loads(bodies.pop() or b"")["clientRequestId"]
    assert stage.pauses == [0.2, 0.4]


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_json", Invalid),
        (401, "unauthorized", Unauthorized),
        (404, "job_not_found", NotFound),
        (409, "request_conflict", Conflict),
        (412, "revision_differs", Conflict),
        (413, "body_too_large", Invalid),
        (422, "validation_failed", Invalid),
        (500, "internal_error", ApiError),
    ],
)
def test_a_refusal_is_raised_at_once_by_its_kind(
    status: int, code: str, kind: type[ApiError]
) -> None:
    stage = Stage(problem(status, code))
    with pytest.raises(kind) as refused:
        stage.play(stage.talks().submit(NewJob("echo")))
    assert type(refused.value) is kind
    assert (refused.value.code, refused.value.status) == (code, status)
    assert refused.value.detail == "because"
    assert not stage.pauses


def test_what_is_no_answer_of_oncue_is_said_so() -> None:
    for strange in (httpx.Response(200, text="hello"), answer(200, {"a": 1}), answer(200, [])):
        stage = Stage(strange)
        with pytest.raises(ApiError, match="not the answer of an Oncue API"):
            stage.play(stage.talks().get(7))


@pytest.mark.parametrize("path", ["/login", ""])
def test_a_redirect_is_not_followed(path: str) -> None:
    stage = Stage(httpx.Response(302, headers={"Location": path}))
    with pytest.raises(ApiError) as refused:
        stage.play(stage.talks().get(7))
    assert refused.value.code == "http_302"


def test_retry_after_is_honoured() -> None:
    stage = Stage(problem(429, "too_many_requests", Retry_After="7"), answer(200, job_of()))
    stage.play(stage.talks().get(7))
    assert stage.pauses == [7.0]


def test_a_retry_after_beyond_the_time_allowed_is_not_waited_for() -> None:
    stage = Stage(problem(503, "overloaded", Retry_After="3600"))
    with pytest.raises(Unavailable) as given_up:
        stage.play(stage.talks(seconds=30).get(7))
    assert given_up.value.last is not None
    assert given_up.value.last.code == "overloaded"
    assert not stage.pauses


@pytest.mark.parametrize("strange", ["soon", "-3", "٣", "Wed, 21 Oct 2015 07:28:00 GMT", ""])
def test_a_retry_after_that_says_nothing_is_ignored(strange: str) -> None:
    failure = httpx.Response(503, headers=[(b"retry-after", strange.encode())])
    stage = Stage(failure, answer(200, job_of()))
    stage.play(stage.talks().get(7))
    assert stage.pauses == [0.2]


def test_tries_are_bounded_in_number() -> None:
    stage = Stage(*(httpx.ConnectError("refused") for _ in range(4)))
    with pytest.raises(Unavailable, match="refused, tried 4 times") as given_up:
        stage.play(stage.talks(attempts=4).submit(NewJob("echo", request_id="mine")))
    assert given_up.value.request_id == "mine"
    assert given_up.value.last is None


def test_tries_are_bounded_in_time() -> None:
    stage = Stage(*(httpx.ReadTimeout("") for _ in range(3)))
    stage.each_request_takes = 15
    with pytest.raises(Unavailable, match="ReadTimeout"):
        stage.play(stage.talks(attempts=100, seconds=40).get(7))
    assert len(stage.sent) == 3


def test_a_url_that_no_request_can_go_to_is_not_tried_twice() -> None:
    stage = Stage(httpx.UnsupportedProtocol("ftp"))
    with pytest.raises(Unavailable, match="ftp"):
        stage.play(stage.talks().get(7))


def test_pauses_grow_to_a_limit_and_differ() -> None:
    retries = Retries()
    assert [retries.pause(n, jitter=1.0) for n in (1, 2, 3, 9, 5000)] == [0.2, 0.4, 0.8, 5.0, 5.0]
    assert retries.pause(1, jitter=0.0) == 0.1
    assert retries.pause(1, retry_after=3, jitter=1.0) == 3


@pytest.mark.parametrize("verb", ["pause", "resume", "retry"])
def test_a_verb_is_repeated_only_when_it_surely_had_no_effect(verb: str) -> None:
    stage = Stage(
        httpx.ConnectError("refused"),
        problem(429, "too_many_requests"),
        problem(503, "overloaded"),
        answer(200, job_of("PAUSED")),
    )
    assert stage.play(stage.talks().change(7, verb)).status == "PAUSED"
    assert {(sent.method, sent.path) for sent in stage.sent} == {
        ("POST", f"/openapi/jobs/7/{verb}")
    }

    for doubtful in (httpx.ReadTimeout("silence"), problem(503, "database_unavailable")):
        stage = Stage(doubtful)
        with pytest.raises(Unavailable, match="it may have been done"):
            stage.play(stage.talks().change(7, verb))


@pytest.mark.parametrize("verb", ["trigger", "revise"])
def test_a_change_is_repeated_only_when_it_surely_had_no_effect(verb: str) -> None:
    def talk(stage: Stage) -> Talk[Job]:
        talks = stage.talks()
        return (
            talks.trigger(7, {"params": 1})
            if verb == "trigger"
            else talks.revise(7, 3, {"priority": 1})
        )

    stage = Stage(problem(503, "overloaded"), answer(200, job_of()))
    assert stage.play(talk(stage)).job_id == 7
    for doubtful in (httpx.ReadTimeout("silence"), problem(503, "database_unavailable")):
        stage = Stage(doubtful)
        with pytest.raises(Unavailable, match="it may have been done"):
            stage.play(talk(stage))


def test_a_trigger_with_a_request_id_is_repeated_whatever_became_of_the_first_try() -> None:
    stage = Stage(httpx.ReadTimeout("silence"), answer(200, job_of()))
    talks = stage.talks()
    assert stage.play(talks.trigger(7, {"request_id": "one", "params": 1})).job_id == 7
    bodies = [json.loads(request.body or b"{}") for request in stage.sent]
    assert bodies == [{"params": 1, "clientRequestId": "one"}] * 2


@pytest.mark.parametrize("ask", ["explain", "find", "redeliver"])
def test_what_can_be_asked_twice_is_repeated(ask: str) -> None:
    callback = {"deliveryId": "d", "jobId": 7, "event": "job.failed", "status": "PENDING"}
    page: dict[str, Any] = {"items": [], "nextCursor": None}
    explanation = {"jobId": 7, "status": "WAITING", "summary": "It waits."}
    stage = Stage(httpx.ReadTimeout("silence"), answer(200, {**callback, **page, **explanation}))
    talks = stage.talks()
    questions: dict[str, Callable[[], Talk[Any]]] = {
        "explain": lambda: talks.explain(7),
        "find": lambda: talks.find("r"),
        "redeliver": lambda: talks.redeliver("d"),
    }
    stage.play(questions[ask]())
    assert len(stage.sent) == 2


def test_a_job_that_left_while_it_was_looked_up_is_not_there() -> None:
    stage = Stage(answer(200, {"items": [job_of()]}), problem(404, "job_not_found"))
    assert stage.play(stage.talks().find("r")) is None


def test_a_cancel_is_repeated_like_a_look() -> None:
    stage = Stage(httpx.ReadTimeout("silence"), answer(200, job_of("CANCELLED")))
    assert stage.play(stage.talks().cancel(7, children=False)).status == "CANCELLED"


def test_a_wait_polls_until_the_end() -> None:
    stage = Stage(
        answer(200, job_of("WAITING")),
        answer(200, job_of("RUNNING")),
        answer(200, job_of("SUCCEEDED", result=[1])),
    )
    job = stage.play(stage.talks().wait(7, None, check=True))
    assert job.result == [1]
    assert [sent.query["wait"] for sent in stage.sent] == [f"{POLL_SECONDS:.3f}"] * 3
    assert not stage.pauses


def test_a_wait_ends_in_time_and_tells_the_state() -> None:
    stage = Stage(answer(200, job_of("RUNNING")), answer(200, job_of("RUNNING")))
    with pytest.raises(WaitTimeout, match="still RUNNING after 25 s") as timed_out:
        stage.play(stage.talks().wait(7, 25, check=True))
    assert timed_out.value.job.status == "RUNNING"
    assert [sent.query["wait"] for sent in stage.sent] == ["20.000", "5.000"]


def test_a_wait_with_no_time_looks_once() -> None:
    stage = Stage(answer(200, job_of("SUCCEEDED")))
    assert stage.play(stage.talks().wait(7, 0, check=True)).succeeded
    stage = Stage(answer(200, job_of("RUNNING")))
    with pytest.raises(WaitTimeout):
        stage.play(stage.talks().wait(7, 0, check=True))


def test_a_wait_does_not_hammer_a_server_that_answers_at_once() -> None:
    stage = Stage(answer(200, job_of()), answer(200, job_of("SUCCEEDED")))
    talk = stage.talks().wait(7, None, check=False)
    assert isinstance(next(talk), Send)
    step = talk.send(answer(200, job_of()))  # no time has gone by
    assert isinstance(step, Pause)
    assert step.seconds == 1.0


def test_a_wait_adapts_to_a_server_that_allows_only_short_ones() -> None:
    stage = Stage(problem(422, "validation_failed"), answer(200, job_of("SUCCEEDED")))
    stage.play(stage.talks().wait(7, None, check=False))
    assert [sent.query["wait"] for sent in stage.sent] == ["20.000", "1.000"]
    stage = Stage(problem(422, "validation_failed"), problem(422, "validation_failed"))
    with pytest.raises(Invalid):
        stage.play(stage.talks().wait(7, None, check=False))


def test_a_wait_survives_a_short_outage_but_not_its_own_timeout() -> None:
    stage = Stage(httpx.ConnectError("refused"), answer(200, job_of("SUCCEEDED")))
    assert stage.play(stage.talks().wait(7, 60, check=False)).succeeded
    stage = Stage(*(httpx.ConnectError("refused") for _ in range(3)))
    with pytest.raises(Unavailable):
        stage.play(stage.talks(seconds=1000, attempts=1000).wait(7, 50, check=False))
    assert 1000 + 50 <= stage.now <= 1000 + 3 * POLL_SECONDS + 1


def test_a_checked_wait_raises_for_a_job_that_did_not_succeed() -> None:
    failed = job_of("FAILED", error={"code": "handler_error", "message": "boom"})
    stage = Stage(answer(200, failed))
    assert stage.play(stage.talks().wait(7, None, check=False)).status == "FAILED"
    stage = Stage(answer(200, failed))
    with pytest.raises(JobFailed, match=r"job 7 ended as FAILED: boom \(handler_error\)") as ended:
        stage.play(stage.talks().wait(7, None, check=True))
    assert ended.value.job.error is not None


def test_of_a_batch_only_what_may_yet_succeed_is_sent_again() -> None:
    busy = {"httpStatus": 503, "code": "overloaded", "detail": "busy"}
    bad = {"httpStatus": 422, "code": "validation_failed", "detail": "no"}
    stage = Stage(
        answer(200, {"items": [busy, bad, {"httpStatus": 202, **job_of()}]}),
        answer(200, {"items": [{"httpStatus": 202, **job_of(jobId=8)}]}),
    )
    jobs = [NewJob("echo", number) for number in range(3)]
    first, second, third = stage.play(stage.talks().submit_many(jobs))
    assert isinstance(first, Job)
    assert first.job_id == 8
    assert isinstance(second, Invalid)
    assert isinstance(third, Job)
    (again,) = json.loads(stage.sent[1].body or b"")["jobs"]
    assert again["clientRequestId"] == jobs[0].request_id


def test_what_stays_refused_in_a_batch_is_told_at_last() -> None:
    busy = {"httpStatus": 503, "code": "overloaded", "detail": "busy"}
    stage = Stage(*(answer(200, {"items": [busy]}) for _ in range(3)))
    (outcome,) = stage.play(stage.talks(attempts=3).submit_many([NewJob("echo")]))
    assert isinstance(outcome, ApiError)
    assert outcome.code == "overloaded"


def test_a_batch_with_too_few_outcomes_is_no_answer() -> None:
    stage = Stage(answer(200, {"items": []}))
    with pytest.raises(ApiError, match="one outcome a job"):
        stage.play(stage.talks().submit_many([NewJob("echo")]))
