"""How often the loops of a simulated dispatcher look for what nobody has told them of.

In production most look each second. Each look is a read that nearly always finds nothing, and in
ten minutes of seven processes they were most of what happened. Here they look less often: what is
told (a wake-up, a signal, a beat) still comes at once, and what is not told comes later, so that
more happens in between. No time that a promise rests on is changed: lives of leases and locks,
beats, renewals, the rule of death, time-outs and retries are the product's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import app.callbacks.handover
import app.dispatch.expire
import app.dispatch.loop
import app.dispatch.recover
import app.dispatch.send
import app.dispatch.standing
import app.dispatch.stop
import app.fleet.live
import app.jobs.sweeper
import app.main
import app.schedules.spawn

PACE: Final[tuple[tuple[Any, str, float], ...]] = (
    (app.callbacks.handover, "LOOK_SECONDS", 3.0),
    (app.dispatch.expire, "LOOK_SECONDS", 3.0),
    (app.dispatch.loop, "RESCAN_SECONDS", 3.0),
    (app.dispatch.recover, "TICK_SECONDS", 2.5),
    (app.dispatch.send, "NOTE_AFTER_SECONDS", 3.0),
    (app.dispatch.standing, "WRITE_SECONDS", 15.0),
    (app.dispatch.stop, "LOOK_SECONDS", 3.0),
    (app.fleet.live, "FRESH_SECONDS", 3.0),
    (app.jobs.sweeper, "LOOK_SECONDS", 5.0),
    (app.main, "CLOCK_SECONDS", 10.0),
    (app.schedules.spawn, "LONGEST_SLEEP_SECONDS", 3.0),
    (app.schedules.spawn, "WITHOUT_LOCK_SECONDS", 1.5),
)


@contextmanager
def paced() -> Iterator[None]:
    """Have the loops look at this pace within the block."""
    with ExitStack() as stack:
        for module, name, seconds in PACE:
            stack.enter_context(mock.patch.object(module, name, seconds))
        yield
