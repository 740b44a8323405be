"""Plain HTTP servers: redirects, tokens, and reads of virtual references."""

import socket
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from pydantic import SecretStr

from shardgate.datasets import open_allowed
from shardgate.errors import (
    ConfigurationError,
    StorageDeniedError,
    StorageRedirectError,
    StorageUnavailableError,
    StorageUnusableError,
)
from shardgate.formats.kerchunk.layout import resolve_source
from shardgate.formats.references import allow, resolve
from shardgate.model import ByteRange, GuardedBucket, ObjectRef
from shardgate.settings import DatasetSettings, LimitSettings, Settings, StoreSettings
from shardgate.storage.http1_client import HttpClient, Origin, RequestTarget
from shardgate.storage.http_store import HttpStore, is_public, resolve_public
from shardgate.storage.stores import Stores
from tests.support.serving import serving
from tests.support.storage.faulty import LONGEST_S, Fault, FaultyServer
from tests.support.storage.listening import Handler, Listener
from tests.support.storage.reading import denied, found


@pytest.fixture
async def store() -> AsyncGenerator[HttpStore]:
    """Open a store of web servers."""
    opened = HttpStore(timeout_s=LONGEST_S)
    yield opened
    await opened.aclose()


async def test_a_server_cannot_be_listed(store: HttpStore) -> None:
    """Listing a web server raises StorageUnusableError."""
    with pytest.raises(StorageUnusableError, match="cannot be listed"):
        await anext(store.list(ObjectRef("http://127.0.0.1:1", "")))


@pytest.mark.parametrize(
    "fault", [Fault.DENY, Fault.TEAPOT, Fault.NO_BUCKET, Fault.NO_HEAD, Fault.ERROR]
)
async def test_server_that_refuses_its_root_is_reachable(
    faulty: FaultyServer, store: HttpStore, fault: Fault
) -> None:
    """A server that answers below 500 is reachable, and one that answers 500 is not."""
    faulty.fail(fault)

    with pytest.raises(StorageUnavailableError) if fault is Fault.ERROR else nullcontext():
        await store.check_reachable(ObjectRef(faulty.url, ""))


@pytest.fixture
def other() -> Generator[FaultyServer]:
    """Run a second server with the object."""
    with FaultyServer().running() as server:
        server.put("cdn", "moved", b"data")
        yield server


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize(
    "location",
    [
        *("OTHER/cdn/moved", "//127.0.0.1:PORT/cdn/moved", "//localhost:HEREPORT/data/moved"),
        "https://127.0.0.1:HEREPORT/data/moved",
        "http://2130706433/data/moved",
        *("http://[::1]/data/moved", "HERE/data-evil/moved", "HERE/data/../cdn/moved"),
        *("/cdn/moved", "/moved", "../cdn/moved", "/data/../cdn/moved", "/data/%2e%2e/cdn/moved"),
        *("/data/%2E./cdn/moved", "/data%2fmoved", "/data/..%2fmoved", "/data/..%5Ccdn/moved"),
        *("HERE/data/x/..;/../moved", "//data/moved", "/DATA/moved", "/\\cdn/moved"),
        "//169.254.169.254/moved",
        "http://me:hunter2@127.0.0.1:HEREPORT/data/moved",
    ],
)
async def test_a_redirect_out_of_the_root_is_refused(
    faulty: FaultyServer, other: FaultyServer, stores: Stores, location: str, *, is_guarded: bool
) -> None:
    """A redirect out of the root or prefix raises StorageRedirectError, after allowed ones too.

    The error names both URLs without their query, and the setting that would allow it.
    """
    for name, server in (("HERE", faulty), ("", other)):
        location = location.replace(f"{name}PORT", server.url.rpartition(":")[2])
        location = location.replace(name or "OTHER", server.url)
    faulty.redirects["/data/key"] = "/data/near"
    faulty.redirects["/data/near"] = f"{location}?signature=hunter2"
    faulty.put("cdn", "moved", b"data")
    opening = stores.open_prefix if is_guarded else stores.open_root

    with pytest.raises(StorageRedirectError) as raised:
        await stores.get(opening(f"{faulty.url}/data").join("key"))

    said = str(raised.value)
    assert ": redirected " in said
    assert f"{faulty.url}/data/key: " in said
    assert "moved" in said
    if "@" not in location and "https" not in location:
        assert ("virtual_chunk_prefixes" if is_guarded else "redirects") in said
    assert "hunter2" not in said
    assert {seen.path for seen in faulty.seen} == {"/data/key", "/data/near"}
    assert not other.seen


@pytest.mark.parametrize("location", ["/data/moved", "moved", "./moved", "x/../moved"])
async def test_a_redirect_below_the_root_is_followed(
    faulty: FaultyServer, stores: Stores, location: str
) -> None:
    """A redirect within the root or prefix is followed, with the requested range."""
    faulty.put("data", "moved", b"0123")
    faulty.redirects["/data/key"] = location

    for opening in (stores.open_root, stores.open_prefix):
        ref = opening(f"{faulty.url}/data").join("key")
        assert (await found(stores, ref, ByteRange(1, 3))).data == b"12"


async def test_circle_of_redirects_is_refused(faulty: FaultyServer, stores: Stores) -> None:
    """A redirect that leads back to itself raises StorageRedirectError after a few requests."""
    faulty.redirects["/data/key"] = "/data/other"
    faulty.redirects["/data/other"] = "/data/key"

    with pytest.raises(StorageRedirectError, match="more than 5 redirects"):
        await stores.get(stores.open_root(f"{faulty.url}/data").join("key"))
    assert len(faulty.seen) == 6


@pytest.mark.parametrize("allowed", ["", "/cdn", "/cdn/"])
async def test_redirect_to_an_allowed_url_is_followed(
    faulty: FaultyServer, other: FaultyServer, stores: Stores, allowed: str
) -> None:
    """A redirect below a URL in `redirects` of the root is followed, and any other is not."""
    faulty.redirects["/data/key"] = f"{other.url}/cdn/moved?signature=x"
    faulty.redirects["/data/away"] = f"{faulty.url}/cdn/moved"
    root = stores.open_root(f"{faulty.url}/data", redirects=[f"{other.url}{allowed}"])
    above = stores.open_root(faulty.url)

    await found(stores, root.join("key"))
    assert other.seen[0].query == "signature=x"
    for ref in root.join("away"), above.join("data/key"):
        with pytest.raises(StorageRedirectError):
            await stores.get(ref)


async def test_reference_may_redirect_below_another_allowed_prefix(
    faulty: FaultyServer, other: FaultyServer, stores: Stores
) -> None:
    """A redirect between two allowed prefixes of a dataset is followed."""
    faulty.redirects["/data/key"] = f"{other.url}/cdn/moved?signature=x"
    faulty.redirects["/data/away"] = f"{other.url}/private/moved"
    prefixes = (f"{faulty.url}/data", f"{other.url}/cdn", "s3://bucket")
    settings = Settings.model_validate(
        {"datasets": {"lab": {"url": "s3://lab", "virtual_chunk_prefixes": prefixes}}}
    )
    first, *_ = open_allowed(stores, settings.datasets["lab"], settings)

    assert (await found(stores, first.root.join("key"))).data == b"data"
    with pytest.raises(StorageRedirectError, match="virtual_chunk_prefixes"):
        await stores.get(first.root.join("away"))


async def test_allowed_redirect_to_a_private_address_is_refused(
    faulty: FaultyServer, stores: Stores
) -> None:
    """A redirect to an allowed name with a private address is not followed."""
    name = f"http://{socket.gethostname()}:{faulty.url.rpartition(':')[2]}"
    faulty.put("cdn", "moved", b"data")
    faulty.redirects["/data/key"] = f"{name}/cdn/moved"
    root = stores.open_prefix(f"{faulty.url}/data", redirects=[f"{name}/cdn"])

    assert "has no public address" in await denied(stores, root.join("key"))
    assert {seen.path for seen in faulty.seen} == {"/data/key"}


TOKEN = "hunter2"


async def test_token_is_sent_to_its_own_server_only(
    faulty: FaultyServer, other: FaultyServer, stores: Stores
) -> None:
    """A bearer token is sent to the server of its store only, and not to one redirected to."""
    faulty.redirects["/data/key"] = f"{other.url}/cdn/moved"
    faulty.redirects["/data/near"] = "/data/key"
    faulty.put("data", "plain", b"data")
    settings = StoreSettings(bearer_token=SecretStr(TOKEN))
    cdn = [f"{other.url}/cdn"]
    with_token = stores.open_root(f"{faulty.url}/data", settings, "lab", cdn)
    without = stores.open_root(f"{faulty.url}/data", redirects=cdn)

    for root in (with_token, without):
        assert (await found(stores, root.join("near"))).data == b"data"
    await found(stores, without.join("plain"))

    sent = [seen.headers.get("Authorization") for seen in faulty.seen]
    assert sent == [f"Bearer {TOKEN}"] * 2 + [None] * 3
    assert [seen.headers.get("Authorization") for seen in other.seen] == [None] * 2
    assert TOKEN not in repr(settings)


async def test_token_of_a_dataset_is_not_sent_for_references(
    faulty: FaultyServer, other: FaultyServer, stores: Stores
) -> None:
    """A virtual prefix on another server gets no token of the dataset's store."""
    faulty.put("data", "moved", b"data")
    prefixes = [f"{faulty.url}/data", f"{other.url}/cdn"]
    dataset = {"url": f"{faulty.url}/lab", "store": "lab", "virtual_chunk_prefixes": prefixes}
    lab = {"bearer_token": TOKEN}
    settings = Settings.model_validate({"stores": {"lab": lab}, "datasets": {"em": dataset}})
    for allowed in open_allowed(stores, settings.datasets["em"], settings):
        await found(stores, allowed.root.join("moved"))

    assert [seen.headers.get("Authorization") for seen in faulty.seen] == [f"Bearer {TOKEN}"]
    assert [seen.headers.get("Authorization") for seen in other.seen] == [None]


async def test_refused_token_is_read_again(
    faulty: FaultyServer, stores: Stores, tmp_path: Path
) -> None:
    """After a 401 a new token in the file is used at once, also for references."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    faulty.put("data", "key", b"data")
    settings = StoreSettings(bearer_token_file=file)
    for opening in (stores.open_root, stores.open_prefix):
        ref = opening(f"{faulty.url}/data", settings, "lab").join("key")
        await found(stores, ref)
        file.write_text("renewed")
        faulty.fail(Fault.UNAUTHORIZED, nth=[0])
        await found(stores, ref)
        file.unlink()
        await found(stores, ref)
        faulty.fail(Fault.UNAUTHORIZED)
        assert "renewed" not in await denied(stores, ref)
        faulty.heal()
        file.write_text(TOKEN)

    sent = [seen.headers["Authorization"] for seen in faulty.seen[:4]]
    assert sent == [f"Bearer {TOKEN}"] * 2 + ["Bearer renewed"] * 2


@pytest.mark.parametrize(
    ("url", "settings", "said"),
    [
        ("https://a.example", {"bearer_token_file": "/no/where"}, "/no/where: No such file"),
        ("https://a.example", {"bearer_token_file": "/dev/null"}, "holds no bearer token"),
        ("https://a.example", {"bearer_token_file": "/bin/sh"}, "/bin/sh: holds no bearer token"),
        ("https://a.example", {"bearer_token": "hun\r\nter2"}, "holds no bearer token"),
        ("http://a.example", {"bearer_token": TOKEN}, "needs https://"),
        ("http://8.8.8.8/data", {"bearer_token": TOKEN}, "needs https://"),
        ("http://[::ffff:8.8.8.8]/data", {"bearer_token": TOKEN}, "needs https://"),
        ("s3://bucket", {"bearer_token": TOKEN}, "s3:// takes no bearer_token"),
        ("https://a.example", {"requester_pays": True}, "https:// takes no requester_pays"),
        ("az://bucket", {"forbidden_is_absent": True}, "az:// takes no forbidden_is_absent"),
        ("az://bucket", {"region": "here"}, "az://"),
        ("gs://bucket", {"session_token": "token"}, "gs://"),
        ("gs://bucket", {"access_key_id": "id", "secret_access_key": "secret"}, "gs://"),
    ],
)
def test_unsuitable_store_setting_is_refused(
    stores: Stores, url: str, settings: dict[str, object], said: str
) -> None:
    """A setting that the store's scheme does not take raises ConfigurationError.

    So does a token that is invalid or would be sent without TLS.
    """
    for opening in (stores.open_root, stores.open_prefix):
        with pytest.raises(ConfigurationError, match=said) as raised:
            opening(url, StoreSettings.model_validate(settings), "lab")

        assert "ter2" not in str(raised.value)


def test_refused_redirect_is_424(faulty: FaultyServer) -> None:
    """A redirect that is not allowed is 424, with both URLs in the detail."""
    faulty.redirects["/data/key"] = "https://cdn.example/key"
    datasets = {
        "closed": DatasetSettings(url=f"{faulty.url}/data"),
        "opened": DatasetSettings(url=f"{faulty.url}/data/", redirects=("https://a.example",)),
    }
    with serving(Settings(datasets=datasets)) as url:
        for name in datasets:
            answer = httpx.get(f"{url}/{name}/key")

            assert answer.status_code == 424
            assert f"{faulty.url}/data/key" in answer.json()["detail"]
            assert "https://cdn.example/key" in answer.json()["detail"]


PUBLIC = "8.8.8.8 172.32.0.1 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::8.8.8.8"
NOT_PUBLIC = """
127.0.0.1 127.255.255.254 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 0.1.2.3
192.0.0.8 192.0.2.1 192.88.99.1 198.18.0.1 224.0.0.1 239.1.2.3 240.0.0.1 255.255.255.255
:: ::1 fe80::1 fe80::1%eth0 fec0::1 fc00::1 fd12::1 ff02::1 2001:db8::1 100::1
::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::127.0.0.1 ::8.8.8.8
2002:7f00:1:: 2002:a9fe:a9fe::1 2001:0:0:0::1 64:ff9b::127.0.0.1 64:ff9b::169.254.169.254
64:ff9b:1::8.8.8.8 localhost 2130706433 0177.0.0.1 127.1
"""
"""Private, loopback, link-local, unspecified, multicast, reserved, such within IPv6, no address."""


def test_public_addresses_are_recognised() -> None:
    """Public IPv4 and IPv6 addresses are public; private and reserved ones, and names, are not."""
    assert [each for each in PUBLIC.split() if not is_public(each)] == []
    assert [each for each in [*NOT_PUBLIC.split(), "", "1.2.3.4 "] if is_public(each)] == []


class _Echo(Handler[list[str]]):
    """Answers with the target of the request, as it was spelled."""

    def answer(self) -> None:
        self.send_response_only(200)
        self.send_header("Content-Length", str(len(self.path)))
        self.end_headers()
        self.wfile.write(self.path.encode())


@pytest.fixture
def echo() -> Generator[str]:
    """Run a server that answers with the target of a request."""
    listener = Listener[list[str]](_Echo, [])
    with listener.running():
        yield listener.url


SPELLED = ["/a%2Fb/c", "/a+b/c", "/a%2Bb/c", "/time=1,x:2@(3)/c", "/100%25/%C3%A9%20c", "/a%2F/c"]


@pytest.mark.parametrize("path", SPELLED)
async def test_root_is_requested_as_its_url_is_spelled(
    echo: str, stores: Stores, path: str
) -> None:
    """The URL of a root, and of a prefix of virtual references, is requested as it is spelled."""
    folder, _, name = path.rpartition("/")
    for root in stores.open_root(echo + folder), stores.open_prefix(echo + folder):
        assert (await found(stores, root.join(unquote(name)))).data.decode() == path


@pytest.mark.parametrize("path", [*SPELLED, "/%7Ec", "/%c3%a9/x%2fy", "/a%252Fb"])
async def test_virtual_reference_is_requested_as_its_url_is_spelled(
    echo: str, stores: Stores, path: str
) -> None:
    """A URL of a virtual reference is requested as it is spelled, in the normal form of RFC 3986:
    upper-case escapes, and none of unreserved characters.
    """
    allowed = [allow(f"{echo}/", stores.open_prefix(f"{echo}/"))]
    normal = path.replace("%7E", "~").replace("%c3%a9", "%C3%A9").replace("%2f", "%2F")

    for ref in resolve(echo + path, allowed), resolve_source(echo + path, allowed):
        assert (await found(stores, ref)).data.decode() == normal


async def test_virtual_reference_with_an_escaped_way_out_is_denied(
    echo: str, stores: Stores
) -> None:
    """No store requests a key whose escapes hide a segment that climbs."""
    root = stores.open_prefix(f"{echo}/data/")

    assert "'..'" in await denied(stores, root.join("a%2F..%2F..%2Fsecret"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST"])
async def test_object_below_a_local_prefix_is_read(
    faulty: FaultyServer, stores: Stores, host: str
) -> None:
    """A prefix on 127.0.0.1 or localhost may be read, though the address is private."""
    faulty.put("a b", "c/key", b"data")
    faulty.fail(Fault.SLOW_DOWN, nth=[0])
    url = faulty.url.replace("127.0.0.1", host)
    root = stores.open_prefix(f"{url}/a%20b/")

    assert isinstance(root.bucket, GuardedBucket)
    assert (await found(stores, root.join("c/key"), ByteRange(1, 3))).data == b"at"
    assert await stores.get(root.join("absent")) is None
    await stores.check_reachable(root)


@pytest.mark.parametrize(
    "name",
    [socket.gethostname(), "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "localhost.", "0"],
)
async def test_name_of_a_local_address_is_denied(
    faulty: FaultyServer, stores: Stores, name: str
) -> None:
    """A prefix whose host name, or unusual address, means this machine is denied."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        pytest.skip(f"{name} means nothing here")
    faulty.put("data", "key", b"data")
    root = stores.open_prefix(faulty.url.replace("127.0.0.1", name) + "/data")

    reason = await denied(stores, root.join("key"))

    assert reason == f"{name.lower()} has no public address"
    assert not faulty.seen


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
async def test_private_address_of_a_name_is_denied_and_not_named(addresses: list[str]) -> None:
    """A name is looked up for each connection; the error of a private address names no address."""
    answers = iter([["8.8.8.8", *addresses], addresses])

    async def look_up(_: str, __: int) -> Sequence[str]:
        return next(answers)

    prefixes = [RequestTarget("http://rebound.example/data")]
    guard = partial(resolve_public, prefixes, look_up=look_up)
    assert await guard(Origin("http", "rebound.example", 80)) == ["8.8.8.8"]
    async with aclosing(HttpStore(timeout_s=LONGEST_S, guard=guard)) as store:
        with pytest.raises(StorageDeniedError) as raised:
            await store.get(ObjectRef(GuardedBucket("http://rebound.example/data"), "key"))

    assert raised.value.reason == "rebound.example has no public address"


async def test_client_connects_to_the_resolved_addresses(faulty: FaultyServer) -> None:
    """The client connects to the addresses of its resolver, and looks up no name itself."""
    faulty.put("data", "key", b"data")

    async def resolve(origin: Origin) -> Sequence[str]:
        assert origin.host == "no-such-host.invalid"
        return ["127.0.0.2", "127.0.0.1"]

    port = faulty.url.rpartition(":")[2]
    async with aclosing(HttpClient(connections=1, silence_s=2, resolve=resolve)) as client:
        target = RequestTarget(f"http://no-such-host.invalid:{port}/data/key")
        response = await client.send("GET", target)

        assert await response.read() == b"data"
    assert faulty.seen[0].headers["Host"] == f"no-such-host.invalid:{port}"


@pytest.mark.parametrize(
    "url",
    [
        *("https://host/a/../b", "s3://bucket/../b", "memory://bucket/a", "https://a..b/c"),
        *("https://me@host/a", "ftp://host/a", "file://relative/a"),
    ],
)
def test_ambiguous_prefix_is_refused(url: str) -> None:
    """A prefix with dot segments, credentials or another scheme raises ConfigurationError."""
    with pytest.raises(ConfigurationError):
        Stores(LimitSettings()).open_prefix(url)
