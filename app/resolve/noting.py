"""What a look-up was told, and how long that is good."""

from math import inf
from typing import Any, Final, NamedTuple, cast

from app.formats.reading import Read, Versioned, Weighable
from app.model import ObjectRef
from app.resolve.fetch import ReadCache, Remembered
from app.storage.contract import Stat

TRUSTED_S: Final = 1.0
"""How long what was asked of a store is not asked again because it does not fit together."""
_TOGETHER_S: Final = 5.0
"""Documents that were read longer before an index may be of another time than the index."""


class _Told(NamedTuple):
    """When a read was last performed, and whether it brought something: what, is not held here."""

    asked_at: float
    is_there: bool


class Noting:
    """A `Fetch` that notes how long everything it told is good, and what of it was old."""

    def __init__(self, fetch: ReadCache) -> None:
        self._fetch = fetch
        self.began_at = fetch.clock()
        self.generation = fetch.generation
        self.expires_at = inf
        self.old: dict[ObjectRef, None] = {}
        self._told: dict[Read[Any], _Told] = {}
        self._modified_s: dict[ObjectRef, int | None] = {}

    @property
    def outdated(self) -> list[Read[Any]]:
        """What was known long before something else was read anew just now."""
        newest = max((told.asked_at for told in self._told.values()), default=-inf)
        if newest < self.began_at - TRUSTED_S:
            return []
        return [
            read
            for read, told in self._told.items()
            if told.is_there and told.asked_at < newest - _TOGETHER_S
        ]

    @property
    def ends_in_absence(self) -> bool:
        """Whether the last that was asked for is not there, or nothing was asked for."""
        last = next(reversed(self._told.values()), None)
        return last is None or not last.is_there

    def known_before(self, began_at: float, present_s: float, absent_s: float) -> list[Read[Any]]:
        """Give what was told that at *began_at* had been known for longer than is said.

        *present_s* is of what was there, *absent_s* of what was not.
        """
        longest = {True: present_s, False: absent_s}
        return [
            read
            for read, told in self._told.items()
            if told.asked_at < began_at - longest[told.is_there]
        ]

    @property
    def oldest(self) -> tuple[float, ObjectRef] | None:
        """Tell when that was asked for which is known longest of what can change, and its name."""
        told = self._told.items()
        known = ((about.asked_at, read.ref) for read, about in told if about.is_there)
        return min(known, default=None)

    async def __call__[T: Weighable](
        self, read: Read[T], /, *, ever: bool = False
    ) -> Versioned[T] | None:
        """Perform *read*, and note what it told."""
        remembered = await self._fetch.remember(read, ever=ever)
        if not read.is_pinned and remembered.expires_at < inf:
            is_there = remembered.known is not None
            self._told[read] = _Told(remembered.asked_at, is_there)
        return cast("Versioned[T] | None", self.note(read.ref, remembered))

    def note(self, ref: ObjectRef, remembered: Remembered) -> Versioned[Any] | Stat | None:
        """Count *remembered*, which is known of *ref*, in."""
        self.expires_at = min(self.expires_at, remembered.expires_at)
        if remembered.asked_at < self.began_at - TRUSTED_S and remembered.expires_at < inf:
            self.old[ref] = None
        if (known := remembered.known) is not None:
            self._modified_s[ref] = known.modified_s
        return known

    def modified_s(self, ref: ObjectRef) -> int | None:
        """Return when *ref* was last modified, if it was read and its store tells."""
        return self._modified_s.get(ref)
