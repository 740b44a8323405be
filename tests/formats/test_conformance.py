"""Conformance suite for every folder of `app/shardgate/formats`."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import shardgate.formats
from shardgate.errors import (
    DamagedError,
    MetadataMissingError,
    ShardgateError,
    StorageUnavailableError,
)
from shardgate.formats.surveying import ChunkCollection, Shards
from shardgate.model import ByteRange, ETag, ObjectRef, Stored, VirtualKey
from shardgate.read.listing import Root, list_names
from shardgate.read.metadata_cache import uncached_reads
from shardgate.read.walking import find_collections
from shardgate.storage.contract import Found
from shardgate.storage.memory import MemoryStore
from shardgate.survey.verify import verify
from tests.support.clocks import Clock
from tests.support.formats.case import Case, chunks_of, filled
from tests.support.formats.cases import CASES, FOLDERS
from tests.support.read.stores import Watching
from tests.support.resolving import ROOT, reading

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_case_with_steps_of_its_own = pytest.mark.parametrize(
    "case", [case for case in CASES if not case.is_spelling], ids=str
)
every_checksummed_case = pytest.mark.parametrize(
    "case", [case for case in CASES if case.checksummed], ids=str
)
every_case_of_shards = pytest.mark.parametrize(
    "case", [case for case in CASES if case.has_shards], ids=str
)


@every_case
@pytest.mark.parametrize("whole_index_nbytes", [2**20, 0])
async def test_chunks_are_exact_and_other_keys_absent(case: Case, whole_index_nbytes: int) -> None:
    """Every written chunk is read exactly; keys of empty chunks or off the grid are absent.

    An index above the limit for whole reads gives the same chunks.
    """
    data = reading(filled(case.build(case.chunks)), whole_index_nbytes=whole_index_nbytes)
    expected = {**dict.fromkeys(case.absent), **case.chunks}

    assert {key: await data.read(key) for key in expected} == expected


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.soak)])
@every_case
async def test_truncated_shard_is_never_absence(case: Case, step: int) -> None:
    """A chunk of a truncated shard is read exactly or raises DamagedError.

    Without a checksum, the end of a truncated shard can look like an index.
    """
    objects = case.build(case.chunks)
    for name, whole in objects.items():
        if case.is_metadata(name):
            continue
        for length in range(len(whole) - 1, -1, -step):
            data = reading(filled({**objects, name: whole[:length]}))
            for key, expected in case.chunks.items():
                try:
                    found = await data.read(key)
                except DamagedError as error:
                    assert name in str(error)  # noqa: PT017 - what it says is the fact
                else:
                    assert found == expected or not case.checksummed


def _root(store: MemoryStore) -> Root:
    data = reading(store)
    return data.resolver.root(data.dataset)


async def _shards(store: MemoryStore) -> list[tuple[str, Shards]]:
    """Return the path and the shards of each container."""
    return [
        (visited.container, visited.found.shards)
        async for visited in find_collections(_root(store))
        if isinstance(visited.found, ChunkCollection) and visited.found.shards is not None
    ]


@every_case_of_shards
async def test_shard_indexes_name_the_written_chunks(case: Case) -> None:
    """The indexes of all shards name exactly the written chunks, at their places.

    Verification counts every chunk and finds no damage.
    """
    store = filled(case.build(case.chunks))
    fetch = uncached_reads(store)
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
        layout, rest, *_ = await root.containers.find(ROOT, VirtualKey(key), fetch)
        location = await layout.locate(rest, fetch)
        assert place in (location, *(location if isinstance(location, tuple) else ()))
    report = await verify(root, chunks=True)
    assert (report.chunks, report.damages) == (len(case.chunks), [])


@every_case_of_shards
async def test_shard_is_the_same_by_chunk_by_name_and_in_the_list(case: Case) -> None:
    """A shard found by a chunk's key, by its name, and in the list of all shards is the same."""
    store = filled(case.build(case.chunks))
    root = _root(store)
    for key in case.chunks:
        layout, rest, *_ = await root.containers.find(ROOT, VirtualKey(key), root.fetch)
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
async def test_other_objects_are_no_shards(case: Case) -> None:
    """Markers, stray objects and absent chunks belong to no shard."""
    store = filled(case.build(case.chunks))
    for _, shards in await _shards(store):
        names = ["zarr.json", "info", "", "notes.txt", f"{shards.prefix}notes.txt"]
        assert [shards.named(name) for name in names] == [None] * len(names)
        assert [shards.holding(VirtualKey(name)) for name in names] == [None] * len(names)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.soak)])
@every_checksummed_case
async def test_flipped_bit_of_a_checksummed_index_is_detected(case: Case, step: int) -> None:
    """A shard with a flipped bit yields right chunks, damage, or the bit in one chunk's data.

    Verification counts all chunks or reports damage.
    """
    objects = case.build(case.chunks)
    name = next(name for name in objects if not case.is_metadata(name))
    for at in range(0, len(objects[name]), step):
        flipped = bytearray(objects[name])
        flipped[at] ^= 0x10
        store = filled({**objects, name: bytes(flipped)})
        data = reading(store)
        for key, expected in case.chunks.items():
            try:
                found = await data.read(key)
            except DamagedError:
                continue
            assert found is not None
            assert len(found) == len(expected)
            assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1
        if case.has_shards:
            report = await verify(_root(store), chunks=False)
            assert report.chunks == len(case.chunks) or report.damages


_OF_FORMATS = {
    *("arrays.py", "commit_body.py", "nodes.py"),
    *("repositories.py", "sections.py", "sessions.py"),
}
"""Modules that serve Icechunk, or show and draw arrays of certain formats."""


def test_formats_are_imported_by_their_own_modules_only() -> None:
    """A format is imported by its own modules and by the composition root only.

    An exception is `formats.icechunk.keys`, which recognizes keys of sessions.
    """
    app_folder = Path(shardgate.formats.__path__[0]).parent
    for path in app_folder.rglob("*.py"):
        home = path.relative_to(app_folder).parts
        if home != ("datasets.py",) and not {*home} & {*FOLDERS, *_OF_FORMATS}:
            text = path.read_text().replace("formats.icechunk.keys", "")
            assert [folder for folder in FOLDERS if f"formats.{folder}" in text] == [], path


@every_case_with_steps_of_its_own
@pytest.mark.parametrize("whole_index_nbytes", [2**20, 0])
async def test_overwrite_during_a_read_yields_the_old_or_new_chunk(
    case: Case, whole_index_nbytes: int
) -> None:
    """A read during which all objects are replaced, at any moment, returns the old or new chunk."""
    new = {name: b"a longer " + chunk for name, chunk in case.chunks.items()}
    before, after = case.build(case.chunks), case.build(new)
    first_and_last = list(case.chunks.items())[:: max(1, len(case.chunks) - 1)]
    for reads_before, (key, old) in product(range(8), first_and_last):
        store = _InterruptedStore(before, reads_before, lambda store, _: filled(after, store))
        data = reading(store, whole_index_nbytes=whole_index_nbytes, chunk_bytes=0)

        for _ in range(3 if reads_before > 4 else 1):
            assert await data.read(key) in {old, new[key]}, (key, reads_before)


_MARKERS = ("zarr.json", "info", "repo", "refs/branch.main/ref.json", ".array.json", ".ozx")


class _LosingStore(MemoryStore):
    """Store that loses the n-th read of a marker, or returns an error page for it."""

    loses_at = 10**9
    page: Found | None = None

    async def get(self, ref: ObjectRef, request: Any = None, **conditions: Any) -> Any:
        """Return nothing or the page for the n-th marker, and the stored object otherwise."""
        found = await super().get(ref, request, **conditions)
        self.loses_at -= found is not None and ref.key.endswith(_MARKERS)
        return self.page if self.loses_at == -1 else found


_PAGE = b"<html>Bad gateway</html>"


@every_case_with_steps_of_its_own
@pytest.mark.parametrize(
    "page", [None, Found(_PAGE, ByteRange(0, len(_PAGE)), len(_PAGE), ETag('"page"'))]
)
async def test_lost_marker_is_never_absence(case: Case, page: Found | None) -> None:
    """A chunk below a marker that is lost in one read is right or an error, never absent."""
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
            assert step > 0 or store.loses_at < -1, "it was not read again"


class _InterruptedStore(MemoryStore):
    """Store that calls *interrupt* before its n-th read."""

    def __init__(self, objects: Mapping[str, bytes], reads: int, interrupt: Any) -> None:
        super().__init__()
        self._reads, self._interrupt = reads, interrupt
        filled(objects, self)

    async def get(self, ref: ObjectRef, request: Any = None, **conditions: Any) -> Any:
        """Call *interrupt* before the n-th read, and read."""
        self._reads -= 1
        if self._reads == -1:
            self._interrupt(self, ref)
        return await super().get(ref, request, **conditions)


def _fail(_: MemoryStore, ref: ObjectRef) -> None:
    raise StorageUnavailableError(ref, "for the test")


@every_case_with_steps_of_its_own
async def test_failed_read_does_not_affect_the_next_request(case: Case) -> None:
    """A request fails if any one read fails, and the next request succeeds."""
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


async def _damage_of(watched: Watching, key: str) -> str | None:
    try:
        await watched.data.read(key)
    except DamagedError as error:
        return str(error)
    return None


@every_case_with_steps_of_its_own
async def test_damage_is_read_once_a_second_and_repeated_to_the_letter(case: Case) -> None:
    """Whichever object is damaged, a refused request costs no read when it is repeated within a
    second, and fails with the same message.
    """
    objects = case.build(case.chunks)
    refused = 0
    for name, whole in objects.items():
        watched = Watching({**objects, name: whole[: len(whole) // 2]})
        for key in case.chunks:
            damage = await _damage_of(watched, key)
            watched.store.calls.clear()
            if damage is not None:
                refused += 1
                watched.clock.now += 0.1
                assert await _damage_of(watched, key) == damage
                assert watched.store.calls == []
    assert refused
