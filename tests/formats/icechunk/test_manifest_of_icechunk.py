"""Manifests that the library Icechunk wrote, read as it reads them."""

import asyncio
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest

from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.manifest import (
    Inlined,
    Manifest,
    ManifestDecoder,
    Native,
    Reference,
    Virtual,
)
from app.model import ByteRange, ETag, UnmodifiedSince
from tests.formats.icechunk.peer import ARCHIVE, Peer, array, read_id, write

FIXTURES = Path("../shared/fixtures")
PAST = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SPECS = [
    icechunk.VirtualChunkSpec([i, j], f"{ARCHIVE}year-{i:04d}/file-{j:03d}.nc", 10 * j, i + 1)
    for i in range(50)
    for j in range(40)
]
"""So many that the library compresses their locations."""


def _manifests(peer: Peer, path: str) -> list[Manifest]:
    return [
        ManifestDecoder(read_id(each), 2**24)(peer.manifest(each))
        for each in peer.manifest_ids(path)
    ]


def _references(peer: Peer, path: str) -> dict[tuple[int, ...], Reference]:
    """Look up all that the manifests of an array list."""
    node = peer.node(path)
    node_id, found = read_id(node["id"])[:8], {}
    for decoded in _manifests(peer, path):
        for row in decoded.coords(node_id, len(node["shape"])).tolist():
            found[tuple(row)] = decoded.lookup(node_id, tuple(row))
    return found  # type: ignore[return-value]


def _listed(peer: Peer, path: str) -> set[tuple[int, ...]]:
    """List the chunks of an array as the library does."""
    session = peer.repository.readonly_session("main")

    async def listing() -> set[tuple[int, ...]]:
        return {tuple(at) async for at in session.chunk_coordinates(path)}

    return asyncio.run(listing())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """Let the library write references of all kinds, and one with too many dimensions."""
    peer = Peer(tmp_path_factory.mktemp("icechunk"))
    session = peer.session()
    native = array(session, "native", (90, 80), chunks=(30, 20))
    native[:60] = np.arange(4800).reshape(60, 80) % 251
    array(session, "inline", (30,), chunks=(10,))[:20] = np.arange(20)
    array(session, "scalar", ())[...] = 7
    array(session, "virtual", (50, 40))
    array(session, "checked", (4,))
    assert session.store.set_virtual_refs("virtual", SPECS) is None
    for at, checksum in enumerate([None, "an-etag", '"quoted"', PAST]):
        session.store.set_virtual_ref(
            f"checked/c/{at}", f"{ARCHIVE}a", offset=at, length=1, checksum=checksum
        )
    write(session, "inline/c/1/0", b"odd")
    session.commit("all kinds")
    return peer


def test_native_references_lead_to_the_chunks(written: Peer) -> None:
    """The chunk file that is named holds the chunk."""
    values = np.arange(4800).reshape(60, 80) % 251
    found = _references(written, "/native")

    assert found.keys() == _listed(written, "/native") == set(np.ndindex(2, 4))
    for (i, j), reference in found.items():
        assert isinstance(reference, Native)
        data = (written.folder / "chunks" / encode_id(reference.chunk_id)).read_bytes()
        expected = values[30 * i : 30 * i + 30, 20 * j : 20 * j + 20]
        assert data[slice(*reference.byte_range)] == expected.astype("u1").tobytes()


def test_inline_references_hold_the_chunks(written: Peer) -> None:
    """Also that of an array without dimensions; one with other dimensions hurts none."""
    for path, expected in (
        ("/inline", {(0,): bytes(range(10)), (1,): bytes(range(10, 20))}),
        ("/scalar", {(): b"\7"}),
    ):
        (decoded,) = _manifests(written, path)
        found = {
            at: decoded.read(reference.place)
            for at, reference in _references(written, path).items()
            if isinstance(reference, Inlined)
        }
        assert found == expected


def test_compressed_locations_are_those_that_were_set(written: Peer) -> None:
    """With their ranges, chunk by chunk."""
    expected = {
        tuple(spec.index): Virtual(
            spec.location, ByteRange(spec.offset, spec.offset + spec.length), None
        )
        for spec in SPECS
    }
    (manifest_id,) = written.manifest_ids("/virtual")
    inspected: Any = written.repository.inspect_manifest(manifest_id)

    assert inspected["compression"]["num_compressed_refs"] == len(SPECS)
    assert _references(written, "/virtual") == expected
    assert _listed(written, "/virtual") == expected.keys()


def test_checksums_are_those_that_were_set(written: Peer) -> None:
    """None, an entity tag without its quotes and with them, a time."""
    found = _references(written, "/checked")
    checksums = [getattr(found[at,], "checksum", "") for at in range(4)]

    time = UnmodifiedSince(int(PAST.timestamp()))
    assert checksums == [None, ETag('"an-etag"'), ETag('"quoted"'), time]


def test_split_manifests_have_a_part_each(tmp_path: Path) -> None:
    """Together all chunks, each manifest those of its extents."""
    by_axis: Any = {icechunk.ManifestSplitDimCondition.Any(): 3}
    peer = Peer(
        tmp_path,
        icechunk.ManifestSplittingConfig.from_dict(
            {icechunk.ManifestSplitCondition.AnyArray(): by_axis}
        ),
    )
    session = peer.session()
    array(session, "a", (10, 7))[1:] = 1
    session.commit("split")

    parts = peer.boxes("/a")
    assert len(parts) == 12
    node_id = read_id(peer.node("/a")["id"])[:8]
    for extents, decoded in zip(parts, _manifests(peer, "/a"), strict=True):
        box = {(i, j) for i in range(*extents[0]) for j in range(*extents[1])}
        assert set(map(tuple, decoded.coords(node_id, 2).tolist())) == box
    assert _references(peer, "/a").keys() == _listed(peer, "/a")


@pytest.mark.skipif(not FIXTURES.is_dir(), reason=f"{FIXTURES} is absent")
def test_manifests_of_other_versions_are_read() -> None:
    """As many references of each kind as the library counts."""
    kinds = {"num_inline": Inlined, "num_native": Native, "num_virtual": Virtual}
    for file in sorted(FIXTURES.glob("icechunk-*/manifests/*")):
        storage = icechunk.local_filesystem_storage(str(file.parents[1]))
        inspected: Any = icechunk.Repository.open(storage).inspect_manifest(file.name)
        decoded = ManifestDecoder(read_id(file.name), 2**24)(file.read_bytes())
        assert decoded.node_ids == [read_id(a["node_id"])[:8] for a in inspected["arrays"]]
        for each in inspected["arrays"]:
            node_id = read_id(each["node_id"])[:8]
            rows = [r for ndim in range(1, 5) for r in decoded.coords(node_id, ndim).tolist()]
            found = Counter(type(decoded.lookup(node_id, tuple(row))) for row in rows)
            assert len(rows) == each["num_chunk_refs"]
            assert all(found[kind] == each[name] for name, kind in kinds.items())
