"""Keys uploaded in parts, by any process, and what is left of them in the store."""

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from app.errors import (
    BadBodyError,
    BadPartError,
    PreconditionFailedError,
    StorageUnavailableError,
    TooLargeError,
    UnknownUploadError,
)
from app.model import ETag, ObjectRef, VirtualKey
from app.resolve.bodies import Demand
from app.resolve.budget import ByteBudget, ByteReservation
from app.resolve.uploads import Completion, PartName, Upload, Uploads
from app.storage.contract import UPLOADS, ObjectHeaders, ObjectStore
from app.storage.memory import MemoryStore
from tests.resolve.stores import Clock
from tests.resolve.writers import Between, Replica, chunks_of, replica, stored, zarr_json
from tests.resolving import ROOT

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

    async def create(self, key: str, *, is_gzip: bool = False) -> str:
        """Begin an upload."""
        dataset = self.replica.reading.dataset
        headers = ObjectHeaders(is_gzip=is_gzip)
        return await self.uploads.create(dataset, VirtualKey(key), headers)

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
        """Join parts."""
        held = ByteReservation(self.budget)
        completion = Completion(parts, demand, check)
        try:
            return await self.uploads.complete(self._upload(key, upload_id), completion, held)
        finally:
            await held.release()

    async def abort(self, key: str, upload_id: str) -> None:
        """Give up."""
        await self.uploads.abort(self._upload(key, upload_id))

    def _upload(self, key: str, upload_id: str) -> Upload:
        return Upload(self.replica.reading.dataset, VirtualKey(key), upload_id)


@pytest.fixture
def memory() -> MemoryStore:
    """Put a sharded array without any chunk into a store."""
    store = MemoryStore()
    store.place(ROOT.join("a/zarr.json"), zarr_json())
    return store


@pytest.fixture
def clock() -> Clock:
    """Begin in 2023, as ids tell the time."""
    return Clock(1.7e9)


def process(store: ObjectStore, clock: Clock, max_nbytes: int = MAX) -> Process:
    """Start a process over *store*."""
    own = replica(store)
    return Process(Uploads(store, own.writer, max_nbytes=max_nbytes, clock=clock), own)


async def left(store: MemoryStore) -> list[str]:
    """List the objects of uploads."""
    listed = [each.ref.key async for each in store.list(ROOT.join(UPLOADS))]
    return [key.removeprefix(ROOT.join(UPLOADS).key).partition(".")[2] for key in listed]


async def test_processes_take_turns(memory: MemoryStore, clock: Clock) -> None:
    """Each step may run in another process; only the record of completion is left."""
    one, two = process(memory, clock), process(memory, clock)
    upload = await one.create("notes/long")
    second = await two.put("notes/long", upload, 2, b"cd")
    first = await one.put("notes/long", upload, 1, b"ab")

    etag = await two.complete("notes/long", upload, first, second)

    assert await stored(memory, "notes/long") == b"abcd"
    stat = await memory.stat(ROOT.join("notes/long"))
    assert stat is not None
    assert stat.etag == etag
    assert await left(memory) == ["done"]


async def test_an_inner_chunk_comes_in_parts(memory: MemoryStore, clock: Clock) -> None:
    """It is written to its shard on completion."""
    one = process(memory, clock)
    upload = await one.create("a/c/3")
    parts = [await one.put("a/c/3", upload, n, b"%d%d" % (n, n)) for n in (1, 2)]
    assert await stored(memory, "a/c/0") is None

    await one.complete("a/c/3", upload, *parts)

    assert chunks_of(await stored(memory, "a/c/0") or b"") == {3: b"1122"}
    assert await one.replica.read("a/c/3") == b"1122"


async def test_parts_carry_the_md5_of_what_is_in_them(memory: MemoryStore, clock: Clock) -> None:
    """As in S3; a part that is sent again is the same."""
    one = process(memory, clock)
    upload = await one.create("notes/long")

    first = await one.put("notes/long", upload, 1, b"ab")

    assert first.md5 == hashlib.md5(b"ab", usedforsecurity=False).hexdigest()
    assert await one.put("notes/long", upload, 1, b"ab") == first
    assert len(await left(memory)) == 2


async def test_the_client_chooses_among_parts_of_one_number(
    memory: MemoryStore, clock: Clock
) -> None:
    """Parts are chosen by ETag; others are left out and removed."""
    one = process(memory, clock)
    upload = await one.create("notes/long")
    wrong = await one.put("notes/long", upload, 1, b"??")
    first = await one.put("notes/long", upload, 1, b"ab")
    await one.put("notes/long", upload, 3, b"no")

    with pytest.raises(BadPartError):
        await one.complete("notes/long", upload, PartName(2, wrong.md5))
    await one.complete("notes/long", upload, first)

    assert await stored(memory, "notes/long") == b"ab"
    assert await left(memory) == ["done"]


async def test_ids_are_of_one_key(memory: MemoryStore, clock: Clock) -> None:
    """Ids of other keys, and invalid ids, are unknown."""
    one = process(memory, clock)
    upload = await one.create("notes/long")
    part = await one.put("notes/long", upload, 1, b"ab")
    for key, name in (
        ("notes/other", upload),
        ("notes/long", "0" * 32),
        ("notes/long", upload.upper() + "A"),
        ("notes/long", "../" + upload[3:]),
        ("notes/long", ""),
    ):
        with pytest.raises(UnknownUploadError):
            await one.put(key, name, 1, b"ab")
        with pytest.raises(UnknownUploadError):
            await one.complete(key, name, part)
        with pytest.raises(UnknownUploadError):
            await one.abort(key, name)
    assert await left(memory) == [f"00001.{part.md5}", "upload"]


async def test_what_is_given_up_is_gone(memory: MemoryStore, clock: Clock) -> None:
    """Abort removes all parts."""
    one = process(memory, clock)
    upload = await one.create("notes/long")
    part = await one.put("notes/long", upload, 1, b"ab")

    await one.abort("notes/long", upload)

    assert await left(memory) == []
    with pytest.raises(UnknownUploadError):
        await one.complete("notes/long", upload, part)


async def test_who_did_not_hear_of_it_asks_again(memory: MemoryStore, clock: Clock) -> None:
    """A repeated completion gets the same answer, but not with other parts or another key."""
    one, two = process(memory, clock), process(memory, clock)
    upload = await one.create("notes/long")
    part = await one.put("notes/long", upload, 1, b"ab")
    etag = await one.complete("notes/long", upload, part, demand=lambda names: not names)

    again = await two.complete("notes/long", upload, part, demand=lambda names: not names)

    assert again == etag
    with pytest.raises(UnknownUploadError):
        await two.complete("notes/long", upload, PartName(2, part.md5))
    with pytest.raises(UnknownUploadError):
        await two.complete("notes/other", upload, part)
    with pytest.raises(UnknownUploadError):
        await two.put("notes/long", upload, 1, b"ab")


async def test_two_who_complete_at_once_both_succeed(memory: MemoryStore, clock: Clock) -> None:
    """Parts may disappear during the second completion."""
    store = Between(memory)
    one, two = process(memory, clock), process(store, clock)
    upload = await one.create("notes/long")
    part = await one.put("notes/long", upload, 1, b"ab")
    etags: list[ETag | None] = []

    async def be_faster() -> None:
        etags.append(await one.complete("notes/long", upload, part))

    def between(call: str, ref: ObjectRef) -> object:
        return be_faster() if call == "get" and part.md5 in ref.key and not etags else None

    store.between = between

    assert await two.complete("notes/long", upload, part) in etags


async def test_demands_are_of_the_moment_of_completion(memory: MemoryStore, clock: Clock) -> None:
    """After a failed precondition the parts remain for another attempt."""
    one = process(memory, clock)
    upload = await one.create("notes/long")
    part = await one.put("notes/long", upload, 1, b"ab")
    await one.replica.put("notes/long", b"another's")

    with pytest.raises(PreconditionFailedError):
        await one.complete("notes/long", upload, part, demand=lambda names: not names)
    assert await stored(memory, "notes/long") == b"another's"
    await one.complete("notes/long", upload, part)

    assert await stored(memory, "notes/long") == b"ab"


async def test_gzip_is_remembered(memory: MemoryStore, clock: Clock) -> None:
    """The coding given at creation applies to the whole."""
    one = process(memory, clock)
    data = gzip.compress(b"text")
    upload = await one.create("notes/long", is_gzip=True)
    parts = [
        await one.put("notes/long", upload, 1, data[:9]),
        await one.put("notes/long", upload, 2, data[9:]),
    ]

    await one.complete("notes/long", upload, *parts)

    assert await stored(memory, "notes/long") == data
    assert await one.replica.read("notes/long") == b"text"


async def test_the_whole_is_checked(memory: MemoryStore, clock: Clock) -> None:
    """The check runs before the write."""
    one = process(memory, clock)
    upload = await one.create("notes/long")
    part = await one.put("notes/long", upload, 1, b"ab")

    def refuse(body: bytes) -> None:
        raise BadBodyError(body.decode())

    with pytest.raises(BadBodyError, match="ab"):
        await one.complete("notes/long", upload, part, check=refuse)
    assert await stored(memory, "notes/long") is None


async def test_a_part_too_many_is_refused(memory: MemoryStore, clock: Clock) -> None:
    """A part is refused if the parts before it are as large."""
    one = process(memory, clock)
    upload = await one.create("notes/long")
    for number in (1, 2):
        await one.put("notes/long", upload, number, bytes(MAX // 2))
    await one.put("notes/long", upload, 2, bytes([1]) * (MAX // 2))

    with pytest.raises(TooLargeError):
        await one.put("notes/long", upload, 3, bytes(MAX // 2))
    await one.put("notes/long", upload, 10_000, b"")


async def test_parts_too_large_together_are_refused(memory: MemoryStore, clock: Clock) -> None:
    """They are refused before they are read."""
    store = Between(memory)
    one = process(store, clock)
    upload = await one.create("notes/long")
    parts = [
        await one.put("notes/long", upload, 3, bytes(MAX // 3)),
        await one.put("notes/long", upload, 4, b"1"),
    ]
    small = await one.put("notes/long", upload, 2, b"12")
    large = await one.put("notes/long", upload, 1, bytes(MAX - 1))
    store.calls.clear()

    with pytest.raises(TooLargeError):
        await one.complete("notes/long", upload, large, small, *parts)
    assert not any("0000" in name for call, name in store.calls if call == "get")


async def test_bytes_are_held_while_parts_are_joined(memory: MemoryStore, clock: Clock) -> None:
    """Parts and body are reserved while joining, then the body only."""
    store = Between(memory)
    one = process(store, clock)
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


async def test_what_is_written_is_acknowledged(memory: MemoryStore, clock: Clock) -> None:
    """A failure to remove the parts does not fail the completion."""
    store = Between(memory)
    one = process(store, clock)
    upload = await one.create("notes/long")
    part = await one.put("notes/long", upload, 1, b"ab")

    def fail(call: str, ref: ObjectRef) -> None:
        if call == "put" and ref.key.endswith("done"):
            raise StorageUnavailableError(ref, "gone")

    store.between = fail
    etag = await one.complete("notes/long", upload, part)

    assert await stored(memory, "notes/long") == b"ab"
    store.between = lambda *_: None
    assert await one.complete("notes/long", upload, part) == etag
    assert await left(memory) == ["done"]


async def test_what_was_abandoned_is_removed(memory: MemoryStore, clock: Clock) -> None:
    """Open uploads are removed after a day, records of completed ones after an hour."""
    one = process(memory, clock)
    folder = ROOT.join(UPLOADS)

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

    assert counts == [162, 62, 7]
    assert sorted(await left(memory)) == ["00001.0"] * 3 + ["done"] + ["upload"] * 3


async def test_the_folder_is_looked_through_once_an_hour(memory: MemoryStore, clock: Clock) -> None:
    """Each process sweeps once an hour."""
    one = process(memory, clock)
    await one.create("notes/long")
    stale = f"{int(clock.now - 25 * HOUR_S):08x}{'0' * 24}.upload"
    memory.place(ROOT.join(UPLOADS + stale), b"{}", modified_s=int(clock.now - 25 * HOUR_S))

    await one.create("notes/long")
    assert len(await left(memory)) == 3
    clock.now += HOUR_S
    await one.create("notes/long")

    assert len(await left(memory)) == 3
    assert await memory.get(ROOT.join(UPLOADS + stale)) is None


async def test_uploads_are_hidden(memory: MemoryStore, clock: Clock) -> None:
    """Listings without their prefix leave uploads out."""
    one = process(memory, clock)
    upload = await one.create("notes/long")
    await one.put("notes/long", upload, 1, b"ab")

    assert [each.ref.key async for each in memory.list(ROOT.prefix)] == ["data/a/zarr.json"]
