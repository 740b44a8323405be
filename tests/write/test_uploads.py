"""Keys uploaded in parts by several processes, and the objects that uploads leave."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardgate.errors import (
    DamagedError,
    StorageUnavailableError,
    TooLargeError,
    UnknownUploadError,
)
from shardgate.model import ETag, ObjectRef, VirtualKey
from shardgate.read.bodies import Demand
from shardgate.read.budget import ByteBudget, ByteReservation
from shardgate.read.containers import Dataset
from shardgate.storage.contract import NO_HEADERS, UPLOADS, Found
from shardgate.storage.memory import MemoryStore
from shardgate.write.uploads import Completion, PartName, Upload, Uploads
from tests.support.clocks import Clock
from tests.support.resolving import ROOT
from tests.support.write.writers import Between, Replica, absent, replica, stored

MAX = 100
HOUR_S = 3600.0


def nothing(_: bytes) -> None:
    """Accept any body."""


@dataclass
class Process:
    """A process of the service."""

    uploads: Uploads
    replica: Replica
    budget: ByteBudget = field(default_factory=lambda: ByteBudget(2**20, wait_s=0.2))

    async def create(self, key: str) -> str:
        """Begin an upload."""
        dataset = self.replica.reading.dataset
        return await self.uploads.create(dataset, VirtualKey(key), NO_HEADERS)

    async def put(self, key: str, upload_id: str, number: int, body: bytes) -> PartName:
        """Upload a part."""
        etag = await self.uploads.put_part(self._upload(key, upload_id), number, body)
        return PartName(number, etag.strip('"'))

    async def complete(
        self,
        key: str,
        upload_id: str,
        *parts: PartName,
        demand: Demand | None = None,
        check: Callable[[bytes], None] = nothing,
    ) -> ETag | None:
        """Complete an upload of *parts*."""
        held = ByteReservation(self.budget)
        completion = Completion(parts, demand, check)
        try:
            return await self.uploads.complete(self._upload(key, upload_id), completion, held)
        finally:
            await held.release()

    async def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload."""
        await self.uploads.abort(self._upload(key, upload_id))

    def _upload(self, key: str, upload_id: str) -> Upload:
        return Upload(self.replica.reading.dataset, VirtualKey(key), upload_id)


@pytest.fixture
def clock() -> Clock:
    """Return a clock of 2023, as upload ids contain the time."""
    return Clock(1.7e9)


def process(store: Any, clock: Clock) -> Process:
    """Start a process over *store*."""
    own = replica(store)

    async def route(dataset: Dataset, key: VirtualKey) -> tuple[Dataset, VirtualKey]:
        return dataset, key

    return Process(Uploads(store, own.writer, route, max_nbytes=MAX, clock=clock), own)


@pytest.fixture
def store(memory: MemoryStore) -> Between:
    """Wrap the store to record its calls."""
    return Between(memory)


@pytest.fixture
def one(store: Between, clock: Clock) -> Process:
    """Start a process."""
    return process(store, clock)


@pytest.fixture
async def begun(one: Process) -> tuple[str, PartName]:
    """Begin an upload of ``notes/long``, and upload a part."""
    upload = await one.create("notes/long")
    return upload, await one.put("notes/long", upload, 1, b"ab")


async def left(store: MemoryStore) -> list[str]:
    """Return the names of the objects of uploads."""
    listed = [each.ref.key async for each in store.list(ROOT.join(UPLOADS))]
    return [key.removeprefix(ROOT.join(UPLOADS).key).partition(".")[2] for key in listed]


async def test_repeated_completion_returns_the_same_etag(
    one: Process, begun: tuple[str, PartName], memory: MemoryStore, clock: Clock
) -> None:
    """A repeated completion returns the same ETag.

    With other parts or another key, and for new parts, it raises UnknownUploadError.
    """
    two = process(memory, clock)
    upload, part = begun
    etag = await one.complete("notes/long", upload, part, demand=absent)

    again = await two.complete("notes/long", upload, part, demand=absent)

    assert again == etag
    with pytest.raises(UnknownUploadError):
        await two.complete("notes/long", upload, PartName(2, part.md5))
    with pytest.raises(UnknownUploadError):
        await two.complete("notes/other", upload, part)
    with pytest.raises(UnknownUploadError):
        await two.put("notes/long", upload, 1, b"ab")


async def test_concurrent_completions_both_succeed(
    begun: tuple[str, PartName], memory: MemoryStore, store: Between, clock: Clock
) -> None:
    """Two concurrent completions of one upload both succeed, though one removes the parts."""
    other, two = process(memory, clock), process(store, clock)
    upload, part = begun
    etags: list[ETag | None] = []

    async def be_faster() -> None:
        etags.append(await other.complete("notes/long", upload, part))

    def between(call: str, ref: ObjectRef) -> object:
        return be_faster() if call == "get" and part.md5 in ref.key and not etags else None

    store.between = between

    assert await two.complete("notes/long", upload, part) in etags


async def test_too_large_upload_is_refused(one: Process, store: Between) -> None:
    """Parts above the limit together are refused when sent or completed, without being read."""
    upload = await one.create("notes/long")
    sizes = {3: MAX // 3, 4: 1, 2: 2, 1: MAX - 1}
    parts = [await one.put("notes/long", upload, n, bytes(size)) for n, size in sizes.items()]
    with pytest.raises(TooLargeError):
        await one.put("notes/long", upload, 5, bytes(MAX // 2))
    await one.put("notes/long", upload, 10_000, b"")

    store.calls.clear()
    with pytest.raises(TooLargeError):
        await one.complete("notes/long", upload, *parts)
    assert not any(".0000" in name for call, name in store.calls if call == "get")


async def test_parts_and_body_are_reserved_while_joining(one: Process, store: Between) -> None:
    """Parts and body are reserved while they are joined, then the body only."""
    upload = await one.create("notes/long")
    part = await one.put("notes/long", upload, 1, bytes(MAX))
    held: dict[str, int] = {}

    def note(call: str, ref: ObjectRef) -> None:
        held[f"{call} {ref.key[-4:]}"] = one.budget.held_bytes

    store.between = note
    await one.complete("notes/long", upload, part)

    assert held[f"get {part.md5[-4:]}"] == 2 * MAX
    assert held["put long"] == MAX
    assert one.budget.held_bytes == 0


async def test_completion_succeeds_though_cleaning_up_fails(
    one: Process, begun: tuple[str, PartName], store: Between, memory: MemoryStore
) -> None:
    """A completion succeeds though removing its parts fails."""
    upload, part = begun

    def fail(call: str, ref: ObjectRef) -> None:
        if call == "put" and ref.key.endswith("done"):
            raise StorageUnavailableError(ref, "gone")

    store.between = fail
    etag = await one.complete("notes/long", upload, part)

    assert await stored(memory, "notes/long") == b"ab"
    store.between = lambda *_: None
    assert await one.complete("notes/long", upload, part) == etag
    assert await left(memory) == ["done"]


async def test_stale_uploads_are_removed(one: Process, memory: MemoryStore, clock: Clock) -> None:
    """Open uploads are removed after a day, and records of completed ones after an hour.

    Objects of other names are kept.
    """
    folder = ROOT.join(UPLOADS)
    memory.place(ROOT.join(f"{UPLOADS}-notes"), b"", modified_s=0)  # listed before all uploads

    def place(name: str, age_s: float) -> None:
        upload_id = f"{int(clock.now - age_s):08x}{'0' * 24}"
        ref = ObjectRef(folder.bucket, f"{folder.key}{upload_id}.{name}")
        memory.place(ref, b"{}", modified_s=int(clock.now - age_s))

    for age_s in (0.5 * HOUR_S, 2 * HOUR_S, 23 * HOUR_S, 25 * HOUR_S):
        for name in ("upload", "00001.0", "done"):
            place(name, age_s)
    for number in range(250):
        place(f"{number:05}.0", 30 * HOUR_S)

    counts = []
    for _ in range(3):
        await one.abort("notes/long", await one.create("notes/long"))
        counts.append(len(await left(memory)))

    assert counts == [163, 63, 8]
    assert sorted(await left(memory)) == ["", *["00001.0"] * 3, "done", *["upload"] * 3]


async def test_uploads_are_swept_once_an_hour(
    one: Process, memory: MemoryStore, clock: Clock
) -> None:
    """Each process sweeps stale uploads once an hour."""
    await one.create("notes/long")
    stale = f"{int(clock.now - 25 * HOUR_S):08x}{'0' * 24}.upload"
    memory.place(ROOT.join(UPLOADS + stale), b"{}", modified_s=int(clock.now - 25 * HOUR_S))

    await one.create("notes/long")
    assert len(await left(memory)) == 3
    clock.now += HOUR_S
    await one.create("notes/long")

    assert len(await left(memory)) == 3
    assert await memory.get(ROOT.join(UPLOADS + stale)) is None


@pytest.mark.parametrize(
    "damaged",
    [
        bytes(20),
        b"[]",
        b"{}",
        b'{"key": "notes/new", "content_type": ""}',
        b'{"key": "notes/new", "coding": 1, "content_type": ""}',
        b'{"key": "notes/new", "coding": "", "content_type": "", "metadata": [["a"]]}',
    ],
)
async def test_damaged_record_of_an_upload_is_damage(
    one: Process, memory: MemoryStore, damaged: bytes
) -> None:
    """A part of an upload whose record is another document raises DamagedError with its name."""
    upload_id = await one.create("notes/new")
    record = ROOT.join(f"{UPLOADS}{upload_id}.upload")
    assert isinstance(await memory.get(record), Found)
    memory.place(record, damaged)

    with pytest.raises(DamagedError, match=r"\.upload: is no record of an upload"):
        await one.put("notes/new", upload_id, 1, b"part")


async def test_damaged_record_of_a_completion_is_damage(one: Process, memory: MemoryStore) -> None:
    """A repeated completion whose record lacks members raises DamagedError with its name."""
    upload_id = await one.create("notes/new")
    part = await one.put("notes/new", upload_id, 1, b"part")
    await one.complete("notes/new", upload_id, part)
    memory.place(ROOT.join(f"{UPLOADS}{upload_id}.done"), b"{}")

    with pytest.raises(DamagedError, match=r"\.done: is no record of an upload: key is wrong"):
        await one.complete("notes/new", upload_id, part)
