"""The clock changes of a time zone, found by asking `zoneinfo`.

`zoneinfo` tells the offset of an instant but not when it changes. So blocks of about half a year
are probed, a change between two probes is found by halving, and what was found is kept.
"""

from __future__ import annotations

from bisect import bisect_right
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

DAY: Final = 86_400
BLOCK: Final = 1 << 24
"""Seconds a block, 194 days."""
MARGIN: Final = 2 * DAY
"""How far a block looks beyond itself: more than any clock was ever moved."""
PROBE: Final = DAY
"""Seconds between probes: no zone has changed its clock and back within six days since 1970."""
CHANGE_HORIZON: Final = 800 * DAY
MAX_ZONE_NAME: Final = 64
_MACHINE_NAMES: Final = frozenset({"localtime", "posixrules", "Factory"})
_OTHER_SCALES: Final = ("right/", "posix/")


class UnknownZone(ValueError):
    """The name is not one of the IANA time zone database."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name[:MAX_ZONE_NAME]!r} is not a zone of the IANA time zone database: "
            "use a name as Europe/Berlin or UTC"
        )


class Stretch(NamedTuple):
    """A time without a clock change: instants in epoch seconds, offsets in seconds.

    It begins at `start` with the change from `offset_before`, and ends at `end` with the change
    to `offset_after`; where nothing changes within the margin the offsets are the same. Only
    instants from `floor` to before `stop` are to be looked for here.
    """

    start: int
    end: int
    offset: int
    offset_before: int
    offset_after: int
    floor: int
    stop: int


class ZoneClock:
    """The stretches of one zone; keeps those it was asked for."""

    def __init__(self, zone: ZoneInfo) -> None:
        self.zone = zone
        self._blocks: dict[int, tuple[tuple[int, ...], tuple[Stretch, ...]]] = {}

    def stretch(self, instant: int) -> Stretch:
        """Return the stretch that an instant lies in."""
        number = instant // BLOCK
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = self._probe(number)
        starts, stretches = block
        return stretches[bisect_right(starts, instant) - 1]

    def next_change(self, after: int, horizon: int = CHANGE_HORIZON) -> Stretch | None:
        """Return the stretch that begins with the first change after an instant, if one is near."""
        instant = after
        while instant < after + horizon:
            instant = self.stretch(instant).stop
            stretch = self.stretch(instant)
            if stretch.start == instant and stretch.offset != stretch.offset_before:
                return stretch
        return None

    def offset_at(self, instant: int) -> int:
        """Return what the zone's clock is ahead of UTC, in seconds."""
        offset = datetime.fromtimestamp(instant, self.zone).utcoffset()
        assert offset is not None, "a zone always has an offset"
        return int(offset.total_seconds())

    def _probe(self, number: int) -> tuple[tuple[int, ...], tuple[Stretch, ...]]:
        low, high = number * BLOCK, (number + 1) * BLOCK
        changes = self._changes(low - MARGIN, high + MARGIN)
        edges = [at for at, _ in changes]
        offsets = [offset for _, offset in changes]
        stretches = tuple(
            Stretch(
                start=start,
                end=end,
                offset=offset,
                offset_before=before,
                offset_after=after,
                floor=max(start, low),
                stop=min(end, high),
            )
            for start, end, offset, before, after in zip(
                edges,
                [*edges[1:], high + MARGIN],
                offsets,
                [offsets[0], *offsets[:-1]],
                [*offsets[1:], offsets[-1]],
                strict=True,
            )
        )
        return tuple(edges), stretches

    def _changes(self, low: int, high: int) -> list[tuple[int, int]]:
        """The beginning, then each change: the instant and the offset from there on."""
        offset = self.offset_at(low)
        found = [(low, offset)]
        for probe in range(low + PROBE, high + PROBE, PROBE):
            until = min(probe, high)
            while (now := self.offset_at(until)) != offset:
                before, after = max(found[-1][0], until - PROBE), until
                while after - before > 1:
                    middle = (before + after) // 2
                    if self.offset_at(middle) == offset:
                        before = middle
                    else:
                        after = middle
                offset = self.offset_at(after)
                found.append((after, offset))
                if offset == now:
                    break
        return found


@lru_cache(maxsize=256)
def zone_clock(name: str) -> ZoneClock:
    """Return the clock of a zone by its IANA name.

    Raises:
        UnknownZone: there is no such zone.
    """
    plain = name.isascii() and name.isprintable() and len(name) <= MAX_ZONE_NAME
    if not plain or name in _MACHINE_NAMES or name.startswith(_OTHER_SCALES):
        raise UnknownZone(name)
    try:
        return ZoneClock(ZoneInfo(name))
    except (OSError, ValueError, LookupError):  # a folder, no zone file, no such name
        raise UnknownZone(name) from None


def local_text(clock: ZoneClock, instant: int) -> str:
    """Write an instant as the zone's clock shows it, with the offset then in force."""
    return datetime.fromtimestamp(instant, UTC).astimezone(clock.zone).isoformat()
