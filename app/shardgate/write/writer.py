"""Write virtual keys: inner chunks into shards, documents translated, other objects unchanged."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple

from shardgate.auditing import AuditedChange, new_change
from shardgate.concurrency import (
    bounded_gather,
    retry_conflicts,
    run_in_thread,
    take,
    yield_to_loop,
)
from shardgate.errors import (
    BadBodyError,
    BadKeyError,
    DamagedError,
    PreconditionFailedError,
    PreconditionRequiredError,
    RangeNotSatisfiedError,
    ShardgateError,
    TooLargeError,
    UnknownCodingError,
    UnsupportedError,
    UnwritableError,
)
from shardgate.formats.compression import CODINGS, decode_content
from shardgate.formats.contract import Document, ShardRewriter, Slot, Stray, Target
from shardgate.formats.documents import etag_of_rewritten
from shardgate.formats.listing import Window
from shardgate.formats.reading import DecodeError, Read, Versioned, Weighable
from shardgate.model import SHARDED, ByteRange, ETag, ObjectRef, VirtualKey, Whole
from shardgate.read.bodies import Demand, forms_of
from shardgate.read.consistency import FreshnessTracker, consistent
from shardgate.read.containers import LIKE_A_CHUNK, Dataset, PassThrough, Routes, split_sharded
from shardgate.read.metadata_cache import ReadCache
from shardgate.read.resolver import Resolver
from shardgate.storage.contract import (
    ABSENT,
    NO_HEADERS,
    Conflict,
    Expected,
    Found,
    ObjectHeaders,
    ObjectStore,
)
from shardgate.write.rewrite import ChunkChange, Rewrites

_AT_ONCE: Final = 16
_ERASED_AT_ONCE: Final = 50_000  # keys, so that each shard is rewritten once
_PAGE: Final = 1000
_SET_BY_TOOLS: Final = {
    "mtime",
    "md5chksum",
    "s3cmd-attrs",
    "icclient",
    "iccompalg",
    "icechunkwriteid",
    "icfiletype",
    "icspecver",
}
"""User metadata that rclone, s3cmd and Icechunk add to every object and do not need."""

type Outcome = ETag | ShardgateError | None
"""The new version of a key, `None` if it was deleted, or the error that prevented the write."""


class KeyWrite(NamedTuple):
    """Write of a key; `None` as body deletes it."""

    key: VirtualKey
    body: bytes | None
    headers: ObjectHeaders = NO_HEADERS
    """Stored if the key names an object and the store keeps headers."""
    demand: Demand | None = None
    change: AuditedChange | None = None
    """Gets the version before, if the write is logged."""


class PassthroughWriter:
    """Writes objects outside of shards, and invalidates their cached state."""

    def __init__(
        self, store: ObjectStore, reads: ReadCache, *, document_bytes: int, decoded_bytes: int
    ) -> None:
        self._store = store
        self._reads = reads
        self._document_bytes = document_bytes
        self._decoded_bytes = decoded_bytes

    async def put(
        self, ref: ObjectRef, body: bytes, headers: ObjectHeaders, *, demand: Demand | None
    ) -> ETag:
        """Store *body* with *headers*, or the inflated body where the store keeps no headers."""
        is_kept = headers == NO_HEADERS or self._store.keeps_headers(ref)
        if body and headers.coding in CODINGS:
            inflated = await self._inflate(headers.coding, body)  # else no reader could
            body = body if is_kept else inflated
            del inflated  # frees its memory while the store is slow
        headers = headers if is_kept else NO_HEADERS

        async def attempt() -> ETag | Conflict:
            expected = await self._expected(ref, demand)
            return await self._store.put(ref, [body], expected=expected, headers=headers)

        etag = await self._repeat(ref, attempt)
        self._reads.mark_removed(ref)  # a marker may be replaced by anything; a read will tell
        return etag

    async def delete(
        self, ref: ObjectRef, *, demand: Demand | None, is_document: bool = False
    ) -> None:
        """Delete *ref* if it exists; clients may know a document by the ETag of another form."""

        async def attempt() -> bool | Conflict:
            expected = await self._expected(ref, demand, is_document=is_document)
            return await self._store.delete(ref, expected=expected)

        if not await self._repeat(ref, attempt):
            raise UnwritableError(f"{ref}: the store cannot remove one version and no other")
        self._reads.mark_removed(ref)

    async def put_document(
        self, document: Document, body: bytes, *, coding: str, demand: Demand | None
    ) -> ETag:
        """Translate *body*, the document as clients see it, to its stored form, and store that."""
        requested = await self._inflate(coding, body) if coding else body
        self._demand_short(document.ref, requested)
        ref = document.ref
        translated = requested

        async def attempt() -> ETag | Conflict:
            nonlocal translated
            stored, etag = await self._stored(ref)
            _check_demand(demand, ref, etag, is_document=True)
            translated = await document.translator.translate(
                requested, stored, self._read_anew, run_in_thread
            )
            self._demand_short(ref, translated)
            return await self._store.put(ref, [translated], expected=etag or ABSENT)

        etag = await self._repeat(ref, attempt)
        if await run_in_thread(document.translator.is_marker, translated):
            self._reads.mark_present(ref)
        else:
            self._reads.mark_removed(ref)
        return etag if translated == requested else etag_of_rewritten(etag)

    def _demand_short(self, ref: ObjectRef, document: bytes) -> None:
        if len(document) > self._document_bytes:
            reason = f"over {self._document_bytes} bytes of metadata: limits.metadata_bytes"
            raise TooLargeError(f"{ref}: {reason}")

    async def _repeat[T](self, ref: ObjectRef, attempt: Callable[[], Awaitable[T | Conflict]]) -> T:
        try:
            return await retry_conflicts(attempt, Conflict, ref)
        finally:  # a failed write may have taken effect
            self._reads.forget(ref)

    async def _expected(
        self, ref: ObjectRef, demand: Demand | None, *, is_document: bool = False
    ) -> Expected:
        if demand is None:
            return None
        stat = await self._store.stat(ref)
        etag = None if stat is None else stat.etag
        _check_demand(demand, ref, etag, is_document=is_document)
        return ABSENT if etag is None else etag

    async def _read_anew[T: Weighable](
        self, read: Read[T], /, *, allow_stale: bool = False
    ) -> Versioned[T] | None:
        await self._reads.refresh(read)
        return await self._reads(read, allow_stale=allow_stale)

    async def _stored(self, ref: ObjectRef) -> tuple[bytes | None, ETag | None]:
        max_nbytes = self._document_bytes
        try:
            found = await self._store.get(ref, ByteRange(0, max_nbytes + 1))
        except RangeNotSatisfiedError:  # an empty object
            found = await self._store.get(ref)
        if not isinstance(found, Found):
            return None, None
        try:
            data = found.data
            if found.coding in CODINGS:
                data = await asyncio.to_thread(decode_content, found.coding, data, max_nbytes)
        except DecodeError as error:
            raise DamagedError(ref, str(error)) from error
        if len(data) > max_nbytes:
            reason = f"metadata of more than {max_nbytes} bytes: limits.metadata_bytes"
            raise DamagedError(ref, reason)
        return data, found.etag

    async def _inflate(self, coding: str, body: bytes) -> bytes:
        try:
            return await asyncio.to_thread(decode_content, coding, body, self._decoded_bytes)
        except DecodeError as error:
            raise BadBodyError(str(error)) from error


def _check_demand(
    demand: Demand | None, ref: ObjectRef, etag: ETag | None, *, is_document: bool
) -> None:
    """Raise `PreconditionFailedError` unless *demand* accepts the version *etag* of *ref*."""
    names: Sequence[ETag] = () if etag is None else forms_of(etag)
    if etag is not None and is_document:  # clients may know the ETag of its served form
        names = (*names, *forms_of(etag_of_rewritten(etag)))
    if demand is not None and (reason := demand(names)) is not None:
        raise PreconditionFailedError(f"{ref}: {reason}")


class Writer:
    """Writes virtual keys durably; readers of this process see each write once it returns."""

    def __init__(
        self, store: ObjectStore, reads: ReadCache, objects: PassthroughWriter, rewrites: Rewrites
    ) -> None:
        self._store = store
        self._reads = reads
        self._routes = Routes(reads)
        self._objects = objects
        self._rewrites = rewrites

    async def put(self, dataset: Dataset, write: KeyWrite) -> ETag | None:
        """Write one key, and return its new version, `None` if it was deleted."""
        if (noted := new_change()) is not None:
            write = write._replace(change=noted)
        await self._store.verify_conditional_writes(dataset.root)
        target = await self._target(dataset, write, self._reads.clock())
        _demand_version(dataset, write)
        if isinstance(target, Slot):
            change = await _encode(target, write)
            await self._rewrites.make(target.shard, (change,))
            etag = await change.done
        else:
            etag = await self._write(target, write)
        if noted is not None:
            noted["after"] = etag
        return etag

    async def check_writable(
        self, dataset: Dataset, key: VirtualKey, headers: ObjectHeaders = NO_HEADERS
    ) -> None:
        """Raise what `put` would for *key*, whatever the body."""
        await self._store.verify_conditional_writes(dataset.root)
        await self._target(dataset, KeyWrite(key, b"", headers), self._reads.clock())

    async def put_each(self, dataset: Dataset, writes: Sequence[KeyWrite]) -> list[Outcome]:
        """Write many keys, those of a shard in one rewrite; the last write of a key wins."""
        await self._store.verify_conditional_writes(dataset.root)
        began_at = self._reads.clock()
        outcomes: dict[VirtualKey, Outcome] = {}
        shards: defaultdict[ShardRewriter[Any], dict[VirtualKey, ChunkChange]] = defaultdict(dict)
        objects: list[tuple[Document | Whole, KeyWrite]] = []
        last_writes = {write.key: write for write in writes}
        for number, (key, write) in enumerate(last_writes.items()):
            await yield_to_loop(number)
            try:
                target = await self._target(dataset, write, began_at)
                _demand_version(dataset, write)
                if isinstance(target, Slot):
                    shards[target.shard][key] = await _encode(target, write)
                else:
                    objects.append((target, write))
            except ShardgateError as error:
                outcomes[key] = error

        async def rewrite(
            shard: ShardRewriter[Any], changes: Mapping[VirtualKey, ChunkChange]
        ) -> None:
            await self._rewrites.make(shard, tuple(changes.values()))
            for number, (key, change) in enumerate(changes.items()):
                outcomes[key] = await _outcome(change.done)
                await yield_to_loop(number)

        async def put(target: Document | Whole, write: KeyWrite) -> None:
            outcomes[write.key] = await _outcome(self._write(target, write))

        jobs = [partial(rewrite, *each) for each in shards.items()]
        jobs += [partial(put, *each) for each in objects]
        await bounded_gather(lambda job: job(), jobs, limit=_AT_ONCE)
        return [outcomes[write.key] for write in writes]

    async def _target(
        self, dataset: Dataset, write: KeyWrite, began_at: float
    ) -> Slot | Document | Whole:
        """Return where a key is written, by metadata that were fresh when the request *began_at*.

        A chunk of a new array must not be written as an object: a key like a chunk's names an
        object only if there is no array yet.
        """
        key = write.key

        async def attempt(tracker: FreshnessTracker) -> Target:
            target = await self._routes.target(dataset, key, tracker)
            absent_s = inf
            if isinstance(target, Whole | Stray):
                # A key like a chunk's names an object only if no array was created a moment ago.
                is_doubtful = tracker.ends_in_absence and LIKE_A_CHUNK.search(key)
                absent_s = 0 if is_doubtful else 1.0
            # Metadata, or their absence, that are cached for longer are read again.
            await tracker.confirm_older(began_at, 5.0, absent_s)
            return target

        target = await consistent(self._reads, attempt)
        if not isinstance(target, Stray):
            self._check_headers(target, write)
            return target
        if write.body is not None:
            raise BadKeyError(f"{key} is no chunk: write the metadata of its array first")
        return Whole(target.ref)

    def _check_headers(self, target: Slot | Document | Whole, write: KeyWrite) -> None:
        coding, _, metadata = write.headers
        if isinstance(target, Whole) and self._store.keeps_headers(target.ref):
            return
        if coding and coding not in CODINGS:
            reason = "can be neither kept nor removed"
            raise UnknownCodingError(f"{write.key}: Content-Encoding: {coding} {reason}")
        for name, _ in metadata:
            if name not in _SET_BY_TOOLS:
                reason = "cannot be kept, only objects in S3 have metadata"
                raise UnsupportedError(f"{write.key}: x-amz-meta-{name} {reason}")

    async def _write(self, target: Document | Whole, write: KeyWrite) -> ETag | None:
        _, body, headers, demand, change = write
        is_document = isinstance(target, Document)
        if change is not None and (demand is not None or (is_document and body is not None)):
            demand = partial(_note_version, change, demand)  # such writes find the version anyway
        elif change is not None:
            with suppress(ShardgateError):  # the write itself needs no such right
                stat = await self._store.stat(target.ref)
                change["before"] = None if stat is None else stat.etag
        if body is None:
            await self._objects.delete(target.ref, demand=demand, is_document=is_document)
            return None
        if isinstance(target, Document):
            return await self._objects.put_document(
                target, body, coding=headers.coding, demand=demand
            )
        return await self._objects.put(target.ref, body, headers, demand=demand)


def _note_version(
    change: AuditedChange, demand: Demand | None, versions: Sequence[ETag]
) -> str | None:
    """Note the first of *versions*, that which is replaced, and apply *demand*."""
    change["before"] = next(iter(versions), None)
    return None if demand is None else demand(versions)


def _demand_version(dataset: Dataset, write: KeyWrite) -> None:
    """Raise `PreconditionRequiredError` if a write below `SHARDED` names no version."""
    demand = write.demand
    # If-Match: * and lists in If-None-Match accept versions that the client has not seen; this tag
    # stands for one, as no header has it.
    is_blind = demand is None or demand([ETag('"\0"')]) is None
    if is_blind and split_sharded(dataset, write.key)[0].containers.is_sharded:
        raise PreconditionRequiredError(
            f"{write.key} may hold chunks that others have written since it was read: send If-Match"
            " with the ETag that was read, or If-None-Match: * for a new object"
        )


async def _encode(slot: Slot, write: KeyWrite) -> ChunkChange:
    shard, entry = slot
    body = write.body
    if body is not None:
        encode = partial(shard.encode, entry, body, coding=write.headers.coding)
        body = await run_in_thread(encode, is_long=len(body) > 32 * 1024)
    return ChunkChange(write.key, entry, body, write.demand, write.change)


async def _outcome(write: Awaitable[ETag | None]) -> Outcome:
    try:
        return await write
    except ShardgateError as error:
        return error


class Eraser:
    """Deletes all keys below a prefix, durably."""

    def __init__(self, resolver: Resolver, objects: PassthroughWriter, writer: Writer) -> None:
        self._resolver = resolver
        self._objects = objects
        self._writer = writer

    async def erase(self, dataset: Dataset, prefix: VirtualKey) -> int:
        """Delete all keys that begin with *prefix*, which ends in a slash; return their number.

        Of whole containers, and outside of containers, objects are deleted and counted.

        Raises: `ReadOnlyError` for a repository at or below *prefix*; the first error of a key.
        """
        if split_sharded(dataset, prefix)[0].containers.is_sharded:
            raise PreconditionRequiredError(
                f"{prefix} has no version: delete its keys by If-Match, or without {SHARDED}"
            )
        await self._check_writable(dataset, f"{prefix}0.0")  # named like a chunk, and not a mesh
        layout, rest, *_ = await self._resolver.find_container(dataset, prefix)
        if not rest or isinstance(layout, PassThrough):
            await self._demand_erasable(dataset, prefix)
            return await self._erase_objects(dataset, prefix)
        return await self._erase_keys(dataset, prefix)

    async def _check_writable(self, dataset: Dataset, key: str) -> None:
        with suppress(BadKeyError):  # that is the name of no chunk, but others may be
            await self._writer.check_writable(dataset, VirtualKey(key))

    async def _demand_erasable(self, dataset: Dataset, prefix: VirtualKey) -> None:
        """Raise if any object below *prefix* is read-only, before the first is deleted."""
        root = self._resolver.root(dataset)
        checked = None
        async for each in root.store.list(dataset.root.join(prefix).prefix):
            path = each.ref.key.removeprefix(dataset.root.prefix.key).rpartition("/")[0]
            # Objects of one folder follow one another, and are written alike.
            if path != checked:
                checked = path
                await self._check_writable(dataset, f"{path}/_")

    async def _erase_objects(self, dataset: Dataset, prefix: VirtualKey) -> int:
        listed = self._resolver.root(dataset).store.list(dataset.root.join(prefix).prefix)
        count = 0
        while batch := await take(listed, _PAGE):
            await bounded_gather(
                lambda each: self._objects.delete(each.ref, demand=None), batch, limit=_AT_ONCE
            )
            count += len(batch)
        return count

    async def _erase_keys(self, dataset: Dataset, prefix: VirtualKey) -> int:
        count = 0
        after: str | None = ""
        while after is not None:
            keys: list[VirtualKey] = []
            while after is not None and len(keys) < _ERASED_AT_ONCE:
                page = await self._resolver.page(dataset, Window(prefix, after), _PAGE)
                keys += [VirtualKey(entry.key) for entry in page.entries]
                after = page.after
            writes = [KeyWrite(key, None) for key in keys]
            for outcome in await self._writer.put_each(dataset, writes):
                if isinstance(outcome, ShardgateError):
                    raise outcome
            count += len(keys)
        return count
