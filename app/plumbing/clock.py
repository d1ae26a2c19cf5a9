"""The database's clock as seen from this process: an estimate for sleeping, never for deciding."""

from __future__ import annotations

import time
from typing import Final

import structlog

from app.plumbing.database import Database

log = structlog.get_logger(__name__)

SKEW_WARN_MS: Final = 1000
SKEW_REFUSE_MS: Final = 5000
SAMPLES: Final = 5


class DatabaseClock:
    """Estimates the database's time from its last measurement and the monotonic clock."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._offset_ms = time.time() * 1000 - time.monotonic() * 1000
        self.skew_ms = 0.0
        """This process's clock minus the database's, at the last measurement."""

    async def measure(self) -> None:
        """Ask the database for its time, and log a skew over a second.

        The estimate is the latest time that it cannot be before, so that nothing seems due early.

        Raises:
            DatabaseUnavailable: the database did not answer.
        """
        offsets = []
        for _ in range(SAMPLES):
            now = await self._database.now()
            # Cut to milliseconds, and some time ago: never more than the truth.
            offsets.append(now - time.monotonic() * 1000)
            self.skew_ms = time.time() * 1000 - now
        self._offset_ms = max(offsets)
        if abs(self.skew_ms) > SKEW_WARN_MS:
            log.warning(
                "clock_skew",
                skew_ms=round(self.skew_ms),
                limit_ms=SKEW_WARN_MS,
                may_dispatch=self.may_dispatch,
            )

    @property
    def may_dispatch(self) -> bool:
        """False while this process's clock is more than 5 s off the database's."""
        return abs(self.skew_ms) <= SKEW_REFUSE_MS

    def now_ms(self) -> float:
        """Return the estimated database time, epoch milliseconds."""
        return time.monotonic() * 1000 + self._offset_ms
