"""The threat model names every route of both services."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from app.main import create_app
from app.settings import Settings
from worker.main import create_app as create_worker
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text()
SECTIONS = dict(
    re.findall(r"^## The (dispatcher|worker)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
)


def app_of(service: str) -> FastAPI:
    """Build a service; nothing is opened."""
    if service == "dispatcher":
        return create_app(Settings.model_construct())
    return create_worker(WorkerSettings.model_construct(internal_token=()))


@pytest.mark.parametrize("service", ["dispatcher", "worker"])
def test_every_route_has_its_place_and_no_place_is_for_a_route_that_is_gone(service: str) -> None:
    routes = {str(route.path) for route in iter_route_contexts(app_of(service).routes)}
    firsts = [line.split("|")[1] for line in SECTIONS[service].splitlines() if line[:3] == "| `"]
    named = {path for cell in firsts for path in re.findall(r"`(/[^`]*)`", cell)}
    assert routes - named == set()
    assert named - routes == set()


def test_every_row_says_who_and_what_guards() -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    assert all(cell.strip() for row in rows for cell in row[1:4])


def test_the_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) >= 4
    assert all((ROOT / one).exists() for one in named)
