"""What is secret is nowhere in clear: not in the database, Redis, a log or an answer of the API."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redis import Redis

from app.plumbing.sealed import draw_key
from tests.support.cli import oncue
from tests.support.engines import Engine
from tests.support.processes import HANDLERS, NewPlatform, Platform
from tests.support.receiver import Answer, Receiver
from tests.support.wait import until

MASKED = {"secret": "********"}
LONG = 1500
"""More than a row holds of params and results: such go to a table of their own."""


def word(kind: str) -> str:
    """Draw a secret that is found wherever it stands, in whatever text."""
    return f"{kind}{secrets.token_hex(12)}"


class Secrets:
    """The secrets of one test."""

    def __init__(self) -> None:
        self.params, self.long_params, self.new_params = word("par"), word("lon"), word("new")
        self.result, self.header = word("res"), word("hea")
        self.keys = draw_key()
        self.given: list[str] = []

    def all(self) -> list[str]:
        """Return all of them."""
        own = [self.params, self.long_params, self.new_params, self.result, self.header, self.keys]
        return own + self.given


def needles(secret: str) -> Iterator[bytes]:
    """Yield how a secret may be spelled: as it is, in hexadecimal, in base64 at any offset."""
    raw = secret.encode()
    yield raw
    yield raw.hex().encode()
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + raw)
        # The ends depend on what stands beside it.
        yield encoded[4 if offset else 0 : -4]
        yield encoded[4 if offset else 0 : -4].replace(b"+", b"-").replace(b"/", b"_")


def found(where: dict[str, bytes], hidden: list[str]) -> list[str]:
    """Name the places where a secret stands, and which."""
    return [
        f"{secret[:3]} in {place}"
        for secret in hidden
        for place, content in where.items()
        if any(needle in content for needle in needles(secret))
    ]


def database_dump(engine: Engine) -> dict[str, bytes]:
    """Return all that the database has: of SQLite its files, of MariaDB each table's rows."""
    if engine.name == "sqlite+valkey":
        path = Path(engine.database_url.partition("///")[2])
        files = path.parent.glob(f"{path.name}*")
        return {file.name.replace(path.name, "database"): file.read_bytes() for file in files}
    name = engine.database_url.rpartition("/")[2].partition("?")[0]
    with engine.servers.mariadb.connect(name) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW TABLES")
        tables = [row[0] for row in cursor.fetchall()]
        dumped = {}
        for table in tables:
            cursor.execute(f"SELECT * FROM `{table}`")
            dumped[table] = "\n".join(
                str(value) for row in cursor.fetchall() for value in row
            ).encode()
        return dumped


def redis_dump(engine: Engine) -> dict[str, bytes]:
    """Return each key with what is under it, and the append-only files: all that was ever said."""
    dumped: dict[str, bytes] = {}
    with Redis.from_url(engine.redis_url) as client:
        for key in client.scan_iter():
            dumped[f"redis {key.decode()}"] = key + b" " + (client.dump(key) or b"")
            if client.type(key) == b"string":
                dumped[f"redis {key.decode()} text"] = client.get(key) or b""
    for file in engine.redis.directory.rglob("*"):
        if file.is_file() and not file.is_socket():
            dumped[f"redis file {file.name}"] = file.read_bytes()
    return dumped


def logs_of(platform: Platform) -> dict[str, bytes]:
    """Return what all processes said."""
    return {name: (platform.directory / f"{name}.log").read_bytes() for name in platform.services}


def started(new_platform: NewPlatform, engine: Engine, hidden: Secrets) -> Platform:
    """Start a platform with keys for callers and workers, all at the level `debug`."""
    platform = new_platform(
        engine,
        environment={
            "ONCUE_SECRET_KEYS": hidden.keys,
            "ONCUE_LOG_LEVEL": "debug",
            "ONCUE_TEST_RESULT": hidden.result,
            "ONCUE_CALLBACK_SCHEDULE_SECONDS": "0,0.2,0.2,0.2",
        },
    )
    platform.dispatcher()
    made = oncue("keys", "bootstrap", "--json", url="", variables=engine.environment)
    root = json.loads(made.out)["key"]
    until(lambda: platform.http.get("/openapi/jobs").status_code == 401, what="closed doors")
    platform.http.headers["Authorization"] = f"Bearer {root}"
    worker_key = made_key(platform, {"name": "fleet", "workerGroup": "all"})
    signing = platform.http.put("/openapi/webhook-secret", json={}).json()["items"][0]["secret"]
    both = f"{HANDLERS},tests.support.secret_handlers"
    own = {"ONCUE_WORKER_KEY": worker_key, "ONCUE_INTERNAL_TOKEN": "", "ONCUE_HANDLERS": both}
    platform.worker(handlers="tests.support.secret_handlers", environment=own)
    platform.wait_for_workers(1)
    caller = made_key(platform, {"name": "app", "roles": ["submit", "operate"]})
    hidden.given = [
        *(root, worker_key, signing, caller, platform.internal_token, platform.webhook_secret)
    ]
    platform.http.headers["Authorization"] = f"Bearer {caller}"
    return platform


def made_key(platform: Platform, body: dict[str, Any]) -> str:
    answer = platform.http.post("/openapi/keys", json=body)
    assert answer.is_success, answer.text
    key: str = answer.json()["key"]
    return key


def hook(receiver: Receiver, path: str, hidden: Secrets) -> dict[str, Any]:
    return {
        "callbackUrl": receiver.url(path),
        "callbackHeaders": {"Authorization": {"secret": hidden.header}},
    }


def test_no_secret_is_in_clear_in_database_redis_logs_or_answers(
    engine: Engine, new_platform: NewPlatform, receiver: Receiver
) -> None:
    hidden = Secrets()
    platform = started(new_platform, engine, hidden)
    echoed = Answer(500, body=f"{hidden.header} and {hidden.result}")
    for path in ("/told", "/always", "/child", "/second"):
        receiver.answer(path, echoed, Answer(200, body=hidden.result))
    short = {"times": 1, "password": hidden.params}
    both = {"secretParams": True, "secretResult": True}
    jobs = {
        "told": platform.submit("told", short, **both, **hook(receiver, "/told", hidden)),
        "long": platform.submit(
            "told", {"times": 60, "text": hidden.long_params * 60}, **both, timeoutMs=30_000
        ),
        "always": platform.submit(
            *("always-secret", short), secretParams=True, **hook(receiver, "/always", hidden)
        ),
        "child": platform.submit(
            *("secret-child", short), secretParams=True, **hook(receiver, "/child", hidden)
        ),
        "second": platform.submit(
            *("second-time", short),
            secretParams=True,
            retryIntervalSeconds=0,
            callbackEvents=["started", "retrying", "succeeded"],
            **hook(receiver, "/second", hidden),
        ),
        **built_in(platform, hidden),
    }
    # A second time with the same body it is the same job, with another secret it is not.
    body = {
        "clientRequestId": "same",
        "jobName": "a",
        "jobHandler": "told",
        "params": short,
        **both,
    }
    first = platform.http.post("/openapi/jobs", json=body)
    again = platform.http.post("/openapi/jobs", json=body)
    assert (first.status_code, again.status_code) == (202, 200)
    other = platform.http.post("/openapi/jobs", json={**body, "params": {"times": 1}})
    assert (other.status_code, other.json()["fields"]) == (409, ["params"])
    # New params of a job whose params are secret are secret too.
    waiting = platform.submit("told", short, delayMs=3_600_000, **both)
    changed = platform.http.patch(
        f"/openapi/jobs/{waiting}",
        json={"params": {"times": 1, "password": hidden.new_params}},
        headers={"If-Match": '"0"'},
    )
    assert changed.is_success, changed.text
    due = {"params": {"times": 2, "token": hidden.new_params}}
    assert platform.http.post(f"/openapi/jobs/{waiting}/trigger", json=due).is_success
    schedule = platform.submit("told", short, cronExpr="0 0 1 1 *", **both)
    fired = platform.http.post(f"/openapi/jobs/{schedule}/trigger", json=due)
    assert fired.is_success, fired.text
    jobs |= {"changed": waiting, "fire": fired.json()["jobId"]}

    ended = {name: platform.ended(job_id) for name, job_id in jobs.items()}
    assert {name: job["status"] for name, job in ended.items()} == {
        **dict.fromkeys(jobs, "SUCCEEDED"),
        **dict.fromkeys(FAIL, "FAILED"),
    }
    assert all(job["params"] == MASKED and job["secretParams"] for job in ended.values())
    assert all(job["result"] == MASKED for name, job in ended.items() if name not in FAIL)
    assert ended["fail"]["error"]["message"] == "ToldToFail: failed as it was told to"

    tell_the_receiver(platform, receiver, jobs, hidden)
    show_nothing(platform, [*jobs.values(), schedule], hidden)
    kept = {**database_dump(engine), **redis_dump(engine), **logs_of(platform)}
    assert any(b'{"sealed":"' in content for content in kept.values())
    assert sum(b"request" in content for content in logs_of(platform).values()), "debug lines"
    assert found(kept, hidden.all()) == []
    for service in platform.services.values():
        service.terminate()
    assert found({**database_dump(engine), **logs_of(platform)}, hidden.all()) == []


FAIL = ("fail", "http", "typed", "typed-child")


def built_in(platform: Platform, hidden: Secrets) -> dict[str, int]:
    """Submit what would tell its params by itself: a job says no more than that they are secret."""
    secret = hidden.params
    jobs: dict[str, Any] = {
        "echo": {"password": secret},
        "sleep": {"ms": 1, "password": secret},
        "fail": {"message": secret},
        "http": {"url": "http://192.0.2.1/", "headers": {secret: 1}, secret: secret},
        # It fits the schema, and not what the worker checks beyond that.
        "typed": {"word": secret},
        "typed-child": {"word": secret},
    }
    return {
        name: platform.submit(name, params, secretParams=True, maxRetry=0)
        for name, params in jobs.items()
    }


def tell_the_receiver(
    platform: Platform, receiver: Receiver, jobs: dict[str, int], hidden: Secrets
) -> None:
    # The receiver gets what is secret of the result, by a signed callback, in each try.
    for path, result in (
        ("/told", {"told": hidden.result}),
        ("/always", [hidden.result] * 2),
        ("/child", {"child": hidden.result, "keys": ["password", "times"]}),
    ):
        got = receiver.wait_for(2, path)
        assert [json.loads(one.body)["data"]["result"] for one in got[:2]] == [result] * 2
        assert {one.headers["authorization"] for one in got} == {hidden.header}
    (delivery, *_) = delivered(platform, jobs["told"])
    assert delivery["history"][0]["answer"] == "********"
    before = len(receiver.received("/told"))
    once_more = platform.http.post(f"/openapi/callbacks/{delivery['deliveryId']}/redeliver")
    assert once_more.is_success, once_more.text
    receiver.wait_for(before + 1, "/told")
    delivered(platform, jobs["told"])
    receiver.wait_for(4, "/second")


def show_nothing(platform: Platform, jobs: list[int], hidden: Secrets) -> None:
    """Ask for all that callers may see of the jobs, the last of which is a schedule."""
    answers = {
        path: platform.http.get(path).content
        for job_id in jobs
        for path in (
            *(f"/openapi/jobs/{job_id}", f"/openapi/jobs/{job_id}/executions"),
            *(f"/openapi/jobs/{job_id}/explain", f"/openapi/jobs/{job_id}/callbacks"),
        )
    }
    answers["list"] = platform.http.get("/openapi/jobs?limit=100").content
    answers["children"] = platform.http.get(f"/openapi/jobs/{jobs[-1]}/children").content
    assert found(answers, hidden.all()) == []
    with platform.http.stream("GET", f"/openapi/jobs/{jobs[0]}/events") as events:
        assert found({"events": next(events.iter_bytes())}, hidden.all()) == []

    shown = oncue(
        *("get", str(jobs[0])),
        url=platform.url,
        variables={"ONCUE_API_KEY": hidden.given[3]},
    )
    assert "********" in shown.out
    assert found({"command": (shown.out + shown.err).encode()}, hidden.all()) == []


def delivered(platform: Platform, job_id: int) -> list[dict[str, Any]]:
    def all_of_them() -> list[dict[str, Any]] | None:
        items = platform.get(f"/openapi/jobs/{job_id}/callbacks")["items"]
        over = items and all(one["status"] == "DELIVERED" for one in items)
        return items if over else None

    return until(all_of_them, what="its callbacks to be delivered")


def test_what_is_looked_for_would_be_found() -> None:
    secret = word("par")
    for spelled in (
        secret.encode(),
        base64.b64encode(b"x" + secret.encode() + b"yz"),
        base64.urlsafe_b64encode(b"xy" + secret.encode()),
        secret.encode().hex().encode(),
    ):
        assert found({"here": b"before " + spelled}, [secret]) == ["par in here"]


def test_without_keys_nothing_secret_is_taken(
    sqlite_engine: Engine, new_platform: NewPlatform
) -> None:
    platform = new_platform(sqlite_engine, environment={"ONCUE_TEST_RESULT": "x"})
    platform.dispatcher()
    platform.worker(handlers="tests.support.secret_handlers")
    for name in ("secretParams", "secretResult"):
        body = {"clientRequestId": name, "jobName": "a", "jobHandler": "told", name: True}
        refused = platform.http.post("/openapi/jobs", json=body)
        assert (refused.status_code, refused.json()["code"]) == (422, "secret_keys_missing")
        assert refused.json()["errors"][0]["pointer"] == f"/{name}"
    platform.wait_for_workers(1)
    # A handler's own word is not given up either: it is not run.
    job = platform.ended(platform.submit("always-secret", [], maxRetry=0))
    assert (job["status"], job["error"]["code"]) == ("FAILED", "secret_keys_missing")


def test_a_lost_key_fails_the_run_and_a_new_one_opens_what_the_old_has_sealed(
    sqlite_engine: Engine, new_platform: NewPlatform
) -> None:
    old, new = draw_key(), draw_key()
    platform = new_platform(sqlite_engine, environment={"ONCUE_TEST_RESULT": "x"})
    platform.dispatcher(environment={"ONCUE_SECRET_KEYS": old})
    both = {"secretParams": True, "secretResult": True}
    body = {"clientRequestId": "k", "jobName": "a", "jobHandler": "told", "params": {"times": 1}}
    stored = platform.http.post("/openapi/jobs", json={**body, **both})
    assert stored.status_code == 202
    lost = platform.submit("told", {"times": 1}, delayMs=3_600_000, maxRetry=0, **both)
    platform.dispatcher(environment={"ONCUE_SECRET_KEYS": f"{new},{old}"})
    platform.worker(handlers="tests.support.secret_handlers")
    assert platform.ended(stored.json()["jobId"])["status"] == "SUCCEEDED"
    other = platform.http.post("/openapi/jobs", json={**body, **both, "params": {"times": 2}})
    assert other.status_code == 409  # the old key still tells one from the other
    platform.dispatcher(environment={"ONCUE_SECRET_KEYS": new})
    repeated = platform.http.post("/openapi/jobs", json={**body, **both})
    assert repeated.status_code == 200
    assert platform.http.post(f"/openapi/jobs/{lost}/trigger").is_success
    job = platform.ended(lost)
    assert (job["status"], job["error"]["code"]) == ("FAILED", "secret_keys_missing")
