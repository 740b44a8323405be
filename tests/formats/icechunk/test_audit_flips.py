"""No key of a damaged repository is refused without `verify` telling of the damage."""

import numpy as np
import pytest

from app.errors import DamagedError
from app.formats.icechunk.layout import Icechunk
from app.model import ObjectRef
from app.resolve.containers import Containers
from app.resolve.fetch import Memory, ReadCache
from app.resolve.verify import verify
from app.resolve.walk import Root
from app.storage.memory import MemoryStore
from tests.formats.icechunk.building import Ref
from tests.formats.icechunk.building_repo import FIRST
from tests.formats.icechunk.small import SECOND, Small, array, spell
from tests.resolving import reading

BUCKET = "memory://t"
FORMATS = (Icechunk(2**20, 2**20),)
SMALL = Small(
    document=array([40], [2]),
    grid=((40, 20),),
    references=[
        Ref(index=[at], inline=bytes([at] * 2))
        if at % 2
        else Ref(index=[at], chunk_id=b"chunk file 1", offset=1, length=2)
        for at in range(20)
    ],
    manifests=((b"one manifest", [(0, 20)]),),
)
KEYS = [
    f"{ref}{key}"
    for ref in ("", "@tag.v 1/", f"@{spell(FIRST)}/", f"@{spell(SECOND)}/")
    for key in (
        "zarr.json",
        "a/zarr.json",
        "s/zarr.json",
        *(f"a/c/{at}" for at in range(20)),
        *(f"s/c/{at}" for at in range(8)),
    )
]


def _store(objects: dict[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, data in objects.items():
        store.place(ObjectRef(BUCKET, key), data)
    return store


async def _damaged(store: MemoryStore) -> list[str]:
    data = reading(store, root=ObjectRef(BUCKET, ""), formats=FORMATS)
    found = []
    for key in KEYS:
        try:
            await data.read(key)
        except DamagedError:
            found.append(key)
    return found


def _flip(data: bytes, random: np.random.Generator) -> bytes:
    flipped = bytearray(data)
    flipped[random.integers(len(data))] ^= int(random.integers(1, 256))
    return bytes(flipped)


@pytest.mark.parametrize("name", sorted(SMALL.objects()))
@pytest.mark.parametrize("change", ["flip", "cut", "lose"])
@pytest.mark.parametrize("times", [10, pytest.param(100, marks=pytest.mark.soak)])
async def test_damage_that_readers_meet_is_told(name: str, change: str, times: int) -> None:
    """Whatever byte of a file is another, or whatever is lacking of it."""
    whole = SMALL.objects()
    random = np.random.default_rng(len(name))
    met = 0
    for _ in range(1 if change == "lose" else times):
        objects = dict(whole)
        if change == "flip":
            objects[name] = _flip(whole[name], random)
        elif change == "cut":
            objects[name] = whole[name][: random.integers(len(whole[name]))]
        else:
            del objects[name]
        store = _store(objects)
        fetch = ReadCache(store, Memory(2**20), ttl_s=60)

        report = await verify(
            Root(ObjectRef(BUCKET, ""), store, Containers(FORMATS), fetch), chunks=False
        )

        damaged = await _damaged(store)
        met += bool(damaged)
        assert report.damages or not damaged, (objects[name], damaged)
    if change == "cut" and "transactions" not in name:
        assert met
