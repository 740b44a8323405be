"""What a look-up was told, and how long that is good."""

from math import inf
from typing import Any, Final, cast

from app.formats.reading import Read, Versioned, Weighable
from app.model import ObjectRef
from app.resolve.fetch import ReadCache, Remembered
from app.storage.contract import Stat

TRUSTED_S: Final = 1.0
"""How long what was asked of a store is not asked again because it does not fit together."""
_TOGETHER_S: Final = 5.0
"""Documents that were read longer before an index may be of another time than the index."""


class Noting:
    """A `Fetch` that notes how long everything it told is good, and what of it was old."""

    def __init__(self, fetch: ReadCache) -> None:
        self._fetch = fetch
        self.began_at = fetch.clock()
        self.generation = fetch.generation
        self.expires_at = inf
        self.old: list[ObjectRef] = []
        self._told: list[tuple[Read[Any], Remembered]] = []

    @property
    def outdated(self) -> list[Read[Any]]:
        """What was known long before something else was read anew just now."""
        newest = max((told.asked_at for _, told in self._told), default=-inf)
        if newest < self.began_at - TRUSTED_S:
            return []
        return [
            read
            for read, told in self._told
            if told.known is not None and told.asked_at < newest - _TOGETHER_S
        ]

    @property
    def oldest(self) -> tuple[float, ObjectRef] | None:
        """Tell when that was asked for which is known longest of what can change, and its name."""
        known = ((told.asked_at, read.ref) for read, told in self._told if told.known is not None)
        return min(known, default=None)

    async def __call__[T: Weighable](
        self, read: Read[T], /, *, ever: bool = False
    ) -> Versioned[T] | None:
        """Perform *read*, and note what it told."""
        remembered = await self._fetch.remember(read, ever=ever)
        if not read.is_pinned and remembered.expires_at < inf:
            self._told.append((read, remembered))
        return cast("Versioned[T] | None", self.note(read.ref, remembered))

    def note(self, ref: ObjectRef, remembered: Remembered) -> Versioned[Any] | Stat | None:
        """Count *remembered*, which is known of *ref*, in."""
        self.expires_at = min(self.expires_at, remembered.expires_at)
        if remembered.asked_at < self.began_at - TRUSTED_S and remembered.expires_at < inf:
            self.old.append(ref)
        return remembered.known
