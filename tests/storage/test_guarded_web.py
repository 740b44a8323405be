"""What a virtual reference may read from a web server."""

import socket
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing

import pytest

from app.errors import ConfigurationError, StorageDeniedError
from app.model import GUARDED, ByteRange, ObjectRef
from app.settings import LimitSettings, StoreSettings
from app.storage.contract import Found
from app.storage.http import HttpStore
from app.storage.http1.client import Client
from app.storage.http1.errors import ForbiddenError
from app.storage.http1.target import Origin, Target
from app.storage.stores import Stores
from app.storage.web_guard import WebGuard
from tests.storage.faulty import Fault, FaultyServer


@pytest.fixture
async def stores() -> AsyncGenerator[Stores]:
    """Open the stores."""
    async with Stores(LimitSettings(timeout_s=2, deadline_s=5)) as opened:
        yield opened


@pytest.fixture
def other() -> Generator[FaultyServer]:
    """Run a second server, with a secret."""
    with FaultyServer().running() as server:
        server.put("data", "secret", b"secret")
        yield server


async def denied(stores: Stores, ref: ObjectRef) -> str:
    """Tell why no read of *ref* is allowed."""
    with pytest.raises(StorageDeniedError):
        await stores.stat(ref)
    with pytest.raises(StorageDeniedError):
        async with stores.stream(ref, ByteRange(0, 1), if_match=None):
            pytest.fail("entered")
    with pytest.raises(StorageDeniedError) as raised:
        await stores.get(ref)
    return raised.value.reason


async def test_an_object_below_is_read(faulty: FaultyServer, stores: Stores) -> None:
    """A server that the operator names by its address may be on this machine."""
    faulty.put("a b", "c/key", b"data")
    root = stores.open_prefix(f"{faulty.url}/a%20b/")

    found = await stores.get(root.join("c/key"), ByteRange(1, 3))

    assert root.bucket.startswith(GUARDED)
    assert isinstance(found, Found)
    assert found.data == b"at"
    assert await stores.get(root.join("absent")) is None
    await stores.reach(root)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST"])
async def test_localhost_may_be_named(faulty: FaultyServer, stores: Stores, host: str) -> None:
    """Who names this machine means it."""
    faulty.put("data", "key", b"data")
    root = stores.open_prefix(faulty.url.replace("127.0.0.1", host) + "/data")

    assert isinstance(await stores.get(root.join("key")), Found)


async def test_a_dataset_on_the_same_server_is_another_bucket(
    faulty: FaultyServer, stores: Stores, other: FaultyServer
) -> None:
    """A dataset may allow redirects, which references do not follow."""
    faulty.redirects["/data/key"] = f"{other.url}/data/secret"
    served = stores.open_root(f"{faulty.url}/data", redirects=[other.url])
    prefix = stores.open_prefix(f"{faulty.url}/data")

    assert isinstance(await stores.get(served.join("key")), Found)
    assert "another server" in await denied(stores, prefix.join("key"))


@pytest.mark.parametrize(
    "name",
    [
        socket.gethostname(),
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "localhost.",
        "0",
    ],
)
async def test_a_name_that_leads_here_is_denied(
    faulty: FaultyServer, stores: Stores, name: str
) -> None:
    """Only an address in its usual form names this machine: names may mean it by accident."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        pytest.skip(f"{name} means nothing here")
    faulty.put("data", "key", b"data")
    root = stores.open_prefix(faulty.url.replace("127.0.0.1", name) + "/data")

    reason = await denied(stores, root.join("key"))

    assert reason == f"{name.lower()} has no public address"
    assert not faulty.seen


def guarded(url: str, *answers: Sequence[str]) -> tuple[HttpStore, list[str]]:
    """Open a store of *url* whose name service gives *answers*, and note who is asked for."""
    asked: list[str] = []

    async def look_up(host: str, _: int) -> Sequence[str]:
        asked.append(host)
        return answers[len(asked) - 1]

    return HttpStore(timeout_s=2, guard=WebGuard(Target(url), look_up=look_up)), asked


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.0.0.1", "::1"],
        ["169.254.169.254"],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["fe80::1%eth0"],
        [],
    ],
)
async def test_what_a_name_means_is_not_told(addresses: list[str]) -> None:
    """The message repeats the name, and no address of the inside."""
    store, asked = guarded("http://rebound.example/data", addresses)

    async with aclosing(store):
        with pytest.raises(StorageDeniedError) as raised:
            await store.get(ObjectRef("guarded+http://rebound.example/data", "key"))

    assert raised.value.reason == "rebound.example has no public address"
    assert asked == ["rebound.example"]


async def test_only_what_was_looked_at_is_connected_to(faulty: FaultyServer) -> None:
    """The client connects to the addresses it is given, and asks no name service itself."""
    faulty.put("data", "key", b"data")

    async def resolve(origin: Origin) -> Sequence[str]:
        assert origin.host == "no-such-host.invalid"
        return ["127.0.0.2", "127.0.0.1"]

    port = faulty.url.rpartition(":")[2]
    async with aclosing(Client(connections=1, silence_s=2, resolve=resolve)) as client:
        target = Target(f"http://no-such-host.invalid:{port}/data/key")
        response = await client.send("GET", target)

        assert await response.read() == b"data"
    assert faulty.seen[0].headers["Host"] == f"no-such-host.invalid:{port}"


async def test_a_name_is_looked_up_for_each_connection(faulty: FaultyServer) -> None:
    """A name that means another address the next time is refused then."""
    answers = iter([["8.8.8.8", "127.0.0.1"], ["127.0.0.1"]])

    async def look_up(_: str, __: int) -> Sequence[str]:
        return next(answers)

    guard = WebGuard(Target("http://rebound.example/"), look_up=look_up)

    assert await guard.resolve(Origin("http", "rebound.example", 80)) == ["8.8.8.8"]
    with pytest.raises(ForbiddenError):
        await guard.resolve(Origin("http", "rebound.example", 80))


@pytest.mark.parametrize("path", ["", "/data"])
@pytest.mark.parametrize(
    "url",
    [
        lambda other: f"{other.url}/data/secret",
        lambda other: f"{other.url.replace('127.0.0.1', 'localhost')}/data/secret",
        lambda other: f"//{other.url.partition('//')[2]}/data/secret",
        lambda other: "http://169.254.169.254/latest/meta-data/",
        lambda other: "http://[::1]/data/secret",
        lambda other: "http://2130706433/data/secret",
        lambda other: "https://127.0.0.1/data/secret",
    ],
)
async def test_a_redirect_to_another_server_is_denied(
    faulty: FaultyServer,
    stores: Stores,
    other: FaultyServer,
    path: str,
    url: Callable[[FaultyServer], str],
) -> None:
    """Another scheme, host or port is another server."""
    faulty.redirects["/data/key"] = url(other)
    root = stores.open_prefix(f"{faulty.url}{path}")

    reason = await denied(stores, root.join("key" if path else "data/key"))

    assert reason.startswith("redirected to another server, http")
    assert "secret" not in reason
    assert not other.seen


@pytest.mark.parametrize(
    "location",
    [
        "/data-evil/secret",
        "/secret",
        "../secret",
        "/data/../secret",
        "/data/%2e%2e/secret",
        "/data/%2E./secret",
        "/data%2fsecret",
        "/data/..%2fsecret",
        "/data/..%5csecret",
        "/data/x/..;/../secret",
        "//data/secret",
        "/DATA/secret",
        "/",
    ],
)
async def test_a_redirect_out_of_the_prefix_is_denied(
    faulty: FaultyServer, stores: Stores, location: str
) -> None:
    """The same server has other paths, which were not allowed, however they are written."""
    faulty.redirects["/data/key"] = (
        f"{faulty.url}{location}" if location.startswith("/") else location
    )

    await denied(stores, stores.open_prefix(f"{faulty.url}/data").join("key"))

    assert {seen.path for seen in faulty.seen} == {"/data/key"}


@pytest.mark.parametrize("location", ["/data/moved", "moved", "./moved", "x/../moved"])
async def test_a_redirect_below_the_prefix_is_followed(
    faulty: FaultyServer, stores: Stores, location: str
) -> None:
    """An object may have moved within what is allowed."""
    faulty.put("data", "moved", b"data")
    faulty.redirects["/data/key"] = location

    found = await stores.get(stores.open_prefix(f"{faulty.url}/data").join("key"))

    assert isinstance(found, Found)


async def test_every_redirect_is_looked_at(faulty: FaultyServer, stores: Stores) -> None:
    """A step that is allowed does not allow the next."""
    faulty.put("evil", "secret", b"secret")
    faulty.redirects["/data/key"] = "/data/moved"
    faulty.redirects["/data/moved"] = "/evil/secret"

    reason = await denied(stores, stores.open_prefix(f"{faulty.url}/data").join("key"))

    assert reason == "redirected out of the allowed prefix"


@pytest.mark.parametrize("key", ["../secret", "a/../../secret", ".", "a/./b", "..\\secret"])
async def test_a_key_that_climbs_is_never_sent(
    faulty: FaultyServer, stores: Stores, key: str
) -> None:
    """Servers resolve dots."""
    await denied(stores, stores.open_prefix(f"{faulty.url}/data").join(key))

    assert not faulty.seen


async def test_patience_is_the_same(faulty: FaultyServer, stores: Stores) -> None:
    """What may pass is tried again through a guard too."""
    faulty.put("data", "key", b"data")
    faulty.fail(Fault.SLOW_DOWN, nth=[0])

    found = await stores.get(stores.open_prefix(f"{faulty.url}/data").join("key"))

    assert isinstance(found, Found)


async def test_a_bucket_is_guarded_by_its_keys(faulty: FaultyServer, stores: Stores) -> None:
    """S3 takes keys as they are; those that climb are refused all the same."""
    faulty.put("bucket", "data/key", b"data")
    settings = StoreSettings(endpoint_url=faulty.url, anonymous=True)
    root = stores.open_prefix("s3://bucket/data/", settings, "lab")

    assert root == ObjectRef("guarded+s3+lab://bucket", "data")
    assert isinstance(await stores.get(root.join("key")), Found)
    await denied(stores, root.join("../secret"))


@pytest.mark.parametrize(
    "url",
    [
        "https://host/a/../b",
        "s3://bucket/../b",
        "memory://bucket/a",
        "https://a..b/c",
        "https://me@host/a",
        "ftp://host/a",
        "file://relative/a",
    ],
)
def test_a_prefix_is_a_plain_url(url: str) -> None:
    """What could mean more than it seems to is no prefix."""
    with pytest.raises(ConfigurationError):
        Stores(LimitSettings()).open_prefix(url)
