"""`info` documents of precomputed data that clients write back."""

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from shardgate.concurrency import run_in_thread
from shardgate.errors import BadBodyError, ConflictError
from shardgate.formats.neuroglancer_precomputed.layout import Precomputed
from shardgate.formats.neuroglancer_precomputed.metadata import parse_info
from shardgate.read.metadata_cache import uncached_reads
from shardgate.storage.memory import MemoryStore
from tests.support.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    MURMUR,
    annotation_info,
    mesh_info,
    skeleton_info,
    volume_info,
)
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.support.resolving import ROOT

type Document = Any

_SCALE: Document = {
    **volume_info(None)["scales"][0],
    "key": "s1",
    "encoding": "compressed_segmentation",
    "compressed_segmentation_block_size": [8, 8, 8],
}
VOLUME = volume_info(RAW_SHARDING)
VOLUME["scales"].append(_SCALE | {"sharding": MURMUR})
VOLUME["scales"].append(_SCALE | {"key": "s2"})
MESHES = mesh_info(GZIP_DATA)
SKELETONS = skeleton_info(MURMUR) | {
    "vertex_attributes": [{"id": "radius", "data_type": "float32", "num_components": 1}]
}
ANNOTATIONS = annotation_info(MURMUR) | {
    "properties": [{"id": "size", "type": "float32", "description": "how large"}],
    "lower_bound": [0, 0, 0],
}
EVERY = pytest.mark.parametrize(
    "stored", [VOLUME, MESHES, SKELETONS, ANNOTATIONS], ids=lambda info: info["@type"]
)


async def _translate(given: bytes, stored: bytes | None) -> bytes:
    translator = Precomputed(2**20, 2**20).translator(ROOT)
    return await translator.translate(given, stored, uncached_reads(MemoryStore()), run_in_thread)


async def _stored(given: Document, stored: Document) -> Document:
    found = await _translate(json.dumps(given).encode(), json.dumps(stored).encode())
    return json.loads(found)


def _served(stored: Document) -> Document:
    info = parse_info(stored, json.dumps(stored).encode())
    assert info is not None
    return json.loads(info.served)


@EVERY
async def test_served_info_is_written_back_with_its_sharding(stored: Document) -> None:
    """A served ``info`` that is written back is stored with its sharding, as is the stored one."""
    other = json.loads(json.dumps(stored).replace('"minishard_bits": 1', '"minishard_bits": 1.0'))

    assert "sharding" not in json.dumps(_served(stored))
    for given_info in (_served(stored), stored, other):
        assert await _stored(given_info, stored) == stored


@EVERY
async def test_info_is_stored_verbatim_without_a_sharded_one(stored: Document) -> None:
    """An ``info`` is stored verbatim, sharded or not, if no sharded one is stored."""
    for info in (stored, _served(stored)):
        given = json.dumps(info, indent=3).encode()
        assert await _translate(given, None) == given
        assert await _translate(given, b"no info") == given
        assert await _translate(given, json.dumps(_served(stored)).encode()) == given


def _scale(at: int = 0, **members: Any) -> Callable[[Document], None]:
    return lambda info: info["scales"][at].update(members)


def _top(**members: Any) -> Callable[[Document], None]:
    return lambda info: info.update(members)


def _level(**members: Any) -> Callable[[Document], None]:
    return lambda info: info["spatial"][1].update(members)


def _elsewhere(info: Document) -> None:
    """Move a relationship to another folder, without sharding."""
    info["relationships"][0]["key"] = "elsewhere"
    info["relationships"][0].pop("sharding", None)


ALLOWED: list[tuple[Document, Callable[[Document], None]]] = [
    (VOLUME, _scale(resolution=[4, 4, 40])),
    (VOLUME, _scale(hidden=True)),
    (VOLUME, _scale(2, size=[1, 1, 1], encoding="raw")),
    (VOLUME, _top(type="segmentation", mesh="mesh")),
    (VOLUME, lambda info: info["scales"].append({**_SCALE, "key": "new", "sharding": MURMUR})),
    (VOLUME, lambda info: info["scales"].insert(0, {**_SCALE, "key": "new"})),
    (VOLUME, lambda info: info["scales"].reverse()),
    (VOLUME, lambda info: info["scales"].pop(0)),
    (MESHES, _top(transform=[2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2, 0], lod_scale_multiplier=2)),
    (MESHES, _top(segment_properties="properties")),
    (MESHES, _top(spatial_index={"path": "at"}, chunk_size=[448, 448, 448])),
    (SKELETONS, _top(transform=[2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2, 0])),
    (SKELETONS, _top(spatial_index={"path": "at"}, chunk_size=[448, 448, 448])),
    (ANNOTATIONS, _top(upper_bound=[9, 9, 9])),
    (ANNOTATIONS, lambda info: info["properties"][0].update(description="its size")),
    (ANNOTATIONS, _level(limit=10)),
    (ANNOTATIONS, _elsewhere),
    (ANNOTATIONS, lambda info: info["spatial"].pop()),
    (ANNOTATIONS, lambda info: info["spatial"].append({"key": "s2", "grid_shape": [1, 1, 1]})),
]


@pytest.mark.parametrize(("stored", "change"), ALLOWED)
async def test_compatible_change_of_an_info_is_stored(
    stored: Document, change: Callable[[Document], None]
) -> None:
    """A change that does not affect stored shards is stored with the sharding of the rest."""
    expected, given = deepcopy(stored), _served(stored)
    change(expected)
    change(given)

    assert await _stored(given, stored) == expected


REFUSED: list[tuple[Document, Callable[[Document], None], str]] = [
    (VOLUME, _scale(size=[8, 5, 1]), "scales s0 is stored in shards, and size cannot change"),
    (VOLUME, _scale(voxel_offset=[0, 0, 0]), "voxel_offset"),
    (VOLUME, lambda info: info["scales"][0].pop("voxel_offset"), "voxel_offset"),
    (VOLUME, _scale(chunk_sizes=[[3, 3, 2]]), "chunk_sizes"),
    (VOLUME, _scale(chunk_sizes=[[3, 3, 1], [4, 4, 4]]), "chunk_sizes"),
    (VOLUME, _scale(encoding="png"), "encoding"),
    (VOLUME, _scale(1, compressed_segmentation_block_size=[4, 4, 4]), "block_size"),
    (VOLUME, _top(data_type="uint16"), "data_type"),
    (VOLUME, _top(num_channels=3), "num_channels"),
    (VOLUME, _scale(sharding=MURMUR), "scales s0 .* its sharding cannot change"),
    (VOLUME, _scale(sharding={"@type": "other"}), "its sharding cannot change"),
    (VOLUME, _scale(sharding={}), "its sharding cannot change"),
    (VOLUME, _scale(sharding=[]), "its sharding cannot change"),
    (MESHES, _top(vertex_quantization_bits=10), "vertex_quantization_bits"),
    (MESHES, _top(**{"@type": "neuroglancer_legacy_mesh"}), "no other @type"),
    (MESHES, _top(**{"@type": "something"}), "no other @type"),
    (MESHES, _top(sharding=MURMUR), "its sharding cannot change"),
    (SKELETONS, _top(vertex_attributes=[]), "vertex_attributes"),
    (ANNOTATIONS, _top(annotation_type="line"), "annotation_type"),
    (ANNOTATIONS, _top(dimensions={"x": [1, "m"], "y": [1, "m"]}), "dimensions"),
    (ANNOTATIONS, _top(dimensions={n: [1, "m"] for n in "zyx"}), "dimensions"),
    (ANNOTATIONS, _top(properties=[]), "properties"),
    (ANNOTATIONS, _top(properties=[{"id": "size", "type": "uint8"}]), "properties"),
    (ANNOTATIONS, _top(properties=["size"]), "properties"),
    (ANNOTATIONS, _top(relationships=[]), "by_id .* relationships cannot change"),
    (ANNOTATIONS, _level(grid_shape=[2, 1, 4]), "spatial spatial1 .* grid_shape"),
    (ANNOTATIONS, _level(chunk_size=[1, 1, 1]), "chunk_size"),
    (ANNOTATIONS, _top(lower_bound=[1, 0, 0]), "lower_bound"),
]


@pytest.mark.parametrize(("stored", "change", "reason"), REFUSED)
async def test_change_that_would_misread_shards_is_refused(
    stored: Document, change: Callable[[Document], None], reason: str
) -> None:
    """A change by which stored shards would be misread raises ConflictError."""
    given = _served(stored)
    change(given)

    with pytest.raises(ConflictError, match=reason):
        await _stored(given, stored)


@pytest.mark.parametrize("given", [b"", b"{", b"{'a': 1}", b'{"a": ' * 100_000, b"{} {}"])
async def test_malformed_json_is_refused(given: bytes) -> None:
    """A written ``info`` of malformed JSON raises BadBodyError."""
    for stored in (None, json.dumps(VOLUME).encode()):
        with pytest.raises(BadBodyError, match="no JSON"):
            await _translate(given, stored)


@pytest.mark.parametrize(
    "change", [_scale(chunk_sizes=[]), _scale(size=[1, 2]), _top(scales=3), _scale(key=5)]
)
async def test_invalid_info_is_refused(change: Callable[[Document], None]) -> None:
    """A written ``info`` with an invalid scale raises BadBodyError."""
    given = deepcopy(VOLUME)
    change(given)

    with pytest.raises(BadBodyError):
        await _translate(json.dumps(given).encode(), None)


async def test_unchanged_malformed_scale_may_be_written_back() -> None:
    """A malformed scale is accepted if it is the stored one, and refused if it was changed."""
    stored = deepcopy(VOLUME)
    stored["scales"].append({**stored["scales"][0], "key": "s9", "size": "large"})
    given = _served(stored)

    assert await _stored({**given, "type": "segmentation"}, stored) == {
        **stored,
        "type": "segmentation",
    }
    given["scales"][-1]["size"] = "larger"
    with pytest.raises(BadBodyError, match="scales s9: size"):
        await _stored(given, stored)


@pytest.mark.parametrize("given", [b"{}", b'{"some": "settings"}', b"a note", b"\xff\xd8"])
async def test_other_files_named_info_are_stored_verbatim(given: bytes) -> None:
    """A file of another program is stored verbatim, but text not in place of an ``info``."""
    for stored in (None, b"", b"an older note", b"{", b'{"other": 1}'):
        assert await _translate(given, stored) == given
    if not given.startswith(b"{"):
        with pytest.raises(BadBodyError):
            await _translate(given, json.dumps(VOLUME).encode())
