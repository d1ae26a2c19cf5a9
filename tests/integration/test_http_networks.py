"""The `http` handler keeps within the networks of the tenant whose job it runs."""

from __future__ import annotations

import json

from tests.support.engines import Engine
from tests.support.processes import NewPlatform
from tests.support.receiver import Receiver
from tests.support.wait import until


def test_a_tenants_list_narrows_what_its_http_jobs_may_call(
    engine: Engine, new_platform: NewPlatform, receiver: Receiver
) -> None:
    platform = new_platform(engine).start()
    url = receiver.url("/called")
    params = {"url": url, "method": "POST", "body": "x"}
    assert platform.ended(platform.submit("http", params))["status"] == "SUCCEEDED"
    assert len(receiver.received("/called")) == 1
    for networks, status, calls in (
        (["10.0.0.0/8"], "FAILED", 1),
        (["127.0.0.0/8"], "SUCCEEDED", 2),
    ):
        answer = platform.http.put("/openapi/egress-allow", json={"networks": networks})
        assert json.loads(answer.text)["networks"] == networks
        job = platform.ended(platform.submit("http", params, maxRetry=0))
        assert (job["status"], len(receiver.received("/called"))) == (status, calls), job
        if status == "FAILED":
            assert job["error"]["code"] == "egress_refused"
    until(lambda: len(receiver.received()) == 2, what="two calls in all")
