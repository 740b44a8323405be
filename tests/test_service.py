"""The whole service over a real object server with faults."""

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import Literal, NamedTuple

import httpx
import pytest

from shardgate.settings import CacheSettings, DatasetSettings, LimitSettings, Settings
from tests.support.clocks import AdvancedClock, advanced_clock
from tests.support.formats.neuroglancer_precomputed import case as precomputed
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.support.formats.zarr.building import EMPTY, build, chunk_bytes, encode_index
from tests.support.records import replaced
from tests.support.serving import client_of
from tests.support.storage.faulty import LONGEST_S, Fault, FaultyServer, timeout_of


class Container(NamedTuple):
    """A container whose chunk *key* is in the object *shard*."""

    key: str
    shard: str
    build: Callable[[Mapping[str, bytes]], dict[str, bytes]]
    chunks: dict[str, bytes]
    steps: dict[str, str | None]
    """Reads of a cold chunk, and the key of the request after which each is the next one."""
    absent: str
    """Key without a chunk that the index of *key* covers, after the last of *steps*."""


KEY = "c/0/1"
CHUNKS = {key: chunk_bytes(number) for number, key in enumerate(["c/0/0", KEY, "c/1/1"])}
ZARR = Container(
    KEY, "c/0/0", build, CHUNKS, {"metadata": None, "index": "zarr.json", "chunk": "c/0/0"}, "c/1/0"
)
ID, NEIGHBOUR, OTHER_MINISHARD, ABSENT, _ = precomputed.IDS
PRECOMPUTED = Container(
    ID,
    "s0/0.shard",
    precomputed.build,
    {key: chunk_bytes(n) for key, n in precomputed.IDS.items() if key != ABSENT},
    {"info": None, "shard index": "info", "minishard index": OTHER_MINISHARD, "chunk": NEIGHBOUR},
    ABSENT,
)
OLD = replaced(PRECOMPUTED, build=partial(precomputed.build, old=True))
GZIP = replaced(PRECOMPUTED, build=partial(precomputed.build, sharding=precomputed.GZIP_DATA))
RAW = replaced(PRECOMPUTED, build=partial(precomputed.build, sharding=RAW_SHARDING))
SERVICES = {
    "s3": ("s3", ZARR),
    "http": ("http", ZARR),
    "precomputed": ("s3", PRECOMPUTED),
    "old": ("s3", OLD),
    "raw": ("s3", RAW),
    "gzip": ("s3", GZIP),
}
USUAL = ("s3", "http", "precomputed")


@dataclass
class Service:
    """The service over a store that holds one container."""

    client: httpx.Client
    store: FaultyServer
    container: Container
    clock: AdvancedClock

    def get(self, key: str | None = None, **headers: str) -> httpx.Response:
        """Request *key* of the dataset, by default that of the container."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.get(f"/em/{key or self.container.key}", headers=sent)

    def get_in_the_end(self, key: str | None = None) -> httpx.Response:
        """Request *key* until it is there: the service may have little patience."""
        deadline = time.monotonic() + LONGEST_S
        while not (answer := self.get(key)).is_success:
            assert time.monotonic() < deadline, answer.text
        return answer

    def reach(self, step: str) -> None:
        """Send the request after which *step* is the next read of the chunk."""
        if (key := self.container.steps[step]) is None:
            return
        self.get_in_the_end(key)
        if self.container is ZARR:
            for _ in range(1000):  # markers of other formats are asked for along
                if any(seen.path.endswith("/ref.json") for seen in self.store.seen):
                    break
                time.sleep(0.01)

    def heal(self) -> None:
        """End the faults of the store, and the second for which damage is remembered."""
        self.store.heal()
        self.clock.forget_damage()

    def put(self, objects: Mapping[str, bytes]) -> None:
        """Store objects of the dataset."""
        for key, data in objects.items():
            self.store.put("bucket", f"em/{key}", data)

    def put_chunks(self, chunks: Mapping[str, bytes]) -> None:
        """Store a container of *chunks*."""
        self.put(self.container.build(chunks))

    def remove(self, key: str) -> None:
        """Remove an object of the dataset."""
        del self.store.objects[f"/bucket/em/{key}"]

    @property
    def chunk(self) -> bytes:
        """The chunk of the container's key."""
        return self.container.chunks[self.container.key]

    @property
    def is_s3(self) -> bool:
        """True if the store is read as S3; for a plain server any 404 is absence."""
        return any("X-Amz" in seen.query for seen in self.store.seen)

    def reads(self) -> int:
        """Count the requests to the store, but for markers of other formats."""
        others = ("/em/info", "/em/repo", "/em/refs/branch.main/ref.json")
        paths = [seen.path for seen in self.store.seen]
        return sum(self.container is not ZARR or not path.endswith(others) for path in paths)


@pytest.fixture(params=USUAL)
def service(request: pytest.FixtureRequest, faulty: FaultyServer) -> Generator[Service]:
    """Serve one container from the object server, without a chunk cache."""
    scheme, container = SERVICES[request.param]
    form: Literal["auto", "precomputed"] = "auto" if container is ZARR else "precomputed"
    dataset = DatasetSettings(url="s3://bucket/em", store="lab", format=form)
    if scheme == "http":
        dataset = DatasetSettings(url=f"{faulty.url}/bucket/em", format=form)
    timeout_s = timeout_of(request)
    settings = Settings(
        cache=CacheSettings(chunk_bytes=0),
        limits=LimitSettings(timeout_s=timeout_s, deadline_s=timeout_s),
        stores={"lab": faulty.settings()},
        datasets={"em": dataset},
    )
    with advanced_clock() as clock, client_of(settings) as client:
        found = Service(client, faulty, container, clock)
        found.put_chunks(container.chunks)
        yield found


def over(*names: str) -> pytest.MarkDecorator:
    """Run a test over the services *names*."""
    return pytest.mark.parametrize("service", names, indirect=True)


def test_head_304_and_404_of_a_known_index_take_no_read(service: Service) -> None:
    """HEAD, 304 and 404 of chunks with a known index take no read of the store."""
    etag = service.get().headers["etag"]
    *_, minishard, _ = service.container.steps
    service.reach(minishard)
    before = service.reads()
    head = service.client.head(f"/em/{service.container.key}")

    assert (head.headers["etag"], head.headers["content-length"]) == (etag, str(len(service.chunk)))
    assert service.get(if_none_match=etag).status_code == 304
    assert service.get(service.container.absent).status_code == 404
    assert service.reads() == before


type Damage = Callable[[bytes], bytes]


def _past_the_end(shard: bytes) -> bytes:
    return shard[:-68] + encode_index([(0, 5), (9, 10**6), EMPTY, EMPTY])


DAMAGE: list[tuple[str, str, Damage]] = [
    ("s3", "c/0/0", lambda shard: shard[:-1] + bytes([shard[-1] ^ 1])),
    ("s3", "c/0/0", _past_the_end),
    ("http", "c/0/0", lambda _: b""),
    ("precomputed", "s0/0.shard", lambda shard: shard[:16] + b"\xff" * 8 + shard[24:]),
    ("precomputed", "info", lambda _: b"{"),
]


@pytest.mark.parametrize(("service", "key", "damage"), DAMAGE, indirect=["service"])
def test_damage_is_424_with_name_of_object(service: Service, key: str, damage: Damage) -> None:
    """A damaged object is 424 with its name, and is read once it is repaired."""
    chunk = OTHER_MINISHARD if service.container is PRECOMPUTED else KEY
    whole = service.container.build(service.container.chunks)[key]
    service.put({key: damage(whole)})
    answer = service.get(chunk)
    service.put({key: whole})
    service.heal()

    assert (answer.status_code, answer.headers["content-type"]) == (424, "application/problem+json")
    assert f"em/{key}: " in answer.json()["detail"]
    assert service.get(chunk).content == service.container.chunks[chunk]


@over("s3")
def test_invalid_index_entry_damages_its_chunk_only(service: Service) -> None:
    """An invalid entry of a shard index makes its own chunk 424, and no other."""
    service.put({"c/0/0": _past_the_end(build(CHUNKS)["c/0/0"])})

    assert service.get("c/0/0").content == CHUNKS["c/0/0"]
    assert service.get(KEY).status_code == 424


LASTING = {
    Fault.DENY: {403},
    Fault.NO_BUCKET: {424},
    Fault.SLOW_DOWN: {503},
    Fault.TOO_MANY: {503},
    Fault.ERROR: {503},
    Fault.RESET: {503, 504},
    Fault.RESET_BODY: {424, 503, 504},
    Fault.CUT: {424, 503, 504},
    Fault.SHORT_LENGTH: {424, 503, 504},
    Fault.BAD_RANGE: {424, 503, 504},
    Fault.GARBAGE: {503, 504},
}


def each_step(*names: str) -> list[tuple[str, str]]:
    """Return the steps of the services *names*."""
    return [(name, step) for name in names for step in SERVICES[name][1].steps]


at_most_steps = pytest.mark.parametrize(
    ("service", "step"),
    [
        *each_step("s3", "precomputed"),
        *(pytest.param("http", step, marks=pytest.mark.soak) for step in ("metadata", "index")),
        ("http", "chunk"),
    ],
    indirect=["service"],
)


def with_faults(*faults: Fault) -> pytest.MarkDecorator:
    """Run a test at each step with one of *faults* by turns, and with all others in the soak."""
    steps = each_step(*USUAL)
    by_turns = set(zip(steps, cycle(faults)))
    return pytest.mark.parametrize(
        ("service", "step", "fault"),
        [
            pytest.param(
                *step, fault, marks=() if (step, fault) in by_turns else (pytest.mark.soak,)
            )
            for step, fault in product(steps, faults)
        ],
        indirect=["service"],
    )


@at_most_steps
def test_a_lasting_fault_of_the_store_has_its_status(service: Service, step: str) -> None:
    """A lasting fault of the store has its status, and Retry-After for 503 and 504.

    The chunk is read once the store is repaired.
    """
    service.reach(step)
    for fault, expected in LASTING.items():
        if fault is Fault.NO_BUCKET and not service.is_s3:
            continue  # absence, to a plain server
        service.store.fail(fault)
        answer = service.get()
        service.heal()

        assert answer.status_code in expected, fault
        assert service.chunk not in answer.content
        assert ("retry-after" in answer.headers) == (answer.status_code in {503, 504}), fault
    assert service.get().content == service.chunk


@with_faults(Fault.STALL, Fault.STALL_BODY)
def test_a_silent_store_is_not_waited_for(service: Service, step: str, fault: Fault) -> None:
    """A read without an answer ends in time, and the next one is made once the store is back."""
    service.reach(step)
    service.store.fail(fault)
    answer = service.get()
    service.heal()

    assert answer.status_code in {503, 504}
    assert "retry-after" in answer.headers
    assert service.get_in_the_end().content == service.chunk


@with_faults(Fault.SLOW_DOWN, Fault.RESET, Fault.CUT)
def test_transient_fault_is_retried(service: Service, fault: Fault, step: str) -> None:
    """A read that fails once is repeated, and the response is 200."""
    service.reach(step)
    service.store.fail(fault, nth=[0])

    assert service.get().content == service.chunk


@pytest.mark.parametrize(
    ("service", "step"),
    [*each_step("s3", "raw", "gzip"), ("http", "chunk")],
    indirect=["service"],
)
def test_replaced_shard_is_read_again(service: Service, step: str) -> None:
    """A replaced shard is read in its new version, whatever was cached."""
    service.reach(step)
    new = {key: b"longer than before " + data for key, data in service.container.chunks.items()}
    service.put_chunks(new)

    assert service.get().content == new[service.container.key]
    assert service.get(range="bytes=1-3").content == new[service.container.key][1:4]


@at_most_steps
def test_shard_replaced_before_every_read_is_an_error(service: Service, step: str) -> None:
    """A shard that is replaced before every read is 424 or 503, and is read afterwards."""
    service.reach(step)
    service.store.fail(Fault.REPLACE, path=f"/bucket/em/{service.container.shard}")
    assert service.get().status_code in {424, 503}

    service.heal()
    service.put_chunks(service.container.chunks)
    assert service.get().content == service.chunk


@over("precomputed", "old")
@pytest.mark.parametrize("name", ["shard", "index", "data"])
def test_refused_object_is_not_absent(service: Service, name: str) -> None:
    """A denied ``.shard`` is 403, and a denied ``.index`` or ``.data`` too in the old form."""
    is_old = service.container is OLD
    service.store.fail(Fault.DENY, path=f"/bucket/em/s0/0.{name}")

    assert service.get().status_code == (403 if name == "shard" or is_old else 200)


@over("precomputed")
def test_a_shard_may_be_rewritten_in_the_old_form(service: Service) -> None:
    """A shard that was rewritten in the old form is read."""
    service.get()
    service.remove("s0/0.shard")
    chunks = {key: data + b"!" for key, data in PRECOMPUTED.chunks.items()}
    service.put(OLD.build(chunks))
    service.remove("s0/1.shard")

    assert service.get().content == chunks[ID]
