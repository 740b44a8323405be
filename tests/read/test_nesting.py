"""Containers among the members of an archive: read, listed and surveyed as in a folder."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shardgate.errors import DamagedError, ReadOnlyError
from shardgate.formats.listing import Window
from shardgate.model import ObjectRef, Stored, VirtualKey
from shardgate.read.consistency import FreshnessTracker
from shardgate.read.listing import find_collections
from shardgate.storage.memory import MemoryStore
from shardgate.survey.inspect import inspect_key
from shardgate.survey.verify import verify
from tests.formats.case import Case, filled
from tests.formats.neuroglancer_precomputed import case as precomputed
from tests.formats.zarr import building as zarr
from tests.formats.zarr import case as zarr_case
from tests.read.stores import SearchedContainers, WatchedStore
from tests.support.resolving import ROOT, Reading, everything, reading

NAME = "lab/scan.zip"
every_case = pytest.mark.parametrize("case", [*zarr_case.CASES, *precomputed.CASES], ids=str)
_CHUNKS = {key: zarr.chunk_bytes(number) for number, key in enumerate(["c/0/0", "c/0/1", "c/2/3"])}


def _archive(objects: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in objects.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return data.getvalue()


def _archived(objects: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> MemoryStore:
    return filled({NAME: _archive(objects, method)})


async def _listed(data: Reading, prefix: str) -> list[tuple[str, int | None]]:
    page = await data.resolver.page(data.dataset, Window(prefix), 10_000)
    assert page.after is None
    return [(each.key.removeprefix(prefix), each.nbytes) for each in page.entries]


@every_case
@pytest.mark.parametrize("whole_index_nbytes", [2**20, 0])
async def test_chunks_in_an_archive_are_exact_and_other_keys_absent(
    case: Case, whole_index_nbytes: int
) -> None:
    """Every chunk of a container in an archive is read exactly; other keys are absent."""
    store = _archived(case.build(case.chunks))
    data = reading(store, whole_index_nbytes=whole_index_nbytes)
    expected = {**dict.fromkeys(case.absent), **case.chunks}

    assert {key: await data.read(f"{NAME}/{key}") for key in expected} == expected


@every_case
async def test_listing_of_an_archive_is_that_of_a_folder(case: Case) -> None:
    """An archive lists the same keys with the same sizes as a folder with its files."""
    objects = case.build(case.chunks)
    expected = await _listed(reading(filled(objects)), "")

    assert await _listed(reading(_archived(objects)), f"{NAME}/") == expected


@every_case
async def test_survey_of_an_archive_is_that_of_a_folder(case: Case) -> None:
    """Collections, shards, chunks and bytes in an archive are those in a folder."""
    objects = case.build(case.chunks)
    reports, paths = [], []
    for store, prefix in ((filled(objects), ""), (_archived(objects), NAME)):
        data = reading(store)
        root = data.resolver.root(data.dataset)
        report = await verify(root, chunks=True)
        assert report.damages == []
        reports.append((report.arrays, report.shards, report.chunks, report.nbytes))
        found = [each.path async for each in find_collections(root)]
        paths.append([path.removeprefix(prefix).lstrip("/") for path in found])

    assert reports[1] == reports[0]
    assert paths[1] == paths[0]


@every_case
async def test_archive_replaced_during_a_read_yields_the_old_or_new_chunk(case: Case) -> None:
    """A read during which the archive is replaced, at any moment, returns the old or new chunk."""
    new = {name: b"a longer " + chunk for name, chunk in case.chunks.items()}
    before, after = (_archive(case.build(chunks)) for chunks in (case.chunks, new))
    for reads_before, (key, old) in product(range(10), case.chunks.items()):
        store = _ReplacedStore(reads_before, after)
        filled({NAME: before}, store)
        data = reading(store, chunk_bytes=0)

        for _ in range(3 if reads_before > 4 else 1):
            assert await data.read(f"{NAME}/{key}") in {old, new[key]}, (key, reads_before)


class _ReplacedStore(WatchedStore):
    """Store whose archive is replaced before the n-th read."""

    def __init__(self, reads: int, after: bytes) -> None:
        super().__init__()
        self._reads, self._after = reads, after

    async def get(self, ref: ObjectRef, request: Any = None, **conditions: Any) -> Any:
        """Replace the archive before the n-th read."""
        self._reads -= 1
        if self._reads == -1:
            self.place(ROOT.join(NAME), self._after)
        return await super().get(ref, request, **conditions)


async def test_inner_chunk_in_an_archive_is_one_range_read() -> None:
    """Once the index is known, a chunk is one read of its range in the archive's version."""
    store = WatchedStore()
    filled({NAME: _archive(zarr.build(_CHUNKS))}, store)
    data = reading(store)
    await data.read(f"{NAME}/c/0/0")
    store.calls.clear()

    assert await data.read(f"{NAME}/c/0/1") == _CHUNKS["c/0/1"]
    (call,) = store.calls
    stat = await store.stat(ROOT.join(NAME))
    assert stat is not None
    assert (call.ref, call.if_match) == (ROOT.join(NAME), stat.etag)


async def test_etag_of_a_listed_member_is_that_of_a_read() -> None:
    """Listing and reading a chunk in an archive give one ETag."""
    data = reading(_archived(zarr.build(_CHUNKS)))
    page = await data.resolver.page(data.dataset, Window(f"{NAME}/c/"), 100)

    for entry in page.entries:
        key = VirtualKey(entry.key)
        async with data.resolver.open(data.dataset, key, everything) as opened:
            assert opened is not None
            assert opened.entity.etag == entry.etag


async def test_shard_in_an_archive_is_inspected_where_it_lies() -> None:
    """The report on a chunk names its range in the archive, and the shard it lies in."""
    objects = zarr.build(_CHUNKS)
    archive = _archive(objects)
    data = reading(filled({NAME: archive}))
    report = await inspect_key(data.resolver.root(data.dataset), VirtualKey(f"{NAME}/c/0/1"))

    assert report.object == str(ROOT.join(NAME))
    assert archive[slice(report.start, report.stop)] == _CHUNKS["c/0/1"]
    assert report.shard is not None
    assert report.shard.nbytes == len(objects["c/0/0"])


async def test_deflated_shard_is_inflated_and_not_surveyed() -> None:
    """Inner chunks of a deflated shard are exact; the shard, no range of the archive, is passed
    over by verification.
    """
    data = reading(_archived(zarr.build(_CHUNKS), zipfile.ZIP_DEFLATED))
    report = await verify(data.resolver.root(data.dataset), chunks=True)

    assert {key: await data.read(f"{NAME}/{key}") for key in _CHUNKS} == _CHUNKS
    assert (report.shards, report.damages) == (0, [])


async def test_damaged_metadata_in_an_archive_are_named() -> None:
    """Damage of a document in an archive names its path in the archive."""
    objects = zarr.build(_CHUNKS) | {"zarr.json": b"{"}
    data = reading(_archived(objects))
    with pytest.raises(DamagedError, match=r"scan\.zip/zarr\.json"):
        await data.read(f"{NAME}/c/0/0")
    report = await verify(data.resolver.root(data.dataset), chunks=False)
    assert [each.object for each in report.damages] == [str(ROOT.join(f"{NAME}/zarr.json"))]


async def test_container_outside_of_an_archive_does_not_reach_into_it() -> None:
    """An array beside an archive and one in it are read apart, and the archive as a file."""
    inside = zarr.build({"c/0/0": zarr.chunk_bytes(9)})
    outside = {f"lab/a/{key}": value for key, value in zarr.build(_CHUNKS).items()}
    data = reading(filled({NAME: (archive := _archive(inside)), **outside}))

    assert await data.read(NAME) == archive
    assert await data.read(f"{NAME}/c/0/0") == zarr.chunk_bytes(9)
    assert await data.read("lab/a/c/0/0") == _CHUNKS["c/0/0"]
    assert NAME in [key for key, _ in await _listed(data, "")]


async def test_members_are_not_written() -> None:
    """Keys in an archive cannot be written: the target raises ReadOnlyError."""
    data = reading(_archived(zarr.build(_CHUNKS)))
    for key in ("c/0/0", "zarr.json", "new/file"):
        container = await data.resolver.find_container(data.dataset, VirtualKey(f"{NAME}/{key}"))
        with pytest.raises(ReadOnlyError, match="read only"):
            await container.layout.target(container.rest, FreshnessTracker(data.fetch))


async def test_folder_of_members_without_containers_is_searched_once() -> None:
    """Members of one folder outside of containers are found by one search."""
    files = {f"v2/0.{n}": bytes([n]) for n in range(4)}
    data = reading(_archived(files))
    known = data.dataset.containers
    searched = SearchedContainers(known.formats, archives=known.archives)
    data.dataset = replace(data.dataset, containers=searched)

    for name, content in files.items():
        assert await data.read(f"{NAME}/{name}") == content
    assert len(searched.searches) == 1


async def test_place_of_a_member_is_a_range_of_the_archive() -> None:
    """A stored member is located as a range of the archive, of its length."""
    files = {"notes/a.txt": b"first", "notes/b.txt": b"second"}
    store = _archived(files)
    data = reading(store)
    tracker = FreshnessTracker(data.fetch)
    layout, rest, _ = await data.resolver.find_container(
        data.dataset, VirtualKey(f"{NAME}/notes/b.txt")
    )
    place = await layout.locate(rest, tracker)

    assert isinstance(place, Stored)
    assert _archive(files)[slice(*place.byte_range)] == b"second"
