"""Manifests that the library Icechunk wrote, read as it reads them."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype

from app.formats.icechunk.ids import NODE_ID_NBYTES, decode_id, encode_id
from app.formats.icechunk.index import Manifest, ManifestDecoder
from app.formats.icechunk.references import Inlined, Native, Reference, Virtual
from app.model import ByteRange, ETag, UnmodifiedSince

_FIXTURES = Path("../shared/fixtures")
_ARCHIVE = "s3://archive/"
_PAST = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_VIRTUAL = [
    icechunk.VirtualChunkSpec([i, j], f"{_ARCHIVE}year-{i:04d}/file-{j:03d}.nc", 10 * j, i + 1)
    for i in range(50)
    for j in range(40)
]
"""So many that the library compresses their locations."""


def _id(text: str, nbytes: int = 12) -> bytes:
    data = decode_id(text, nbytes)
    assert data is not None
    return data


class _Repository:
    """A repository in *folder*, as the library sees it and as its manifests are decoded."""

    def __init__(self, folder: Path, repository: icechunk.Repository) -> None:
        self.folder = folder
        self.repository = repository
        self.session = repository.readonly_session("main")
        snapshot: Any = repository.inspect_snapshot(self.session.snapshot_id)
        self.nodes = {node["path"]: node for node in snapshot["nodes"]}

    def decode(self, manifest_id: str) -> Manifest:
        data = (self.folder / "manifests" / manifest_id).read_bytes()
        return ManifestDecoder(_id(manifest_id), 2**24)(data)

    def manifests(self, path: str) -> list[Manifest]:
        return [self.decode(item["id"]) for item in self.nodes[path]["manifest_refs"]]

    def lookup(self, path: str, coords: tuple[int, ...]) -> tuple[Manifest, Reference] | None:
        node_id = _id(self.session.get_node_id(path), NODE_ID_NBYTES)
        for manifest in self.manifests(path):
            if (found := manifest.lookup(node_id, coords)) is not None:
                return manifest, found
        return None

    def references(self, path: str) -> dict[tuple[int, ...], Reference]:
        """Look up all that the manifests of an array list."""
        node = self.nodes[path]
        node_id, found = _id(node["id"], NODE_ID_NBYTES), {}
        for manifest in self.manifests(path):
            for row in manifest.coords(node_id, len(node["shape"])).tolist():
                found[tuple(row)] = manifest.lookup(node_id, tuple(row))
        return found  # type: ignore[return-value]

    def listed(self, path: str) -> set[tuple[int, ...]]:
        """List the chunks of an array as the library does."""

        async def listing() -> set[tuple[int, ...]]:
            return {tuple(at) async for at in self.session.chunk_coordinates(path)}

        return asyncio.run(listing())


async def _write_odd(session: icechunk.Session) -> None:
    """Write a chunk with too many dimensions, which the library accepts."""
    buffer = default_buffer_prototype().buffer
    await session.store.set("inline/c/1/0", buffer.from_bytes(b"odd"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> _Repository:
    """Let the library write references of all kinds."""
    folder = tmp_path_factory.mktemp("icechunk")
    config = icechunk.RepositoryConfig.default()
    config.set_virtual_chunk_container(
        icechunk.VirtualChunkContainer(_ARCHIVE, icechunk.s3_store(region="us-east-1"))
    )
    repository = icechunk.Repository.create(
        icechunk.local_filesystem_storage(str(folder)), config=config
    )
    session = repository.writable_session("main")
    group = zarr.group(session.store)

    def array(name: str, shape: tuple[int, ...], chunks: tuple[int, ...]) -> zarr.Array[Any]:
        return group.create_array(
            name, shape=shape, chunks=chunks, dtype="u1", compressors=None, filters=None
        )

    array("native", (90, 80), (30, 20))[:60] = np.arange(4800).reshape(60, 80) % 251
    array("inline", (30,), (10,))[:20] = np.arange(20)
    array("scalar", (), ())[...] = 7
    array("virtual", (50, 40), (1, 1))
    array("checked", (4,), (1,))
    store = session.store
    assert store.set_virtual_refs("virtual", _VIRTUAL) is None
    checksums = [None, "an-etag", '"quoted"', _PAST]
    for at, checksum in enumerate(checksums):
        store.set_virtual_ref(
            f"checked/c/{at}", f"{_ARCHIVE}a", offset=at, length=1, checksum=checksum
        )
    asyncio.run(_write_odd(session))
    session.commit("all kinds")
    return _Repository(folder, repository)


def test_native_references_lead_to_the_chunks(written: _Repository) -> None:
    """The chunk file that is named holds the chunk."""
    values = np.arange(4800).reshape(60, 80) % 251
    found = written.references("/native")

    assert found.keys() == written.listed("/native") == set(np.ndindex(2, 4))
    for (i, j), reference in found.items():
        assert isinstance(reference, Native)
        data = (written.folder / "chunks" / encode_id(reference.chunk_id)).read_bytes()
        start, stop = reference.byte_range
        expected = values[30 * i : 30 * i + 30, 20 * j : 20 * j + 20]
        assert data[start:stop] == expected.astype("u1").tobytes()


@pytest.mark.parametrize(
    ("path", "coords", "expected"),
    [
        ("/inline", (0,), bytes(range(10))),
        ("/inline", (1,), bytes(range(10, 20))),
        ("/scalar", (), b"\7"),
    ],
)
def test_inline_references_hold_the_chunks(
    written: _Repository, path: str, coords: tuple[int, ...], expected: bytes
) -> None:
    """Also that of an array without dimensions."""
    found = written.lookup(path, coords)

    assert found is not None
    manifest, reference = found
    assert isinstance(reference, Inlined)
    assert manifest.read(reference.place) == expected


def test_a_reference_with_other_dimensions_hurts_none(written: _Repository) -> None:
    """The library writes it, and does not find it either."""
    assert written.references("/inline").keys() == {(0,), (1,)}
    (manifest,) = written.manifests("/inline")
    (node_id,) = manifest.node_ids
    assert manifest.coords(node_id, 1).tolist() == [[0], [1]]


def test_compressed_locations_are_those_that_were_set(written: _Repository) -> None:
    """With their ranges, chunk by chunk."""
    expected = {
        tuple(spec.index): Virtual(
            spec.location, ByteRange(spec.offset, spec.offset + spec.length), None
        )
        for spec in _VIRTUAL
    }
    (item,) = written.nodes["/virtual"]["manifest_refs"]
    inspected: Any = written.repository.inspect_manifest(item["id"])

    assert inspected["compression"]["num_compressed_refs"] == len(_VIRTUAL)
    assert written.references("/virtual") == expected
    assert written.listed("/virtual") == expected.keys()


def test_checksums_are_those_that_were_set(written: _Repository) -> None:
    """None, an entity tag without its quotes and with them, a time."""
    found = written.references("/checked")
    checksums = [getattr(found[at,], "checksum", "") for at in range(4)]

    time = UnmodifiedSince(int(_PAST.timestamp()))
    assert checksums == [None, ETag('"an-etag"'), ETag('"quoted"'), time]


def test_split_manifests_have_a_part_each(tmp_path: Path) -> None:
    """Together all chunks, each manifest those of its extents."""
    by_axis: Any = {icechunk.ManifestSplitDimCondition.Any(): 3}
    splitting = icechunk.ManifestSplittingConfig.from_dict(
        {icechunk.ManifestSplitCondition.AnyArray(): by_axis}
    )
    config = icechunk.RepositoryConfig.default()
    config.manifest = icechunk.ManifestConfig(splitting=splitting)
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    repository = icechunk.Repository.create(storage, config=config)
    session = repository.writable_session("main")
    array = zarr.create_array(session.store, name="a", shape=(10, 7), chunks=(1, 1), dtype="u1")
    array[1:] = 1
    session.commit("split")
    written = _Repository(tmp_path, repository)

    parts = [item["extents"] for item in written.nodes["/a"]["manifest_refs"]]
    assert len(parts) == 12
    node_id = _id(written.nodes["/a"]["id"], NODE_ID_NBYTES)
    for extents, manifest in zip(parts, written.manifests("/a"), strict=True):
        box = {(i, j) for i in range(*extents[0]) for j in range(*extents[1])}
        assert set(map(tuple, manifest.coords(node_id, 2).tolist())) == box
    assert written.references("/a").keys() == written.listed("/a")


def _fixtures() -> Iterator[Path]:
    yield from sorted(_FIXTURES.glob("icechunk-*/manifests/*"))


@pytest.mark.skipif(not _FIXTURES.is_dir(), reason=f"{_FIXTURES} is absent")
def test_manifests_of_other_versions_are_read() -> None:
    """As many references of each kind as the library counts."""
    kinds = {"num_inline": Inlined, "num_native": Native, "num_virtual": Virtual}
    for file in _fixtures():
        storage = icechunk.local_filesystem_storage(str(file.parents[1]))
        inspected: Any = icechunk.Repository.open(storage).inspect_manifest(file.name)
        manifest = ManifestDecoder(_id(file.name), 2**24)(file.read_bytes())
        assert manifest.node_ids == [_id(a["node_id"], 8) for a in inspected["arrays"]]
        for array in inspected["arrays"]:
            node_id = _id(array["node_id"], 8)
            rows = [r for ndim in range(1, 5) for r in manifest.coords(node_id, ndim).tolist()]
            found = Counter(type(manifest.lookup(node_id, tuple(row))) for row in rows)
            assert len(rows) == array["num_chunk_refs"]
            assert all(found[kind] == array[name] for name, kind in kinds.items())
