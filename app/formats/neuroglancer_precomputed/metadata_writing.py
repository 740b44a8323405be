"""``info`` as clients write it, turned into the stored form, which keeps the sharding."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from app.errors import BadBodyError, ConflictError
from app.formats.documents import begins_like_json
from app.formats.neuroglancer_precomputed.metadata import (
    MESHES,
    SKELETONS,
    Info,
    is_sharded,
    parse_info,
    parse_sharding,
    path_of,
)
from app.formats.reading import DecodeError, Fetch

type Json = Any

_SCALE: Final = ("size", "chunk_sizes", "encoding", "compressed_segmentation_block_size")


@dataclass(frozen=True, slots=True)
class InfoTranslator:
    """Keeps the sharding of stored shards, and all members that give their bytes a meaning."""

    async def translate(self, sent: bytes, stored: bytes | None, _: Fetch) -> bytes:
        """Return *sent* with the sharding of the objects that *stored* has as well. A document
        that is no ``info`` of this format is stored unchanged. Raises: `BadBodyError`,
        `ConflictError`.
        """
        old = None if stored is None else _parse_stored(stored)
        if old is None and not begins_like_json(sent):
            return sent
        document, new = _parse(sent)
        if old is None or not _restore(old, document, new):
            return sent
        translated = json.dumps(document).encode()
        _parse(translated)
        return translated


def _parse_stored(stored: bytes) -> Info | None:
    try:
        return parse_info(json.loads(stored), stored)
    except (ValueError, RecursionError):
        return None


def _parse(sent: bytes) -> tuple[Json, Info | None]:
    try:
        document = json.loads(sent)
        return document, parse_info(document, sent)
    except DecodeError as error:
        raise BadBodyError(f"the info: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadBodyError(f"the info is no JSON: {error}") from None


def _restore(old: Info, document: Json, new: Info | None) -> bool:
    """Set the sharding of objects of *old* in those of *document*; return whether any was."""
    members: defaultdict[tuple[str, str | None], list[Json]] = defaultdict(list)
    for name, member in () if new is None else new.members:
        members[name, path_of(member)].append(member)
    is_any = False
    for name, member in old.members:
        if not is_sharded(member):
            continue
        here = members[name, path_of(member)]
        if member is old.document and not here:
            raise ConflictError(f"what is stored in shards is {name}, and no other @type")
        if here:
            found = here.pop(0)
            _check(name, (old.document, member), (document, found))
            found["sharding"] = member["sharding"]
            is_any = True
    return is_any


def _check(name: str, old: tuple[Json, Json], new: tuple[Json, Json]) -> None:
    (_, before), (_, after) = old, new
    called = f"{name} {before.get('key', '')}".strip()
    sharding = after.get("sharding")
    if sharding is not None and not _is_same_sharding(before["sharding"], sharding):
        raise ConflictError(f"{called} is stored in shards, and its sharding cannot change")
    meaning, expected = _meaning(name, *new), _meaning(name, *old)
    changed = [aspect for aspect, value in expected.items() if meaning[aspect] != value]
    if changed:
        raise ConflictError(f"{called} is stored in shards, and {changed[0]} cannot change")


def _is_same_sharding(old: Json, new: Json) -> bool:
    try:
        return old["@type"] == new["@type"] and parse_sharding(old) == parse_sharding(new)
    except (DecodeError, AttributeError, KeyError, TypeError):
        return False


def _meaning(name: str, document: Json, member: Json) -> Mapping[str, Json]:
    """Return the members that give the chunks of *member*, and their ids, a meaning."""
    if name == "scales":
        return {
            "data_type": str(document.get("data_type")).lower(),
            "num_channels": document.get("num_channels"),
            "voxel_offset": member.get("voxel_offset", [0, 0, 0]),
            **{each: member.get(each) for each in _SCALE},
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
