"""Objects of a plain HTTP server."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Self
from urllib.parse import quote

from app.errors import StorageDeniedError, StorageRedirectError, StorageUnavailableError
from app.model import GUARDED, ByteRange, ByteRequest, Condition, ETag, ObjectRef
from app.storage.contract import Found, Listed, NotModified, Stat
from app.storage.http1.client import Client
from app.storage.http1.errors import BadUrlError
from app.storage.http1.target import Target
from app.storage.range_reader import RangeReader
from app.storage.read_only import ReadOnly
from app.storage.refusals import Method, Refusal
from app.storage.web_guard import WebGuard, is_below

_SERVER_FAULT: Final = 500
_ABSENT: Final = frozenset({404, 410})


class HttpStore(ReadOnly):
    """Reads ranges of what lies below the URL that is the bucket; the rest of the path is the key.

    Redirects are followed below the bucket, and below the URLs that *redirects* has for it. A
    *guard* decides in place of that.
    """

    def __init__(
        self,
        *,
        connections: int = 64,
        timeout_s: float = 10.0,
        guard: WebGuard | None = None,
        redirects: Mapping[str, Sequence[Target]] = MappingProxyType({}),
    ) -> None:
        client = Client(
            connections=connections,
            silence_s=timeout_s,
            resolve=None if guard is None else guard.resolve,
        )
        self._guard = guard
        self._redirects = redirects
        self._reader = RangeReader(_Paths(), client, follow=self._follow)

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Send one GET."""
        return await self._reader.get(ref, request, if_match, if_none_match)

    def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Send one GET and pass its body on."""
        return self._reader.stream(ref, byte_range, if_match)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Send one HEAD."""
        return await self._reader.stat(ref)

    def list(
        self,
        prefix: ObjectRef,
        *,
        delimiter: str = "",  # noqa: ARG002  the contract's argument
        after: str = "",  # noqa: ARG002  likewise
    ) -> AsyncIterator[Listed]:
        """Raise when iterated: HTTP has no listing."""
        return _Unlisted(prefix)

    async def reach(self, root: ObjectRef) -> None:
        """Take any answer below 500 for a server that works."""
        if (status := await self._reader.probe(root)) >= _SERVER_FAULT:
            raise StorageUnavailableError(root, f"the server answered {status}")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._reader.aclose()

    def _follow(self, ref: ObjectRef, target: Target, location: str) -> Target:
        """Return where the redirect of *ref* to *location* leads.

        Raises: `StorageRedirectError`, or what the guard raises.
        """
        try:
            found = target.redirected(location)
        except BadUrlError as error:
            shown = location.partition("?")[0].rpartition("@")[2]
            raise StorageRedirectError(ref, f"redirected to {shown!r}: {error}") from error
        if self._guard is not None:
            self._guard.follow(found)
        elif not any(
            is_below(found, prefix)
            for prefix in (Target(ref.bucket), *self._redirects.get(ref.bucket, ()))
        ):
            shown = found.without_query
            raise StorageRedirectError(
                ref, f"redirected to {shown}, which is neither below the root nor in its redirects"
            )
        return found


class _Paths:
    """Makes URLs by quoting keys; there is nothing to renew."""

    sends_etags = False

    async def target(self, _: Method, ref: ObjectRef) -> Target:
        return _target(ref)

    def renew(self, *_: object) -> bool:
        return False

    def proves_absence(self, refusal: Refusal) -> bool:
        return refusal.status in _ABSENT


class _Unlisted:
    def __init__(self, prefix: ObjectRef) -> None:
        self._prefix = prefix

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Listed:
        raise StorageUnavailableError(self._prefix, "an HTTP server cannot be listed", lasting=True)


@lru_cache(maxsize=8192)
def _target(ref: ObjectRef) -> Target:
    """Quote the key; servers would follow dots out of the folder, and no quoting stops them."""
    if not {".", ".."}.isdisjoint(ref.key.split("/")):
        raise StorageDeniedError(ref, "the key climbs")
    return Target(f"{ref.bucket.removeprefix(GUARDED)}/{quote(ref.key, safe='/~')}")
