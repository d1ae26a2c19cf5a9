"""Fixtures of all tests: engines, platforms and receivers, fresh for each test."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest

from tests.support.contract import installed_tools
from tests.support.engines import ENGINE_NAMES, Engine, EngineName, Servers, migrated
from tests.support.missing import NOT_TESTED_HERE
from tests.support.models import models_built_once
from tests.support.processes import NewPlatform, Platform
from tests.support.receiver import Receiver

# A slow machine is no failure of a property, and engines are fresh for each test, not for each
# example; CI repeats what it found.
hypothesis.settings.register_profile(
    "oncue",
    deadline=None,
    print_blob=True,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("oncue")


MOSTLY_WAITING = ("promises", "e2e")


def pytest_configure() -> None:
    """Take Ctrl-C, and send nothing of ours to a proxy.

    A shell starts background jobs with Ctrl-C ignored, and children inherit that. A developer's
    proxy does not know the servers of the tests.
    """
    for name in ("NO_PROXY", "no_proxy"):
        given = os.environ.get(name, "").split(",")
        missing = [host for host in ("127.0.0.1", "localhost") if host not in given]
        os.environ[name] = ",".join([*filter(None, given), *missing])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix files that mostly wait among those that mostly compute: at the end none waits alone."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = {path for path in files if path.parent.name in MOSTLY_WAITING}
    places: dict[Path, float] = {}
    for kind in (waiting, files.keys() - waiting):
        own = [path for path in files if path in kind]
        places |= {path: (number + 0.5) / len(own) for number, path in enumerate(own)}
    items[:] = [item for path in sorted(files, key=places.__getitem__) for item in files[path]]


@pytest.fixture(scope="session", autouse=True)
def _models() -> Iterator[None]:
    """Spare the hundreds of applications of this process what one has built."""
    with models_built_once():
        yield


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The database and Redis servers that the tests of this process share."""
    found = Servers(in_memory=True)
    yield found
    found.remove()


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder of the programs of the contract tests."""
    return installed_tools()


@pytest.fixture(params=ENGINE_NAMES)
def engine(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Engine]:
    """A fresh engine with an empty database: the test runs once over each pair."""
    yield from _fresh(servers, request.param)


@pytest.fixture(scope="module", params=ENGINE_NAMES)
def module_engine(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Engine]:
    """Like `engine`, shared by the tests of a module (give it `pytest.mark.xdist_group`)."""
    yield from _fresh(servers, request.param)


@pytest.fixture
def migrated_engine(engine: Engine) -> Engine:
    """A fresh engine whose database has the current schema."""
    return migrated(engine)


@pytest.fixture
def sqlite_engine(servers: Servers) -> Iterator[Engine]:
    """A fresh SQLite and Valkey engine alone, for what does not depend on the engine."""
    yield from _fresh(servers, "sqlite+valkey")


@pytest.fixture
def mariadb_engine(servers: Servers) -> Iterator[Engine]:
    """A fresh MariaDB and Redis engine alone, for what only they can do."""
    yield from _fresh(servers, "mariadb+redis")


PLATFORMS = pytest.StashKey[list[Platform]]()


@pytest.fixture
def new_platform(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NewPlatform]:
    """Make platforms, `new_platform(engine, dispatchers=2)`, that end with the test.

    Nothing of it runs yet: `.start()` starts all, `.dispatcher()` and `.worker()` one.
    """
    made: list[Platform] = []
    request.node.stash[PLATFORMS] = made
    with ExitStack() as ends:

        def make(
            engine: Engine,
            *,
            dispatchers: int = 1,
            environment: Mapping[str, str] | None = None,
        ) -> Platform:
            directory = tmp_path / f"platform-{len(made) + 1}"
            directory.mkdir()
            platform = Platform(engine, directory, environment or {}, dispatchers)
            made.append(platform)
            ends.callback(platform.close)
            return platform

        yield make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show, with a failed test, what its processes wrote last."""
    report = yield
    if report.failed:
        for platform in item.stash.get(PLATFORMS, []):
            for name, service in platform.services.items():
                report.sections.append((f"end of the log of {name}", service.child.log_tail()))
    return report


@pytest.fixture
def platform(engine: Engine, new_platform: NewPlatform) -> Platform:
    """One dispatcher and one worker over a fresh engine, running; once over each pair."""
    return new_platform(engine).start()


@pytest.fixture
def sqlite_platform(sqlite_engine: Engine, new_platform: NewPlatform) -> Platform:
    """A platform over SQLite and Valkey, nothing of it running yet."""
    return new_platform(sqlite_engine)


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    """A running receiver of callbacks that answers 200 unless told otherwise."""
    found = Receiver(tmp_path)
    found.start()
    yield found
    found.kill()


def _fresh(servers: Servers, name: EngineName) -> Iterator[Engine]:
    engine = servers.engine(name)
    yield engine
    servers.drop(engine)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after pytest's own summary, as the last word
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say at the very end what this machine could not test."""
    yield
    reasons = {
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    }
    for reason in sorted(reasons):
        if reason.startswith(NOT_TESTED_HERE):
            terminalreporter.write_line(reason, red=True, bold=True)
