"""Loads a reference stack from a folder of peers, on servers of our own.

The folder is named by BENCH_PEERS and holds `common.py` (where the servers are), `ref_app.py`
(FastAPI, Celery) and `ref2_app.py` (FastAPI, taskiq). It runs in an environment of its own:

    uvicorn bench.reference.given:app
    celery -A bench.reference.given:celery worker
    taskiq worker bench.reference.given:broker
    python -m bench.reference.given               # makes the tables
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

sys.path.insert(0, os.environ["BENCH_PEERS"])
_common: Any = importlib.import_module("common")
_common.MYURL = os.environ["BENCH_MYSQL"]
_common.REDIS = os.environ["BENCH_REDIS"]
_stack: Any = importlib.import_module(os.environ["BENCH_STACK"])


def __getattr__(name: str) -> Any:
    if name == "app":
        return _stack.make_app()
    return getattr(_stack, name)


def make_tables() -> None:
    """Make the stack's tables in an empty database."""
    engine = importlib.import_module("sqlalchemy").create_engine(
        f"mysql+pymysql://{os.environ['BENCH_MYSQL']}"
    )
    _stack.Base.metadata.create_all(engine)
    engine.dispose()


if __name__ == "__main__":
    make_tables()
