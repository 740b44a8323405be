"""The entry point and the arrays of a hierarchy, and the documents that are served for them."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from app.formats.reading import DecodeError
from app.formats.zarr_sharding_indexed.chunk import ChunkForm
from app.formats.zarr_sharding_indexed.unshard import UnshardableError, shape_of
from app.formats.zarr_storage_transformer.index import ShardGrid
from app.formats.zarr_storage_transformer.keys import ChunkIdentifiers

type Json = Any

_CORE: Final = re.compile(r"https?://purl\.org/zarr/spec/(?:protocol/)?core/3(?:\.[0-9]+)?/?")
"""The protocol: ``protocol/core/3.0``, from May 2022 on ``core/3.0``; minor versions add only."""
_SHARDING: Final = re.compile(
    r"https?://purl\.org/zarr/spec/storage[_-]transformers/sharding/1(?:\.[0-9]+)?/?"
)
"""The draft's example and its heading do not agree on the underscore."""
_DATA_TYPE: Final = re.compile("[<>|]?[iufc](1|2|4|8|16)|r([1-9][0-9]{0,5})")
"""Core data types, but for ``bool``: by their bytes, or ``r*`` by its bits."""
_OVERHEAD: Final = 4096


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """What the entry point tells of all arrays."""

    metadata_key_suffix: str
    why_sharded: str = ""
    """Why arrays are served as they are."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the entry point holds, roughly."""
        return _OVERHEAD


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array with the transformer: its chunks and shards, and how both are named."""

    grid: ShardGrid
    identifiers: ChunkIdentifiers
    chunk: ChunkForm
    """What chunks are like."""


@dataclass(frozen=True, slots=True)
class Document:
    """Metadata of an array, or of many."""

    served: bytes
    """The document that clients see."""
    is_rewritten: bool
    """Whether *served* differs from what is stored."""
    array: ArraySpec | None = None
    """Set for an array that is served without its shards."""
    why_sharded: str = ""
    """Why an array with storage transformers is served as it is."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the document holds, roughly."""
        return len(self.served) + _OVERHEAD


def parse_hierarchy(document: Json) -> Hierarchy | None:
    """Understand an entry point; `None` if it is not of the drafts of 2022.

    Raises: `DecodeError` for a suffix that is none.
    """
    if not isinstance(document, dict) or not _names(_CORE, document.get("zarr_format")):
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
    return Hierarchy(suffix, _why_not_understood(document.get("extensions")))


def parse_array_document(document: Json, data: bytes) -> Document:
    """Understand the *document* of an array, which *data* spells.

    Raises: `DecodeError` for what is no metadata, or contradicts itself or the specification.
    """
    if not isinstance(document, dict):
        raise DecodeError("the metadata of an array are no object")
    if not document.get("storage_transformers"):
        return Document(data, is_rewritten=False)
    try:
        array = parse_array(document)
    except UnshardableError as reason:
        return Document(data, is_rewritten=False, why_sharded=str(reason))
    served = json.dumps(without_transformer(document)).encode()
    return Document(served, is_rewritten=True, array=array)


def parse_consolidated(document: Json, data: bytes) -> Document:
    """Rewrite the arrays in consolidated metadata; those that are damaged stay as they are."""
    nodes = document.get("metadata") if isinstance(document, dict) else None
    if not isinstance(nodes, dict):
        return Document(data, is_rewritten=False)
    rewritten = {key: _rewritten(node) for key, node in nodes.items()}
    if all(rewritten[key] is node for key, node in nodes.items()):
        return Document(data, is_rewritten=False)
    served = json.dumps({**document, "metadata": rewritten}).encode()
    return Document(served, is_rewritten=True)


def parse_array(document: dict[str, Json]) -> ArraySpec:
    """Read the metadata of an array that has storage transformers.

    Raises: `UnshardableError` where they, or the chunk grid, are others than we know.
    """
    configuration = _configuration(document["storage_transformers"])
    if why := _why_not_understood(document.get("extensions")):
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
    shards = _shard_grid(counts, configuration.get("chunks_per_shard"))
    identifiers = ChunkIdentifiers(separator, len(shards.chunk_grid_shape))
    return ArraySpec(shards, identifiers, _chunk_form(document, chunk_shape))


def without_transformer(document: dict[str, Json]) -> dict[str, Json]:
    """Describe the same array unsharded; every other member stays as it is.

    Without the member, not with an empty one: readers of drafts before this do not know its name.
    """
    return {name: value for name, value in document.items() if name != "storage_transformers"}


def _chunk_form(document: dict[str, Json], chunk_shape: Sequence[int]) -> ChunkForm:
    """Tell what chunks are like; zarr-python 2 kept filters among the attributes."""
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


def _configuration(transformers: Json) -> dict[str, Json]:
    """Read the configuration of the only storage transformer."""
    if not isinstance(transformers, list) or not all(isinstance(t, dict) for t in transformers):
        raise DecodeError(f"storage_transformers is no list of objects: {str(transformers)[:80]}")
    if len(transformers) > 1:
        raise UnshardableError("several storage transformers are stacked")
    (transformer,) = transformers
    if not _names(_SHARDING, extension := transformer.get("extension")):
        raise UnshardableError(f"the storage transformer is {str(extension)[:80]}")
    if (shard_format := transformer.get("type")) != "indexed":
        raise UnshardableError(f"the binary shard format is {str(shard_format)[:80]}")
    configuration = transformer.get("configuration")
    if not isinstance(configuration, dict):
        raise DecodeError("the sharding transformer has no configuration")
    return configuration


def _shard_grid(counts: tuple[int, ...], chunks_per_shard: Json) -> ShardGrid:
    """Read ``chunks_per_shard`` as the draft has it, and as zarr-python 2 wrote it.

    That leaves out the last dimensions where each chunk is a shard, and takes an array without
    dimensions for one of one dimension: its only chunk is ``c0``.
    """
    per_shard = shape_of(chunks_per_shard, "chunks_per_shard")
    if not counts and len(per_shard) == 1:
        counts = (1,)
    if len(per_shard) > len(counts) or (counts and not per_shard):
        raise DecodeError(
            f"chunks_per_shard has {len(per_shard)} dimensions instead of {len(counts)}"
        )
    return ShardGrid(counts, per_shard + (1,) * (len(counts) - len(per_shard)))


def _rewritten(node: Json) -> Json:
    try:
        if isinstance(node, dict) and node.get("storage_transformers"):
            parse_array(node)
            return without_transformer(node)
    except (UnshardableError, DecodeError):
        pass
    return node


def _why_not_understood(extensions: Json) -> str:
    """Name an extension without which nothing may be interpreted; empty if there is none."""
    for extension in extensions if isinstance(extensions, list) else ():
        if isinstance(extension, dict) and extension.get("must_understand"):
            return f"the extension {str(extension.get('extension'))[:80]} must be understood"
    return ""


def _names(known: re.Pattern[str], uri: Json) -> bool:
    return isinstance(uri, str) and known.fullmatch(uri) is not None
