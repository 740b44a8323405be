"""Writes objects of S3 by compare-and-swap, and lets the server copy what it has."""

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from crc32c import crc32c

from app.errors import StorageTimeoutError, VersionChangedError
from app.model import ByteRange, ETag, ObjectRef, Piece
from app.storage.abreast import aside, is_large
from app.storage.contract import CONFLICT, Conflict, Expected, ObjectHeaders
from app.storage.moved import Moved, OnWrite, unheard
from app.storage.parts import Part, nbytes_of, plan_parts
from app.storage.patience import Patience
from app.storage.range_reader import RangeReader
from app.storage.ranges import is_derived
from app.storage.s3.client import S3Client
from app.storage.s3.fetch import Fetcher
from app.storage.s3.joining import Joiner
from app.storage.s3.look import Seen, look
from app.storage.s3.probe import Abilities, Probe
from app.storage.s3.removal import Removal
from app.storage.s3.swap import Swap, Write
from app.storage.s3.sweep import Sweeper
from app.storage.s3.upload import CannotCopyError, Tools
from app.storage.s3.write_ids import Lineage, WriteIds, next_ids
from app.storage.writes import demand_writable

_KEY_BYTES: Final = 990
"""Longer keys leave no room for the name of an unfinished object."""


class Writing(NamedTuple):
    """How objects are written, and who hears of it."""

    deadline_s: float = 30.0
    """Longest silence while the server works, and about half of the longest time for a request
    with all that it is repeated."""
    copied_nbytes: int = 16 * 1024**2
    """Where the ranges of an object that is replaced are shorter in sum, all of it is sent.

    Measured with SeaweedFS on the same machine, which copies twice: 16 MiB take 0.16 s either way,
    256 MiB 2.4 s; what is sent goes over the network as well.
    """
    whole_nbytes: int = 64 * 1024**2
    """Larger objects are not put together in memory, but sent in parts."""
    stale_s: float = 3600.0
    """What is unfinished for so long is no one's any more, and removed."""
    on_write: OnWrite = unheard


WRITING: Final = Writing()


class S3Writer:
    """Does what `ObjectWriter` promises."""

    def __init__(self, client: S3Client, reader: RangeReader, writing: Writing) -> None:
        self._writing = writing
        self._client = client
        self._patience = Patience(2 * writing.deadline_s)
        self._fetcher = Fetcher(reader, Patience(writing.deadline_s))
        tools = Tools(client, self._patience, self._fetcher)
        self._sweeper = Sweeper(tools, writing.stale_s)
        self._joiner = Joiner(tools, self._sweeper)
        self._on_write = writing.on_write
        self._lineage = Lineage()
        self._abilities: dict[str, Abilities] = {}
        self._safe: set[ObjectRef] = set()
        self._probing = asyncio.Lock()
        self._cannot_copy: set[str] = set()

    async def demand_safety(self, root: ObjectRef) -> None:
        """Try the server once; who waits for that tries it again if it fails."""
        if root in self._safe:
            return
        try:
            async with asyncio.timeout(self._patience.deadline_s), self._probing:
                if root not in self._safe:
                    probe = Probe(self._client, self._patience, root)
                    self._abilities[root.bucket] = await probe.run()
                    self._safe.add(root)
        except TimeoutError as error:
            raise StorageTimeoutError(root, "the server was not tried in time") from error
        await self._sweeper.sweep(root.prefix)

    async def put(
        self, ref: ObjectRef, pieces: Sequence[Piece], expected: Expected, headers: ObjectHeaders
    ) -> ETag | Conflict:
        """Write the object in the way that moves the least."""
        demand_writable(ref, pieces, expected)
        before = await self._ids_of(ref, expected)
        if isinstance(before, Conflict):
            return CONFLICT
        write = Write(ref, expected, next_ids(before), headers)
        etag = await self._put(write, pieces)
        if not isinstance(etag, Conflict):
            self._lineage.keep(ref, etag, write.ids)
        return etag

    async def delete(self, ref: ObjectRef, expected: ETag | None) -> bool | Conflict:
        """Remove the object, if it is in the version *expected*."""
        demand_writable(ref, (), expected)
        if expected is not None and is_derived(expected):
            return CONFLICT
        if expected is not None and not (await self._abilities_of(ref)).deletes:
            return False
        return await Removal(self._client, self._patience, ref, expected).run()

    async def _put(self, write: Write, pieces: Sequence[Piece]) -> ETag | Conflict:
        total = sum(map(nbytes_of, pieces))
        kept = sum(piece.length for piece in pieces if isinstance(piece, ByteRange))
        if kept >= self._writing.copied_nbytes and write.ref.bucket not in self._cannot_copy:
            try:
                etag = await self._join(write, await asyncio.to_thread(plan_parts, pieces))
            except CannotCopyError:
                self._cannot_copy.add(write.ref.bucket)
            else:
                if etag is not None:
                    return etag
        if total > self._writing.whole_nbytes:
            parts = await asyncio.to_thread(plan_parts, pieces, copies=False)
            etag = await self._join(write, parts)
            if etag is not None:
                return etag
        return await self._send(write, pieces)

    async def _join(self, write: Write, parts: Sequence[Part]) -> ETag | Conflict | None:
        """Upload in parts, or not at all if nothing would be safe or saved by that."""
        abilities = await self._abilities_of(write.ref)
        if abilities.joining is None or not abilities.keeps_metadata:
            return None
        if len(parts) < 2 or len(write.ref.key.encode()) > _KEY_BYTES:  # noqa: PLR2004  not one
            return None
        etag, moved = await self._joiner.put(write, parts, abilities.joining)
        self._on_write("copy" if moved.copied else "put", write.ref, moved)
        return etag

    async def _send(self, write: Write, pieces: Sequence[Piece]) -> ETag | Conflict:
        version = write.expected if isinstance(write.expected, str) else None
        try:
            body, fetched = await self._fetcher.join(write.ref, pieces, version)
        except VersionChangedError:
            return CONFLICT
        checksum = await aside(_checksum, body, is_long=is_large(len(body)))
        send = partial(
            self._client.ask,
            write.ref,
            "put_object",
            Body=body,
            ChecksumCRC32C=checksum,
            **write.headers,
        )
        abilities = self._abilities.get(write.ref.bucket)
        is_bare = abilities is not None and not abilities.keeps_metadata
        holds = partial(self._holds, write.ref, body) if is_bare else None
        try:
            etag = await Swap(self._client, self._patience, write, send, holds).run()
        finally:
            self._on_write("put", write.ref, Moved(len(body), fetched))
        if not isinstance(etag, Conflict):
            self._fetcher.keep(write.ref, etag, body)
        return etag

    async def _holds(self, ref: ObjectRef, body: bytes, seen: Seen) -> bool:
        if seen.size != len(body):
            return False
        data, _ = await self._fetcher.join(ref, [ByteRange(0, seen.size)], seen.etag)
        return data == body

    async def _ids_of(self, ref: ObjectRef, expected: Expected) -> WriteIds | Conflict:
        """Tell what the version *expected* carries, if that still is there."""
        if not isinstance(expected, str):
            return ()
        if is_derived(expected):
            return CONFLICT
        known = self._lineage.find(ref, expected)
        if known is not None:
            return known
        seen = await self._patience.run(ref, lambda: look(self._client, ref))
        return CONFLICT if seen is None or seen.etag != expected else seen.ids

    async def _abilities_of(self, ref: ObjectRef) -> Abilities:
        if ref.bucket not in self._abilities:
            above = ref.key.rpartition("/")[0]
            await self.demand_safety(ObjectRef(ref.bucket, above))
        return self._abilities[ref.bucket]


def _checksum(body: bytes) -> str:
    """Sum *body* up for the server: SeaweedFS stores nothing where a connection ends before it."""
    return b64encode(crc32c(body).to_bytes(4, "big")).decode()
