"""Where keys of precomputed containers are written, and what bodies are taken there."""

import json
from typing import Any

import pytest

from app.errors import BadBodyError, BadKeyError, ConflictError, ReadOnlyError
from app.formats.writing import Document
from app.model import VirtualKey, Whole
from app.resolve.containers import Containers
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    IDS,
    MURMUR,
    annotation_info,
    mesh_info,
    skeleton_info,
    volume_info,
)
from tests.formats.neuroglancer_precomputed.rewritten import MOST_NBYTES, slot, target
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING, address
from tests.resolving import ROOT, known_formats
from tests.zipped import zipped

VOLUME = volume_info(RAW_SHARDING)
MESHES = mesh_info(RAW_SHARDING)
SKELETONS = skeleton_info(MURMUR)
ANNOTATIONS = annotation_info(MURMUR)


@pytest.mark.parametrize(("key", "chunk_id"), IDS.items())
async def test_a_chunk_is_written_into_its_shard(key: str, chunk_id: int) -> None:
    """Under its id."""
    shard, entry = await slot(VOLUME, key)

    assert entry == (chunk_id,)
    assert shard.ref == ROOT.join(f"s0/{address(chunk_id, RAW_SHARDING)[0]}.shard")


@pytest.mark.parametrize(
    ("info", "key", "shard", "entry"),
    [
        (SKELETONS, "7", f"{address(7, MURMUR)[0]}.shard", (7,)),
        (ANNOTATIONS, "by_id/7", f"by_id/{address(7, MURMUR)[0]}.shard", (7,)),
        (ANNOTATIONS, "by_segment/7", f"by_segment/{address(7, MURMUR)[0]}.shard", (7,)),
        (ANNOTATIONS, "spatial1/1_0_2", f"spatial1/{address(5, MURMUR)[0]}.shard", (5,)),
    ],
)
async def test_entries_of_other_things(
    info: Any, key: str, shard: str, entry: tuple[int, ...]
) -> None:
    """Ids and cells."""
    found = await slot(info, key)

    assert (found.shard.ref, found.entry) == (ROOT.join(shard), entry)


async def test_shards_are_the_same_where_their_chunks_are_in_one() -> None:
    """So that what waits for it is gathered."""
    first, second, other = [(await slot(VOLUME, key)).shard for key in [*list(IDS)[:2], *IDS][:3]]

    assert (first, hash(first)) == (second, hash(second))
    assert first == other
    assert first != (await slot(VOLUME, list(IDS)[4])).shard


@pytest.mark.parametrize(
    ("info", "key", "rule"),
    [
        (VOLUME, "s0/-1-3_5-8_0-1", r"chunks have \[3, 3, 1\] voxels, from \[-1, 5, 0\] on"),
        (VOLUME, "s0/-4--1_5-8_0-1", "chunks have"),
        (VOLUME, "s0/8-11_5-8_0-1", "chunks have"),
        (VOLUME, "s0/5-8_5-8_0-1", r"end where the \[7, 5, 1\] voxels of the volume do"),
        (MESHES, "07", "without zeros before them"),
        (MESHES, "07.index", "and .index behind them"),
        (SKELETONS, str(2**64), "below 2\\^64"),
        (SKELETONS, "\u0667", "decimal"),
        (ANNOTATIONS, "by_id/00", "decimal"),
        (ANNOTATIONS, "spatial1/2_0_0", r"below \[2, 1, 3\]"),
        (ANNOTATIONS, "spatial1/0_0", r"below \[2, 1, 3\]"),
    ],
)
async def test_names_of_no_chunk_are_refused(info: Any, key: str, rule: str) -> None:
    """Nobody would look for them where they would be stored."""
    with pytest.raises(BadKeyError, match=rule):
        await target(info, key)


@pytest.mark.parametrize(
    ("info", "key"),
    [
        (VOLUME, "info"),
        (VOLUME, "0.shard"),
        (VOLUME, "s0/00.shard"),
        (volume_info(None), "s0/0.shard"),
        (VOLUME, "provenance"),
        (VOLUME, "s0/notes"),
        (VOLUME, "mesh/7"),
        (volume_info(None), "s0/-1-3_5-8_0-1"),
        (SKELETONS, "07.spatial"),
        (mesh_info(None), "07.index"),
    ],
)
async def test_all_else_is_an_object(info: Any, key: str) -> None:
    """Also what is only spelled like a shard."""
    assert await target(info, key) == Whole(ROOT.join(key))


@pytest.mark.parametrize(
    ("info", "key"),
    [
        (VOLUME, "s0/0.shard"),
        (VOLUME, "s0/0.index"),
        (VOLUME, "s0/0.data"),
        (SKELETONS, "0.shard"),
        (MESHES, "0.shard"),
        (ANNOTATIONS, "by_id/0.shard"),
    ],
)
async def test_no_shard_is_written_as_a_whole(info: Any, key: str) -> None:
    """All its chunks would be gone, and whoever sees no shards cannot mean that."""
    with pytest.raises(ConflictError, match=f"^{key} is a shard: .*raw"):
        await target(info, key)


async def test_shards_of_several_things_are_not_written() -> None:
    """The ids of one would be those of the other."""
    scale = VOLUME["scales"][0]
    two = scale | {"chunk_sizes": [[3, 3, 1], [2, 2, 2]]}
    for scales in ([two], [scale, scale | {"key": "./s0"}]):
        with pytest.raises(ReadOnlyError, match="s0"):
            await target({**VOLUME, "scales": scales}, "s0/-1-2_5-8_0-1")


async def test_a_shard_index_that_is_too_large_is_not_written() -> None:
    """Nobody here would read it."""
    with pytest.raises(ReadOnlyError, match=str(16 * 2**20)):
        await target(skeleton_info({**RAW_SHARDING, "minishard_bits": 20}), "7")


async def test_an_info_is_translated() -> None:
    """In whichever directory it is, be there one or not."""
    store = MemoryStore()
    store.place(ROOT.join("info"), json.dumps(VOLUME).encode())
    containers = Containers(known_formats())
    for key in ("info", "mesh/info"):
        found = await containers.target(ROOT, VirtualKey(key), DirectFetch(store))
        assert isinstance(found, Document)
        assert found.ref == ROOT.join(key)


@pytest.mark.parametrize(
    ("data_type", "channels", "key", "nbytes"),
    [
        ("uint8", 1, "s0/-1-2_5-8_0-1", 9),
        ("uint8", 1, "s0/5-6_8-10_0-1", 2),
        ("uint16", 3, "s0/2-5_8-10_0-1", 36),
        ("float32", 1, "s0/-1-2_5-8_0-1", 36),
        ("UINT64", 1, "s0/-1-2_5-8_0-1", 72),
    ],
)
async def test_chunks_of_voxels_have_one_size(
    data_type: str, channels: int, key: str, nbytes: int
) -> None:
    """That of their voxels, clipped at the end of the volume; inflated if need be."""
    for sharding in (RAW_SHARDING, GZIP_DATA):
        info = volume_info(sharding) | {"data_type": data_type, "num_channels": channels}
        shard, entry = await slot(info, key)
        for wrong in (nbytes - 1, nbytes + 1, 0):
            with pytest.raises(BadBodyError, match=str(nbytes) if wrong else "empty"):
                shard.encode(entry, bytes(wrong), is_gzip=False)
            with pytest.raises(BadBodyError):
                shard.encode(entry, zipped(bytes(wrong)), is_gzip=True)
        assert shard.encode(entry, bytes(nbytes), is_gzip=False)


@pytest.mark.parametrize(
    "members", [{"encoding": "png"}, {"encoding": "compressed_segmentation"}, {"encoding": "new"}]
)
async def test_encoded_chunks_have_any_size_but_none(members: Any) -> None:
    """Only their decoders know it."""
    shard, entry = await slot(volume_info(RAW_SHARDING, **members), next(iter(IDS)))

    assert shard.encode(entry, b"x", is_gzip=False) == b"x"
    with pytest.raises(BadBodyError):
        shard.encode(entry, b"", is_gzip=False)


async def test_gzip_is_stored_as_it_came() -> None:
    """Once it was seen to inflate; what came plain is compressed, always alike."""
    shard, entry = await slot(skeleton_info(GZIP_DATA), "7")
    body = b"a skeleton " * 100
    stored = shard.encode(entry, body, is_gzip=False)

    assert shard.encode(entry, zipped(body), is_gzip=True) == zipped(body)
    assert len(stored) < len(body)
    assert stored == shard.encode(entry, body, is_gzip=False)
    assert stored[4:8] == bytes(4)
    assert shard.encode(entry, stored, is_gzip=True) == stored


async def test_gzip_is_inflated_for_shards_without() -> None:
    """Clients that compress what they send need not know."""
    shard, entry = await slot(skeleton_info(RAW_SHARDING), "7")

    assert shard.encode(entry, zipped(b"a skeleton"), is_gzip=True) == b"a skeleton"
    assert shard.encode(entry, zipped(b"as it is"), is_gzip=False) == zipped(b"as it is")


@pytest.mark.parametrize(
    "body", [b"plain", b"", zipped(b"cut off")[:-1], zipped(bytes(MOST_NBYTES + 1)), zipped(b"")]
)
@pytest.mark.parametrize("sharding", [RAW_SHARDING, GZIP_DATA], ids=["raw", "gzip"])
async def test_what_is_no_gzip_is_refused(sharding: Any, body: bytes) -> None:
    """Or what holds more than is taken, or nothing."""
    shard, entry = await slot(skeleton_info(sharding), "7")

    with pytest.raises(BadBodyError):
        shard.encode(entry, body, is_gzip=True)
