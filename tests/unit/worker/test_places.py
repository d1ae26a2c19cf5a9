"""Whoever wrote a handler is shown their own lines, not the worker's that called them."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pytest

import oncue.handlers
from worker.execute import handler_trace
from worker.offered import HandlersNotLoaded, import_handlers


def test_a_refused_decorator_names_the_line_that_it_stands_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "takes_nothing.py"
    module.write_text(
        "from oncue import handler\n\n\n@handler('nothing')\ndef nothing():\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HandlersNotLoaded, match=rf"must take .* \({re.escape(str(module))}:4\)$"):
        import_handlers(["takes_nothing"])


def test_a_missing_module_has_no_place() -> None:
    with pytest.raises(HandlersNotLoaded, match=r"No module named 'no_such_module'$"):
        import_handlers(["no_such_module"])


def raised_in(filename: str) -> BaseException:
    """Return an error that came through a frame of `filename` and out of this file's `fails`."""
    code = compile("fails()", filename, "exec")
    with pytest.raises(LookupError) as caught:
        exec(code, {"fails": fails})
    trace = caught.value.__traceback__
    assert trace is not None
    return caught.value.with_traceback(trace.tb_next)  # without this test's own frame


def fails() -> None:
    raise LookupError("no stock")


def test_a_trace_begins_at_the_handler() -> None:
    linecache.checkcache()
    trace = handler_trace(raised_in(oncue.handlers.__file__))
    assert trace.startswith("the handler failed\nTraceback")
    assert trace.endswith("LookupError: no stock")
    assert trace.count("  File ") == 1
    assert __file__ in trace


def test_frames_of_others_stay() -> None:
    assert handler_trace(raised_in("/srv/shop/orders.py")).count("  File ") == 2
