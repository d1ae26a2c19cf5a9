"""The Dockerfile, compose.yaml and env.example: linted, valid, and true to the settings."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings

from app.embedded import UpSettings
from app.settings import Settings
from tests.support.contract import run_tool, tool_environment
from tests.support.image import (
    COMPOSE,
    DOCKERFILE,
    ENV_EXAMPLE,
    copied_paths,
    example_variables,
    read_compose,
    read_dockerfile,
    start_order,
    variables_of_compose,
)
from tests.support.ports import free_port
from tests.support.processes import ROOT
from worker.settings import WorkerSettings

VARIABLES = dict.fromkeys(example_variables(), "given")
SERVICES: dict[str, Any] = read_compose(VARIABLES)["services"]
OURS = [name for name, service in SERVICES.items() if service["image"] == "oncue"]


def known_settings() -> set[str]:
    """Return every variable that a process of ours reads its settings from."""
    kinds: tuple[type[BaseSettings], ...] = (Settings, WorkerSettings, UpSettings)
    return {
        str(setting.validation_alias or f"ONCUE_{name.upper()}")
        for kind in kinds
        for name, setting in kind.model_fields.items()
    }


def test_the_dockerfile_is_clean(tools: Path, tmp_path: Path) -> None:
    said = run_tool(
        *(tools / "hadolint", "--no-color", "--failure-threshold", "style", DOCKERFILE),
        environment=tool_environment(tools),
        directory=tmp_path,
    )
    assert said == ""


def test_compose_is_valid(tools: Path, tmp_path: Path) -> None:
    run_tool(
        *(tools / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE),
        environment=tool_environment(tools),
        directory=tmp_path,
    )


def test_the_image_is_multi_stage_and_runs_as_nobody_special() -> None:
    build, image = read_dockerfile()
    assert build.base == image.base
    assert image.base.startswith("python:")
    assert image.base.endswith("-slim"), "no compiler comes with it"
    commands = [*image.texts("RUN"), *build.texts("RUN")]
    assert not [one for one in commands if "apt" in one], "nothing is compiled, so none is needed"
    (requirements,) = (one for one in commands if "requirements.lock" in one)
    assert "--require-hashes" in requirements
    assert "--only-binary :all:" in requirements
    # A number, so that Kubernetes can tell that it is not root.
    user = image.last("USER").text
    assert re.fullmatch(r"[1-9]\d+", user)
    assert f"--uid {user} " in " ".join(image.texts("RUN"))
    # All that comes from the build is the environment with the wheels.
    assert image.texts("COPY") == [f"--from={build.name} /opt/oncue /opt/oncue"]
    assert image.last("ENTRYPOINT").words == ["oncue"]


def test_all_that_the_build_copies_is_let_in() -> None:
    build, _ = read_dockerfile()
    for text in build.texts("COPY"):
        for source in text.split()[:-1]:
            assert source in copied_paths()
            assert (ROOT / source).exists()


def test_the_default_ports_of_the_health_check_are_those_that_are_exposed() -> None:
    _, image = read_dockerfile()
    defaults = [Settings.model_fields["port"].default, WorkerSettings.model_fields["port"].default]
    assert image.last("EXPOSE").words == [str(port) for port in defaults]
    assert all(str(port) in image.health_check[-1] for port in defaults)


@pytest.mark.parametrize("path", [DOCKERFILE, COMPOSE, ENV_EXAMPLE], ids=lambda path: path.name)
def test_every_variable_is_a_setting(path: Path) -> None:
    named = set(re.findall(r"\bONCUE_[A-Z_]+", path.read_text()))
    assert named
    assert named - known_settings() == set()


def test_env_example_sets_what_compose_asks_for_and_leaves_the_secrets_to_you() -> None:
    assert set(example_variables()) == variables_of_compose()
    assert all(
        line.endswith("=") for line in ENV_EXAMPLE.read_text().splitlines() if line[:1].isalpha()
    )


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_compose_refuses_to_start_without_a_secret(name: str) -> None:
    if name in ("ONCUE_EGRESS_ALLOW", "ONCUE_SECRET_KEYS"):  # which may be left out
        assert read_compose({**VARIABLES, name: ""})
        return
    with pytest.raises(KeyError, match=name):
        read_compose({**VARIABLES, name: ""})


def test_compose_has_the_whole_platform_in_health_order() -> None:
    assert [SERVICES[name]["command"] for name in OURS] == [
        ["migrate"],
        *[["dispatcher"]] * 2,
        *[["worker"]] * 2,
    ]
    order = start_order(SERVICES)
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            assert order.index(needed) < order.index(name)
            finished = how["condition"] == "service_completed_successfully"
            assert finished == (needed == "migrate")
            assert finished or how["condition"] == "service_healthy"
    assert {"mysql", "redis", "migrate"} <= SERVICES["dispatcher-2"]["depends_on"].keys()
    # Workers need no database.
    assert "ONCUE_DATABASE_URL" not in SERVICES["worker-1"]["environment"]


def test_services_tell_workers_where_they_are() -> None:
    for name in OURS:
        environment = SERVICES[name].get("environment", {})
        if SERVICES[name]["command"] == ["worker"]:
            assert environment["ONCUE_WORKER_NAME"] == name
            assert environment["ONCUE_ADVERTISE_URL"] == f"http://{name}:8081"
            hosts = re.findall(r"//([\w-]+):8080", environment["ONCUE_DISPATCHER_URL"])
            assert [SERVICES[host]["command"] for host in hosts] == [["dispatcher"]] * 2


def test_only_the_api_is_published_and_on_loopback_alone() -> None:
    published = {name: one["ports"] for name, one in SERVICES.items() if "ports" in one}
    assert set(published) == {"dispatcher-1", "dispatcher-2"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_every_service_is_restarted_but_the_migration_that_succeeded() -> None:
    assert {name: one["restart"] for name, one in SERVICES.items()} == {
        **dict.fromkeys(SERVICES, "unless-stopped"),
        "migrate": "on-failure",
    }


def test_a_container_is_given_longer_than_a_process_takes_to_end() -> None:
    grace = Settings.model_fields["grace_seconds"].default
    for name in OURS:
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > grace


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (200, '{"ready":true}', 0),
        (503, '{"ready":false,"draining":true}', 0),
        (503, '{"ready":false,"draining":false}', 1),
    ],
)
def test_the_image_is_healthy_when_it_is_ready_or_drains(status: int, body: str, code: int) -> None:
    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_args: object) -> None:
            """Keep the output of the tests to themselves."""

    with HTTPServer(("127.0.0.1", 0), Ready) as server, ThreadPoolExecutor(1) as pool:
        answered = pool.submit(server.handle_request)
        environment = {
            "ONCUE_PORT": str(free_port()),
            "ONCUE_WORKER_PORT": str(server.server_port),
            "no_proxy": "127.0.0.1",
        }
        _python, *arguments = read_dockerfile()[-1].health_check
        asked = subprocess.run([sys.executable, *arguments], env=environment, check=False)
        answered.result()
    assert asked.returncode == code
