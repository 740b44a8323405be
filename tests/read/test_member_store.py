"""`shardgate.read.member_store`: containers in archives, which are read as in folders."""

import io
import json
import zipfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from threading import get_ident
from typing import Any, Final

import pytest

from shardgate.errors import DamagedError, ReadOnlyError
from shardgate.formats.listing import Window
from shardgate.formats.members import Members, Place
from shardgate.formats.reading import DecodeError, Fetch, Opaque, Read
from shardgate.formats.surveying import ChunkCollection
from shardgate.model import (
    ByteRange,
    ByteRequest,
    ETag,
    Inline,
    ObjectRef,
    SuffixRange,
    VirtualKey,
)
from shardgate.read.bodies import Entity, Selection
from shardgate.read.budget import ByteBudget
from shardgate.read.containers import Routes
from shardgate.read.listing import Root
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from shardgate.read.walking import find_collections
from shardgate.storage.memory import MemoryStore
from shardgate.survey.inspect import inspect_key, inspect_shard
from shardgate.survey.verify import verify
from tests.support.formats.case import Case, filled
from tests.support.formats.icechunk import case as icechunk
from tests.support.formats.neuroglancer_precomputed import case as precomputed
from tests.support.formats.zarr import building as zarr
from tests.support.formats.zarr import case as zarr_case
from tests.support.formats.zip.archives import Entry, archive, deflated
from tests.support.read.stores import WatchedStore, watch_searches
from tests.support.resolving import ROOT, Reading, everything, reading
from tests.support.zipped import zipped

NAME = "lab/scan.zip"
_CASES: Final = [*zarr_case.CASES, *precomputed.CASES]
_UNLIKE: Final = [
    case for case in _CASES if case.name in ("start", "nested", "gzip-data", "skeletons", "meshes")
]
"""Cases of which each is read in another way."""
every_case = pytest.mark.parametrize("case", _CASES, ids=str)
every_method = pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"]
)
_CHUNKS = {key: zarr.chunk_bytes(number) for number, key in enumerate(["c/0/0", "c/0/1", "c/2/3"])}


def _archive(objects: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name, content in objects.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return data.getvalue()


def _archived(objects: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> MemoryStore:
    return filled({NAME: _archive(objects, method)})


@pytest.mark.parametrize("is_archived", [False, True])
async def test_volume_around_an_array_is_read_after_it(*, is_archived: bool) -> None:
    """A chunk of a volume is found after one of an array that lies at a folder of the volume."""
    case = next(case for case in precomputed.CASES if any(key[:3] == "s0/" for key in case.chunks))
    stored = case.build(case.chunks)
    info = json.loads(stored["info"])
    for scale in info["scales"]:
        scale["key"] = f"img/{scale['key']}"
    objects = {f"img/{name}": data for name, data in stored.items()}
    objects["info"] = json.dumps(info).encode()
    objects["img/zarr.json"] = next(iter(zarr.build(_CHUNKS).values()))
    served = reading(_archived(objects) if is_archived else filled(objects))
    lead = f"{NAME}/img/" if is_archived else "img/"
    key = next(key for key in case.chunks if key[:3] == "s0/")

    await served.read(f"{lead}c/0/0")

    assert await served.read(f"{lead}{key}") == case.chunks[key]


_GZIP_DATA: Final = next(case for case in precomputed.CASES if case.name == "gzip-data")
_DAMAGED: Final = "s0/2-5_5-8_0-1"


def _with_damaged_chunk() -> dict[str, bytes]:
    """Build a volume whose chunk `_DAMAGED`, which should be gzip, has other bytes."""
    chunk = zipped(_GZIP_DATA.chunks[_DAMAGED])
    objects = _GZIP_DATA.build(_GZIP_DATA.chunks)
    return {name: data.replace(chunk, b"x" * len(chunk)) for name, data in objects.items()}


def _root(store: MemoryStore) -> Root:
    return reading(store).root


def _inflated(entity: Entity) -> Selection | None:
    return None if entity.coding else everything(entity)


def _refuse(_: bytes) -> Opaque:
    raise DecodeError("refused")


async def _member(store: MemoryStore, name: str) -> ObjectRef:
    """Return the member *name* of the archive."""
    data = reading(store)
    found = await data.dataset.containers.find_archive(ROOT, f"{NAME}/", data.fetch)
    assert found is not None
    return found[0].root.join(name)


@dataclass(frozen=True)
class _Recorder:
    """Decoder that records its thread, and what a budget holds; all of them are equal."""

    budget: ByteBudget = field(default=ByteBudget(0, wait_s=0), compare=False)
    calls: list[tuple[int, int]] = field(default_factory=list, compare=False)

    def __call__(self, data: bytes) -> Opaque:
        self.calls.append((get_ident(), self.budget.held_bytes))
        return Opaque(data)


@dataclass(frozen=True)
class _InMemory(Members):
    """Members that all have the same bytes in memory."""

    data: bytes

    async def find(self, _: str, __: Fetch) -> Place:
        return Inline(self.data, ETag('"1"'))

    async def below(self, *_: object) -> AsyncIterator[tuple[str, int | None]]:
        yield "a", len(self.data)

    async def collections(self, *_: object) -> Sequence[ChunkCollection | DamagedError]:
        return ()


async def _listed(data: Reading, prefix: str) -> list[tuple[str, int | None]]:
    page = await data.page(Window(prefix), 10_000)
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


@pytest.mark.parametrize(
    ("case", "method"),
    [
        *((case, zipfile.ZIP_STORED) for case in _CASES),
        *((case, zipfile.ZIP_DEFLATED) for case in _UNLIKE),
    ],
    ids=str,
)
async def test_survey_of_an_archive_is_that_of_a_folder(case: Case, method: int) -> None:
    """Collections, shards, chunks and bytes in any archive are those in a folder."""
    objects = case.build(case.chunks)
    reports, paths = [], []
    for store, prefix in ((filled(objects), ""), (_archived(objects, method), NAME)):
        root = _root(store)
        report = await verify(root, chunks=True)
        assert report.damages == []
        reports.append((report.arrays, report.shards, report.chunks, report.nbytes))
        found = [each.path async for each in find_collections(root)]
        paths.append([path.removeprefix(prefix).lstrip("/") for path in found])

    assert reports[1] == reports[0]
    assert paths[1] == paths[0]


@every_method
async def test_damaged_chunk_in_an_archive_is_listed_and_not_inflated(method: int) -> None:
    """A chunk in an archive that is no gzip is listed as stored; reading and verification find the
    damage.
    """
    store = _archived(_with_damaged_chunk(), method)
    data = reading(store)
    expected = await _listed(reading(filled(_GZIP_DATA.build(_GZIP_DATA.chunks))), "")

    assert await _listed(data, f"{NAME}/") == expected
    with pytest.raises(DamagedError, match="no gzip"):
        await data.read(f"{NAME}/{_DAMAGED}")
    for key, chunk in _GZIP_DATA.chunks.items():
        if key != _DAMAGED:
            assert await data.read(f"{NAME}/{key}") == chunk
    report = await verify(_root(store), chunks=True)
    assert [each.key for each in report.damages] == [f"{NAME}/{_DAMAGED}"]


@pytest.mark.parametrize(
    "case",
    [
        *_UNLIKE,
        *(pytest.param(case, marks=pytest.mark.soak) for case in _CASES if case not in _UNLIKE),
    ],
    ids=str,
)
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


async def test_shard_in_an_archive_is_inspected_where_it_lies() -> None:
    """The report on a chunk names its range in the archive, and the shard it lies in."""
    objects = zarr.build(_CHUNKS)
    archive = _archive(objects)
    data = reading(filled({NAME: archive}))
    report = await inspect_key(data.root, VirtualKey(f"{NAME}/c/0/1"))

    assert report.object == str(ROOT.join(NAME))
    assert archive[slice(report.start, report.stop)] == _CHUNKS["c/0/1"]
    assert report.shard is not None
    assert report.shard.nbytes == len(objects["c/0/0"])


async def test_shard_that_is_deflated_in_an_archive_is_inspected_by_its_name() -> None:
    """Reports on a shard that is no range of its archive, and on its chunks, name the entry."""
    objects = zarr.build(_CHUNKS)
    root, key = _root(_archived(objects, zipfile.ZIP_DEFLATED)), VirtualKey(f"{NAME}/c/0/0")
    report = await inspect_shard(root, key)

    assert (report.shard, report.nbytes) == (str(ROOT.join(key)), len(objects["c/0/0"]))
    assert (await inspect_key(root, VirtualKey(f"{NAME}/c/0/1"))).shard == report


@every_method
@pytest.mark.parametrize(
    ("nbytes", "request_"),
    [(10, ByteRange(0, 2**20)), (2**19, ByteRange(0, 2**20)), (2**19, SuffixRange(2**18))],
)
async def test_document_in_an_archive_is_decoded_once(
    method: int, nbytes: int, request_: ByteRequest
) -> None:
    """A member, or a part of one that is not small, is decoded once however often it is read."""
    document = (bytes(range(256)) * 2**11)[:nbytes]
    store = _archived({"a": document}, method)
    fetch = reading(store).fetch
    recorder = _Recorder()
    read = Read("member", await _member(store, "a"), request_, recorder)
    found = [await fetch(read), await fetch(read)]

    expected = document[-(2**18) :]
    if isinstance(request_, ByteRange):
        expected = document
    assert [each and (each.value.data, each.size) for each in found] == 2 * [(expected, nbytes)]
    assert len(recorder.calls) == 1


async def test_deflated_document_is_decoded_off_the_event_loop() -> None:
    """A deflated member is inflated and decoded in a thread, and its size counts as memory."""
    budget = ByteBudget(2**30, wait_s=0)
    store = _archived({"a": bytes(2**19)}, zipfile.ZIP_DEFLATED)
    fetch = ReadCache(store, MetadataCache(2**20, budget), ttl_s=60)
    recorder = _Recorder(budget)
    await fetch(Read("member", await _member(store, "a"), None, recorder))

    ((thread, held_nbytes),) = recorder.calls
    assert thread != get_ident()
    assert held_nbytes >= 2**19
    assert budget.held_bytes == 0


async def test_small_parts_of_a_deflated_member_share_its_content() -> None:
    """Small parts of a deflated member are cut from its content, which is read once."""
    store = WatchedStore()
    content = bytes(range(256)) * 2**11
    filled({NAME: _archive({"a": content}, zipfile.ZIP_DEFLATED)}, store)
    fetch, ref = reading(store).fetch, await _member(store, "a")
    await fetch(Read("member", ref, ByteRange(0, 8), Opaque))
    store.calls.clear()

    for start in range(0, 2**19, 2**15):
        part = ByteRange(start, start + 2**15)
        found = await fetch(Read("member", ref, part, Opaque))
        assert found is not None
        assert (found.value.data, found.size) == (content[slice(*part)], len(content))
    assert store.calls == []


async def test_long_bytes_in_a_reference_set_are_decoded_off_the_event_loop() -> None:
    """Bytes that a set of references holds are decoded in a thread if they are long."""
    recorder = _Recorder()
    for nbytes in (10, 2**19):
        members = _InMemory(ROOT, ETag('"1"'), 2**20, None, bytes(nbytes))
        fetch = reading(MemoryStore()).fetch
        await fetch(Read("member", members.root.join("a"), None, recorder))

    assert [thread == get_ident() for thread, _ in recorder.calls] == [True, False]


@every_method
async def test_damage_of_a_document_in_an_archive_is_no_other_error(method: int) -> None:
    """A member that its decoder refuses raises DamagedError, deflated or not, in parts too."""
    store = _archived({"a": bytes(2**10)}, method)
    fetch, ref = reading(store).fetch, await _member(store, "a")
    for request in (None, ByteRange(0, 8)):
        with pytest.raises(DamagedError, match=r"scan\.zip/a: refused"):
            await fetch(Read("member", ref, request, _refuse))


@every_method
@pytest.mark.parametrize("is_array", [False, True])
async def test_listed_members_are_those_that_are_read(method: int, *, is_array: bool) -> None:
    """Size, ETag and time of each listed member, in an array or not, are those of its read form."""
    files = {
        "notes/a.txt": bytes(1000),
        "b.txt": bytes(99),
        "docs/c/x": bytes(300),
        "0.0": b"a",
    }
    array = zarr.build(_CHUNKS) if is_array else {}
    store = _archived({**files, **array}, method)
    stat = await store.stat(ROOT.join(NAME))
    data = reading(store)
    page = await data.page(Window(f"{NAME}/"), 100)

    assert stat is not None
    assert len(page.entries) == len(files) + is_array * (len(_CHUNKS) + 1)
    for entry in page.entries:
        key = VirtualKey(entry.key)
        async with data.resolver.open(data.dataset, key, _inflated) as opened:
            assert opened is not None
            assert opened.entity.length == entry.nbytes
            is_chunk = entry.key.removeprefix(f"{NAME}/") in array
            assert entry.etag == opened.entity.etag or (entry.etag is None and not is_chunk)
            assert entry.modified_s == opened.entity.modified_s == stat.modified_s


@every_method
async def test_file_in_an_archive_that_is_named_like_metadata_is_an_ordinary_file(
    method: int,
) -> None:
    """A file in an archive that has the name of metadata by chance is served as it is stored."""
    files = {"a/info": b'{"a": 1}', "info": b"no JSON", "a/b": b"other"}
    data = reading(_archived(files, method))

    assert {name: await data.read(f"{NAME}/{name}") for name in files} == files


async def test_repository_in_an_archive_is_served_as_it_is_stored() -> None:
    """Files of an Icechunk repository in an archive are served as stored, and listed so."""
    files = icechunk.CASES[0].build(icechunk.CASES[0].chunks)
    data = reading(_archived({f"lab/{name}": content for name, content in files.items()}))

    assert {name: await data.read(f"{NAME}/lab/{name}") for name in files} == files
    assert dict(await _listed(data, f"{NAME}/lab/")) == {
        name: len(content) for name, content in files.items()
    }
    assert await data.read(f"{NAME}/lab/zarr.json") is None
    assert await data.read(f"{NAME}/lab/@branch.main/zarr.json") is None


@every_method
@pytest.mark.parametrize(
    ("name", "content", "reason"), [("zarr.json", b"{", "JSON"), ("c/0/0", b"", "0 bytes")]
)
async def test_damaged_member_of_an_archive_is_named(
    method: int, name: str, content: bytes, reason: str
) -> None:
    """Damage of metadata or of a shard in an archive names its path in the archive."""
    store = _archived(zarr.build(_CHUNKS) | {name: content}, method)

    with pytest.raises(DamagedError, match=rf"scan\.zip/{name}: .*{reason}"):
        await reading(store).read(f"{NAME}/c/0/0")
    report = await verify(_root(store), chunks=False)
    assert [(each.object, each.key) for each in report.damages] == [
        (str(ROOT.join(f"{NAME}/{name}")), f"{NAME}/{name}")
    ]


async def test_metadata_that_cannot_be_read_hide_no_other_members() -> None:
    """A `zarr.json` with an unknown compression is damage, as are keys like those of chunks below
    it; other members are read, and all are listed.
    """
    entries = Entry(b"zarr.json", b"{}", method=12), Entry(b"c/0/0"), Entry(b"notes.txt")
    data = reading(filled({NAME: archive(*entries)}))

    for key in ("zarr.json", "c/0/0"):
        with pytest.raises(DamagedError, match=r"zarr\.json: its compression method is 12"):
            await data.read(f"{NAME}/{key}")
    assert await data.names(f"{NAME}/") == ["c/", "notes.txt", "zarr.json"]
    assert await data.read(f"{NAME}/notes.txt") == b"content"


@pytest.mark.parametrize("key", ["notes.txt", "c/0/0"])
async def test_deflated_member_that_is_too_large_is_refused_without_reading_it(key: str) -> None:
    """A deflated file or shard that the directory says to be too large to inflate is not read."""
    objects = {**zarr.build(_CHUNKS), "notes.txt": bytes(5000)}
    limit = 4999 if key == "notes.txt" else len(objects["c/0/0"]) - 1
    entries = [Entry(n.encode(), d, 8 if n == key else 0) for n, d in objects.items()]
    whole, store = archive(*entries), WatchedStore()
    filled({NAME: whole}, store)
    data = reading(store, decoded_bytes=limit)

    with pytest.raises(DamagedError, match=f"once inflated, more than {limit}"):
        await data.read(f"{NAME}/{key}")
    starts = {call.request.start for call in store.calls if isinstance(call.request, ByteRange)}
    assert whole.index(deflated(objects[key])) not in starts


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
        with pytest.raises(ReadOnlyError, match="read only"):
            await Routes(data.fetch).target(
                data.dataset, VirtualKey(f"{NAME}/{key}"), data.resolver.new_tracker()
            )


async def test_folder_of_members_without_containers_is_searched_once() -> None:
    """Members of one folder outside of containers are found by one search."""
    files = {f"v2/0.{n}": bytes([n]) for n in range(4)}
    data = reading(_archived(files))
    searches = watch_searches(data)

    for name, content in files.items():
        assert await data.read(f"{NAME}/{name}") == content
    assert len(searches) == 1


async def test_absent_shard_in_an_archive_is_absent_to_an_inspection() -> None:
    """The report on a chunk whose shard an archive lacks says absent, and has no shard."""
    objects = zarr.build(_CHUNKS)
    del objects["c/0/0"]
    report = await inspect_key(_root(_archived(objects)), VirtualKey(f"{NAME}/c/0/1"))

    assert (report.state, report.shard) == ("absent", None)


async def test_chunks_of_one_shard_in_an_archive_have_one_name() -> None:
    """Chunks of one shard in an archive have the same name for affinity, and others another."""
    data = reading(_archived(zarr.build(_CHUNKS)))
    names = []
    for key in _CHUNKS:
        layout, rest, *_ = await data.container(f"{NAME}/{key}")
        names.append(await layout.shard(rest, data.root.fetch))

    assert names[0] == names[1] != names[2]
    assert None not in names


async def test_sparse_array_in_an_archive_is_listed_by_its_indexes() -> None:
    """The chunks of a large sparse array in an archive are listed as those of one in a folder."""
    metadata = zarr.array_metadata([100 * 200], [200], [zarr.sharding([1])])
    shard = zarr.encode_shard([None] * 199 + [b"x"])
    shards = {f"c/{number}": shard for number in range(0, 100, 5)}
    data = reading(_archived({"zarr.json": json.dumps(metadata).encode(), **shards}))

    keys = sorted(f"c/{number * 200 + 199}" for number in range(0, 100, 5))
    assert await data.keys(Window(f"{NAME}/c/")) == [f"{NAME}/{key}" for key in keys]


async def test_array_in_an_archive_that_lost_its_metadata_is_damage() -> None:
    """A chunk in an archive is damage where only the group above describes its sharded array."""
    objects = {f"a/{name}": content for name, content in zarr.build(_CHUNKS).items()}
    array = json.loads(objects.pop("a/zarr.json"))
    group = json.dumps(zarr.consolidated({"a": array})).encode()
    data = reading(_archived(objects | {"zarr.json": group}))

    with pytest.raises(DamagedError, match="consolidated metadata describe an array"):
        await data.read(f"{NAME}/a/c/0/0")
