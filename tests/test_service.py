"""The whole service over a real, and sometimes wicked, object server."""

import asyncio
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import product

import httpx
import pytest
from pydantic import ByteSize, SecretStr

from app.settings import CacheSettings, DatasetSettings, LimitSettings, Settings, StoreSettings
from tests.formats.zarr.building import (
    CRC,
    EMPTY,
    LITTLE,
    array_metadata,
    build,
    checksum,
    chunk_bytes,
    encode_index,
    sharding,
)
from tests.serving import serving
from tests.storage.faulty import Fault, FaultyServer

KEY = "c/0/1"
CHUNKS = {key: chunk_bytes(number) for number, key in enumerate(["c/0/0", KEY, "c/1/1"])}
SHARD = "bucket/em/c/0/0"


@dataclass
class Service:
    """The service, its store, and how often it asked there."""

    client: httpx.Client
    store: FaultyServer

    def get(self, key: str = KEY, **headers: str) -> httpx.Response:
        """Ask for *key* of the dataset."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.get(f"/em/{key}", headers=given)

    def put(self, key: str, data: bytes) -> None:
        """Store an object of the dataset."""
        self.store.put("bucket", f"em/{key}", data)

    def put_all(self, objects: dict[str, bytes]) -> None:
        """Store objects of the dataset."""
        for key, data in objects.items():
            self.put(key, data)

    def reads(self, *, of: str = "") -> int:
        """Count what was asked of the store below *of*."""
        return sum(seen.path.startswith(f"/bucket/em/{of}") for seen in self.store.seen)


def _settings(store: FaultyServer, *, scheme: str, chunk_bytes: int = 0) -> Settings:
    url = f"{store.url}/bucket/em" if scheme == "http" else "s3://bucket/em"
    lab = StoreSettings(
        endpoint_url=store.url,
        region="us-east-1",
        access_key_id="key",
        secret_access_key=SecretStr("secret"),
    )
    return Settings(
        cache=CacheSettings(chunk_bytes=ByteSize(chunk_bytes)),
        limits=LimitSettings(timeout_s=2, deadline_s=5),
        stores={"lab": lab},
        datasets={"em": DatasetSettings(url=url, store="lab" if scheme == "s3" else None)},
    )


@pytest.fixture(params=["s3", "http"])
def service(request: pytest.FixtureRequest, faulty: FaultyServer) -> Generator[Service]:
    """Serve one array from the object server, without a chunk cache."""
    with (
        serving(_settings(faulty, scheme=request.param)) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        found = Service(client, faulty)
        found.put_all(build(CHUNKS))
        yield found


def test_chunk(service: Service) -> None:
    """A plain GET brings the bytes of an inner chunk."""
    answer = service.get()

    assert (answer.status_code, answer.content) == (200, CHUNKS[KEY])


def test_cold_chunk_takes_two_reads_after_the_metadata(service: Service) -> None:
    """One read of the index, one of the chunk."""
    service.get("zarr.json")
    service.get()

    assert service.reads(of="c/") == 2


def test_warm_chunk_takes_one_read(service: Service) -> None:
    """With the index at hand, a chunk is one range read of its shard."""
    service.get()
    before = service.reads()
    service.get("c/0/0")

    assert service.reads() - before == 1


def test_range_of_a_warm_chunk_takes_one_read(service: Service) -> None:
    """A part of a chunk is a part of the shard."""
    service.get()
    before = service.reads()
    answer = service.get(range="bytes=1-2")

    assert (answer.status_code, answer.content) == (206, CHUNKS[KEY][1:3])
    assert service.reads() - before == 1


def test_head_and_304_of_a_warm_chunk_take_no_read(service: Service) -> None:
    """Size and version are known from the index."""
    etag = service.get().headers["etag"]
    before = service.reads()
    head = service.client.head(f"/em/{KEY}")
    unchanged = service.get(if_none_match=etag)

    assert (head.headers["etag"], head.headers["content-length"]) == (etag, str(len(CHUNKS[KEY])))
    assert unchanged.status_code == 304
    assert service.reads() == before


def test_absent_chunk_of_a_known_shard_takes_no_read(service: Service) -> None:
    """The index says so."""
    service.get()
    before = service.reads()

    assert service.get("c/1/0").status_code == 404
    assert service.reads() == before


def test_absent_shard_is_asked_for_once(service: Service) -> None:
    """Absence is remembered."""
    service.get("c/2/0")
    before = service.reads()

    assert service.get("c/2/1").status_code == 404
    assert service.reads() == before


async def test_a_hundred_callers_of_a_cold_chunk_share_two_reads(faulty: FaultyServer) -> None:
    """The index is read once for all, and so is the chunk."""
    for key, data in build(CHUNKS).items():
        faulty.put("bucket", f"em/{key}", data)
    limits = httpx.Limits(max_connections=100)
    with serving(_settings(faulty, scheme="s3", chunk_bytes=2**20)) as url:
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=20) as client:
            await client.get("/em/zarr.json")
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.get(f"/em/{KEY}")) for _ in range(100)]

    assert {task.result().content for task in tasks} == {CHUNKS[KEY]}
    assert sum("/c/" in seen.path for seen in faulty.seen) == 2


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "checksum": lambda shard: shard[:-1] + bytes([shard[-1] ^ 1]),
    "truncated": lambda shard: shard[:-3],
    "shorter than an index": lambda shard: shard[:20],
    "empty": lambda _: b"",
    "past the end": lambda shard: shard[:-68] + encode_index([(0, 5), (9, 10**6), EMPTY, EMPTY]),
    "on the index": lambda shard: shard[:-68] + encode_index([(0, 5), (24, 6), EMPTY, EMPTY]),
    "past 2^64": lambda shard: shard[:-68] + encode_index([(0, 5), (2**64 - 3, 6), EMPTY, EMPTY]),
    "half empty, offset": lambda shard: (
        shard[:-68] + encode_index([(0, 5), (2**64 - 1, 6), EMPTY, EMPTY])
    ),
    "half empty, nbytes": lambda shard: (
        shard[:-68] + encode_index([(0, 5), (8, 2**64 - 1), EMPTY, EMPTY])
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_shard(service: Service, damage: str) -> None:
    """A shard that contradicts itself is 502 with the object's name, and leaves nothing behind."""
    whole = build(CHUNKS)["c/0/0"]
    service.put("c/0/0", DAMAGE[damage](whole))
    answer = service.get()
    service.put("c/0/0", whole)

    assert (answer.status_code, answer.headers["content-type"]) == (502, "application/problem+json")
    assert "em/c/0/0: " in answer.json()["detail"]
    assert service.get().content == CHUNKS[KEY]


def test_damage_of_one_chunk_is_not_that_of_others(service: Service) -> None:
    """An entry that cannot be right makes its own chunk unreadable only."""
    service.put("c/0/0", DAMAGE["past the end"](build(CHUNKS)["c/0/0"]))

    assert service.get("c/0/0").content == CHUNKS["c/0/0"]
    assert service.get(KEY).status_code == 502


METADATA = {
    "no JSON": b"{",
    "not UTF-8": b'{"zarr_format": 3, "node_type": "\xff"}',
    "empty": b"",
    "a list": b"[]",
    "another version": b'{"zarr_format": 4, "node_type": "array"}',
    "no node type": b'{"zarr_format": 3}',
    "too deep": b"[" * 100_000,
    "10 MB": b'{"zarr_format": 3, "node_type": "group", "a": "' + b"x" * 10_000_000 + b'"}',
    "inner chunks do not divide": json.dumps(
        array_metadata([8], [4], [sharding([3])]),
    ).encode(),
    "inner chunks of zero": json.dumps(array_metadata([8], [4], [sharding([0])])).encode(),
    "other dimensions": json.dumps(array_metadata([8], [4], [sharding([2, 2])])).encode(),
    "no index codecs": json.dumps(
        array_metadata([8], [4], [sharding([2], index_codecs=[])]),
    ).encode(),
    "no endian": json.dumps(
        array_metadata([8], [4], [sharding([2], index_codecs=[{"name": "bytes"}])]),
    ).encode(),
    "index in the middle": json.dumps(
        array_metadata([8], [4], [sharding([2], index_location="middle")]),
    ).encode(),
    "transpose of nothing": json.dumps(
        array_metadata(
            [8], [4], [{"name": "transpose", "configuration": {"order": [1]}}, sharding([2])]
        ),
    ).encode(),
}


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("key", ["zarr.json", "c/0"])
def test_damaged_metadata(service: Service, name: str, key: str) -> None:
    """Metadata that cannot be understood is 502 with the object's name, for chunks as well."""
    service.put("zarr.json", METADATA[name])
    answer = service.get(key)

    assert answer.status_code == 502
    assert "em/zarr.json: " in answer.json()["detail"]


SERVED_AS_IT_IS = {
    "compressor after sharding": [sharding([2]), {"name": "gzip", "configuration": {"level": 1}}],
    "unknown codec after sharding": [sharding([2]), {"name": "from.the.future"}],
    "unknown codec before sharding": [{"name": "from.the.future"}, sharding([2])],
    "compressed index": [sharding([2], index_codecs=[LITTLE, {"name": "gzip"}])],
    "unknown index codec": [sharding([2], index_codecs=[LITTLE, {"name": "from.the.future"}])],
    "not sharded": [LITTLE, CRC],
}


@pytest.mark.parametrize("name", SERVED_AS_IT_IS)
def test_array_that_cannot_be_unsharded(service: Service, name: str) -> None:
    """Its metadata and its shards are served as they are stored."""
    stored = json.dumps(array_metadata([8], [4], SERVED_AS_IT_IS[name])).encode()
    service.put_all({"zarr.json": stored, "c/1": b"a shard"})

    assert service.get("zarr.json").content == stored
    assert service.get("c/1").content == b"a shard"
    assert service.get("c/2").status_code == 404


@pytest.mark.parametrize(
    ("key", "status"),
    [
        ("c/2/2", 404),
        ("c/3/0", 404),
        ("c/99999999999999999999/0", 404),
        ("c/00/1", 404),
        ("c/%D9%A3/0", 404),
        ("c/+0/1", 404),
        ("c/-0/1", 404),
        ("c/0", 404),
        ("c/0%2F1", 200),
        ("%2e%2e/em/zarr.json", 400),
        ("..%2f..%2fetc%2fpasswd", 400),
        ("%2E%2E%2Fetc", 400),
        ("c/%00/1", 400),
        ("c//0", 400),
        ("%ff", 400),
        ("x" * 60_000, 400),
    ],
)
def test_keys(service: Service, key: str, status: int) -> None:
    """What is no key is refused, what is not canonical is absent, and neither asks the store."""
    service.get()
    before = service.reads(of="c/")
    answer = service.client.get(f"/em/{key}")

    assert answer.status_code == status
    assert service.reads(of="..") == 0
    assert service.reads(of="c/") - before <= 1


def test_unknown_dataset(service: Service) -> None:
    """A dataset nobody configured is absent."""
    assert service.client.get("/nothing/c/0").status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "TRACE"])
def test_method(service: Service, method: str) -> None:
    """What cannot be done is said with what can."""
    answer = service.client.request(method, f"/em/{KEY}")

    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize("header", ["bytes=5-2", "bytes=x-", "bytes"])
def test_malformed_range(service: Service, header: str) -> None:
    """A range that is none is a fault of the client."""
    assert service.get(range=header).status_code == 400


def test_range_past_the_end(service: Service) -> None:
    """The size of the chunk is told."""
    answer = service.get(range="bytes=1000-")

    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(CHUNKS[KEY])}"


LASTING = {
    Fault.DENY: 403,
    Fault.NO_BUCKET: 503,
    Fault.SLOW_DOWN: 503,
    Fault.TOO_MANY: 503,
    Fault.ERROR: 503,
    Fault.STALL: 504,
    Fault.STALL_BODY: 504,
    Fault.RESET: 503,
    Fault.RESET_BODY: 502,
    Fault.CUT: 502,
    Fault.SHORT_LENGTH: 502,
    Fault.BAD_RANGE: 502,
    Fault.GARBAGE: 503,
}


@pytest.mark.parametrize(
    ("service", "step"),
    [
        *product(("s3",), ("metadata", "index", "chunk")),
        *(pytest.param("http", step, marks=pytest.mark.soak) for step in ("metadata", "index")),
        ("http", "chunk"),
    ],
    indirect=["service"],
)
@pytest.mark.parametrize("fault", LASTING)
def test_fault_of_the_store(service: Service, fault: Fault, step: str) -> None:
    """Whatever fails, at whichever step: its status, no byte, and nothing left behind."""
    if step != "metadata":
        service.get("zarr.json")
    if step == "chunk":
        service.get("c/0/0")
    service.store.fail(fault)
    answer = service.get()
    service.store.heal()

    allowed = {LASTING[fault], 503, 504} if LASTING[fault] >= 500 else {LASTING[fault]}
    if fault is Fault.NO_BUCKET:
        allowed = {503, 404} if str(service.client.base_url) and _is_plain(service) else {503}
    assert answer.status_code in allowed
    assert CHUNKS[KEY] not in answer.content
    assert ("retry-after" in answer.headers) == (answer.status_code in {503, 504})
    if answer.status_code != 404:
        assert service.get().content == CHUNKS[KEY]


def _is_plain(service: Service) -> bool:
    """Tell whether the store is plain HTTP, where 404 is 404 whatever its body says."""
    return not any("X-Amz" in seen.query for seen in service.store.seen)


@pytest.mark.parametrize(
    "fault", [Fault.SLOW_DOWN, Fault.ERROR, Fault.RESET, Fault.RESET_BODY, Fault.CUT]
)
def test_passing_fault_is_not_noticed(service: Service, fault: Fault) -> None:
    """What goes away when asked again is no failure."""
    service.get("zarr.json")
    service.store.fail(fault, nth=[0])

    assert service.get().content == CHUNKS[KEY]


@pytest.mark.parametrize("fault", [Fault.IGNORE_RANGE, Fault.RANGE_AS_200, Fault.IGNORE_CONDITIONS])
def test_store_with_manners_of_its_own(service: Service, fault: Fault) -> None:
    """A store that ignores ranges or conditions still gives the right bytes."""
    service.store.fail(fault)

    assert service.get().content == CHUNKS[KEY]


@pytest.mark.parametrize("known", ["nothing", "metadata", "index"])
def test_replaced_shard(service: Service, known: str) -> None:
    """After an overwrite a reader gets the new chunk, even from an index it had."""
    if known != "nothing":
        service.get("zarr.json")
    if known == "index":
        service.get()
    new = {key: b"longer than before " + data for key, data in CHUNKS.items()}
    service.put_all(build(new))

    assert service.get().content == new[KEY]


def test_removed_shard(service: Service) -> None:
    """After a removal the chunk is absent, although its index was known."""
    service.get()
    del service.store.objects[f"/{SHARD}"]

    assert service.get().status_code == 404


def test_shard_that_never_holds_still(service: Service) -> None:
    """A shard that is replaced before every read is an error, not a loop."""
    service.get("zarr.json")
    service.store.fail(Fault.REPLACE, path=f"/{SHARD}")
    answer = service.get()

    assert answer.status_code in {502, 503}


def test_checksum_is_that_of_the_specification() -> None:
    """The tests' own checksum is CRC-32C: of "123456789" it is e3069283."""
    assert checksum(b"123456789")[::-1].hex() == "e3069283"
