"""What every format owes, asked of every folder of `app/shardgate/formats`."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import shardgate.formats
from shardgate.errors import DamagedError, MetadataMissingError, ShardgateError
from shardgate.formats.surveying import ChunkCollection, Shards
from shardgate.model import ByteRange, ETag, ObjectRef, Stored, VirtualKey
from shardgate.read.listing import Root, find_collections, list_names
from shardgate.read.perform import DirectFetch
from shardgate.storage.contract import Found
from shardgate.storage.memory import MemoryStore
from shardgate.survey.verify import verify
from tests.formats.case import Case, chunks_of, filled
from tests.read.stores import Clock
from tests.support.resolving import ROOT, reading

FOLDERS = sorted(
    path.name
    for path in Path(shardgate.formats.__path__[0]).iterdir()
    if path.is_dir() and not path.name.startswith("_")
)


def _cases() -> Iterator[Case]:
    for folder in FOLDERS:
        yield from importlib.import_module(f"tests.formats.{folder}.case").CASES


CASES = list(_cases())
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_checksummed_case = pytest.mark.parametrize(
    "case", [case for case in CASES if case.checksummed], ids=str
)
every_case_of_shards = pytest.mark.parametrize(
    "case", [case for case in CASES if case.has_shards], ids=str
)


@every_case
@pytest.mark.parametrize("whole_index_nbytes", [2**20, 0])
async def test_every_chunk_is_exact_and_others_are_absent(
    case: Case, whole_index_nbytes: int
) -> None:
    """Keys of empty chunks, off the grid, or of another spelling name nothing.

    An index that is too large to read whole gives the same chunks.
    """
    data = reading(filled(case.build(case.chunks)), whole_index_nbytes=whole_index_nbytes)
    expected = {**dict.fromkeys(case.absent), **case.chunks}

    assert {key: await data.read(key) for key in expected} == expected


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.soak)])
@every_case
async def test_truncation_is_never_absence(case: Case, step: int) -> None:
    """However much is cut off a shard, a chunk is right or an error.

    Only a checksum can tell: without one, or reading entry by entry, an index at the end of a
    truncated shard is whatever bytes stand there now.
    """
    objects = case.build(case.chunks)
    for name, whole in objects.items():
        if case.is_metadata(name):
            continue
        for length in range(len(whole) - 1, -1, -step):
            store = filled({**objects, name: whole[:length]})
            for key, expected in case.chunks.items():
                try:
                    found = await reading(store).read(key)
                except DamagedError as error:
                    assert name in str(error)  # noqa: PT017 - what it says is the fact
                else:
                    assert found == expected or not case.checksummed


def _root(store: MemoryStore) -> Root:
    data = reading(store)
    return data.resolver.root(data.dataset)


async def _shards(store: MemoryStore) -> list[tuple[str, Shards]]:
    """Return the paths of the containers with the shards in them."""
    return [
        (visited.container, visited.found.shards)
        async for visited in find_collections(_root(store))
        if isinstance(visited.found, ChunkCollection) and visited.found.shards is not None
    ]


@every_case_of_shards
async def test_shards_say_which_chunks_were_written(case: Case) -> None:
    """The indexes of all stored shards name what was written, where it is looked up.

    Every chunk is counted when they are verified, and none is called damaged.
    """
    store = filled(case.build(case.chunks))
    fetch = DirectFetch(store)
    named: dict[str, Stored] = {}
    for container, shards in await _shards(store):
        for name in [name async for name in list_names(store, ROOT.join(container), "")]:
            if (shard := shards.named(name)) is not None:
                named |= {
                    f"{container}/{key}".lstrip("/"): place
                    async for key, place in chunks_of(shard, fetch)
                }

    assert set(named) == {key + case.entry_suffix for key in case.chunks}
    root = _root(store)
    for key, place in named.items():
        layout, rest = await root.containers.find(ROOT, VirtualKey(key), fetch)
        location = await layout.locate(rest, fetch)
        assert place in (location, *(location if isinstance(location, tuple) else ()))
    report = await verify(root, chunks=True)
    assert (report.chunks, report.damages) == (len(case.chunks), [])


@every_case_of_shards
async def test_a_chunk_has_one_shard_however_it_is_found(case: Case) -> None:
    """By a chunk's key, by the name of its object, and among all there could be, it is the same."""
    store = filled(case.build(case.chunks))
    root = _root(store)
    for key in case.chunks:
        layout, rest = await root.containers.find(ROOT, VirtualKey(key), root.fetch)
        shards = await layout.shards_at(rest, root.fetch)
        shard = None if shards is None else shards.holding(rest)
        assert shards is not None
        assert shard is not None
        survey = await shard.survey(root.fetch)
        assert survey is not None
        container = ROOT.join(key.removesuffix(rest)).prefix
        name = survey.whole.ref.key.removeprefix(container.key)
        assert name.startswith(shards.prefix)
        assert shards.named(name) == shard
        every = shards.every()
        assert every is None or list(every).count(shard) == 1


@every_case
async def test_what_is_no_shard_is_not_taken_for_one(case: Case) -> None:
    """Markers and stray objects are passed over, and absent chunks are in no other shard."""
    store = filled(case.build(case.chunks))
    for _, shards in await _shards(store):
        names = ["zarr.json", "info", "", "notes.txt", f"{shards.prefix}notes.txt"]
        assert [shards.named(name) for name in names] == [None] * len(names)
        assert [shards.holding(VirtualKey(name)) for name in names] == [None] * len(names)


@every_checksummed_case
async def test_a_flipped_bit_of_an_index_is_noticed(case: Case) -> None:
    """Whichever bit of a shard flips, a checksummed index leads to no other range.

    Nor is a chunk called sound that leads elsewhere.
    """
    objects = case.build(case.chunks)
    name = next(name for name in objects if not case.is_metadata(name))
    for at in range(len(objects[name])):
        flipped = bytearray(objects[name])
        flipped[at] ^= 0x10
        store = filled({**objects, name: bytes(flipped)})
        for key, expected in case.chunks.items():
            try:
                found = await reading(store).read(key)
            except DamagedError:
                continue
            assert found is not None
            assert len(found) == len(expected)
            assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1
        if case.has_shards:
            report = await verify(_root(store), chunks=False)
            assert report.chunks == len(case.chunks) or report.damages


_OF_REPOSITORIES = {"api_repositories.py", "api_sessions.py", "repositories.py"}
"""Modules outside of the folders called ``icechunk`` that serve Icechunk only."""


def test_a_format_is_a_folder() -> None:
    """Outside of a format only the composition root and what serves that format alone import it.

    Every layer may ask whether a key is one of a session.
    """
    app_folder = Path(shardgate.formats.__path__[0]).parent
    for path in app_folder.rglob("*.py"):
        home = path.relative_to(app_folder).parts
        if home != ("datasets.py",) and not {*home} & {*FOLDERS, *_OF_REPOSITORIES}:
            text = path.read_text().replace("formats.icechunk.keys", "")
            assert [folder for folder in FOLDERS if f"formats.{folder}" in text] == [], path


@every_case
@pytest.mark.parametrize("whole_index_nbytes", [2**20, 0])
@pytest.mark.parametrize("reads_before", range(8))
async def test_survives_an_overwrite_at_any_moment(
    case: Case, reads_before: int, whole_index_nbytes: int
) -> None:
    """Whenever objects are replaced, a reader sees the old chunk or the new."""
    for key, old in case.chunks.items():
        new = {name: b"a longer " + chunk for name, chunk in case.chunks.items()}
        after = case.build(new)
        store = _InterruptedStore(
            case.build(case.chunks),
            reads_before,
            lambda store, _, after=after: filled(after, store),
        )
        data = reading(store, whole_index_nbytes=whole_index_nbytes, chunk_bytes=0)

        assert await data.read(key) in {old, new[key]}
        if reads_before > 4:
            assert await data.read(key) in {old, new[key]}
            assert await data.read(key) in {old, new[key]}


_MARKERS = ("zarr.json", "info", "repo", "refs/branch.main/ref.json", ".array.json")


class _LosingStore(MemoryStore):
    """Answers the n-th read of a marker with nothing, or with an error page as if it were one."""

    loses_at = 10**9
    page: Found | None = None

    async def get(self, ref: ObjectRef, request: Any = None, **conditions: Any) -> Any:
        """Find no marker when it is time, else read."""
        found = await super().get(ref, request, **conditions)
        self.loses_at -= found is not None and ref.key.endswith(_MARKERS)
        return self.page if self.loses_at == -1 else found


_PAGE = b"<html>Bad gateway</html>"


@every_case
@pytest.mark.parametrize(
    "page", [None, Found(_PAGE, ByteRange(0, len(_PAGE)), len(_PAGE), ETag('"page"'))]
)
async def test_a_lost_marker_is_never_absence_of_chunks(case: Case, page: Found | None) -> None:
    """Whichever marker that was seen is not found at a read, a chunk is right or an error."""
    key, expected = next(iter(case.chunks.items()))
    for step in range(5):
        store = _LosingStore()
        store.page = page
        filled(case.build(case.chunks), store)
        clock = Clock()
        data = reading(store, clock=clock)
        assert await data.read(key) == expected
        clock.now += 61
        store.loses_at = step
        try:
            assert await data.read(key) == expected
        except (MetadataMissingError, DamagedError):
            clock.now += 1
            assert await data.read(key) == expected
        else:
            assert step > 0


class _InterruptedStore(MemoryStore):
    """Calls *interrupt* before its n-th read."""

    def __init__(self, objects: Mapping[str, bytes], reads: int, interrupt: Any) -> None:
        super().__init__()
        self._reads, self._interrupt = reads, interrupt
        filled(objects, self)

    async def get(self, ref: ObjectRef, request: Any = None, **conditions: Any) -> Any:
        """Interrupt when it is time, else read."""
        self._reads -= 1
        if self._reads == -1:
            self._interrupt(self, ref)
        return await super().get(ref, request, **conditions)


def _fail(_: MemoryStore, ref: ObjectRef) -> None:
    raise DamagedError(ref, "for the test")


@every_case
async def test_failure_at_any_step_leaves_nothing_behind(case: Case) -> None:
    """Whichever read fails, the request fails or needs it not, and the next one is answered."""
    key, expected = next(iter(case.chunks.items()))
    failed = 0
    for step in range(10):
        data = reading(_InterruptedStore(case.build(case.chunks), step, _fail))
        try:
            assert await data.read(key) == expected
        except ShardgateError:
            failed += 1
            assert await data.read(key) == expected
    assert failed >= 2
