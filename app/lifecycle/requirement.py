"""What a task asks of a worker's labels. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PREFIX: Final = "worker."
MAX_LENGTH: Final = 255


class RequirementTooLong(ValueError):
    """The `worker.` labels of a job are together longer than 255 characters."""


def requirement_of(labels: Mapping[str, str]) -> str:
    """Write the `worker.NAME` labels of a job as the requirement of its queue: `a=1,b=2`.

    Other labels describe the job and ask nothing. Commas, equal signs
    and spaces are escaped (MySQL compares text without its trailing spaces).
    """
    if not labels:
        return ""
    text = ",".join(
        f"{name.removeprefix(PREFIX)}={_escape(value)}"
        for name, value in sorted(labels.items())
        if name.startswith(PREFIX)
    )
    if len(text) > MAX_LENGTH:
        raise RequirementTooLong(
            f"the `{PREFIX}` labels must be shorter than {MAX_LENGTH} together"
        )
    return text


def meets(requirement: str, labels: Mapping[str, str]) -> bool:
    """Tell whether a worker with these labels may run the tasks of a queue."""
    if not requirement:
        return True
    for part in requirement.split(","):
        name, _, value = part.partition("=")
        if name not in labels or _escape(labels[name]) != value:
            return False
    return True


def asked_labels(requirement: str) -> dict[str, str]:
    """Return the labels that a queue asks for, as the job named them."""
    return {
        name: _unescape(value)
        for name, _, value in (part.partition("=") for part in requirement.split(",") if part)
    }


def _unescape(value: str) -> str:
    # The percent sign last: it opens every escape.
    for character in " =,%":
        value = value.replace(f"%{ord(character):02X}", character)
    return value


def _escape(value: str) -> str:
    for character in "%,= ":
        value = value.replace(character, f"%{ord(character):02X}")
    return value
