"""Shards of meshes made anew: fragments and manifests go together."""

import gzip
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BadBodyError, ConflictError, DamagedError
from app.formats.writing import ShardRewriter
from app.model import ByteRange
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.formats.neuroglancer_precomputed.case import encode_manifest, mesh_info
from tests.formats.neuroglancer_precomputed.rewritten import decoded, rewritten, slot
from tests.formats.neuroglancer_precomputed.shards import (
    RAW_SHARDING,
    Sharding,
    encode_minishard,
    encode_shard,
)
from tests.resolve.stores import WatchedStore
from tests.zipped import zipped

FRAGMENTS, MANIFEST = 0, 1
_SINGLE = {**RAW_SHARDING, "preshift_bits": 0, "minishard_bits": 2, "shard_bits": 0}
_GZIP = {**_SINGLE, "data_encoding": "gzip", "minishard_index_encoding": "gzip"}

type Mesh = tuple[bytes, bytes]
"""Fragments and manifest."""
type Changes = dict[tuple[int, ...], bytes | None]


async def _shard(sharding: Sharding = _SINGLE) -> Any:
    shard, entry = await slot(mesh_info(sharding), "7")
    assert entry == (7, FRAGMENTS)
    assert await slot(mesh_info(sharding), "7.index") == (shard, (7, MANIFEST))
    return shard


def _mesh(fragments: bytes) -> Mesh:
    first = len(fragments) // 2
    return fragments, encode_manifest([[first], [len(fragments) - first]])


def _meshes_of(shard: bytes, sharding: Sharding) -> dict[int, Mesh]:
    """Take a shard apart, in which fragments and manifests lie without holes."""
    places = [item for each in decoded(shard, sharding) for item in each.items()]
    found, end = {}, 16 * 2 ** sharding["minishard_bits"]
    for chunk_id, (start, stop) in sorted(places, key=lambda item: item[1]):
        manifest = shard[start:stop]
        if sharding["data_encoding"] == "gzip":
            manifest = gzip.decompress(manifest)
        found[chunk_id] = (shard[end:start], manifest)
        assert found[chunk_id] == _mesh(shard[end:start])
        end = stop
    indexes = struct.iter_unpack("<2Q", shard[: 16 * 2 ** sharding["minishard_bits"]])
    assert not places or end == 16 * 2 ** sharding["minishard_bits"] + min(
        start for start, stop in indexes if start < stop
    )
    return found


def _written(shard: ShardRewriter[Any], meshes: Mapping[int, bytes | None], *parts: int) -> Changes:
    """Give the changes that put the *parts* of meshes, or take them away."""
    changes: Changes = {}
    for chunk_id, fragments in meshes.items():
        for part in parts or (FRAGMENTS, MANIFEST):
            entry = (chunk_id, part)
            changes[entry] = None
            if fragments is not None:
                body = _mesh(fragments)[part]
                changes[entry] = shard.encode(entry, body, is_gzip=False)
    return changes


_histories = st.lists(
    st.dictionaries(st.integers(0, 12), st.none() | st.binary(max_size=9), max_size=5), max_size=5
)


@given(sharding=st.sampled_from([_SINGLE, _GZIP]), history=_histories, is_large=st.booleans())
async def test_any_history_leaves_whole_meshes(
    sharding: Sharding, history: list[dict[int, bytes | None]], *, is_large: bool
) -> None:
    """Each manifest has its fragments right before it, and nothing else is there."""
    shard = await _shard(sharding)
    shard = replace(shard, large_nbytes=0) if is_large else shard
    model: dict[int, bytes] = {}
    stored: bytes | None = None
    for meshes in history:
        changes = _written(shard, meshes)
        stored, planned = await rewritten(shard, stored, changes)
        for chunk_id, fragments in meshes.items():
            model.pop(chunk_id, None)
            if fragments is not None:
                model[chunk_id] = fragments
        assert (stored is None) == (not model)
        if stored is not None and planned is not None:
            expected = {chunk_id: _mesh(fragments) for chunk_id, fragments in model.items()}
            assert _meshes_of(stored, sharding) == expected
            places = {entry: stored[slice(*place)] for entry, place in planned.places.items()}
            assert places == {entry: data for entry, data in changes.items() if data is not None}


@given(sharding=st.sampled_from([_SINGLE, _GZIP]), history=_histories)
async def test_equal_meshes_have_equal_bytes(
    sharding: Sharding, history: list[dict[int, bytes | None]]
) -> None:
    """Whatever was there before."""
    shard = await _shard(sharding)
    stored: bytes | None = None
    model: dict[int, bytes | None] = {}
    for meshes in history:
        stored, _ = await rewritten(shard, stored, _written(shard, meshes))
        model |= meshes

    assert (await rewritten(shard, None, _written(shard, model)))[0] == stored


async def _stored(shard: ShardRewriter[Any]) -> bytes:
    stored, _ = await rewritten(shard, None, _written(shard, {7: b"seven", 8: b"eight!", 9: b""}))
    assert stored is not None
    return stored


@pytest.mark.parametrize(
    ("meshes", "parts"),
    [
        ({7: b"longer than before"}, [FRAGMENTS]),
        ({7: b"longer than before"}, [MANIFEST]),
        ({9: b"something"}, [FRAGMENTS]),
        ({1: b"new"}, [FRAGMENTS]),
        ({1: b""}, [FRAGMENTS]),
        ({1: b"new"}, [MANIFEST]),
        ({7: None}, [FRAGMENTS]),
    ],
)
async def test_what_does_not_fit_together_is_a_conflict(
    meshes: dict[int, bytes | None], parts: list[int]
) -> None:
    """Half a mesh is written only where the other half that is there goes with it."""
    shard = await _shard()

    with pytest.raises(ConflictError, match=r"write \d and \d.index in one batch"):
        await rewritten(shard, await _stored(shard), _written(shard, meshes, *parts))


@pytest.mark.parametrize(
    ("meshes", "parts", "expected"),
    [
        ({7: b"SEVEN"}, [FRAGMENTS], {7: b"SEVEN", 8: b"eight!", 9: b""}),
        ({7: b"SEVEN"}, [MANIFEST], {7: b"seven", 8: b"eight!", 9: b""}),
        ({7: None}, [MANIFEST], {8: b"eight!", 9: b""}),
        ({7: None, 8: None}, [MANIFEST], {9: b""}),
        ({9: None}, [FRAGMENTS], {7: b"seven", 8: b"eight!", 9: b""}),
        ({1: b""}, [MANIFEST], {1: b"", 7: b"seven", 8: b"eight!", 9: b""}),
        ({1: None}, [FRAGMENTS], {7: b"seven", 8: b"eight!", 9: b""}),
    ],
)
async def test_what_fits_is_written(
    meshes: dict[int, bytes | None], parts: list[int], expected: dict[int, bytes]
) -> None:
    """Fragments of the same length, a manifest of the same; without one the mesh is gone."""
    shard = await _shard()
    new, _ = await rewritten(shard, await _stored(shard), _written(shard, meshes, *parts))

    assert new is not None
    assert _meshes_of(new, _SINGLE) == {each: _mesh(data) for each, data in expected.items()}


async def test_the_last_mesh_goes_with_the_shard() -> None:
    """Nothing is left, then."""
    shard = await _shard()
    changes = _written(shard, {7: None, 8: None, 9: None}, MANIFEST)

    assert await rewritten(shard, await _stored(shard), changes) == (None, None)


async def test_lookup_finds_both_parts() -> None:
    """Of the meshes that it was opened for."""
    shard = await _shard()
    store = MemoryStore()
    stored = await _stored(shard)
    store.place(shard.ref, stored)
    opened = await shard.open([(7, MANIFEST), (8, FRAGMENTS), (1, MANIFEST)], DirectFetch(store))

    for entry in ((7, FRAGMENTS), (7, MANIFEST), (8, FRAGMENTS), (8, MANIFEST)):
        fragments = {7: b"seven", 8: b"eight!"}[entry[0]]
        assert stored[slice(*opened.lookup(entry))] == _mesh(fragments)[entry[1]]
    assert opened.lookup((1, MANIFEST)) is None
    assert opened.size == len(stored)


@pytest.mark.parametrize("body", [b"", b"short", encode_manifest([[1], [2]])[:-1]])
async def test_a_body_that_is_no_manifest_is_refused(body: bytes) -> None:
    """Nobody could find the fragments."""
    for sharding in (_SINGLE, _GZIP):
        with pytest.raises(BadBodyError):
            (await _shard(sharding)).encode((7, MANIFEST), body, is_gzip=False)


async def test_fragments_are_never_gzip_in_a_shard() -> None:
    """Viewers read ranges of them."""
    shard = await _shard(_GZIP)

    assert shard.encode((7, FRAGMENTS), zipped(b"seven"), is_gzip=True) == b"seven"
    assert shard.encode((7, FRAGMENTS), b"", is_gzip=False) == b""
    with pytest.raises(BadBodyError):
        shard.encode((7, FRAGMENTS), b"seven", is_gzip=True)


def _damaged(*rows: tuple[int, int, int], body: bytes) -> bytes:
    index = encode_minishard(list(rows))
    return struct.pack("<2Q", len(body), len(body) + len(index)) + bytes(48) + body + index


_BODY = b"seven" + _mesh(b"seven")[1]


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (_damaged((4, 4, len(_BODY) - 5), body=_BODY[1:]), "more than lie before it"),
        (_damaged((4, 5, len(_BODY) - 6), body=_BODY), "ends after"),
        (_damaged((4, 5, len(_BODY)), body=_BODY), "overlaps a minishard index"),
        (_damaged((5, 5, len(_BODY) - 5), body=_BODY), "in minishard 0 and not in minishard 1"),
    ],
)
async def test_damaged_shards_are_refused(stored: bytes, reason: str) -> None:
    """What is there could not be kept."""
    shard = await _shard()

    with pytest.raises(DamagedError, match=reason):
        await rewritten(shard, stored, _written(shard, {8: b"eight"}))


async def test_manifests_far_apart_are_read_alone() -> None:
    """And those near each other at once: two reads for three meshes, behind the two of indexes."""
    fragments = {4: bytes(10), 8: bytes(100_000), 12: bytes(10)}
    meshes = [{each: _mesh(data)[1] for each, data in fragments.items()}, {}, {}, {}]
    head, body = encode_shard(meshes, _SINGLE, before=fragments)
    store = WatchedStore()
    shard = await _shard()
    store.place(shard.ref, head + body)
    opened = await shard.open([(4, MANIFEST)], DirectFetch(store))

    assert opened.lookup((4, FRAGMENTS)).length == 10
    lengths = [call.request.length for call in store.calls if isinstance(call.request, ByteRange)]
    assert lengths[2:] == [len(_mesh(b"")[1]), 2 * len(_mesh(b"")[1]) + 10]
