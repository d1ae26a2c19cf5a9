"""Every example in README.md and docs/ is run as its reader would, in order, page by page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import BadPage, Block, read_page
from tests.support.processes import ROOT
from tests.support.reader import Reader, Unlike

PAGES = sorted(
    str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
)
NOT_RUN = {
    "README.md": 1,  # the commands of a deployment over several hosts
    "docs/simulation.md": 2,  # many clusters take long
    "docs/operating.md": 1,  # needs a Docker engine
}
"""A page that is not named has none: what is added here is seen by whoever reviews it."""


def blocks_of(page: str) -> list[Block]:
    return read_page(ROOT / page, page)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_work(page: str, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    if not any(block.kind in ("run", "terminal") for block in blocks):
        return
    reader = Reader(tmp_path)
    try:
        if not any(block.kind == "terminal" and " up" in block.text for block in blocks):
            reader.start_platform()
        for block in blocks:
            reader.do(block)
    finally:
        reader.close()


def test_what_is_not_run_is_counted_and_has_a_reason() -> None:
    left = [block for page in PAGES for block in blocks_of(page) if block.kind == "not run"]
    for block in left:
        print(f"not run: {block.place}: {block.word}")
    counts: dict[str, int] = {}
    for block in left:
        counts[block.page] = counts.get(block.page, 0) + 1
    assert counts == NOT_RUN


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```\nls\n```\n", "name one of"),
        ("```bash\nls\n```\n", "name one of"),
        ("<!-- skip -->\n```sh\nls\n```\n", "not understood"),
        ("<!-- not run: -->\n```sh\nls\n```\n", "not understood"),
        ("<!-- terminal 1: up -->\n```python\n1\n```\n", "is `sh`"),
        ("```sh\nls\n", "no end"),
        ("Do this:\n\n    ls\n", "fence this block"),
    ],
)
def test_a_block_that_would_be_left_out_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(BadPage, match=why):
        read_page(tmp_path / "page.md", "page.md")


def test_a_fence_in_a_list_and_a_longer_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "1. do\n\n    more\n\n   ```sh\n   ls\n   ```\n\n````text\n```sh\nno\n```\n````\n"
    )
    first, second = read_page(tmp_path / "page.md", "page.md")
    assert (first.text, first.kind, first.line) == ("ls\n", "run", 5)
    assert (second.text, second.kind) == ("```sh\nno\n```\n", "show")


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("sh", "false\ntrue\n"),
        ("python", "assert not 1\n"),
        ("python", "import warnings; warnings.warn('x')\n"),
        ("console", "$ echo a\nb\n"),
        ("console", "$ echo a\n"),
        ("console", "$ true\n$ echo $?\n1\n"),
    ],
)
def test_an_example_that_does_something_else_fails(
    language: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(Unlike):
        Reader(tmp_path).do(Block("page.md", 1, language, text, "run"))


def test_a_page_is_one_terminal_and_its_ports_are_free_ones(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for language, text in (
        ("sh", "export NAME='a\nb'\nprintf 8080 > port\n"),
        (
            "console",
            '$ echo "$NAME"\na\nb\n$ false\n$ echo $?\n1\n$ echo\n> echo one two\n\n... two\n',
        ),
        ("python", "import os\nassert os.environ['NAME'] == 'a\\nb'\n"),
    ):
        reader.do(Block("page.md", 1, language, text, "run"))
    port = (reader.checkout / "port").read_text()
    assert port != "8080"
    assert reader.environment["ONCUE_URL"].endswith(f":{port}")
