"""Manifests are cut where the library cuts them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flatbuffers.flexbuffers
import icechunk
import pytest
import zarr
import zstandard
from flatbuffers.number_types import Uint8Flags
from flatbuffers.table import Table
from hypothesis import given, settings
from hypothesis import strategies as st

from app.formats.icechunk.manifest import ManifestDecoder
from app.formats.icechunk.manifest_writer import (
    ManifestsRewrite,
    needed_manifests,
    rewrite_manifests,
)
from app.formats.icechunk.payloads import Inlaid
from app.formats.icechunk.snapshot import ManifestRef
from app.formats.icechunk.splitting import Splits, parse_splitting
from app.formats.reading import DecodeError
from tests.formats.icechunk.peer import Peer, array, delete, read_id, write
from tests.formats.icechunk.repositories import spell
from tests.formats.icechunk.test_manifest_writer import LIMIT, Coords, changes

C, D = icechunk.ManifestSplitCondition, icechunk.ManifestSplitDimCondition
WHOLE = 2**32 - 1


def splitting(rules: Mapping[Any, Mapping[Any, int]]) -> Any:
    """Configure the library."""
    return icechunk.ManifestSplittingConfig.from_dict(dict(rules))


def stored(folder: Path) -> Any:
    """Read what the library stored in `repo` of its configuration of splitting."""
    data = (folder / "repo").read_bytes()[39:]
    payload = zstandard.ZstdDecompressor().decompress(data)
    root = Table(payload, int.from_bytes(payload[:4], "little"))
    slot = root.Offset(4 + 2 * 9)
    start, count = root.Vector(slot), root.VectorLen(slot)
    assert root.Get(Uint8Flags, start) is not None
    config = flatbuffers.flexbuffers.Loads(payload[start : start + count])
    manifest = config["manifest"]
    return manifest and manifest["splitting"]


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


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("names", [None, ["time", None]])
def test_an_array_is_cut_as_by_the_library(
    name: str, names: Sequence[str | None] | None, tmp_path: Path
) -> None:
    """Its manifests have the same extents, whatever the rules."""
    peer = Peer(tmp_path, splitting(RULES[name]))
    session = peer.session()
    made = array(session, "g/a", (7, 5), dimension_names=names)
    made[:, :4] = 1
    session.commit("a")

    node = peer.node("/g/a")
    grid = tuple(d["num_chunks"] for d in node["shape"])
    splits = parse_splitting(stored(tmp_path)).splits("/g/a", names, len(grid))
    changed: dict[Coords, Any] = {(i, j): Inlaid(b"\1") for i in range(7) for j in range(4)}
    rewrite = ManifestsRewrite(read_id(node["id"])[:8], grid, (), changes(changed, 2), splits)
    found = rewrite_manifests(rewrite, {}, lambda: os.urandom(12))

    boxes = [[list(pair) for pair in ref.extents] for ref in found.refs]
    assert boxes == peer.boxes("/g/a")


SIZES = st.tuples(st.integers(1, 7), st.integers(1, 7))
EDITS = st.dictionaries(st.tuples(st.integers(0, 7), st.integers(0, 5)), st.booleans(), max_size=6)


@settings(max_examples=30)
@given(
    sizes=st.lists(SIZES, min_size=2, max_size=3),
    grids=st.tuples(SIZES, SIZES, SIZES),
    edits=st.lists(EDITS, min_size=3, max_size=3),
)
def test_what_the_library_keeps_is_kept_and_what_it_cuts_is_cut(
    sizes: list[tuple[int, int]],
    grids: tuple[tuple[int, int], ...],
    edits: list[dict[Coords, bool]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Through commits that write, delete, grow, shrink and follow other splits."""
    peer = Peer(tmp_path_factory.mktemp("peer"))
    session = peer.session()
    made = array(session, "a", grids[0])
    made[:] = 1
    session.commit("made")
    for number, (split, grid, edit) in enumerate(zip(sizes, grids, edits, strict=False)):
        rules = {C.AnyArray(): {D.Axis(0): split[0], D.Axis(1): split[1]}}
        peer.reopen(splitting(rules))
        before = peer.node("/a")
        session = peer.session()
        resized = tuple(d["array_length"] for d in before["shape"]) != grid
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
    peer: Peer, before: dict[str, Any], changed: dict[Coords, bool], value: int, split: Coords
) -> None:
    after = peer.node("/a")
    refs = tuple(
        ManifestRef(read_id(each["id"]), tuple((a, b) for a, b in each["extents"]))
        for each in before["manifest_refs"]
    )
    grid = tuple(d["num_chunks"] for d in after["shape"])
    payloads = {at: Inlaid(b"%c" % value) if on else None for at, on in changed.items()}
    rewrite = ManifestsRewrite(
        read_id(before["id"])[:8], grid, refs, changes(payloads, 2), Splits(split)
    )
    manifests = {
        each: ManifestDecoder(each, LIMIT)(peer.manifest(text))
        for text in peer_ids(before)
        if (each := read_id(text)) in needed_manifests(rewrite)
    }
    found = rewrite_manifests(rewrite, manifests, lambda: os.urandom(12))
    theirs = [
        (each["extents"], each["id"] if each["id"] in peer_ids(before) else "new")
        for each in after["manifest_refs"]
    ]
    kept = {ref.object_id: spell(ref.object_id) for ref in found.kept}
    ours = [
        ([list(pair) for pair in ref.extents], kept.get(ref.object_id, "new")) for ref in found.refs
    ]
    assert ours == theirs


def peer_ids(node: dict[str, Any]) -> list[str]:
    """Name the manifests of a node."""
    return [each["id"] for each in node["manifest_refs"]]


def test_a_repository_without_rules_does_not_split() -> None:
    """One manifest takes all."""
    assert parse_splitting(None).splits("/a", None, 2) == Splits((WHOLE, WHOLE))
    assert parse_splitting({"split_sizes": None}).splits("/a", ["x"], 1) == Splits((WHOLE,))


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"split_sizes": {}},
        {"split_sizes": ["any_array"]},
        {"split_sizes": [["some_array", []]]},
        {"split_sizes": [["any_array", {}]]},
        {"split_sizes": [["any_array", [{"condition": "Any"}]]]},
        {"split_sizes": [["any_array", [{"condition": "Any", "num_chunks": 0}]]]},
        {"split_sizes": [["any_array", [{"condition": "Some", "num_chunks": 1}]]]},
    ],
)
def test_what_is_no_configuration_is_refused(document: Any) -> None:
    """A manifest is not cut where nobody said."""
    with pytest.raises(DecodeError, match=r"split"):
        parse_splitting(document)
