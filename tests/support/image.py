"""The Dockerfile and compose.yaml read as Docker reads them, so that tests run what they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

from tests.support.processes import ROOT

DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = ROOT / "compose.yaml"
ENV_EXAMPLE = ROOT / "deploy" / "env.example"
_VARIABLE = re.compile(r"\$(?:(?P<escaped>\$)|\{(?P<name>\w+)(?:(?P<how>:[?-])(?P<word>[^}]*))?\})")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile: its name, and what follows it on joined lines."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The words, of the JSON form too."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)


@dataclass
class Stage:
    """One stage of a Dockerfile."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def texts(self, name: str) -> list[str]:
        """Return what follows each instruction of a name."""
        return [one.text for one in self.instructions if one.name == name]

    def last(self, name: str) -> Instruction:
        """Return the instruction of a name that counts."""
        return [one for one in self.instructions if one.name == name][-1]

    @property
    def environment(self) -> dict[str, str]:
        """What ENV sets, unexpanded."""
        pairs = [word.partition("=") for text in self.texts("ENV") for word in shlex.split(text)]
        return {name: value for name, _, value in pairs}

    @property
    def health_check(self) -> list[str]:
        """The command of the health check."""
        flags, _, command = self.last("HEALTHCHECK").text.partition("CMD ")
        assert flags
        found: list[str] = json.loads(command)
        return found


def read_dockerfile() -> list[Stage]:
    """Return the stages of the Dockerfile, in order."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    stages: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        name, _, text = line.partition(" ")
        if name == "FROM":
            base, _, alias = text.partition(" AS ")
            stages.append(Stage(base, alias))
        else:
            stages[-1].instructions.append(Instruction(name, text.strip()))
    return stages


def example_variables() -> list[str]:
    """Return the names that env.example sets, in order."""
    lines = ENV_EXAMPLE.read_text().splitlines()
    return [line.partition("=")[0] for line in lines if line and not line.startswith("#")]


def variables_of_compose() -> set[str]:
    """Return the variables that compose.yaml asks its environment for."""
    return {found["name"] for found in _VARIABLE.finditer(COMPOSE.read_text()) if found["name"]}


def read_compose(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return compose.yaml, its anchors merged and its variables put in.

    Raises:
        KeyError: a variable that it demands is not set, or empty.
    """

    def value(found: re.Match[str]) -> str:
        if found["escaped"]:
            return "$"
        given = variables.get(found["name"], "")
        if given or found["how"] is None:
            return given
        if found["how"] == ":?":
            raise KeyError(found["name"])
        return found["word"]

    def put(node: Any) -> Any:
        if isinstance(node, str):
            return _VARIABLE.sub(value, node)
        if isinstance(node, dict):
            return {name: put(one) for name, one in node.items()}
        return [put(one) for one in node] if isinstance(node, list) else node

    document = yaml.safe_load(COMPOSE.read_text())
    found: dict[str, Any] = put({name: document[name] for name in ("services", "volumes")})
    return found


def start_order(services: Mapping[str, Any]) -> list[str]:
    """Return the services so that each comes after those that it depends on."""
    return list(
        TopologicalSorter(
            {name: service.get("depends_on", {}) for name, service in services.items()}
        ).static_order()
    )


def copied_paths() -> set[str]:
    """Return the top-level names that .dockerignore lets into the build."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*", "what is not named stays out"
    return {line.removeprefix("!") for line in lines if line.startswith("!")}


class BuiltImage:
    """The build stage, carried out at another place of this machine, and what it left there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._build, self._image = read_dockerfile()

    def mapped(self, text: str) -> str:
        """Put the places of the image, in a text, where they are here."""
        return re.sub(r"(?<![\w/.])/(opt|srv|home)/(?=\w)", rf"{self.root}/\1/", text)

    def build(self, run: Callable[[str, Path, Mapping[str, str]], None]) -> None:
        """Carry out the build stage; `run(command, directory, variables)` runs one of its RUNs."""
        directory = self.root
        variables: dict[str, str] = {}
        for step in self._build.instructions:
            if step.name == "WORKDIR":
                directory = Path(self.mapped(step.text))
                directory.mkdir(parents=True)
            elif step.name == "ENV":
                for name, _, value in (word.partition("=") for word in step.words):
                    variables[name] = value
            elif step.name == "COPY":
                *sources, target = step.words
                for source in sources:
                    _copy(ROOT / source, directory / target)
            elif step.name == "RUN":
                run(self.mapped(step.text), directory, variables)
            else:
                raise NotImplementedError(f"{step.name} in the build stage")

    @property
    def environment(self) -> dict[str, str]:
        """What the image sets for its processes, and nothing else of this machine."""
        path = os.environ["PATH"]
        return {
            name: self.mapped(value).replace("$PATH", path)
            for name, value in {"PATH": path, **self._image.environment}.items()
        }

    def command(self, command: Sequence[str] | None = None) -> list[str]:
        """Return the process of a container: the entry point with a command, or the default one."""
        words = self._image.last("CMD").words if command is None else command
        return self._found([*self._image.last("ENTRYPOINT").words, *words])

    @property
    def health_check(self) -> list[str]:
        """The command of the health check, as it runs in a container."""
        return self._found(self._image.health_check)

    def _found(self, words: Sequence[str]) -> list[str]:
        program = shutil.which(words[0], path=self.environment["PATH"])
        assert program is not None
        assert Path(program).is_relative_to(self.root), f"{program} is none of the image's"
        return [program, *words[1:]]


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
