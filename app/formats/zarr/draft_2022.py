"""Zarr v3 as drafted in 2022, with the storage transformer ``sharding`` (version 1.0).

A shard of the draft is one of the codec ``sharding_indexed`` with its index at the end,
little-endian and without a checksum. Here an array of the draft is one of that codec whose
elements are chunks: both share index, look-up, rewriting and surveys.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from operator import mul
from typing import Any, Final, NamedTuple

from app.errors import ConflictError, DamagedError, StorageUnavailableError
from app.formats.contract import Document, Layout, Target
from app.formats.documents import DocumentDecoder, show
from app.formats.listing import PLAIN, ListingRules
from app.formats.reading import DecodeError, Fetch, Read, Versioned
from app.formats.surveying import Collection, Description, Listing, Shards
from app.formats.zarr.codecs import ChunkForm, ShardingLevel, UnshardableError, Unsharded, shape_of
from app.formats.zarr.index import IndexCodec, IndexLocation
from app.formats.zarr.layout import ZarrLimits, chunk_slot, locate_chunk
from app.formats.zarr.metadata import (
    HIDDEN,
    MISREAD,
    ArraySpec,
    Restorer,
    encode_document,
    parse_sent,
    parse_stored,
)
from app.formats.zarr.survey import ChunkWalk, ZarrShards
from app.model import MISSING, ByteRange, Location, ObjectRef, VirtualKey, Whole

type Json = Any

CONSOLIDATED: Final = VirtualKey("meta/root/consolidated/.zmetadata")
"""Consolidated metadata of zarr-python 2, which no draft specifies."""
_META: Final = "meta/root"
_DATA: Final = "data/root"
_NUMBER: Final = re.compile("0|[1-9][0-9]{0,18}")
_IDENTIFIER: Final = re.compile("c(?:[0-9]+(?:[/.][0-9]+)*)?")
_CORE: Final = re.compile(r"https?://purl\.org/zarr/spec/(?:protocol/)?core/3(?:\.[0-9]+)?/?")
"""The protocol: ``protocol/core/3.0``, from May 2022 on ``core/3.0``; minor versions add only."""
_SHARDING: Final = re.compile(
    r"https?://purl\.org/zarr/spec/storage[_-]transformers/sharding/1(?:\.[0-9]+)?/?"
)
"""The draft's example and its heading do not agree on the underscore."""
_DATA_TYPE: Final = re.compile("[<>|]?[iufc](1|2|4|8|16)|r([1-9][0-9]{0,5})")
"""Core data types except ``bool``: by their bytes, or ``r*`` by its bits."""
_CODEC: Final = re.compile("https?://.*/codecs?/(.+)")
_TRANSFORMERS: Final = "storage_transformers"
_FIXED: Final = ("chunk_grid", "chunk_memory_layout", "compressor", "data_type", "fill_value")
"""Members of a sharded array that cannot change."""
_OVERHEAD: Final = 4096


@dataclass(frozen=True, slots=True)
class MetadataKeys:
    """Keys of the metadata of arrays ("Storage keys")."""

    suffix: str

    def format(self, path: str) -> VirtualKey:
        """Return the metadata key of the array at *path*, which is empty for the root."""
        return VirtualKey(f"{_META}/{path}".rstrip("/") + f".array{self.suffix}")

    def parse(self, key: str) -> str | None:
        """Return the path of the array whose metadata key is *key*."""
        stem = key.removesuffix(f".array{self.suffix}")
        path = stem.removeprefix(_META).removeprefix("/")
        return path if stem != key and key == self.format(path) else None


class DataKey(NamedTuple):
    """A key of chunk data: the path of an array, empty for the root, and a chunk identifier."""

    path: str
    identifier: str

    @classmethod
    def parse(cls, key: str) -> "DataKey | None":
        """Split *key* at its last segment with a ``c`` in front; `None` if it is no key of chunk
        data.
        """
        node, _, rest = key.rpartition("/c")
        identifier = f"c{rest}"
        if not f"{node}/".startswith(f"{_DATA}/") or "//" in key:
            return None
        if not _IDENTIFIER.fullmatch(identifier):
            return None
        return cls(node[len(_DATA) + 1 :], identifier)

    def format(self) -> VirtualKey:
        return VirtualKey("/".join(filter(None, (_DATA, *self))))


@dataclass(frozen=True, slots=True)
class DraftKeys:
    """Keys of the chunks, or shards, of the array at *path*: ``c1/23/45``, ``c`` without
    dimensions.
    """

    path: str
    separator: str
    ndim: int

    def parse(self, key: str) -> tuple[int, ...] | None:
        found = DataKey.parse(key)
        if found is None or found.path != self.path:
            return None
        numbers = found.identifier[1:].split(self.separator) if found.identifier != "c" else []
        if len(numbers) != self.ndim or not all(map(_NUMBER.fullmatch, numbers)):
            return None
        return tuple(map(int, numbers))

    def format(self, coords: tuple[int, ...]) -> str:
        return DataKey(self.path, "c" + self.separator.join(map(str, coords))).format()

    def beginning(self, coords: tuple[int, ...] = ()) -> str:
        return self.format(coords) + (self.separator if 0 < len(coords) < self.ndim else "")

    def owns(self, key: str) -> bool:
        return (found := DataKey.parse(key)) is not None and found.path == self.path


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The entry point of a hierarchy."""

    metadata_key_suffix: str
    why_sharded: str = ""

    @property
    def nbytes(self) -> int:
        return _OVERHEAD


@dataclass(frozen=True, slots=True)
class ArrayDocument:
    """Metadata of an array, or of many."""

    served: bytes
    is_rewritten: bool
    array: ArraySpec | None = None
    """Set for an array that is served unsharded; its elements are chunks."""
    why_sharded: str = ""

    @property
    def nbytes(self) -> int:
        return len(self.served) + _OVERHEAD


@dataclass(frozen=True, slots=True)
class ArrayParser:
    """Understands the metadata of the array at *path*."""

    path: str

    def __call__(self, document: Json, data: bytes) -> ArrayDocument:
        if not isinstance(document, dict):
            raise DecodeError("the metadata of an array are no object")
        if not document.get(_TRANSFORMERS):
            return ArrayDocument(data, is_rewritten=False)
        try:
            array = parse_array(document, self.path)
        except UnshardableError as reason:
            return ArrayDocument(data, is_rewritten=False, why_sharded=str(reason))
        served = json.dumps(without_transformer(document)).encode()
        return ArrayDocument(served, is_rewritten=True, array=array)


def parse_consolidated(document: Json, data: bytes) -> ArrayDocument:
    """Rewrite the arrays in consolidated metadata; damaged ones are unchanged."""
    nodes = document.get("metadata") if isinstance(document, dict) else None
    if not isinstance(nodes, dict):
        return ArrayDocument(data, is_rewritten=False)
    rewritten = {key: _unsharded(node) for key, node in nodes.items()}
    if all(rewritten[key] is node for key, node in nodes.items()):
        return ArrayDocument(data, is_rewritten=False)
    served = json.dumps({**document, "metadata": rewritten}).encode()
    return ArrayDocument(served, is_rewritten=True)


def _unsharded(node: Json) -> Json:
    try:
        if isinstance(node, dict) and node.get(_TRANSFORMERS):
            parse_array(node)
            return without_transformer(node)
    except (UnshardableError, DecodeError):
        pass
    return node


def parse_array(document: dict[str, Json], path: str = "") -> ArraySpec:
    """Read the metadata of an array with transformers. Raises: `UnshardableError`."""
    sharding = _sharding(document[_TRANSFORMERS])
    if why := _unknown_extension(document.get("extensions")):
        raise UnshardableError(why)
    shape = shape_of(document.get("shape"), "shape", least=0)
    grid = document.get("chunk_grid")
    if not isinstance(grid, dict):
        raise DecodeError(f"the chunk grid is no object: {str(grid)[:80]}")
    if grid.get("type") != "regular" or "extension" in grid:
        raise UnshardableError(f"the chunk grid is {str(grid.get('type'))[:80]}")
    chunk_shape = shape_of(grid.get("chunk_shape"), "chunk_shape", len(shape))
    separator = grid.get("separator", "/")
    if separator not in ("/", "."):
        raise DecodeError(f"the separator is neither '/' nor '.': {str(separator)[:80]}")
    counts = tuple(-(-n // size) for n, size in zip(shape, chunk_shape, strict=True))
    counts, per_shard = _shard_grid(counts, sharding.get("chunks_per_shard"))
    strides = tuple(prod(per_shard[axis + 1 :]) for axis in range(len(per_shard)))
    index = IndexCodec(prod(per_shard), IndexLocation.END, big_endian=False, has_checksum=False)
    level = ShardingLevel((1,) * len(counts), per_shard, strides, index)
    return ArraySpec(
        shape=counts,
        shard_shape=per_shard,
        keys=DraftKeys(path, separator, len(counts)),
        unsharded=Unsharded((level,), ("bytes",)),
        chunk=_chunk_form(document, chunk_shape),
    )


def _sharding(transformers: Json) -> dict[str, Json]:
    if not isinstance(transformers, list) or not all(isinstance(t, dict) for t in transformers):
        raise DecodeError(f"storage_transformers is no list of objects: {str(transformers)[:80]}")
    if len(transformers) > 1:
        raise UnshardableError("several storage transformers are stacked")
    (transformer,) = transformers
    if not _matches(_SHARDING, extension := transformer.get("extension")):
        raise UnshardableError(f"the storage transformer is {str(extension)[:80]}")
    if (shard_format := transformer.get("type")) != "indexed":
        raise UnshardableError(f"the binary shard format is {str(shard_format)[:80]}")
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
    if document.get("compressor") or filters or not isinstance(data_type, str):
        return ChunkForm()
    if data_type == "bool":
        return ChunkForm(prod(chunk_shape))
    if (found := _DATA_TYPE.fullmatch(data_type)) is None:
        return ChunkForm()
    nbytes, bits = (int(number or 0) for number in found.groups())
    item_nbytes, rest = (nbytes, 0) if nbytes else divmod(bits, 8)
    return ChunkForm(None if rest else prod(chunk_shape) * item_nbytes)


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
class ArrayTranslator:
    """Translates the metadata of an array."""

    async def translate(self, sent: bytes, stored: bytes | None, _: Fetch) -> bytes:
        """Return *sent* with the transformer of the *stored* array."""
        document = parse_sent(sent)
        restored = restore(document, parse_stored(stored))
        return sent if restored is document else encode_document(restored)


@dataclass(frozen=True, slots=True)
class ConsolidatedTranslator:
    """Translates the consolidated metadata of zarr-python 2."""

    restorer: Restorer
    keys: MetadataKeys

    async def translate(self, sent: bytes, _: bytes | None, fetch: Fetch) -> bytes:
        """Return *sent* with the transformers of the stored arrays."""
        document = parse_sent(sent)
        nodes = document.get("metadata")
        if not isinstance(nodes, dict):
            return sent
        restored = dict(nodes)
        for key, node in nodes.items():
            if isinstance(node, dict) and self.keys.parse(key) is not None:
                restored[key] = await self.restorer.node(node, key, key, fetch)
        if all(restored[key] is node for key, node in nodes.items()):
            return sent
        return encode_document({**document, "metadata": restored})


def restore(sent: dict[str, Json], stored: Json) -> dict[str, Json]:
    """Return the metadata to store for an array. Raises: `ConflictError` for misread shards."""
    kept = stored.get(_TRANSFORMERS) if isinstance(stored, dict) else None
    if sent.get(_TRANSFORMERS) and sent[_TRANSFORMERS] != kept:
        raise ConflictError(HIDDEN)
    if not kept:
        return sent
    try:
        parse_array(stored)
    except (UnshardableError, DecodeError):  # not served unsharded
        return sent
    shape = sent.get("shape")
    if not isinstance(shape, list) or len(shape) != len(stored["shape"]):
        raise ConflictError(f"the number of dimensions cannot change: {MISREAD}")
    for member in _FIXED:
        if _with_default(sent, member) != _with_default(stored, member):
            raise ConflictError(f"{member} cannot change: {MISREAD}")
    return {**sent, _TRANSFORMERS: kept}


def _with_default(array: dict[str, Json], member: str) -> Json:
    found = array.get(member)
    if member == "chunk_grid" and isinstance(found, dict):
        return {"separator": "/", **found}
    return found


def describe(path: str, document: ArrayDocument) -> Description:
    """Describe the array at *path*. Raises: `DecodeError`."""
    served: dict[str, Json] = json.loads(document.served)
    grid, data_type = served.get("chunk_grid"), served.get("data_type")
    chunk_shape: tuple[int, ...] = ()
    if isinstance(grid, dict) and grid.get("type") == "regular" and "extension" not in grid:
        chunk_shape = shape_of(grid.get("chunk_shape"), "chunk_shape", least=0)
    if isinstance(data_type, dict):  # an extension has a core data type for a fallback
        data_type = data_type.get("type")
    compressor = served.get("compressor")
    uri = compressor.get("codec") if isinstance(compressor, dict) else None
    per_shard = document.array.shard_shape if document.array else None
    return Description(
        path=path,
        format="zarr",
        kind="array",
        shape=shape_of(served.get("shape"), "shape", least=0),
        data_type=data_type if isinstance(data_type, str) else None,
        inner_chunk_shape=chunk_shape,
        codecs=(_CODEC.sub(r"\1", uri),) if isinstance(uri, str) else (),
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
        if not isinstance(suffix, str):
            raise DecodeError(f"metadata_key_suffix is no string: {str(suffix)[:80]}")
        return Hierarchy(suffix, _unknown_extension(document.get("extensions")))

    def layout(self, directory: ObjectRef, spec: Versioned[Hierarchy]) -> "HierarchyLayout":
        return HierarchyLayout(directory, spec.value, self)

    def translator(self, _: ObjectRef) -> None:
        """Return `None`: an entry point has nothing to do with shards."""


@dataclass(frozen=True, slots=True)
class HierarchyLayout(Layout):
    """A whole hierarchy: metadata of all nodes below ``meta``, chunks of all below ``data``."""

    directory: ObjectRef
    hierarchy: Hierarchy
    limits: Zarr2022

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Locate a chunk, or metadata without the transformer; serve other objects whole."""
        if not self.hierarchy.why_sharded:
            if (document := self._read(key)) is not None:
                found = await fetch(document)
                return MISSING if found is None else show(found)
            array = await self._array_of(key, fetch)
            if array is not None and (coords := array.keys.parse(key)) is not None:
                if (origin := array.origin(coords)) is None:
                    return MISSING
                return await locate_chunk(self.directory, array, origin, fetch, self.limits)
        return Whole(self.directory.join(key))

    async def target(self, key: VirtualKey, fetch: Fetch) -> Target:
        ref = self.directory.join(key)
        if self.hierarchy.why_sharded:
            return Whole(ref)
        if key == CONSOLIDATED:
            restorer = Restorer(self.directory, self.limits.limit_bytes, restore)
            return Document(ref, ConsolidatedTranslator(restorer, self._metadata_keys))
        if self._metadata_keys.parse(key) is not None:
            return Document(ref, ArrayTranslator())
        if (array := await self._array_of(key, fetch)) is None:
            return Whole(ref)
        return chunk_slot(self.directory, array, key, self.limits)

    def encloses(self, _: VirtualKey) -> bool:
        return True

    async def listing_rules(self, directory: VirtualKey, fetch: Fetch) -> ListingRules:
        if self.hierarchy.why_sharded:
            return PLAIN
        if not directory.startswith(f"{_DATA}/"):
            return ListingRules()
        found = await fetch(self._read_array(directory[len(_DATA) + 1 : -1]))
        if found is None:
            return ListingRules()
        if (array := found.value.array) is None:
            return PLAIN
        return ListingRules(lambda name: not _is_chunk_name(name), (ChunkWalk(array),))

    async def collections(
        self, fetch: Fetch, listing: Listing
    ) -> Sequence[Collection | DamagedError]:
        """Describe every array, or say why no array can be unsharded."""
        if why := self.hierarchy.why_sharded:
            return (Collection(Description("", "zarr", "hierarchy", why_sharded=why), None),)
        try:
            paths = await self._array_paths(fetch, listing)
        except DamagedError as damaged:
            return (damaged,)
        return [await self._collection(path, fetch) for path in paths]

    async def shards_at(self, key: VirtualKey, fetch: Fetch) -> Shards | None:
        if self.hierarchy.why_sharded or (data_key := DataKey.parse(key)) is None:
            return None
        return self._shards(data_key.path, await self._array_of(key, fetch))

    @property
    def _metadata_keys(self) -> MetadataKeys:
        return MetadataKeys(self.hierarchy.metadata_key_suffix)

    def _read(self, key: VirtualKey) -> Read[ArrayDocument] | None:
        if key == CONSOLIDATED:
            return self._describe_read(key, parse_consolidated)
        path = self._metadata_keys.parse(key)
        return None if path is None else self._read_array(path)

    def _read_array(self, path: str) -> Read[ArrayDocument]:
        return self._describe_read(self._metadata_keys.format(path), ArrayParser(path))

    def _describe_read(
        self, key: VirtualKey, parse: Callable[[Json, bytes], ArrayDocument]
    ) -> Read[ArrayDocument]:
        limit = self.limits.limit_bytes
        decode, request = DocumentDecoder(parse, limit), ByteRange(0, limit + 1)
        return Read("metadata", self.directory.join(key), request, decode)

    async def _array_of(self, key: str, fetch: Fetch) -> ArraySpec | None:
        if (data_key := DataKey.parse(key)) is None:
            return None
        found = await fetch(self._read_array(data_key.path))
        return None if found is None else found.value.array

    async def _array_paths(self, fetch: Fetch, listing: Listing) -> Sequence[str]:
        """List the arrays; where the store cannot list, use consolidated metadata or an array at
        the root.
        """
        keys = self._metadata_keys
        try:
            found = [keys.parse(key) async for key in listing("meta/")]
        except StorageUnavailableError as error:
            if not error.lasting:
                raise
            read = self._describe_read(CONSOLIDATED, parse_consolidated)
            if (consolidated := await fetch(read)) is not None:
                document = json.loads(consolidated.value.served)
                nodes = document.get("metadata") if isinstance(document, dict) else None
                found = list(map(keys.parse, nodes if isinstance(nodes, dict) else ()))
            elif await fetch(self._read_array("")) is not None:
                found = [""]
            else:
                raise
        return sorted(path for path in found if path is not None)

    async def _collection(self, path: str, fetch: Fetch) -> Collection | DamagedError:
        read = self._read_array(path)
        try:
            if (found := await fetch(read)) is None:
                return DamagedError(read.ref, "does not exist, though other metadata name it")
            description = describe(path, found.value)
        except DamagedError as damaged:
            return damaged
        except DecodeError as error:
            return DamagedError(read.ref, str(error))
        return Collection(description, self._shards(path, found.value.array))

    def _shards(self, path: str, array: ArraySpec | None) -> ZarrShards | None:
        prefix = f"{DataKey(path, '').format()}/"
        return None if array is None else ZarrShards(self.directory, array, prefix)


def _is_chunk_name(name: str) -> bool:
    return _IDENTIFIER.fullmatch(name.removesuffix("/")) is not None and name != "c/"
