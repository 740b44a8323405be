"""Zarr v3 as drafted in 2022, with the storage transformer ``sharding`` (version 1.0).

A shard of the draft is one of the codec ``sharding_indexed`` with its index at the end,
little-endian and without a checksum. Here an array of the draft is one of that codec whose
elements are chunks: both share index, look-up, rewriting and surveys.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from operator import mul
from typing import Final

from shardgate.errors import ConflictError, DamagedError
from shardgate.formats.compression import MEASURES
from shardgate.formats.contract import Document, Layout, StoredContainer, Target
from shardgate.formats.documents import DocumentDecoder, Json, parse_json, show, write_json
from shardgate.formats.listing import PLAIN, ListingRules
from shardgate.formats.reading import (
    DecodedMetadata,
    DecodeError,
    Fetch,
    Read,
    RunInThread,
    Versioned,
)
from shardgate.formats.surveying import ChunkCollection, Description, Listing, Shards
from shardgate.formats.zarr.array_spec import ArraySpec
from shardgate.formats.zarr.codecs import ChunkForm, item_nbytes, shape_of
from shardgate.formats.zarr.index import IndexCodec, ShardingLevel
from shardgate.formats.zarr.keys import ChunkKeys
from shardgate.formats.zarr.layout import ZarrLimits, chunk_slot, locate_chunk
from shardgate.formats.zarr.metadata import Node, parse_sent, parse_stored
from shardgate.formats.zarr.survey import ZarrShards, walk_chunks
from shardgate.model import MISSING, ByteRange, Location, ObjectRef, VirtualKey, Whole, is_key

_CONSOLIDATED: Final = VirtualKey("meta/root/consolidated/.zmetadata")  # only of zarr-python 2
_CHUNK: Final = "c(?:[0-9]+(?:[/.][0-9]+)*)?"
_CHUNK_NAME: Final = re.compile(f"(?!c/){_CHUNK}/?")
_DATA_KEY: Final = re.compile(f"data/root/((?:[^/]+/)*){_CHUNK}")
"""A key of a chunk: it begins at the last segment with a ``c`` in front, behind the array."""
_CORE: Final = re.compile(r"https?://purl\.org/zarr/spec/(?:protocol/)?core/3(?:\.[0-9]+)?/?")
"""The protocol: ``protocol/core/3.0``, from May 2022 on ``core/3.0``; minor versions add only."""
_SHARDING: Final = re.compile(
    r"https?://purl\.org/zarr/spec/storage[_-]transformers/sharding/1(?:\.[0-9]+)?/?"
)
"""The draft's example and its heading do not agree on the underscore."""
_BY_BYTES: Final = re.compile("[<>|]?[iufc](1|2|4|8|16)")  # core data types but ``bool``, ``r*``
_CODEC: Final = re.compile("https?://.*/codecs?/(.+)")
_LONGEST_SUFFIX: Final = 256  # each key, of up to 1,024 bytes, is compared with it
_TRANSFORMERS: Final = "storage_transformers"
_READ_ONLY: Final = (
    "metadata of sharded arrays of the draft of 2022 are read-only here: write this in the store, "
    'or through a dataset with view = "raw"'
)


def array_of(key: str) -> str | None:
    """Return the path, empty or with a final slash, of a chunk key's array; `None` for others."""
    found = _DATA_KEY.fullmatch(key)
    return None if found is None else found[1]


@dataclass(frozen=True, slots=True)
class Hierarchy(DecodedMetadata):
    """The entry point of a hierarchy."""

    metadata_key_suffix: str
    why_sharded: str = ""

    @property
    def nbytes(self) -> int:
        return len(self.metadata_key_suffix)

    def metadata_key(self, path: str) -> VirtualKey:
        """Return the metadata key of the array at *path* ("Storage keys")."""
        node = f"meta/root/{path}"[:-1]  # the path ends in a slash, or is empty
        return VirtualKey(f"{node}.array{self.metadata_key_suffix}")

    def array_path(self, key: str) -> str | None:
        """Return the path of the array whose metadata key is *key*."""
        suffix = re.escape(f".array{self.metadata_key_suffix}")
        found = re.fullmatch(f"meta/root((?:/[^/]+)*){suffix}", key)
        return None if found is None else f"{found[1]}/"[1:]  # the slash at the other end


@dataclass(frozen=True, slots=True)
class ArrayParser:
    """Understands the metadata of the array at *path*."""

    path: str

    def __call__(self, document: Json, data: bytes) -> Node:
        if not isinstance(document, dict):
            raise DecodeError("the metadata of an array are no object")
        if not document.get(_TRANSFORMERS):
            return Node("array", data, is_rewritten=False)
        try:
            array = parse_draft_array(document, self.path)
            served = write_json(without_transformer(document))
        except DecodeError as reason:
            return Node("array", data, is_rewritten=False, why_sharded=str(reason))
        return Node("array", served, is_rewritten=True, array=array)


def parse_consolidated(document: Json, data: bytes) -> Node:
    """Rewrite the arrays in consolidated metadata; those not understood are unchanged."""
    nodes = document.get("metadata") if isinstance(document, dict) else None
    if not isinstance(nodes, dict):
        return Node("group", data, is_rewritten=False)
    rewritten = {key: _unsharded(node) for key, node in nodes.items()}
    if all(rewritten[key] is node for key, node in nodes.items()):
        return Node("group", data, is_rewritten=False)
    served = write_json({**document, "metadata": rewritten})
    return Node("group", served, is_rewritten=True)


def _unsharded(node: Json) -> Json:
    with suppress(DecodeError):
        if isinstance(node, dict) and node.get(_TRANSFORMERS):
            parse_draft_array(node)
            return without_transformer(node)
    return node


def parse_draft_array(document: dict[str, Json], path: str = "") -> ArraySpec:
    """Read an array with transformers. Raises: `DecodeError` where it cannot be unsharded."""
    sharding = _sharding(document[_TRANSFORMERS])
    if why := _unknown_extension(document.get("extensions")):
        raise DecodeError(why)
    shape = shape_of(document.get("shape"), "shape", least=0)
    grid = document.get("chunk_grid")
    if not isinstance(grid, dict):
        raise DecodeError(f"the chunk grid is no object: {str(grid)[:80]}")
    if grid.get("type") != "regular" or "extension" in grid:
        raise DecodeError(f"the chunk grid is {str(grid.get('type'))[:80]}")
    chunk_shape = shape_of(grid.get("chunk_shape"), "chunk_shape", len(shape))
    separator = grid.get("separator", "/")
    if separator not in ("/", "."):
        raise DecodeError(f"the separator is neither '/' nor '.': {str(separator)[:80]}")
    chunk_counts = tuple(-(-n // size) for n, size in zip(shape, chunk_shape, strict=True))
    counts, per_shard = _shard_grid(chunk_counts, sharding.get("chunks_per_shard"))
    index = IndexCodec(per_shard, "end", big_endian=False, checksum_count=0)
    # Elements are chunks here: an inner chunk has the shape 1 along each axis.
    level = ShardingLevel.of((1,) * len(counts), per_shard, index, tuple(range(len(counts))))
    return ArraySpec(
        shape=counts,
        shard_shape=per_shard,
        keys=ChunkKeys(f"data/root/{path}c", separator, len(counts)),
        levels=(level,),
        codecs=("bytes",),
        chunk=_chunk_form(document, chunk_shape),
    )


def _sharding(transformers: Json) -> dict[str, Json]:
    if not isinstance(transformers, list) or not all(isinstance(t, dict) for t in transformers):
        raise DecodeError(f"storage_transformers is no list of objects: {str(transformers)[:80]}")
    if len(transformers) > 1:
        raise DecodeError("several storage transformers are stacked")
    (transformer,) = transformers
    if not _matches(_SHARDING, extension := transformer.get("extension")):
        raise DecodeError(f"the storage transformer is {str(extension)[:80]}")
    if (shard_format := transformer.get("type")) != "indexed":
        raise DecodeError(f"the binary shard format is {str(shard_format)[:80]}")
    configuration = transformer.get("configuration")
    if not isinstance(configuration, dict):
        raise DecodeError("the sharding transformer has no configuration")
    return configuration


def _shard_grid(
    counts: tuple[int, ...], chunks_per_shard: Json
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Read ``chunks_per_shard``. Of it zarr-python 2 omits trailing dimensions with one chunk per
    shard, and treats an array without dimensions as one of one dimension: its only chunk is ``c0``.
    """
    per_shard = shape_of(chunks_per_shard, "chunks_per_shard")
    if not counts and len(per_shard) == 1:
        counts = (1,)
    if len(per_shard) > len(counts) or (counts and not per_shard):
        raise DecodeError(
            f"chunks_per_shard has {len(per_shard)} dimensions instead of {len(counts)}"
        )
    return counts, per_shard + (1,) * (len(counts) - len(per_shard))


def _chunk_form(document: dict[str, Json], chunk_shape: Sequence[int]) -> ChunkForm:
    """Return the form of chunks; zarr-python 2 kept filters among the attributes."""
    attributes = document.get("attributes")
    filters = isinstance(attributes, dict) and attributes.get("filters")
    data_type = document.get("data_type")
    nbytes: int | None = None
    if not filters and isinstance(data_type, str):
        found = _BY_BYTES.fullmatch(data_type)
        nbytes = int(found[1]) if found else item_nbytes(data_type)
    plain_nbytes = None if nbytes is None else prod(chunk_shape) * nbytes
    if not document.get("compressor"):
        return ChunkForm(plain_nbytes)
    compressor = (_compressor(document) or "").partition("/")[0]
    if compressor not in MEASURES:
        return ChunkForm()
    return ChunkForm(compressor=compressor, plain_nbytes=plain_nbytes)


def _compressor(document: dict[str, Json]) -> str | None:
    """Return name and version of the compressor of an array: ``gzip/1.0``."""
    compressor = document.get("compressor")
    uri = compressor.get("codec") if isinstance(compressor, dict) else None
    return _CODEC.sub(r"\1", uri) if isinstance(uri, str) else None


def without_transformer(document: dict[str, Json]) -> dict[str, Json]:
    """Return the metadata without the member, which readers of earlier drafts do not know."""
    return {name: value for name, value in document.items() if name != _TRANSFORMERS}


def _unknown_extension(extensions: Json) -> str:
    for extension in extensions if isinstance(extensions, list) else ():
        if isinstance(extension, dict) and extension.get("must_understand"):
            return f"the extension {str(extension.get('extension'))[:80]} must be understood"
    return ""


def _matches(known: re.Pattern[str], uri: Json) -> bool:
    return isinstance(uri, str) and known.fullmatch(uri) is not None


@dataclass(frozen=True, slots=True)
class ReadOnlyTranslator:
    """Refuses to change the metadata of arrays with transformers, or of all arrays."""

    is_of_all: bool

    def is_marker(self, _: bytes) -> bool:
        return True  # the metadata of an array give its keys a meaning

    async def translate(
        self, sent: bytes, stored: bytes | None, _: Fetch, run_in_thread: RunInThread
    ) -> bytes:
        parsed = await run_in_thread(parse_sent, sent)
        for document in (parsed, await run_in_thread(parse_stored, stored)):
            is_sharded = isinstance(document, dict) and bool(document.get(_TRANSFORMERS))
            if is_sharded or self.is_of_all:
                raise ConflictError(_READ_ONLY)
        return sent


def describe(path: str, document: Node) -> Description:
    """Describe the array at *path*. Raises: `DecodeError`."""
    served: dict[str, Json] = parse_json(document.served)
    grid = served.get("chunk_grid")
    data_type = served.get("data_type")
    chunk_shape: tuple[int, ...] = ()
    if isinstance(grid, dict) and grid.get("type") == "regular" and "extension" not in grid:
        chunk_shape = shape_of(grid.get("chunk_shape"), "chunk_shape", least=0)
    if isinstance(data_type, dict):  # an extension has a core data type for a fallback
        data_type = data_type.get("type")
    compressor = _compressor(served)
    per_shard = document.array.shard_shape if document.array else None
    return Description(
        path=path.removesuffix("/"),
        format="zarr",
        kind="array",
        shape=shape_of(served.get("shape"), "shape", least=0),
        data_type=data_type if isinstance(data_type, str) else None,
        inner_chunk_shape=chunk_shape,
        codecs=() if compressor is None else (compressor,),
        shard_shape=tuple(map(mul, chunk_shape, per_shard)) if per_shard is not None else None,
        chunks_per_shard=per_shard,
        index_location=("end",) if document.array else (),
        why_sharded=document.why_sharded,
    )


@dataclass(frozen=True, slots=True)
class Zarr2022(ZarrLimits):
    """Zarr v3 as drafted in 2022: the ``zarr.json`` of a hierarchy is its entry point."""

    def parse(self, document: Json, _: bytes) -> Hierarchy | None:
        if not isinstance(document, dict) or not _matches(_CORE, document.get("zarr_format")):
            return None
        match document.get("metadata_encoding"):
            case str(uri) if _CORE.fullmatch(uri):
                suffix = document.get("metadata_key_suffix", ".json")
            case {"type": "json", **options}:  # in the draft of November 2022
                suffix = options.get("metadata_key_suffix", ".json")
            case _:
                return Hierarchy("", "the metadata are not encoded as JSON")
        if not isinstance(suffix, str) or len(suffix) > _LONGEST_SUFFIX or not is_key(f"x{suffix}"):
            raise DecodeError(f"metadata_key_suffix is no short end of a key: {str(suffix)[:80]}")
        return Hierarchy(suffix, _unknown_extension(document.get("extensions")))

    def may_rewrite(self, _: bytes) -> bool:
        return False

    def layout(self, directory: ObjectRef, spec: Versioned[Hierarchy]) -> "HierarchyLayout":
        return HierarchyLayout(directory, spec.value, self)

    def translator(self, _: ObjectRef) -> None:
        return None  # an entry point has nothing to do with shards


@dataclass(frozen=True, slots=True)
class HierarchyLayout(Layout):
    """A whole hierarchy: metadata of all nodes below ``meta``, chunks of all below ``data``."""

    directory: ObjectRef
    hierarchy: Hierarchy
    limits: Zarr2022

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Locate a chunk, or metadata without the transformer; serve other objects whole."""
        if self.hierarchy.why_sharded:
            return Whole(self.directory.join(key))
        if (document := self._read(key)) is not None:
            found = await fetch(document)
            return MISSING if found is None else show(document.ref, found)
        array = await self._array_of(key, fetch)
        return await locate_chunk(self.directory, array, key, fetch, self.limits)

    async def target(self, key: VirtualKey, fetch: Fetch) -> Target:
        ref = self.directory.join(key)
        if self.hierarchy.why_sharded:
            return Whole(ref)
        if self._read(key) is not None:
            return Document(ref, ReadOnlyTranslator(key == _CONSOLIDATED))
        if (array := await self._array_of(key, fetch)) is None:
            return Whole(ref)
        return chunk_slot(self.directory, array, key, self.limits)

    def encloses(self, _: VirtualKey) -> bool:
        return True

    async def listing_rules(self, directory: VirtualKey, fetch: Fetch) -> ListingRules:
        if self.hierarchy.why_sharded:
            return PLAIN
        if not directory.startswith("data/root/"):
            return ListingRules()
        path = directory.removeprefix("data/root/")
        if (found := await fetch(self._read_array(path))) is None:
            return ListingRules()
        if (shards := self._shards(path, found.value.array)) is None:
            return PLAIN
        walk = walk_chunks(shards)
        return ListingRules(lambda name: not _CHUNK_NAME.fullmatch(name), (walk,))

    async def collections(
        self, fetch: Fetch, listing: Listing, run_in_thread: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        """Describe every array, or say why no array can be unsharded."""
        if why := self.hierarchy.why_sharded:
            return (ChunkCollection(Description("", "zarr", "hierarchy", why_sharded=why), None),)
        paths = [self.hierarchy.array_path(key) async for key in listing("meta/")]
        found = sorted(path for path in paths if path is not None)
        return [await self._collection(path, fetch, run_in_thread) for path in found]

    def as_stored(self) -> Layout:
        return StoredContainer(self.directory, self)

    async def explain_absence(self, key: VirtualKey, fetch: Fetch) -> str:
        array = await self._array_of(key, fetch)
        return "" if array is None else array.explain_absence(key, array_of(key) or "")

    async def shards_at(self, key: VirtualKey, fetch: Fetch) -> Shards | None:
        return self._shards(array_of(key) or "", await self._array_of(key, fetch))

    def _read(self, key: VirtualKey) -> Read[Node] | None:
        if key == _CONSOLIDATED:
            return self._describe_read(key, parse_consolidated)
        path = self.hierarchy.array_path(key)
        return None if path is None else self._read_array(path)

    def _read_array(self, path: str) -> Read[Node]:
        return self._describe_read(self.hierarchy.metadata_key(path), ArrayParser(path))

    def _describe_read(self, key: VirtualKey, parse: Callable[[Json, bytes], Node]) -> Read[Node]:
        limit = self.limits.limit_bytes
        decode = DocumentDecoder(parse, limit)
        request = ByteRange(0, limit + 1)
        return Read("metadata", self.directory.join(key), request, decode, is_marker=True)

    async def _array_of(self, key: str, fetch: Fetch) -> ArraySpec | None:
        path = None if self.hierarchy.why_sharded else array_of(key)
        found = None if path is None else await fetch(self._read_array(path))
        return None if found is None else found.value.array

    async def _collection(
        self, path: str, fetch: Fetch, run_in_thread: RunInThread
    ) -> ChunkCollection | DamagedError:
        read = self._read_array(path)
        try:
            found = await fetch(read)
        except DamagedError as damaged:
            return damaged
        if found is None:
            return DamagedError(read.ref, "does not exist")
        why = found.value.why_sharded
        try:
            description = await run_in_thread(describe, path, found.value)
        except DecodeError as error:
            if not why:
                return DamagedError(read.ref, str(error))
            description = Description(path.removesuffix("/"), "zarr", "array", why_sharded=why)
        return ChunkCollection(description, self._shards(path, found.value.array))

    def _shards(self, path: str, array: ArraySpec | None) -> ZarrShards | None:
        prefix = f"data/root/{path}"
        return None if array is None else ZarrShards(self.directory, array, prefix)
