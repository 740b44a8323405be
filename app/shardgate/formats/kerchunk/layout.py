"""The format of reference sets, in JSON and in Parquet, and their keys located and listed."""

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from math import prod
from operator import itemgetter
from typing import Final
from urllib.parse import quote

import numpy as np

from shardgate.errors import DamagedError
from shardgate.formats.kerchunk import json_set, parquet_set
from shardgate.formats.kerchunk.json_set import decode_json_set
from shardgate.formats.kerchunk.parquet_set import decode_catalog, decode_table
from shardgate.formats.kerchunk.reference_table import (
    ABSENT,
    CONSOLIDATED,
    InvalidReference,
    ReferenceGrid,
    ReferenceSet,
    ReferenceTable,
    SourcePart,
)
from shardgate.formats.listing import Window
from shardgate.formats.members import SET_SUFFIXES, Members, Place
from shardgate.formats.reading import BoundDecoder, DecodeError, Fetch, Opaque, Read, RunInThread
from shardgate.formats.references import SLASHES, Allowed, resolve
from shardgate.formats.surveying import ABSENT_SOURCE, ChunkCollection, Listing
from shardgate.model import MISSING, ByteRange, ETag, Inline, ObjectRef, Part, Stored

_FILE: Final = re.compile(r"^(?:(?:file|local):)?/(?!/)|^/+", re.IGNORECASE)
"""Begin of the absolute path of a file, as fsspec takes it: with one slash, or without a scheme."""
_MOST_NAMED: Final = 100  # invalid references in a description


@dataclass(frozen=True, slots=True)
class Kerchunk:
    """Format of objects ``*.json``, perhaps compressed, and of directories with ``.zmetadata`` that
    has a ``record_size``. References lead to objects below the *allowed* prefixes.
    """

    limit_nbytes: int
    """Most bytes of a set in JSON, of a catalog, and of a table, also once it is inflated."""
    decoded_nbytes: int
    """See `Members`."""
    allowed: tuple[Allowed, ...] = ()

    @property
    def patterns(self) -> Sequence[str]:
        return [*(f"*{suffix}" for suffix in SET_SUFFIXES), CONSOLIDATED]

    def is_container(self, name: str) -> bool:
        return name.lower().endswith(SET_SUFFIXES)

    async def open(self, ref: ObjectRef, fetch: Fetch) -> Members | None:
        if self.is_container(ref.key):
            document = ref
            decode = BoundDecoder(decode_json_set, (self.limit_nbytes,))
        else:
            document = ref.join(CONSOLIDATED)
            decode = BoundDecoder(decode_catalog, (self.limit_nbytes,))
        request = ByteRange(0, self.limit_nbytes + 1)
        memory_nbytes = json_set.memory_nbytes
        read = Read("metadata", document, request, decode, None, memory_nbytes, is_marker=True)
        found = await fetch(read)
        if found is None or not found.value.is_metadata:
            return None
        return ReferencedMembers(
            ref,
            found.etag,
            self.decoded_nbytes,
            None,
            self.limit_nbytes,
            self.allowed,
            document,
            found.value,
        )


@dataclass(frozen=True, slots=True)
class ReferencedMembers(Members):
    """The keys of one version of a set, which *document* has."""

    limit_nbytes: int
    allowed: tuple[Allowed, ...]
    document: ObjectRef
    decoded: ReferenceSet

    @property
    def references(self) -> ObjectRef:
        return self.document

    async def find(self, name: str, fetch: Fetch) -> Place:
        ref = self.document
        etag = self.etag
        table = self.decoded.table
        row = self.decoded.names.position(name)
        if row is None:
            chunk = self.decoded.find_chunk(name)
            if chunk is None:
                return MISSING
            if isinstance(chunk, InvalidReference):
                raise DamagedError(ref, f"{name}: {chunk.reason}")
            path, number = chunk
            record, row = divmod(number, self.decoded.record_size)
            read = self._read_table(path, record)
            if (found := await fetch(read)) is None:
                return MISSING
            # From here on the same of another table, and of its file.
            ref = read.ref
            etag = found.etag
            table = found.value
        match table.lookup(row):
            case None:
                return MISSING
            case bytes(data):
                # ``k1`` changes whenever the same set is served in another form.
                return Inline(data, ETag(f'{etag[:-1]}-{row:x}-k1"'))
            case InvalidReference(reason):
                raise DamagedError(ref, f"{name}: {reason}")
            case source:
                try:
                    return await self._follow(source, fetch)
                except DecodeError as error:
                    raise DamagedError(ref, f"{name}: {error}") from error

    async def _follow(self, source: SourcePart, fetch: Fetch) -> Place:
        """Locate *source*. Raises: `DecodeError`, `NotAllowedError`, `DamagedError`."""
        ref = resolve_source(source.url, self.allowed)
        if source.byte_range is not None:
            return Part(ref, source.byte_range)
        first = await fetch(Read("reference-source", ref, ByteRange(0, 1), Opaque))
        if first is None:
            raise DamagedError(ref, ABSENT_SOURCE)
        return Stored(ref, ByteRange(0, first.size), first.etag)

    async def below(
        self, prefix: str, after: str, delimiter: str, fetch: Fetch
    ) -> AsyncIterator[tuple[str, int | None]]:
        references = self.decoded
        window = Window(prefix, after, delimiter)
        arrays = [
            (f"{path}/0", (path, grid))
            for path, grid in references.arrays.items()  # its document has the same folder
            if isinstance(grid, ReferenceGrid)
            and 0 not in grid.counts
            and window.meets(f"{path}/")
            and window.fold(f"{path}/") is None
        ]
        names = references.names.below(prefix, after, delimiter)
        by_name = itemgetter(0)
        for name, found_at in merge(names, sorted(arrays, key=by_name), key=by_name):
            if isinstance(found_at, tuple):
                async for key in self._chunks(*found_at, window, fetch):
                    yield key
            else:
                yield name, None if found_at is None else references.table.length_of(found_at)
        if references.fault:
            raise DamagedError(self.document, references.fault)

    async def collections(
        self, _fetch: Fetch, _listing: Listing, run_in_thread: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        references = self.decoded
        faults = await run_in_thread(lambda: [*islice(references.invalid(), _MOST_NAMED + 1)])
        if references.fault:
            faults.insert(0, ("", references.fault))
        damages = [
            DamagedError(self.ref.join(name) if name else self.document, reason)
            for name, reason in faults[:_MOST_NAMED]
        ]
        if len(faults) > _MOST_NAMED:
            reason = f"it has more than {_MOST_NAMED} invalid references"
            damages.append(DamagedError(self.document, reason))
        return [*references.left_out.describe("kerchunk"), *damages]

    async def _chunks(
        self, path: str, grid: ReferenceGrid, window: Window, fetch: Fetch
    ) -> AsyncIterator[tuple[str, int | None]]:
        """Yield the keys of chunks of the array at *path*."""
        size = self.decoded.record_size
        count = prod(grid.counts)
        tables = -(-count // size)
        if count > 2**26 or tables > 2**14:  # 64 MiB of memory, and so many reads
            reason = f"{path}: {count} chunks in {tables} tables are too many to be listed"
            raise DamagedError(self.document, reason)
        present = np.zeros(count, np.bool_)
        for record in range(tables):
            if (found := await fetch(self._read_table(path, record))) is not None:
                part = present[record * size : (record + 1) * size]
                rows = found.value.sources[: len(part)] != ABSENT
                part[: len(rows)] = rows
        last = window.after
        for key, number in grid.names(present.reshape(grid.counts), f"{path}/", window):
            record, row = divmod(number, size)
            name = window.fold(key) or key
            if name <= last or not key.startswith(window.prefix):
                continue
            last = name
            nbytes = None
            table = await fetch(self._read_table(path, record)) if name == key else None
            if table is not None and row < len(table.value):
                nbytes = table.value.length_of(row)
            yield name, nbytes

    def _read_table(self, path: str, record: int) -> Read[ReferenceTable]:
        """Return the read of a table of the array at *path*."""
        ref = self.ref.join(f"{path}/refs.{record}.parq")
        decode = BoundDecoder(decode_table, (self.decoded.record_size, self.limit_nbytes))
        request = ByteRange(0, self.limit_nbytes + 1)
        return Read("references", ref, request, decode, None, parquet_set.memory_nbytes)


def resolve_source(url: str, allowed: Sequence[Allowed]) -> ObjectRef:
    """Return the object at *url* as fsspec understands it: only http URLs are percent-encoded, an
    absolute path is that of a local file, and empty segments of such a path do not count. What
    *allowed* prefixes contain is decided of the resolved path. Raises: `DecodeError`,
    `NotAllowedError`.
    """
    try:
        url.encode()
    except UnicodeEncodeError as error:
        raise DecodeError(f"a reference to {url[:200]!r}: {error}") from None
    scheme, is_url, place = _FILE.sub("file:///", url).partition("://")
    if not is_url:
        shown = repr(url[:200]) if url else "nothing"
        raise DecodeError(f"a reference to {shown}: expected a URL, or the absolute path of a file")
    authority, slash, path = place.partition("/")
    is_file = scheme.lower() in ("file", "local")
    is_web = scheme.lower() in ("http", "https")
    if is_file:
        path = SLASHES.sub("/", path).removeprefix("/")
    if is_file or is_web:
        path = _without_dots(path)
    if not is_web:
        path = quote(path)
    elif "?" in place:
        raise DecodeError("a reference to a URL with a query")
    return resolve(f"{scheme}://{authority}{slash}{path}", allowed)


def _without_dots(path: str) -> str:
    """Resolve the segments ``.`` and ``..`` (RFC 3986 §5.2.4): names in buckets may have them."""
    kept: list[str] = []
    segments = path.split("/")
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in (".", ".."):
        kept.append("")
    return "/".join(kept)
