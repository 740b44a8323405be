"""Archives and reference sets whose numbers lie are opened, listed and looked up, or refused."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import pytest

from shardgate.errors import ShardgateError
from shardgate.formats.kerchunk.layout import Kerchunk
from shardgate.formats.members import MemberFormat
from shardgate.formats.references import allow
from shardgate.formats.zip.layout import Zip
from shardgate.model import ObjectRef
from shardgate.read.metadata_cache import uncached_reads
from shardgate.storage.memory import MemoryStore
from tests.support.formats.kerchunk import changing as sets
from tests.support.formats.members import Opened
from tests.support.formats.zip import changing as archives
from tests.support.processor import processor_time_below

ROOT: Final = ObjectRef("memory://bucket", "")
MOST: Final = 2**20
SET_NBYTES: Final = 2**14
"""So that a set has at most 512 references."""
KINDS: Final[dict[str, tuple[str, MemberFormat, Callable[[random.Random], bytes]]]] = {
    "zip": ("a.zip", Zip(MOST, MOST), archives.changed),
    "kerchunk": ("a.json", Kerchunk(SET_NBYTES, MOST, (allow("s3://bucket", ROOT),)), sets.changed),
}


async def use(container: MemberFormat, name: str, data: bytes) -> None:
    """List a container, and look up all names of it, and others. Raises: `ShardgateError`."""
    store = MemoryStore()
    store.place(ROOT.join("one"), bytes(20))
    store.place(ROOT.join(name), data)
    fetch = uncached_reads(store)
    members = await container.open(ROOT.join(name), fetch)
    if members is None:
        return
    opened = Opened(members, store, fetch)
    names = await opened.names()
    assert all(nbytes is None or 0 <= nbytes < 2**63 for nbytes in names.values())
    folded = {each[: each.find("/") + 1] or each for each in names}
    assert {*await opened.names(delimiter="/")} == folded
    for each in [*names, "c/0", "a/0", "absent"]:
        with suppress(ShardgateError):
            await opened.find(each)


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        ("zip", 10_000),
        ("kerchunk", 500),
        pytest.param("zip", 3_000_000, marks=pytest.mark.soak),
        pytest.param("kerchunk", 200_000, marks=pytest.mark.soak),
    ],
)
async def test_changed_container_is_used_or_refused(kind: str, examples: int) -> None:
    """Containers with wrong numbers, types and lengths are opened, listed and looked up, or raise
    an error of the service, 100 of them within 2 s of CPU time.
    """
    name, container, changed = KINDS[kind]
    chance = random.Random(54)
    for _ in range(examples // 100):
        with processor_time_below(2):
            for _ in range(100):
                with suppress(ShardgateError):
                    await use(container, name, changed(chance))
