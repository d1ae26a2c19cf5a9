"""What schemathesis does to each request: real ids in half of them, and no address but loopback.

It runs in the environment of the contract tools. CONTRACT_IDS holds, by the name of a path
parameter, ids that exist.
"""

import itertools
import json
import os
from typing import Any

import schemathesis
from schemathesis import GenerationMode

NOBODY = "http://127.0.0.1:9/"
IDS: dict[str, list[Any]] = json.loads(os.environ.get("CONTRACT_IDS", "{}"))
_turns = {name: itertools.cycle([*ids, None]) for name, ids in IDS.items()}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Change a request that is about to be sent."""
    case.body = _harmless(case.body)
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    for name, turn in _turns.items():
        if name in case.path_parameters and (real := next(turn)) is not None:
            case.path_parameters[name] = real


def _harmless(value: Any) -> Any:
    """Return a body in which no address can be called."""
    if isinstance(value, dict):
        return {key: _harmless(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_harmless(one) for one in value]
    if isinstance(value, str) and value.lower().startswith(("http:", "https:")):
        return NOBODY
    return value
