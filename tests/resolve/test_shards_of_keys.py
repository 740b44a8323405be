"""Shard names of keys, from metadata alone."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest

from app.formats.reading import Read, Versioned, Weighable
from app.model import ObjectRef, VirtualKey
from app.resolve.containers import Containers
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.formats.case import Case
from tests.formats.icechunk.case import CASES as REPOSITORIES
from tests.formats.neuroglancer_precomputed.case import CASES as PRECOMPUTED
from tests.formats.zarr.case import CASES as ZARR
from tests.resolving import ROOT, known_formats

CONTAINERS = Containers(known_formats(whole_index_nbytes=0))


class Recorded:
    """Performs reads, and records their kinds."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        store = MemoryStore()
        for key, data in objects.items():
            store.place(ROOT.join(key), data)
        self._fetch = DirectFetch(store)
        self.kinds: set[str] = set()

    async def __call__[T: Weighable](
        self, read: Read[T], /, *, ever: bool = False
    ) -> Versioned[T] | None:
        """Perform *read*."""
        self.kinds.add(read.kind)
        return await self._fetch(read, ever=ever)

    async def name(self, key: str) -> str | None:
        """Name the shard of *key*."""
        layout, rest = await CONTAINERS.find(ROOT, VirtualKey(key), self)
        return await layout.shard(rest, self)

    async def stored_in(self, key: str) -> ObjectRef:
        """Return the object of the chunk *key*, from its index."""
        layout, rest = await CONTAINERS.find(ROOT, VirtualKey(key), self)
        shards = await layout.shards_at(rest, self)
        shard = None if shards is None else shards.holding(rest)
        survey = None if shard is None else await shard.survey(self)
        assert survey is not None
        return survey.whole.ref


def together[T](names: Iterable[tuple[str, T]]) -> set[frozenset[str]]:
    """Group keys by name."""
    groups: defaultdict[T, set[str]] = defaultdict(set)
    for key, name in names:
        groups[name].add(key)
    return set(map(frozenset, groups.values()))


@pytest.mark.parametrize("case", [*ZARR, *PRECOMPUTED], ids=str)
async def test_keys_of_one_object_have_one_name(case: Case) -> None:
    """Chunks have the same name exactly if they are in the same object."""
    fetch = Recorded(case.build(case.chunks))

    named = [(key, await fetch.name(key)) for key in case.chunks]

    assert None not in dict(named).values()
    assert together(named) == together([(key, await fetch.stored_in(key)) for key in case.chunks])


@pytest.mark.parametrize("case", [*ZARR, *PRECOMPUTED, *REPOSITORIES], ids=str)
async def test_only_metadata_are_read(case: Case) -> None:
    """No shard index and no manifest is read."""
    fetch = Recorded(case.build(case.chunks))
    for key in (*case.chunks, *case.absent):
        await fetch.name(key)

    assert fetch.kinds & {"metadata", "snapshot"}
    assert not {kind for kind in fetch.kinds if "index" in kind or "manifest" in kind}


@pytest.mark.parametrize("case", REPOSITORIES, ids=str)
async def test_only_shards_of_repositories_have_names(case: Case) -> None:
    """Each of the four shards of an array has a name; unsharded chunks have none."""
    fetch = Recorded(case.build(case.chunks))
    named = [(key, await fetch.name(key)) for key in case.chunks]

    expected: list[tuple[str, object]] = [(key, None) for key in case.chunks]
    if "sharded" in case.name:
        cells = [key.split("/")[-2:] for key in case.chunks]
        shards = [(int(i) // 2, int(j) // 2) for i, j in cells]
        expected = list(zip(case.chunks, shards, strict=True))
    assert together(named) == together(expected)


async def test_refs_of_a_repository_share_names() -> None:
    """A shard has the same name in each ref, so that requests for it meet its cached index."""
    case = next(case for case in REPOSITORIES if "sharded" in case.name)
    fetch = Recorded(case.build(case.chunks))
    key = next(iter(case.chunks))

    assert await fetch.name(key) is not None
    assert await fetch.name(f"@branch.main/{key}") == await fetch.name(key)


@pytest.mark.parametrize("case", [*ZARR, *PRECOMPUTED], ids=str)
async def test_documents_are_in_no_shard(case: Case) -> None:
    """Documents have no shard name."""
    objects = case.build(case.chunks)
    fetch = Recorded(objects)

    documents = [key for key in objects if key.endswith(("zarr.json", "info"))]
    assert documents
    assert [await fetch.name(key) for key in documents] == [None] * len(documents)
