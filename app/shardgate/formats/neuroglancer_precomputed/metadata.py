"""``info``: the chunks it describes, the document that is served in its place, and the stored form
of one that a client writes, which keeps the sharding.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from posixpath import normpath
from typing import Annotated, Final, NamedTuple

import numpy as np
import pydantic.dataclasses
from pydantic import Field, TypeAdapter, ValidationError

from shardgate.errors import BadBodyError, ConflictError
from shardgate.formats.documents import Json, as_integer, begins_like_json, parse_json, write_json
from shardgate.formats.neuroglancer_precomputed.index import Integer, Sharding
from shardgate.formats.neuroglancer_precomputed.keys import (
    CellNames,
    IdNames,
    MortonGrid,
    Names,
    VoxelBounds,
)
from shardgate.formats.reading import DecodedMetadata, DecodeError, Fetch, RunInThread
from shardgate.formats.surveying import Description
from shardgate.model import is_key

_ID_BITS: Final = 64
_VOLUME: Final = "neuroglancer_multiscale_volume"
MESHES: Final = "neuroglancer_multilod_draco"
SKELETONS: Final = "neuroglancer_skeletons"
_ANNOTATIONS: Final = "neuroglancer_annotations_v1"
_KNOWN: Final = (_VOLUME, MESHES, SKELETONS, _ANNOTATIONS)
_DATA_TYPES: Final = {f"{kind}int{8 * n}": n for kind in ("", "u") for n in (1, 2, 4, 8)} | {
    "float32": 4
}
"""Bytes of a voxel in one channel."""
_STOP: Final = 2**63
_MAX_PARTS: Final = 64  # in one directory: a name of a chunk is compared with those of each part
SHARDED: Final = "neuroglancer_uint64_sharded_v1"


class Kind(StrEnum):
    """Kind of the chunks of a part."""

    VOLUME = "volume"
    MANIFESTS = "manifests"
    FRAGMENTS = "fragments"
    """Fragment data, before each manifest in the shard and under the id of the manifest."""
    SKELETONS = "skeletons"
    ANNOTATIONS = "annotations"
    VALUES = "values"
    """Values of any form, by ids alone."""


@dataclass(frozen=True, slots=True)
class ShardedPart:
    """Chunks in shards of their own, below *path*."""

    kind: Kind
    path: str
    """Relative to the ``info``; empty for the same directory."""
    names: Names
    sharding: Sharding
    member: Json = field(repr=False, compare=False)
    voxel_nbytes: int | None = None
    """Bytes of a voxel, all channels, in a volume of raw chunks."""

    def may_have(self, chunk_id: int) -> bool:
        """Return whether *chunk_id* is that of a possible chunk."""
        return bool(self.names.covers(np.array([chunk_id], np.uint64))[0])

    def chunk_nbytes(self, chunk_id: int) -> int | None:
        """Return the size of a chunk, where no encoding makes it depend on the values."""
        if self.voxel_nbytes is None or not isinstance(self.names, VoxelBounds):
            return None
        return self.voxel_nbytes * self.names.count_voxels(chunk_id)


_Offset = Annotated[Integer, Field(gt=-_STOP, lt=_STOP)]
_Size = Annotated[Integer, Field(ge=0, lt=_STOP)]
_Step = Annotated[Integer, Field(ge=1, lt=_STOP)]


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class _Scale:
    size: tuple[_Size, _Size, _Size]
    chunk_sizes: Annotated[
        list[tuple[_Step, _Step, _Step]], Field(min_length=1, max_length=_MAX_PARTS)
    ]
    voxel_offset: tuple[_Offset, _Offset, _Offset] = (0, 0, 0)


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class _Level:
    grid_shape: Annotated[list[_Step], Field(max_length=64)]  # unlike a tuple's, cheap


_SHARDING: Final = TypeAdapter(Sharding)
_SCALE: Final = TypeAdapter(_Scale)
_LEVEL: Final = TypeAdapter(_Level)


def _parse[T](members: TypeAdapter[T], document: Json) -> T:
    """Check the members of *document* that are relied on. Raises: `DecodeError`."""
    try:
        return members.validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        reason = f"{name}: {first['msg']}: {str(first['input'])[:80]}"
        raise DecodeError(reason.removeprefix(": ")) from None


class Member(NamedTuple):
    """An object of an ``info`` that may be sharded."""

    name: str
    """Of the member of the document that has it."""
    value: Json
    path: str | None = None
    parts: Sequence[ShardedPart] = ()
    """Empty unless it is sharded."""
    fault: str = ""
    """Reason why it is served as it is stored, though the sharding is known."""

    @property
    def loses_sharding(self) -> bool:
        """True if clients see it without the sharding."""
        if self.fault:
            return False
        return bool(self.parts) or self.value.get("sharding", "absent") is None


@dataclass(frozen=True, slots=True)
class Info(DecodedMetadata):
    """A decoded ``info``."""

    served: bytes
    is_rewritten: bool
    document: Json
    members: tuple[Member, ...]
    parts_at: Mapping[str, Sequence[ShardedPart]]
    faults_at: Mapping[str, str]
    """Faults of members, by the directories of their chunks."""
    paths: frozenset[str]
    """Directories of chunks, sharded or not."""
    below: tuple[str, ...]
    """Directories that are containers if they have an ``info``."""
    values: ShardedPart | None = None
    """The shards beside a document that has a sharding, and whose @type is not known."""

    @property
    def nbytes(self) -> int:
        # The text and its values, the parts, and the objects of every info.
        return 3 * len(self.served) + 2048 * len(self.parts) + 4096

    @property
    def parts(self) -> tuple[ShardedPart, ...]:
        return tuple(chain.from_iterable(self.parts_at.values()))

    @property
    def why_sharded(self) -> str:
        """Reasons why members stay sharded, of the first few."""
        faults = [member.fault for member in self.members if member.fault]
        return "; ".join(faults[:3])


def parse_info(document: Json, data: bytes) -> Info | None:
    """Understand *document*, parsed from *data*; `None` if it is no precomputed ``info``."""
    if not isinstance(document, dict):
        return None
    kind = document.get("@type", _VOLUME if "scales" in document else None)
    if not isinstance(kind, str) or not kind.startswith("neuroglancer_"):
        return None
    parts_at: defaultdict[str, list[ShardedPart]] = defaultdict(list)
    members = tuple(_read(document, *member, parts_at) for member in _members(kind, document))
    is_rewritten = any(member.loses_sharding for member in members)
    directories = map(document.get, ("mesh", "skeletons", "segment_properties"))
    below = [path for path in directories if isinstance(path, str)]
    return Info(
        served=_without_sharding(kind, data, members) if is_rewritten else data,
        is_rewritten=is_rewritten,
        document=document,
        members=members,
        parts_at=dict(parts_at),
        faults_at={m.path: m.fault for m in members if m.fault and m.path is not None},
        paths=frozenset(member.path for member in members if member.path),
        below=tuple(filter(None, map(_normal, below))),
        values=_read_values(kind, document),
    )


def _read_values(kind: str, document: Json) -> ShardedPart | None:
    """Return the part of a document that is a sharding, or has one beside a @type that is not
    known; `None` for a malformed sharding, too: all is then served as it is stored.
    """
    if kind in _KNOWN:
        return None
    stored = document if kind == SHARDED else document.get("sharding")
    if not isinstance(stored, dict) or stored.get("@type") != SHARDED:
        return None
    try:
        return ShardedPart(Kind.VALUES, "", IdNames(), _parse(_SHARDING, stored), document)
    except DecodeError:
        return None


def _read(
    document: Json, name: str, value: Json, parts_at: defaultdict[str, list[ShardedPart]]
) -> Member:
    """Read a member, and add its parts to *parts_at*; one that is malformed costs no other."""
    path = None
    parts: tuple[ShardedPart, ...] = ()
    fault = ""
    try:
        path = _path_of(value)
        parts = tuple(_parts(document, name, value, path))
    except DecodeError as error:
        fault = str(error)
    if parts and len(parts) + len(parts_at.get(parts[0].path, ())) > _MAX_PARTS:
        fault = f"chunks of more than {_MAX_PARTS} kinds are in one directory"
    if fault:
        return Member(name, value, path, fault=f"{_called(name, value)}: {fault}")
    for part in parts:
        parts_at[part.path].append(part)
    return Member(name, value, path, parts)


def _called(name: str, value: Json) -> str:
    key = value.get("key", "") if isinstance(value, dict) else value
    return f"{name} {str(key)[:80]}".strip()


def _without_sharding(kind: str, data: bytes, members: Sequence[Member]) -> bytes:
    document = parse_json(data)
    for (_, value), member in zip(_members(kind, document), members, strict=True):
        if member.loses_sharding:
            del value["sharding"]
    return write_json(document)


def _members(kind: str, document: Json) -> Iterator[tuple[str, Json]]:
    if kind == _VOLUME:
        yield from _objects(document, "scales")
    elif kind in {MESHES, SKELETONS}:
        yield kind, document
    elif kind == _ANNOTATIONS:
        if isinstance(by_id := document.get("by_id"), dict):
            yield "by_id", by_id
        yield from _objects(document, "relationships")
        yield from _objects(document, "spatial")


def _objects(document: Json, name: str) -> Iterator[tuple[str, Json]]:
    found = document.get(name, [])
    if not isinstance(found, list):
        raise DecodeError(f"{name} is no list of objects")
    return ((name, each) for each in found)


def _path_of(member: Json) -> str | None:
    """Return the directory of *member* as `_normal` does. Raises: `DecodeError`."""
    if not isinstance(member, dict):
        raise DecodeError("is no object")
    key = member.get("key", "")
    if not isinstance(key, str):
        raise DecodeError(f"a key is no text: {str(key)[:80]}")
    return _normal(key)


def _normal(key: str) -> str | None:
    """Return the directory *key*, relative to the ``info``; `None` if no key leads there."""
    path = normpath(key)
    if path == ".":
        return ""
    return path if is_key(path) and "://" not in key else None


def _parts(document: Json, name: str, member: Json, path: str | None) -> Iterator[ShardedPart]:
    """Yield the parts of *member*, none of one without shards of the known format at *path*."""
    stored = member.get("sharding")
    if path is None or not isinstance(stored, dict) or stored.get("@type") != SHARDED:
        return
    sharding = _parse(_SHARDING, stored)
    if name == "scales":
        nbytes = _voxel_nbytes(document, member)
        for names in voxel_bounds(member):
            _check_bits(names.grid)
            yield ShardedPart(Kind.VOLUME, path, names, sharding, member, nbytes)
    elif name == MESHES:
        yield ShardedPart(Kind.MANIFESTS, path, IdNames(".index"), sharding, member)
        yield ShardedPart(Kind.FRAGMENTS, path, IdNames(), sharding, member)
    elif name == SKELETONS:
        yield ShardedPart(Kind.SKELETONS, path, IdNames(), sharding, member)
    elif name == "spatial":
        grid = MortonGrid(tuple(_parse(_LEVEL, member).grid_shape))
        _check_bits(grid)
        yield ShardedPart(Kind.ANNOTATIONS, path, CellNames(grid), sharding, member)
    else:
        yield ShardedPart(Kind.ANNOTATIONS, path, IdNames(), sharding, member)


def voxel_bounds(scale: Json) -> list[VoxelBounds]:
    """Read the grid of each chunk size of a scale. Raises: `DecodeError`."""
    found = _parse(_SCALE, scale)
    return [VoxelBounds(found.voxel_offset, found.size, each) for each in found.chunk_sizes]


def _voxel_nbytes(document: Json, scale: Json) -> int | None:
    """Return the bytes of a voxel, all channels, in raw chunks of *scale*; `None` for others."""
    nbytes = _DATA_TYPES.get(str(document.get("data_type")).lower())
    channels = _channels(document)
    if scale.get("encoding") != "raw" or nbytes is None or channels is None:
        return None
    return nbytes * channels


def _channels(document: Json) -> int | None:
    found = as_integer(document.get("num_channels"))
    return found if type(found) is int and 0 < found < _STOP else None


def _check_bits(grid: MortonGrid) -> None:
    if (bits := grid.bit_count) > _ID_BITS:
        raise DecodeError(f"a grid of {list(grid.shape)} takes ids of {bits} bits, more than 64")


class MemberDescription(NamedTuple):
    """An object of an ``info``; of a sharded one with the part that its indexes name chunks of."""

    description: Description
    part: ShardedPart | None


def describe(info: Info) -> Iterator[MemberDescription | DecodeError]:
    """Describe all members, each scale by each chunk size; ``#2`` tells equal paths apart."""
    last: dict[str, int] = {}
    if (values := info.values) is not None:
        sharding = _spell(values.sharding)
        description = Description("", "precomputed", str(values.kind), sharding=sharding)
        yield MemberDescription(description, values)
    for member in info.members:
        if member.fault:
            yield DecodeError(member.fault)
            continue
        try:
            for description, sharded in _describe(info, member):
                path = _unique(description.path, last)
                yield MemberDescription(replace(description, path=path), sharded)
        except DecodeError as error:
            yield error


def _unique(path: str, last: dict[str, int]) -> str:
    """Append a number to a path that is in *last*, which has the last number of each path."""
    name = path
    number = last.get(path, 0) + 1
    while name in last:  # a path of its own may end in such a number
        number += 1
        name = f"{path}#{number}"
    last[name] = 0
    last[path] = number - 1
    return name


def _describe(info: Info, read: Member) -> Iterator[MemberDescription]:
    name, member, path, parts, _ = read
    description = Description(
        path=member["key"] if path is None else path,
        format="precomputed",
        kind={MESHES: "meshes", SKELETONS: "skeletons"}.get(name, "annotations"),
        sharding=_spell(parts[0].sharding) if parts else None,
        why_sharded="" if parts else _why_sharded(member),
    )
    if name != "scales":
        yield MemberDescription(description, parts[0] if parts else None)
        return
    count = _channels(info.document)
    channels = (count,) if count is not None and count > 1 else ()
    for number, bounds in enumerate(voxel_bounds(member)):
        array = replace(
            description,
            kind="array",
            shape=bounds.size + channels,
            data_type=_text(info.document.get("data_type")),
            dimension_names=("x", "y", "z") + ("channel",) * len(channels),
            inner_chunk_shape=bounds.chunk_size + channels,
            codecs=tuple(filter(None, (_text(member.get("encoding")),))),
        )
        yield MemberDescription(array, parts[number] if parts else None)


def _spell(sharding: Sharding) -> str:
    return (
        f"{sharding.hash}, preshift {sharding.preshift_bits}, minishard {sharding.minishard_bits}, "
        f"shard {sharding.shard_bits} bits, index {sharding.minishard_index_encoding}, "
        f"data {sharding.data_encoding}"
    )


def _why_sharded(member: Json) -> str:
    if (sharding := member.get("sharding")) is None:
        return ""
    kind = sharding.get("@type") if isinstance(sharding, dict) else sharding
    if kind != SHARDED:
        return f"the sharding is {str(kind)[:80]}"
    return "its key is no path below the directory of the info"


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class InfoTranslator:
    """Keeps the sharding of stored shards, and all members that give their bytes a meaning."""

    def is_marker(self, stored: bytes) -> bool:
        return _parse_stored(stored) is not None

    async def translate(
        self, sent: bytes, stored: bytes | None, _: Fetch, run_in_thread: RunInThread
    ) -> bytes:
        """Return *sent* with the sharding of the objects that *stored* has as well. A document
        that is no ``info`` of this format is stored unchanged. Raises: `BadBodyError`,
        `ConflictError`.
        """
        return await run_in_thread(_translate, sent, stored)


def _translate(sent: bytes, stored: bytes | None) -> bytes:
    old = None if stored is None else _parse_stored(stored)
    if old is None and not begins_like_json(sent):
        return sent
    members = () if old is None else old.members
    known = {_canonical(member.value) for member in members if member.fault}
    document, new = _parse_sent(sent, known)
    if old is None or not _restore(old, document, new):
        return sent
    try:
        translated = write_json(document)
    except ValueError as error:
        raise BadBodyError(f"the info cannot be written: {error}") from None
    _parse_sent(translated, known)  # with the sharding, members may be malformed
    return translated


def _parse_stored(stored: bytes) -> Info | None:
    try:
        return parse_info(parse_json(stored), stored)
    except ValueError:
        return None


def _canonical(value: Json) -> str:
    return json.dumps(value, sort_keys=True)


def _parse_sent(sent: bytes, known: Collection[str]) -> tuple[Json, Info | None]:
    """Parse a sent document; of malformed members it may have those that are *known*."""
    try:
        document = parse_json(sent)
        info = parse_info(document, sent)
    except DecodeError as error:
        raise BadBodyError(f"the info: {error}") from error
    except ValueError as error:
        raise BadBodyError(f"the info is no JSON: {error}") from None
    for member in () if info is None else info.members:
        if member.fault and _canonical(member.value) not in known:
            raise BadBodyError(f"the info: {member.fault}")
    return document, info


def _restore(old: Info, document: Json, new: Info | None) -> bool:
    """Set the sharding of objects of *old* in those of *document*; return whether any was."""
    members: defaultdict[tuple[str, str | None], list[Json]] = defaultdict(list)
    for each in () if new is None else new.members:
        members[each.name, each.path].append(each.value)
    is_any = False
    for name, member, path, parts, _ in old.members:
        if not parts:
            continue
        here = members[name, path]
        if member is old.document and not here:
            raise ConflictError(f"the stored shards hold {name}, and no other @type")
        if here:
            found = here.pop(0)
            _check_unchanged(name, (old.document, member), (document, found))
            found["sharding"] = member["sharding"]
            is_any = True
    return is_any


def _check_unchanged(name: str, old: tuple[Json, Json], new: tuple[Json, Json]) -> None:
    """Check that the sharding, and what gives the stored chunks a meaning, are the same in a member
    of two documents, each of which stands before its member. Raises: `ConflictError`.
    """
    member = old[1]
    sharding = new[1].get("sharding")
    meaning = _meaning(name, *new)
    changed = [each for each, value in _meaning(name, *old).items() if meaning[each] != value]
    if sharding is not None and not _is_same_sharding(member["sharding"], sharding):
        changed.insert(0, "its sharding")
    if changed:
        called = _called(name, member)
        raise ConflictError(f"{called} is stored in shards, and {changed[0]} cannot change")


def _is_same_sharding(old: Json, new: Json) -> bool:
    try:
        return old["@type"] == new["@type"] and _parse(_SHARDING, old) == _parse(_SHARDING, new)
    except (DecodeError, KeyError, TypeError):
        return False


def _meaning(name: str, document: Json, member: Json) -> Mapping[str, Json]:
    """Return the members that give the chunks of *member*, and their ids, a meaning."""
    if name == "scales":
        of_scale = ("size", "chunk_sizes", "encoding", "compressed_segmentation_block_size")
        return {
            "data_type": str(document.get("data_type")).lower(),
            "num_channels": document.get("num_channels"),
            "voxel_offset": member.get("voxel_offset", [0, 0, 0]),
            **{each: member.get(each) for each in of_scale},
        }
    if name == MESHES:
        return {"vertex_quantization_bits": document.get("vertex_quantization_bits")}
    if name == SKELETONS:
        return {"vertex_attributes": document.get("vertex_attributes") or []}
    dimensions = document.get("dimensions")
    annotations = {
        "annotation_type": document.get("annotation_type"),
        "dimensions": list(dimensions.items()) if isinstance(dimensions, dict) else dimensions,
        "properties": _each(document, "properties", "id", "type"),
    }
    if name == "by_id":
        return annotations | {"relationships": _each(document, "relationships", "id")}
    if name == "relationships":
        return annotations | {"id": member.get("id")}
    grid = {each: member.get(each) for each in ("grid_shape", "chunk_size")}
    return annotations | {"lower_bound": document.get("lower_bound"), **grid}


def _each(document: Json, name: str, *members: str) -> Json:
    found = document.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        return found
    return [[each.get(member) for member in members] for each in found]
