"""Uploads that nobody goes on with."""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from app.errors import StorageError
from app.model import ObjectRef
from app.resolve.parts import Parts

_UNFINISHED_S: Final = 24 * 3600.0
"""What is as old and not completed is taken for abandoned."""
_DONE_S: Final = 3600.0
"""How long it is known of an upload that it was completed; as seldom old ones are looked for."""
_SWEPT: Final = 100
"""Objects that are removed at a time; where there are more, the next time is at once."""


class Abandoned:
    """Removes what is left of old uploads."""

    def __init__(self, parts: Parts, clock: Callable[[], float]) -> None:
        self._parts = parts
        self._clock = clock
        self._next_s: dict[ObjectRef, float] = {}

    async def sweep(self, root: ObjectRef) -> None:
        """Clean up below *root*, once in a while; if that fails, another time."""
        now_s = self._clock()
        if now_s < self._next_s.get(root, 0):
            return
        self._next_s[root] = now_s + _DONE_S
        with suppress(StorageError):
            stale = await self._stale(root, now_s)
            await self._parts.remove(stale)
            if len(stale) == _SWEPT:
                self._next_s[root] = now_s

    async def _stale(self, root: ObjectRef, now_s: float) -> list[ObjectRef]:
        """Find the first objects that nobody needs any more."""
        stale: list[ObjectRef] = []
        async for ref, kind, came_s in self._parts.old(root, now_s - _DONE_S):
            if came_s < now_s - (_DONE_S if kind == "done" else _UNFINISHED_S):
                stale.append(ref)
            if len(stale) == _SWEPT:
                break
        return stale
