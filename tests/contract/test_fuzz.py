"""Both documents are true: whatever is sent, running services answer as they say, and never 5xx."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.contract import Keyed, run_tool, start_keyed, tool_environment
from tests.support.engines import Engine
from tests.support.processes import ROOT, NewPlatform
from tests.support.wait import until

DOCUMENTS = ROOT / "openapi"
CONFIG = ROOT / "tests" / "contract" / "schemathesis.toml"
PROGRAMS = ROOT / "tests" / "contract" / "programs"


@pytest.fixture
def subject(engine: Engine, new_platform: NewPlatform) -> Keyed:
    """A platform over each engine that lets nobody wait for long."""
    return start_keyed(engine, new_platform, ONCUE_LONG_POLL_SECONDS="1")


@pytest.mark.timeout(900)
def test_the_services_answer_as_their_documents_say(
    subject: Keyed, tools: Path, tmp_path: Path
) -> None:
    ids = known_ids(subject)
    before = [subject.platform.job(job_id)["revision"] for job_id in ids["jobId"]]
    fuzz = Fuzzer(subject, tools, tmp_path, ids)
    # A worker that was sent the highest term, or told to drain, refuses everything: then no job
    # that a verb has reopened would end, nor any stream of it.
    drain = "/openapi/workers/{workerId}/drain"
    fuzz.run("dispatcher.json", subject.url, "--exclude-path", drain)
    fuzz.run("worker.json", subject.worker_url, "--exclude-path", "/drain")
    fuzz.run("dispatcher.json", subject.url, "--include-path", drain)
    fuzz.run("worker.json", subject.worker_url, "--include-path", "/drain")

    after = [subject.platform.job(job_id)["revision"] for job_id in ids["jobId"]]
    assert after != before, "no verb ever met a job that exists"
    fuzz.look_for_faults()


@pytest.mark.timeout(900)
def test_an_open_dispatcher_answers_as_its_document_says(
    sqlite_engine: Engine, new_platform: NewPlatform, tools: Path, tmp_path: Path
) -> None:
    environment = {"ONCUE_LONG_POLL_SECONDS": "1"}
    subject = Keyed(new_platform(sqlite_engine, environment=environment).start(), "")
    fuzz = Fuzzer(subject, tools, tmp_path, known_ids(subject))
    # The first key would close it. Every limit is tried at the closed one: few draws are enough.
    fuzz.run(
        *("dispatcher.json", subject.url, "--exclude-operation-id", "create_key"),
        *("--include-path-regex", "^/openapi/", "--phases", "fuzzing", "--max-examples", "4"),
        # The document says that a key is needed: here it is not.
        *("--exclude-checks", "ignored_auth,negative_data_rejection"),
    )
    assert subject.platform.http.get("/openapi/jobs").status_code == 200
    fuzz.look_for_faults()


class Fuzzer:
    """Sends a running platform whatever its documents allow, and more."""

    def __init__(
        self, subject: Keyed, tools: Path, directory: Path, ids: dict[str, list[Any]]
    ) -> None:
        self._subject = subject
        self._tools = tools
        self._directory = directory
        self._environment = tool_environment(
            tools,
            PYTHONPATH=str(PROGRAMS),
            SCHEMATHESIS_HOOKS="fuzz_hooks",
            CONTRACT_API_KEY=subject.api_key,
            CONTRACT_INTERNAL_TOKEN=subject.platform.internal_token,
            CONTRACT_IDS=json.dumps(ids),
        )

    def run(self, document: str, url: str, *selection: str) -> None:
        """Try the selected operations; fails at an answer that the document does not know."""
        told = run_tool(
            self._tools / "schemathesis",
            *("--config-file", CONFIG, "run", DOCUMENTS / document),
            *("--url", url, *selection),
            environment=self._environment,
            directory=self._directory,
            timeout=250,
        )
        assert not re.search(r"\b0 generated", told), told

    def look_for_faults(self) -> None:
        """Fail if a service has ended, or logged an error that no answer may have shown."""
        for name, service in self._subject.platform.services.items():
            lines = service.child.log.read_text().splitlines()
            faults = [line for line in lines if is_fault(line)]
            assert not faults, f"{name} logged errors: {faults[:3]}"
            assert service.child.running


def is_fault(line: str) -> bool:
    """Whether a log line tells of an error that no answer may have shown."""
    return (
        line.startswith("Traceback") or '"level": "error"' in line or '"level": "critical"' in line
    )


def known_ids(subject: Keyed) -> dict[str, list[Any]]:
    """Return ids of jobs in each state, and of a delivery, by the name of their path parameter."""
    platform = subject.platform
    later = {"delayMs": 86_400_000}
    jobs = {
        "waiting": platform.submit("echo", **later),
        "paused": platform.submit("echo", **later),
        "cancelled": platform.submit("echo", **later),
        "failed": platform.submit("fail", maxRetry=0, callbackUrl="http://127.0.0.1:9/"),
        "ended": platform.submit("echo", {"a": [1]}),
    }
    for state, verb in (("paused", "pause"), ("cancelled", "cancel")):
        assert platform.http.post(f"/openapi/jobs/{jobs[state]}/{verb}").is_success
    platform.ended(jobs["failed"])
    platform.ended(jobs["ended"])

    def deliveries() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = platform.get(f"/openapi/jobs/{jobs['failed']}/callbacks")[
            "items"
        ]
        return found

    (delivery,) = until(deliveries, what="the callback to be listed")
    executions = platform.get(f"/openapi/jobs/{jobs['ended']}/executions")["items"]
    return {
        "jobId": list(jobs.values()),
        "deliveryId": [delivery["deliveryId"]],
        "executionId": [one["executionId"] for one in executions],
        "workerId": [one["workerId"] for one in platform.get("/openapi/workers")["items"]],
        "tenantId": [0],
    }


def guarded_operations() -> Iterator[tuple[str, str, str]]:
    """Yield the document, verb and path of every operation that has security."""
    for document in ("dispatcher.json", "worker.json"):
        paths = json.loads((DOCUMENTS / document).read_text())["paths"]
        for path, operations in paths.items():
            for verb, operation in operations.items():
                if operation.get("security"):
                    yield document, verb, path


def test_every_guarded_operation_refuses_who_has_no_key(keyed: Keyed) -> None:
    wrong: tuple[dict[str, str], ...] = (
        {},
        {"Authorization": "Bearer no-such-key"},
        {"Authorization": keyed.api_key},
    )
    tried = 0
    with httpx.Client(trust_env=False, timeout=10) as client:
        for document, verb, path in guarded_operations():
            url = keyed.url if document == "dispatcher.json" else keyed.worker_url
            # A caller's key opens nothing that is for workers.
            foreign = keyed.api_key if not path.startswith("/openapi/") else "another"
            for headers in (*wrong, {"Authorization": f"Bearer {foreign}"}):
                answer = client.request(
                    verb, url + path.replace("{", "").replace("}", ""), headers=headers
                )
                assert answer.status_code == 401, (verb, path, headers, answer.text)
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["code"] == "unauthorized"
                tried += 1
    assert tried > 40
