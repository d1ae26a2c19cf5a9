"""The code blocks of a Markdown page, and what a comment right before one says about it.

A fence names its language: `sh` and `python` are run, `console` is run and its output compared
(`...` stands for anything), `json` must be JSON, `text` and `mermaid` are only shown. Before it
may stand one of

    <!-- not run: why it cannot be -->
    <!-- file: greet.py -->                 the block is the content of this file
    <!-- terminal 1: Oncue is up -->        it stays in that terminal; go on once it prints this
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

Kind = Literal["run", "show", "file", "terminal", "not run"]

RUN: Final = frozenset({"sh", "python", "console"})
SHOWN: Final = frozenset({"json", "text", "mermaid"})
LANGUAGES: Final = RUN | SHOWN

_FENCE: Final = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")
_COMMENT: Final = re.compile(r"^ *<!-- *(.*?) *-->$")
_DIRECTIVE: Final = re.compile(r"(?:(not run|file)|terminal (\d+)): +(\S.*)")
_INDENTED: Final = re.compile(r"^ {4,}\S")
_IN_A_LIST: Final = re.compile(r"^ {0,8}(?:[-*+]|\d+\.) ")


class BadPage(ValueError):
    """A block that cannot be told what to do with; the message names page and line."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block: `kind` says what is done with it, `word` what its comment names."""

    page: str
    line: int
    language: str
    text: str
    kind: Kind
    word: str = ""
    terminal: int = 0

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        return f"{self.page}:{self.line}"


def read_page(path: Path, name: str) -> list[Block]:
    """Return the blocks of a page in order.

    Raises:
        BadPage: a block has no language that is known, a comment that is not understood, no end,
            or is indented where a fence is wanted.
    """
    blocks: list[Block] = []
    lines = path.read_text().splitlines()
    number = 0
    in_a_list = False
    while number < len(lines):
        line = lines[number]
        if line.strip():
            in_a_list = bool(_IN_A_LIST.match(line)) or (in_a_list and line.startswith(" "))
        fence = _FENCE.match(line)
        if fence is None:
            after_a_gap = number == 0 or not lines[number - 1].strip()
            if _INDENTED.match(line) and after_a_gap and not in_a_list:
                raise BadPage(f"{name}:{number + 1}: fence this block and name its language")
            number += 1
            continue
        end = _end_of(lines, number, fence[2])
        if end is None:
            raise BadPage(f"{name}:{number + 1}: this block has no end")
        indent = len(fence[1])
        body = "".join(f"{one[indent:]}\n" for one in lines[number + 1 : end])
        comment = _COMMENT.match(lines[number - 1]) if number else None
        blocks.append(
            _block(
                name, number + 1, fence[3].strip(), body, None if comment is None else comment[1]
            )
        )
        number = end + 1
    return blocks


def _end_of(lines: list[str], start: int, fence: str) -> int | None:
    for number in range(start + 1, len(lines)):
        if lines[number].strip() == fence:
            return number
    return None


def _block(page: str, line: int, language: str, text: str, comment: str | None) -> Block:
    if language not in LANGUAGES:
        raise BadPage(
            f"{page}:{line}: name one of {', '.join(sorted(LANGUAGES))}, not {language!r}"
        )
    if comment is None:
        return Block(page, line, language, text, "run" if language in RUN else "show")
    told = _DIRECTIVE.fullmatch(comment)
    if told is None:
        raise BadPage(f"{page}:{line}: the comment before it is not understood: {comment!r}")
    if told[2]:
        if language != "sh":
            raise BadPage(f"{page}:{line}: what stays in a terminal is `sh`")
        return Block(page, line, language, text, "terminal", told[3], int(told[2]))
    return Block(page, line, language, text, cast("Kind", told[1]), told[3])
