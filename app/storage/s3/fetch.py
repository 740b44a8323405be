"""Bytes of the object that is replaced, to be sent again."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from cachetools import LRUCache

from app.errors import RangeNotSatisfiedError, VersionChangedError
from app.model import ByteRange, Condition, ETag, ObjectRef, Piece
from app.storage.abreast import abreast, aside, is_large
from app.storage.contract import Found
from app.storage.parts import nbytes_of
from app.storage.patience import Patience
from app.storage.range_reader import RangeReader
from app.storage.spans import assemble, plan_spans

_AT_ONCE: Final = 8
_KEPT_NBYTES: Final = 64 * 1024**2
"""Who writes into a shard mostly does so again: what was sent last need not be fetched then."""


class _Sent(NamedTuple):
    etag: ETag
    body: bytes


class Fetcher:
    """Reads ranges of one version, and keeps what was sent last."""

    def __init__(self, reader: RangeReader, patience: Patience) -> None:
        self._reader = reader
        self._patience = patience
        self._sent: LRUCache[ObjectRef, _Sent] = LRUCache(_KEPT_NBYTES, lambda sent: len(sent.body))

    def keep(self, ref: ObjectRef, etag: ETag, body: bytes) -> None:
        """Remember that *body* is the version *etag* of *ref*."""
        self._sent.pop(ref, None)
        if len(body) <= _KEPT_NBYTES:
            self._sent[ref] = _Sent(etag, body)

    async def join(
        self, ref: ObjectRef, pieces: Sequence[Piece], version: Condition | None
    ) -> tuple[bytes, int]:
        """Join *pieces*, whose ranges are of *version*; tell how many bytes were read.

        Raises: `VersionChangedError`, `RangeNotSatisfiedError`, `StorageError`.
        """
        nbytes = sum(map(nbytes_of, pieces))
        sent = self._sent.get(ref)
        if sent is not None and sent.etag == version:
            size = len(sent.body)
            if any(isinstance(piece, ByteRange) and piece.stop > size for piece in pieces):
                raise RangeNotSatisfiedError(ref, size)
            whole, read = [ByteRange(0, size)], [sent.body]
            return await aside(assemble, pieces, whole, read, is_long=is_large(nbytes)), 0
        spans = plan_spans(piece for piece in pieces if isinstance(piece, ByteRange))
        read = await abreast(lambda span: self._read(ref, span, version), spans, at_a_time=_AT_ONCE)
        body = await aside(assemble, pieces, spans, read, is_long=is_large(nbytes))
        return body, sum(map(len, read))

    async def _read(self, ref: ObjectRef, span: ByteRange, version: Condition | None) -> bytes:
        found = await self._patience.run(ref, lambda: self._reader.get(ref, span, version, None))
        if not isinstance(found, Found):
            raise VersionChangedError(ref)
        if found.byte_range != span:
            raise RangeNotSatisfiedError(ref, found.size)
        return found.data
