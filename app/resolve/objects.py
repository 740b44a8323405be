"""Objects and documents, written as they are or in the form in which they are stored."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from app.errors import (
    BadBodyError,
    BusyError,
    DamagedError,
    PreconditionFailedError,
    RangeNotSatisfiedError,
    TooLargeError,
    UnwritableError,
)
from app.formats.compression import inflate
from app.formats.contract import Document
from app.formats.documents import begins_like_json, etag_of_rewritten
from app.formats.reading import DecodeError, Read, Versioned, Weighable
from app.model import ByteRange, ETag, ObjectRef
from app.resolve.entity import Demand, gzip_name
from app.resolve.fetch import ReadCache
from app.storage.contract import (
    ABSENT,
    NO_HEADERS,
    Absent,
    Conflict,
    Expected,
    Found,
    ObjectHeaders,
    ObjectStore,
)

_ATTEMPTS: Final = 10
"""How often a write with a demand is begun anew because another was faster."""


class ObjectWriter:
    """Replaces whole objects; what readers of this process know of them is forgotten."""

    def __init__(
        self, store: ObjectStore, fetch: ReadCache, *, document_bytes: int, decoded_bytes: int
    ) -> None:
        self._store = store
        self._fetch = fetch
        self._document_bytes = document_bytes
        self._decoded_bytes = decoded_bytes

    async def put(
        self, ref: ObjectRef, body: bytes, headers: ObjectHeaders, *, demand: Demand | None
    ) -> ETag:
        """Store *body* with *headers*, or what it holds where the store keeps none.

        Raises: `PreconditionFailedError`, `BadBodyError`, `BusyError`, `StorageError`.
        """
        is_kept = self._store.keeps_headers(ref)
        if headers.is_gzip:
            inflated = await self._inflated(body)  # else no reader could
            body = body if is_kept else inflated
            del inflated  # not held while the store is slow
        headers = headers if is_kept else NO_HEADERS

        async def attempt() -> ETag | Conflict:
            expected = await self._expected(ref, demand)
            return await self._store.put(ref, [body], expected=expected, headers=headers)

        return await self._repeat(ref, attempt)

    async def delete(
        self, ref: ObjectRef, *, demand: Demand | None, is_document: bool = False
    ) -> None:
        """Remove *ref*, if it is there; a document may be known by the name of another form.

        Raises: `PreconditionFailedError`, `BusyError`, `UnwritableError`, `StorageError`.
        """

        async def attempt() -> bool | Conflict:
            expected = await self._expected(ref, demand, is_document=is_document)
            if isinstance(expected, Absent):
                return True
            return await self._store.delete(ref, expected=expected)

        if not await self._repeat(ref, attempt):
            raise UnwritableError(f"{ref}: the store cannot remove one version and no other")
        self._fetch.mark_removed(ref)

    async def put_document(
        self, document: Document, body: bytes, *, is_gzip: bool, demand: Demand | None
    ) -> ETag:
        """Store what *body*, which is the document as clients see it, is to be stored as.

        Raises: as `put`, and `ConflictError`, `DamagedError`, `TooLargeError`.
        """
        given = await self._inflated(body) if is_gzip else body
        if len(given) > self._document_bytes:
            raise TooLargeError(f"{document.ref}: over {self._document_bytes} bytes of metadata")
        ref, translated = document.ref, given

        async def attempt() -> ETag | Conflict:
            nonlocal translated
            stored, etag = await self._stored(ref)
            if demand is not None and not demand(_names(etag)):
                raise _failed(ref)
            translated = await document.translator.translate(given, stored, self._read_anew)
            return await self._store.put(ref, [translated], expected=etag or ABSENT)

        etag = await self._repeat(ref, attempt)
        if begins_like_json(translated):
            self._fetch.mark_present(ref)
        else:
            self._fetch.mark_removed(ref)
        return etag if translated == given else etag_of_rewritten(etag)

    async def _repeat[T](self, ref: ObjectRef, attempt: Callable[[], Awaitable[T | Conflict]]) -> T:
        for _ in range(_ATTEMPTS):
            try:
                done = await attempt()
            finally:  # what failed may have been done
                self._fetch.forget(ref)
            if not isinstance(done, Conflict):
                return done
        raise BusyError(f"{ref}: others have replaced it {_ATTEMPTS} times meanwhile")

    async def _expected(
        self, ref: ObjectRef, demand: Demand | None, *, is_document: bool = False
    ) -> Expected:
        """Find the version that fulfils *demand*, so that it is replaced and no other."""
        if demand is None:
            return None
        stat = await self._store.stat(ref)
        etag = None if stat is None else stat.etag
        names = _names(etag) if is_document else _names_of_object(etag)
        if not demand(names):
            raise _failed(ref)
        return ABSENT if etag is None else etag

    async def _read_anew[T: Weighable](
        self, read: Read[T], /, *, ever: bool = False
    ) -> Versioned[T] | None:
        """Perform *read*, whatever is known: what is written by that lasts."""
        await self._fetch.has_changed(read)
        return await self._fetch(read, ever=ever)

    async def _stored(self, ref: ObjectRef) -> tuple[bytes | None, ETag | None]:
        """Read the document that is stored, and its version."""
        most_nbytes = self._document_bytes
        try:
            found = await self._store.get(ref, ByteRange(0, most_nbytes + 1))
        except RangeNotSatisfiedError:  # an empty object
            found = await self._store.get(ref)
        if not isinstance(found, Found):
            return None, None
        try:
            data = inflate(found.data, most_nbytes) if found.is_gzip else found.data
        except DecodeError as error:
            raise DamagedError(ref, str(error)) from error
        if len(data) > most_nbytes:
            raise DamagedError(ref, f"metadata of more than {most_nbytes} bytes")
        return data, found.etag

    async def _inflated(self, body: bytes) -> bytes:
        try:
            return await asyncio.to_thread(inflate, body, self._decoded_bytes)
        except DecodeError as error:
            raise BadBodyError(str(error)) from error


def _names_of_object(etag: ETag | None) -> Sequence[ETag]:
    """Give all names that clients may know an object by."""
    return () if etag is None else (etag, gzip_name(etag))


def _names(etag: ETag | None) -> Sequence[ETag]:
    """Give all names that clients may know a document by, rewritten or not."""
    if etag is None:
        return ()
    return (*_names_of_object(etag), *_names_of_object(etag_of_rewritten(etag)))


def _failed(ref: ObjectRef) -> PreconditionFailedError:
    return PreconditionFailedError(f"{ref}: the object is not as the request demands")
