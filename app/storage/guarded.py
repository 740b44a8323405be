"""Reads that others than the operator ask for: no key climbs out of where it begins."""

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final

from app.errors import StorageDeniedError
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef
from app.storage.contract import Found, Listed, NotModified, ObjectReader, Stat
from app.storage.read_only import ReadOnly

_SEPARATORS: Final = re.compile(r"[/\\]")


def is_plain(segment: str) -> bool:
    """Tell whether no server could take the segment of a path for more than a name."""
    return {".", ".."}.isdisjoint(_SEPARATORS.split(segment)) and "/" not in segment


class GuardedStore(ReadOnly):
    """Lets reads of plain keys through to *inner*; it cannot be listed.

    It knows no prefix: whoever makes keys joins them to the root that was opened, and a plain key
    cannot lead out of that again. *inner* stays open.
    """

    def __init__(self, inner: ObjectReader) -> None:
        self._inner = inner

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Read a plain key."""
        _demand_plain(ref)
        return await self._inner.get(ref, request, if_match=if_match, if_none_match=if_none_match)

    def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Stream a plain key."""
        _demand_plain(ref)
        return self._inner.stream(ref, byte_range, if_match=if_match)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Ask for a plain key."""
        _demand_plain(ref)
        return await self._inner.stat(ref)

    def list(
        self,
        prefix: ObjectRef,
        *,
        delimiter: str = "",  # noqa: ARG002  the contract's argument
        after: str = "",  # noqa: ARG002  likewise
    ) -> AsyncIterator[Listed]:
        """Refuse: references name objects."""
        raise StorageDeniedError(prefix, "only named objects may be read")

    async def reach(self, root: ObjectRef) -> None:
        """Ask for the root."""
        await self._inner.reach(root)

    async def aclose(self) -> None:
        """Leave *inner* open: it may have other readers."""


def _demand_plain(ref: ObjectRef) -> None:
    if not all(map(is_plain, ref.key.split("/"))):
        raise StorageDeniedError(ref, "the key climbs")
