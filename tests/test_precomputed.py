"""The whole service over precomputed containers in a real, and sometimes wicked, object server."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import httpx
import pytest
from pydantic import ByteSize, SecretStr

from app.settings import CacheSettings, DatasetSettings, LimitSettings, Settings, StoreSettings
from tests.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    IDS,
    build,
    build_meshes,
    chunk_bytes,
)
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.serving import serving
from tests.storage.faulty import Fault, FaultyServer

KEY, NEIGHBOUR, OTHER_MINISHARD, ABSENT, OTHER_SHARD = IDS
CHUNKS = {key: chunk_bytes(number) for key, number in IDS.items() if key != ABSENT}
SHARD = "s0/0.shard"
STEPS = {
    "info": None,
    "shard index": "info",
    "minishard index": OTHER_MINISHARD,
    "chunk": NEIGHBOUR,
}
"""What is read, and after which request that is the next thing to be."""


@dataclass
class Service:
    """The service and its store."""

    client: httpx.Client
    store: FaultyServer

    def get(self, key: str = KEY, **headers: str) -> httpx.Response:
        """Ask for *key* of the dataset."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.get(f"/em/{key}", headers=given)

    def put(self, objects: dict[str, bytes]) -> None:
        """Store objects of the dataset."""
        for key, data in objects.items():
            self.store.put("bucket", f"em/{key}", data)

    def remove(self, key: str) -> None:
        """Remove an object of the dataset."""
        del self.store.objects[f"/bucket/em/{key}"]

    def reads(self) -> list[str]:
        """Name what was asked of the store."""
        return [seen.path.removeprefix("/bucket/em/") for seen in self.store.seen]


@pytest.fixture
def service(faulty: FaultyServer) -> Generator[Service]:
    """Serve a volume from the object server, without a chunk cache."""
    lab = StoreSettings(
        endpoint_url=faulty.url,
        region="us-east-1",
        access_key_id="key",
        secret_access_key=SecretStr("secret"),
    )
    settings = Settings(
        cache=CacheSettings(chunk_bytes=ByteSize(0)),
        limits=LimitSettings(timeout_s=1, deadline_s=3),
        stores={"lab": lab},
        datasets={"em": DatasetSettings(url="s3://bucket/em", store="lab", format="precomputed")},
    )
    with serving(settings) as url, httpx.Client(base_url=url, timeout=20) as client:
        found = Service(client, faulty)
        found.put(build(CHUNKS))
        yield found


def test_cold_chunk_takes_three_reads_after_the_document(service: Service) -> None:
    """Shard index, minishard index, chunk."""
    service.get("info")
    del service.store.seen[:]

    assert service.get().content == CHUNKS[KEY]
    assert service.reads() == [SHARD] * 3


def test_warm_chunk_takes_one_read(service: Service) -> None:
    """Of exactly its bytes."""
    service.get(NEIGHBOUR)
    del service.store.seen[:]

    assert service.get().content == CHUNKS[KEY]
    assert [seen.headers["Range"] for seen in service.store.seen] == ["bytes=35-39"]


def test_absent_chunk_of_a_known_minishard_takes_no_read(service: Service) -> None:
    """The index says so."""
    service.get(OTHER_MINISHARD)
    del service.store.seen[:]

    assert service.get(ABSENT).status_code == 404
    assert service.reads() == []


LASTING = {
    Fault.DENY: {403},
    Fault.SLOW_DOWN: {503},
    Fault.TOO_MANY: {503},
    Fault.ERROR: {503},
    Fault.STALL: {503, 504},
    Fault.STALL_BODY: {503, 504},
    Fault.RESET: {503, 504},
    Fault.RESET_BODY: {502, 503, 504},
    Fault.CUT: {502, 503, 504},
    Fault.SHORT_LENGTH: {502, 503, 504},
    Fault.BAD_RANGE: {502, 503, 504},
    Fault.GARBAGE: {503, 504},
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", LASTING)
def test_fault_of_the_store(service: Service, fault: Fault, step: str) -> None:
    """Whatever fails, at whichever step: its status, no byte, and nothing left behind."""
    if before := STEPS[step]:
        assert service.get(before).status_code == 200
    service.store.fail(fault)
    answer = service.get()
    service.store.heal()

    assert answer.status_code in LASTING[fault]
    assert CHUNKS[KEY] not in answer.content
    assert service.get().content == CHUNKS[KEY]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.ERROR, Fault.RESET, Fault.CUT])
def test_passing_fault_is_not_noticed(service: Service, fault: Fault, step: str) -> None:
    """What goes away when asked again is no failure."""
    if before := STEPS[step]:
        service.get(before)
    service.store.fail(fault, nth=[0])

    assert service.get().content == CHUNKS[KEY]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", ["shard", "index", "data"])
def test_a_refusal_is_never_absence(service: Service, name: str, *, old: bool) -> None:
    """Whichever form the shard has: what may not be read may be there."""
    service.put(build(CHUNKS, old=old))
    if old:
        service.remove(SHARD)
    service.store.fail(Fault.DENY, path=f"/bucket/em/s0/0.{name}")
    expected = 403 if name == "shard" or old else 200

    assert service.get().status_code == expected


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("sharding", [RAW_SHARDING, GZIP_DATA], ids=["raw", "gzip"])
def test_replaced_shard(service: Service, step: str, sharding: dict[str, object]) -> None:
    """After an overwrite a reader gets the new chunk, whatever was known."""
    service.put(build(CHUNKS, sharding=sharding))
    if before := STEPS[step]:
        service.get(before)
    new = {key: b"longer than before " + data for key, data in CHUNKS.items()}
    service.put(build(new, sharding=sharding))

    assert service.get().content == new[KEY]
    assert service.get(range="bytes=1-3").content == new[KEY][1:4]


@pytest.mark.parametrize("step", STEPS)
def test_shard_that_is_replaced_between_two_reads(service: Service, step: str) -> None:
    """The reads of one answer are of one version."""
    if before := STEPS[step]:
        service.get(before)
    service.store.fail(Fault.REPLACE, path=f"/bucket/em/{SHARD}")
    assert service.get().status_code in {502, 503}

    service.store.heal()
    service.put(build(CHUNKS))
    assert service.get().content == CHUNKS[KEY]


def test_removed_shard(service: Service) -> None:
    """After a removal its chunks are absent, although its indexes were known."""
    service.get()
    service.remove(SHARD)

    assert service.get().status_code == 404


def test_shard_that_is_written_in_the_other_form(service: Service) -> None:
    """A volume that is rewritten by another version of a program is read on."""
    service.get()
    service.remove(SHARD)
    service.put(build({key: data + b"!" for key, data in CHUNKS.items()}, old=True))
    service.remove("s0/1.shard")

    assert service.get().content == CHUNKS[KEY] + b"!"


@pytest.mark.parametrize("known", ["nothing", "7.index", "7"])
def test_replaced_mesh(service: Service, known: str) -> None:
    """Manifest and fragments are of one version."""
    objects = build_meshes({"7": b"fragments"}, sharding=RAW_SHARDING)
    service.put({f"mesh/{key}": data for key, data in objects.items()})
    service.get(f"mesh/{known}")
    objects = build_meshes({"7": b"more fragments than before"}, sharding=RAW_SHARDING)
    service.put({f"mesh/{key}": data for key, data in objects.items()})

    assert service.get("mesh/7").content == b"more fragments than before"


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": (SHARD, lambda _: b""),
    "shorter than its index": (SHARD, lambda shard: shard[:20]),
    "truncated": (SHARD, lambda shard: shard[:-1]),
    "index of the shard": (SHARD, lambda shard: shard[:16] + b"\xff" * 8 + shard[24:]),
    "index of the minishard": (SHARD, lambda shard: shard[:-8] + b"\xff" * 8),
    "no JSON": ("info", lambda _: b"{"),
    "no document": ("info", lambda _: b""),
    "absurd bits": ("info", lambda info: info.replace(b'"shard_bits": 1', b'"shard_bits": 99')),
    "no hash": ("info", lambda info: info.replace(b"identity", b"md5")),
    "no grid": ("info", lambda info: info.replace(b"chunk_sizes", b"chunk")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(service: Service, name: str) -> None:
    """What contradicts itself is 502 with the object's name, and leaves nothing behind."""
    key, damage = DAMAGE[name]
    whole = build(CHUNKS)[key]
    service.put({key: damage(whole)})
    answer = service.get(OTHER_MINISHARD)
    service.put({key: whole})

    assert (answer.status_code, answer.headers["content-type"]) == (502, "application/problem+json")
    assert f"em/{key}: " in answer.json()["detail"]
    assert service.get(OTHER_MINISHARD).content == CHUNKS[OTHER_MINISHARD]


@pytest.mark.parametrize(
    ("key", "status"),
    [
        ("s0/5-8_5-8_0-1", 404),
        ("s0/-4--1_5-8_0-1", 404),
        ("s0/%2D1-2_5-8_0-1", 200),
        ("s0%2F-1-2_5-8_0-1", 200),
        ("s0/-1-2_5-8_0-01", 404),
        ("s0/\u0661-2_5-8_0-1", 404),
        ("s0/" + "9" * 500 + "-2_5-8_0-1", 404),
        ("s0/0.shard", 200),
        ("s0", 404),
        ("s0//-1-2_5-8_0-1", 400),
        ("s0/../s0/-1-2_5-8_0-1%00", 400),
    ],
)
def test_keys(service: Service, key: str, status: int) -> None:
    """Names off the grid are absent, and what is no key is refused."""
    assert service.get(key).status_code == status
