"""Manifests that are written: split as by the library, and read by it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.formats.icechunk.changes import ChunkChanges
from shardgate.formats.icechunk.config import WHOLE, Config, parse_splitting
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.manifest import (
    InlineChunk,
    Manifest,
    ManifestDecoder,
    Native,
    Reference,
    Virtual,
)
from shardgate.formats.icechunk.manifest_writer import (
    ArrayRewrite,
    Rewritten,
    needed_manifests,
    rewrite_manifests,
)
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.repo_info import RepoInfoDecoder
from shardgate.formats.icechunk.snapshot import ManifestFile, ManifestRef, StoredArray
from shardgate.formats.reading import DecodeError
from shardgate.model import ByteRange, ETag, UnmodifiedSince
from tests.support.formats.icechunk.building import MANIFEST, Ref, Table, envelope, manifest
from tests.support.formats.icechunk.peer import (
    ARCHIVE,
    LIMIT,
    Peer,
    array,
    delete,
    read_manifest,
    write,
)
from tests.support.payloads import references

new_id = partial(os.urandom, 12)

NODE, OTHER = b"arraynod", b"othernod"
OLD = b"old manifest"

type Coords = tuple[int, ...]


def changes(changed: Mapping[Coords, Reference | None], ndim: int) -> ChunkChanges:
    """Return changes in order of coordinates."""
    coords = sorted(changed)
    return ChunkChanges(
        np.array(coords, np.uint32).reshape(len(coords), ndim),
        Payloads.of(changed[at] for at in coords),
    )


def contents(
    refs: Sequence[ManifestRef], manifests: Mapping[bytes, Manifest], ndim: int
) -> dict[Coords, object]:
    """Return all references of an array; of two for one chunk, that of the first manifest."""
    found: dict[Coords, object] = {}
    for ref in refs:
        decoded = manifests[ref.object_id]
        for row in decoded.coords(NODE, ndim).tolist():
            if ref.covers(tuple(row)):
                found.setdefault(tuple(row), decoded.lookup(NODE, tuple(row)))
    return found


def decoded(written: Mapping[bytes, bytes]) -> dict[bytes, Manifest]:
    """Decode new manifests."""
    return {each: ManifestDecoder(each, LIMIT)(data) for each, data in written.items()}


def old_manifest(
    refs: Sequence[Ref | Table], object_id: bytes = OLD, other: Sequence[Ref] = (), **more: Any
) -> Manifest:
    """Build a manifest independently, with references of another array too, and decode it."""
    payload = manifest(object_id, [(OTHER, other), (NODE, refs)], **more)
    return ManifestDecoder(object_id, LIMIT)(envelope(payload, MANIFEST))


RANGES = st.tuples(st.integers(0, 2**40), st.integers(0, 2**20)).map(
    lambda at: ByteRange(at[0], at[0] + at[1])
)
NATIVE = st.builds(Native, st.binary(min_size=12, max_size=12), RANGES)
LOCATIONS = st.sampled_from(
    ["s3://a/b", "s3://a/bb", "vcc://x/y", "file:///ä", "s3://c/" + "d" * 90]
)
CHECKSUMS = st.sampled_from([None, ETag('"e"'), ETag('"etag"'), UnmodifiedSince(7)])
VIRTUAL = st.builds(Virtual, LOCATIONS, RANGES, CHECKSUMS)
INLINE = st.builds(InlineChunk, st.binary(max_size=9))
PAYLOADS = st.one_of(NATIVE, VIRTUAL, INLINE)

DICTIONARIES = [
    zstandard.train_dictionary(
        1024, [b"s3://%d/file-%d.nc" % (i, k) for k in range(500)]
    ).as_bytes()
    for i in range(2)
]


def stored(at: Coords, payload: object, dictionary: bytes | None) -> Ref:
    """Return a reference for the old manifest."""
    match payload:
        case Native(chunk_id, (start, stop)):
            return Ref(index=at, chunk_id=chunk_id, offset=start, length=stop - start)
        case InlineChunk(data):
            return Ref(index=at, inline=data)
        case Virtual(location, (start, stop), checksum):
            data = location.encode()
            if dictionary is not None:
                trained = zstandard.ZstdCompressionDict(dictionary)
                data = zstandard.ZstdCompressor(3, trained).compress(data)
            at_s = checksum.epoch_s if isinstance(checksum, UnmodifiedSince) else None
            return Ref(
                index=at,
                location=None if dictionary is not None else data,
                compressed_location=None if dictionary is None else data,
                offset=start,
                length=stop - start,
                checksum_etag=None if isinstance(checksum, UnmodifiedSince) else checksum,
                checksum_last_modified=at_s,
            )
    raise TypeError(payload)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ArrayRewrite, dict[bytes, Manifest]]:
    """Draw old manifests, changes, a new grid and a splitting."""
    ndim = draw(st.integers(0, 3))
    coords = st.tuples(*[st.integers(0, 4)] * ndim)
    refs: list[ManifestRef] = []
    manifests: dict[bytes, Manifest] = {}
    for number in range(draw(st.integers(0, 3))):
        object_id = (b"old manifest %d" % number)[-12:]
        dictionary = draw(st.sampled_from([None, *DICTIONARIES]))
        found = draw(st.lists(st.tuples(coords, PAYLOADS), max_size=12))
        items = [stored(at, payload, dictionary) for at, payload in found]
        alien = [Ref(index=(1,) * (ndim + 1), inline=b"alien")] * draw(st.integers(0, 1))
        manifests[object_id] = old_manifest(
            [*alien, *items],
            object_id,
            [Ref(index=(1,) * ndim, inline=b"other")] * draw(st.integers(0, 1)),
            dictionary=dictionary,
            algorithm=0 if dictionary is None else 1,
        )
        box = draw(st.tuples(*[st.tuples(st.integers(0, 2), st.integers(3, 5))] * ndim))
        refs.append(ManifestRef(object_id, box))
    changed = draw(st.dictionaries(coords, st.none() | PAYLOADS, max_size=8))
    grid = draw(st.tuples(*[st.integers(0, 6)] * ndim))
    splits = draw(st.just((WHOLE,) * ndim) | st.tuples(*[st.integers(1, 4)] * ndim))
    return ArrayRewrite(NODE, grid, tuple(refs), changes(changed, ndim), splits), manifests


@settings(max_examples=40)
@given(cases())
def test_rewritten_manifests_have_old_and_changed_references(
    case: tuple[ArrayRewrite, dict[bytes, Manifest]],
) -> None:
    """Rewritten manifests have all old references in the grid, and the changes.

    They have no other arrays, tight extents within one split each, and right counts.
    """
    rewrite, manifests = case
    ndim = len(rewrite.grid)
    sizes = rewrite.splits
    expected = contents(rewrite.manifests, manifests, ndim)
    rows = rewrite.changes.coords.tolist()
    expected |= dict(zip(map(tuple, rows), references(rewrite.changes.payloads), strict=True))
    expected = {
        at: payload
        for at, payload in expected.items()
        if payload is not None and all(i < n for i, n in zip(at, rewrite.grid, strict=True))
    }
    needed = {each: manifests[each] for each in needed_manifests(rewrite)}
    found, written = rewrite_manifests(rewrite, needed, new_id)
    new = decoded(written)

    assert contents(found.manifests, manifests | new, ndim) == expected
    refs = [ref for ref in found.manifests if ref not in rewrite.manifests]
    assert {ref.object_id for ref in refs} == set(written)
    assert [each.object_id for each in found.files] == list(written)
    for ref in refs:
        assert list(new[ref.object_id].arrays) == [(NODE, ndim)]
        coords = new[ref.object_id].coords(NODE, ndim)
        low, high = coords.min(axis=0).tolist(), coords.max(axis=0).tolist()
        assert ref.extents == tuple((a, b + 1) for a, b in zip(low, high, strict=True))
        assert all(a // n == b // n for a, b, n in zip(low, high, sizes, strict=True))
        size = len(written[ref.object_id])
        assert ManifestFile(ref.object_id, size, len(coords)) in found.files


def _rewritten(
    peer: Peer,
    path: str,
    changed: Mapping[Coords, Reference | None],
    splits: tuple[int, ...] = (),
) -> Rewritten:
    """Apply changes to the manifests of an array, and store them in the repository."""
    node, array = peer.node(path), peer.array(path)
    ids = [ref.object_id for ref in array.manifests]
    manifests = {each: read_manifest(peer.folder, each) for each in ids}
    made = changes(changed, len(array.grid))
    splits = splits or (WHOLE,) * len(array.grid)
    rewrite = ArrayRewrite(node.node_id, array.grid, array.manifests, made, splits)
    found, written = rewrite_manifests(rewrite, manifests, new_id)
    peer.put(path, found.manifests, written)
    return found


def test_library_reads_and_commits_onto_written_manifests(tmp_path: Path) -> None:
    """The library reads written manifests, and its commits keep their references."""
    peer = Peer(tmp_path)
    session = peer.session()
    array(session, "native", (600, 4), chunks=(300, 2))[:] = 3
    array(session, "scalar", ())[...] = 5
    session.commit("first")
    (ref,) = peer.array("/native").manifests
    first = read_manifest(tmp_path, ref.object_id).lookup(peer.node("/native").node_id, (0, 0))
    assert isinstance(first, Native)
    part = Native(first.chunk_id, ByteRange(7, 17))
    _rewritten(peer, "/native", {(0, 1): None, (1, 1): part, (1, 0): InlineChunk(b"x" * 600)})
    _rewritten(peer, "/scalar", {(): InlineChunk(b"y")})
    chunks = {
        "native/c/0/0": b"\3" * 600,
        "native/c/0/1": None,
        "native/c/1/0": b"x" * 600,
        "native/c/1/1": b"\3" * 10,
        "scalar/c": b"y",
    }

    assert {key: peer.get(key) for key in chunks} == chunks
    assert [each["extents"] for each in peer.inspect_manifests("/scalar")] == [[]]
    theirs = {"native/c/0/1": b"theirs", "scalar/c": b"theirs"}
    session = peer.session()
    for key, data in theirs.items():
        write(session, key, data)
    session.commit("theirs")
    peer.reopen()
    assert {key: peer.get(key) for key in chunks} == chunks | theirs


def test_library_reads_written_virtual_references(tmp_path: Path) -> None:
    """The library reads new and kept virtual references; compressed locations stay compressed."""
    specs = [
        icechunk.VirtualChunkSpec([i], f"{ARCHIVE}year-{i % 99:04d}/file.nc", i, 7)
        for i in range(1200)  # the library compresses the locations of 1,000 and more
    ]
    peer = Peer(tmp_path)
    session = peer.session()
    array(session, "virtual", (len(specs),))
    assert session.store.set_virtual_refs("virtual", specs) is None
    session.commit("first")
    new = f"{ARCHIVE}new.nc"
    changed: dict[Coords, Reference | None] = {
        (0,): Virtual(new, ByteRange(1, 3), None),
        (1,): Virtual(new, ByteRange(2, 3), ETag('"e"')),
        (2,): Virtual(new, ByteRange(3, 3), UnmodifiedSince(7)),
        (3,): None,
    }
    found = _rewritten(peer, "/virtual", changed)
    (ref,) = peer.inspect_manifests("/virtual")
    inspected = peer.repository.inspect_manifest(ref["id"])

    assert inspected["compression"]["uses_location_compression"]
    assert inspected["compression"]["num_compressed_refs"] == len(specs) - 4
    assert inspected["arrays"][0]["num_virtual"] == found.files[0].num_chunk_refs == len(specs) - 1
    locations = peer.repository.readonly_session("main").all_virtual_chunk_locations()
    assert sorted(locations) == sorted([new] * 3 + [spec.location for spec in specs[4:]])


def test_scalar_with_a_dimension_is_rewritten_without_it() -> None:
    """The reference of a scalar with a dimension, as early writers had, is written without it.

    Once the chunk is deleted, there is no manifest.
    """
    old = {OLD: old_manifest([Ref(index=[0], inline=b"x")])}
    rewrite = ArrayRewrite(NODE, (), (ManifestRef(OLD, ((0, 1),)),), changes({}, 0), ())
    assert rewrite_manifests(rewrite, {}, new_id)[0].manifests == rewrite.manifests

    rewrite = replace(rewrite, changes=changes({(): InlineChunk(b"y")}, 0))
    found, written = rewrite_manifests(rewrite, old, new_id)
    assert [ref.extents for ref in found.manifests] == [()]
    assert contents(found.manifests, decoded(written), 0) == {(): InlineChunk(b"y")}
    rewrite = replace(rewrite, changes=changes({(): None}, 0))
    assert rewrite_manifests(rewrite, old, new_id)[0].manifests == ()


def test_references_of_a_grid_of_more_than_2_to_64_chunks_are_rewritten() -> None:
    """References whose coordinates together take more than 64 bits are kept, changed and added."""
    last = 2**32 - 2
    far, near, new = (last, last, last), (0, 0, 1), (0, last, 0)
    old = old_manifest([Ref(index=far, inline=b"far"), Ref(index=near, inline=b"near")])
    everything = ManifestRef(OLD, ((0, last + 1),) * 3)
    changed = changes({near: InlineChunk(b"changed"), new: InlineChunk(b"new")}, 3)
    rewrite = ArrayRewrite(NODE, (last + 1,) * 3, (everything,), changed, (WHOLE,) * 3)
    rewritten, written = rewrite_manifests(rewrite, {OLD: old}, new_id)

    (ref,) = rewritten.manifests
    found = ManifestDecoder(ref.object_id, LIMIT)(written[ref.object_id])
    assert {at: found.lookup(NODE, at) for at in (far, near, new, (0, 0, 0))} == {
        far: InlineChunk(b"far"),
        near: InlineChunk(b"changed"),
        new: InlineChunk(b"new"),
        (0, 0, 0): None,
    }


def test_rewrite_of_a_damaged_reference_is_refused() -> None:
    """A rewrite of a manifest with a damaged reference raises DecodeError."""
    broken = old_manifest([Ref(index=[0], location="s3://a/b")])
    data = bytearray(broken.references.data)
    at = data.index(b"s3://a/b") - 4
    data[at : at + 4] = b"\xff\xff\xff\x0f"
    old = {OLD: ManifestDecoder(OLD, LIMIT)(envelope(bytes(data), MANIFEST))}

    refs, one_more = (ManifestRef(OLD, ((0, 9),)),), changes({(5,): InlineChunk(b"z")}, 1)

    with pytest.raises(DecodeError, match="reaches out"):
        rewrite_manifests(ArrayRewrite(NODE, (9,), refs, one_more, (WHOLE,)), old, new_id)


C, D = icechunk.ManifestSplitCondition, icechunk.ManifestSplitDimCondition


def splitting(rules: Mapping[Any, Mapping[Any, int]]) -> Any:
    """Return a splitting configuration of the library."""
    return icechunk.ManifestSplittingConfig.from_dict(dict(rules))


RULES: dict[str, dict[Any, dict[Any, int]]] = {
    "any": {C.AnyArray(): {D.Any(): 3}},
    "axis": {C.AnyArray(): {D.Axis(1): 2}},
    "axes": {C.AnyArray(): {D.Axis(1): 2, D.Any(): 4}},
    "name": {C.AnyArray(): {D.DimensionName("^ti"): 2, D.DimensionName("ime"): 3}},
    "path": {C.path_matches("^/g/a$"): {D.Any(): 3}, C.AnyArray(): {D.Axis(0): 1}},
    "other path": {C.path_matches("^a"): {D.Any(): 3}},
    "leaf": {C.name_matches("^a$"): {D.Axis(0): 5}, C.path_matches("g"): {D.Axis(1): 2}},
    "or": {C.or_conditions([C.path_matches("x"), C.name_matches("a")]): {D.Any(): 2}},
    "and": {C.and_conditions([C.path_matches("x"), C.name_matches("a")]): {D.Any(): 2}},
    "later": {C.AnyArray(): {D.Axis(0): 3}, C.path_matches("/a"): {D.Any(): 2}},
    "none": {},
    "larger": {C.AnyArray(): {D.Any(): 100}},
}


@pytest.mark.parametrize(
    ("name", "names"), [*((name, None) for name in RULES), ("name", ["time", None])]
)
def test_new_manifests_are_split_as_by_the_library(
    name: str, names: Sequence[str | None] | None, tmp_path: Path
) -> None:
    """New manifests have the extents that the library gives them, for each kind of rule."""
    peer = Peer(tmp_path, splitting(RULES[name]))
    session = peer.session()
    made = array(session, "g/a", (7, 5), dimension_names=names)
    made[:, :4] = 1
    session.commit("a")

    node, grid = peer.node("/g/a"), peer.array("/g/a").grid
    config = RepoInfoDecoder(LIMIT)((tmp_path / "repo").read_bytes()).config
    assert isinstance(config, Config)
    splits = parse_splitting(config.splitting).splits("/g/a", names, len(grid))
    changed: dict[Coords, Any] = {(i, j): InlineChunk(b"\1") for i in range(7) for j in range(4)}
    rewrite = ArrayRewrite(node.node_id, grid, (), changes(changed, 2), splits)
    found, _ = rewrite_manifests(rewrite, {}, new_id)

    boxes = [[list(pair) for pair in ref.extents] for ref in found.manifests]
    assert boxes == [each["extents"] for each in peer.inspect_manifests("/g/a")]


SIZES = st.tuples(st.integers(1, 7), st.integers(1, 7))
EDITS = st.dictionaries(st.tuples(st.integers(0, 7), st.integers(0, 5)), st.booleans(), max_size=6)


@settings(max_examples=10)
@given(
    sizes=st.lists(SIZES, min_size=2, max_size=3),
    grids=st.tuples(SIZES, SIZES, SIZES),
    edits=st.lists(EDITS, min_size=3, max_size=3),
)
def test_rewritten_manifests_are_kept_and_split_as_by_the_library(
    sizes: list[tuple[int, int]],
    grids: tuple[tuple[int, int], ...],
    edits: list[dict[Coords, bool]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Through writes, deletions, resizes and new splits, manifests are kept as by the library."""
    peer = Peer(tmp_path_factory.mktemp("peer"))
    session = peer.session()
    made = array(session, "a", grids[0])
    made[:] = 1
    session.commit("made")
    for number, (split, grid, edit) in enumerate(zip(sizes, grids, edits, strict=False)):
        rules = {C.AnyArray(): {D.Axis(0): split[0], D.Axis(1): split[1]}}
        peer.reopen(splitting(rules))
        before = peer.array("/a")
        session = peer.session()
        resized = tuple(each.length for each in before.dimensions) != grid
        if resized:
            zarr.open_array(session.store, path="a").resize(grid)
        changed = {at: on for at, on in edit.items() if at[0] < grid[0] and at[1] < grid[1]}
        for (i, j), on in changed.items():
            if on:
                write(session, f"a/c/{i}/{j}", b"%c" % (number + 2))
            else:
                delete(session, f"a/c/{i}/{j}")
        if not changed and not resized:
            continue
        session.commit("edited")
        _compare(peer, before, changed, number + 2, split)


def _compare(
    peer: Peer, before: StoredArray, changed: dict[Coords, bool], value: int, split: Coords
) -> None:
    payloads = {at: InlineChunk(b"%c" % value) if on else None for at, on in changed.items()}
    node, grid = peer.node("/a"), peer.array("/a").grid
    rewrite = ArrayRewrite(node.node_id, grid, before.manifests, changes(payloads, 2), split)
    needed = {each: read_manifest(peer.folder, each) for each in needed_manifests(rewrite)}
    ours = rewrite_manifests(rewrite, needed, new_id)[0].manifests
    old_ids = [encode_id(ref.object_id) for ref in before.manifests]
    told = [(encode_id(ref.object_id), [list(each) for each in ref.extents]) for ref in ours]
    assert [(name if name in old_ids else "new", box) for name, box in told] == [
        (each["id"] if each["id"] in old_ids else "new", each["extents"])
        for each in peer.inspect_manifests("/a")
    ]
