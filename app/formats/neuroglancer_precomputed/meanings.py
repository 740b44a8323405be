"""Which members of an ``info`` tell what the bytes of its chunks, and the ids of those, mean."""

from collections.abc import Mapping
from typing import Any, Final

from app.formats.neuroglancer_precomputed.metadata import MESHES, SKELETONS

type Json = Any

_SCALE: Final = ("size", "chunk_sizes", "encoding", "compressed_segmentation_block_size")


def meaning_of(name: str, document: Json, member: Json) -> Mapping[str, Json]:
    """Give, by their names, what *document* and its *member*, which is called *name*, say."""
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
    return _annotations(document) | _annotations_of(name, document, member)


def _annotations(document: Json) -> dict[str, Json]:
    dimensions = document.get("dimensions")
    ordered = list(dimensions.items()) if isinstance(dimensions, dict) else dimensions
    return {
        "annotation_type": document.get("annotation_type"),
        "dimensions": ordered,
        "properties": _each(document, "properties", "id", "type"),
    }


def _annotations_of(name: str, document: Json, member: Json) -> dict[str, Json]:
    if name == "by_id":
        return {"relationships": _each(document, "relationships", "id")}
    if name == "relationships":
        return {"id": member.get("id")}
    grid = {each: member.get(each) for each in ("grid_shape", "chunk_size")}
    return {"lower_bound": document.get("lower_bound"), **grid}


def _each(document: Json, name: str, *members: str) -> Json:
    """Give the *members* that each of a list has, in its order."""
    found = document.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        return found
    return [[each.get(member) for member in members] for each in found]
