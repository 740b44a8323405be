"""`shardgate.http.auth.oidc`: keys of issuers, read over TLS too, and what they are good for."""

import asyncio
import gzip
import json
import logging
import ssl
from collections.abc import AsyncGenerator, Generator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from shardgate.errors import IssuerUnavailableError
from shardgate.http.auth.oidc import (
    APART_S,
    KEYS_S,
    RETRY_S,
    IssuerKeys,
    VerificationKey,
    decode_jwks,
    open_client,
    read_keys,
)
from shardgate.settings import IssuerSettings
from tests.http.auth.issuing import (
    AUDIENCE,
    DISCOVERY,
    JWKS,
    Issuer,
    make_key,
)
from tests.storage.faulty import LONGEST_S, Fault, FaultyServer

IMPATIENT_S = 0.3


@pytest.fixture
def issuer(faulty: FaultyServer) -> Issuer:
    """Give an issuer that goes wrong when told to."""
    return Issuer(faulty)


@pytest.fixture
async def client(request: pytest.FixtureRequest) -> AsyncGenerator[httpx.AsyncClient]:
    """Open a client, which is impatient only where an issuer is to fall silent."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    is_silent = params.get("wrong") in ("STALL", "STALL_BODY")
    async with open_client(IMPATIENT_S if is_silent else LONGEST_S) as client:
        yield client


async def kids(client: httpx.AsyncClient, settings: IssuerSettings) -> list[str | None]:
    """Read the names of the keys."""
    return [key.kid for key in await read_keys(client, settings, client.timeout.read or 0)]


async def test_keys_are_where_the_configuration_says(
    issuer: Issuer, client: httpx.AsyncClient
) -> None:
    """It is below the URL of the issuer, after one slash (Discovery §4), or none is read."""
    assert await kids(client, issuer.settings) == ["first"]
    assert [seen.path for seen in issuer.server.seen] == [DISCOVERY, JWKS]
    there = f"{issuer.url}{JWKS}"
    elsewhere = IssuerSettings(url="https://elsewhere.example", audience=AUDIENCE, jwks_url=there)
    assert await kids(client, elsewhere) == ["first"]
    assert issuer.reads(DISCOVERY) == 1

    issuer.configure(issuer=f"{issuer.url}/", jwks_uri=there)
    assert await kids(client, IssuerSettings(url=f"{issuer.url}/", audience="x")) == ["first"]


@pytest.mark.parametrize("path", [DISCOVERY, JWKS])
@pytest.mark.parametrize(
    "wrong",
    [
        *("DENY", "ERROR", "STALL", "STALL_BODY", "RESET", "CUT", "GARBAGE"),
        *(b"", b"<html></html>", b"[" * 100_000, gzip.compress(b"{}", mtime=0), b"\xff\xfe"),
    ],
)
async def test_an_issuer_that_fails_cannot_be_reached(
    issuer: Issuer, client: httpx.AsyncClient, path: str, wrong: str | bytes
) -> None:
    """However it fails, and soon; so with what is no document, such as a page to log in."""
    if isinstance(wrong, str):
        issuer.server.fail(Fault[wrong], path=path)
    else:
        issuer.server.objects[path] = wrong

    with pytest.raises(IssuerUnavailableError):
        await kids(client, issuer.settings)


@pytest.mark.parametrize("path", [DISCOVERY, JWKS])
async def test_a_redirect_is_not_followed(
    issuer: Issuer, client: httpx.AsyncClient, path: str
) -> None:
    """It could lead to where nobody but we can go; a huge document is refused, told so or not."""
    for fault in (None, Fault.CHUNKED):
        sound = issuer.server.objects[path]
        issuer.server.objects[path] = sound + b" " * 1024**2
        if fault is not None:
            issuer.server.fail(fault, path=path)
        with pytest.raises(IssuerUnavailableError, match="more than"):
            await kids(client, issuer.settings)
        issuer.server.objects[path] = sound

    issuer.server.objects["/other/place"] = issuer.server.objects[path]
    issuer.server.redirects[path] = f"{issuer.url}/other/place"
    with pytest.raises(IssuerUnavailableError, match="302"):
        await kids(client, issuer.settings)
    assert issuer.reads("/other/place") == 0


@pytest.mark.parametrize(
    "configuration",
    [
        {"issuer": "https://other.example", "jwks_uri": "{url}/keys/jwks"},
        {"issuer": "{url}/", "jwks_uri": "{url}/keys/jwks"},
        {"jwks_uri": "{url}/keys/jwks"},
        {"issuer": "{url}"},
        {"issuer": "{url}", "jwks_uri": 7},
        {"issuer": "{url}", "jwks_uri": "http://169.254.169.254/latest"},
        {"issuer": "{url}", "jwks_uri": "file:///etc/passwd"},
        {"issuer": "{url}", "jwks_uri": "https://[::"},
        {"issuer": "{url}", "jwks_uri": "https://user:password@lab.example/keys"},
        ["{url}"],
    ],
)
async def test_a_configuration_that_is_not_of_the_issuer_is_refused(
    issuer: Issuer, client: httpx.AsyncClient, configuration: object
) -> None:
    """It has the very name, and its keys are where nobody on the way can replace them."""
    said = json.dumps(configuration).replace("{url}", issuer.url)
    issuer.server.objects[DISCOVERY] = said.encode()

    with pytest.raises(IssuerUnavailableError):
        await kids(client, issuer.settings)
    assert issuer.reads() == 0


class Source:
    """Where keys are read, with a clock that stands still."""

    def __init__(self, *kids: str) -> None:
        self.now = 1000.0
        self.reads = 0
        self.can_be_reached = True
        self.pause = asyncio.Event()
        self.pause.set()
        self.publish(*kids)
        self.jwks = IssuerKeys(self.read, lambda: self.now)

    def publish(self, *kids: str) -> None:
        """Say which keys there are."""
        jwks = {"keys": [make_key(kid).as_dict(private=False) for kid in kids]}
        self.keys = decode_jwks(json.dumps(jwks).encode())

    async def read(self) -> tuple[VerificationKey, ...]:
        """Read the keys."""
        self.reads += 1
        await self.pause.wait()
        if not self.can_be_reached:
            raise IssuerUnavailableError("unplugged")
        return self.keys

    async def has(self, kid: str) -> bool:
        """Tell whether a key is found."""
        return await self.jwks.find(kid, "RS256") is not None


async def test_keys_are_read_once_an_hour() -> None:
    """A withdrawn key is good until then; one that is not known makes the keys be read."""
    source = Source("a")
    assert await source.has("a")
    source.publish("b")
    source.now += KEYS_S - 1
    assert await source.has("a")
    assert source.reads == 1
    source.now += 1
    assert not await source.has("a")

    source.publish("b", "c")
    source.now += APART_S
    assert await source.has("c")


async def test_a_flood_of_unknown_keys_reads_them_seldom() -> None:
    """Anybody can invent a name of a key."""
    source = Source("a")
    for second in range(100):
        for each in range(10):
            assert not await source.has(f"invented {second} {each}")
        source.now += 1

    assert source.reads == 100 / APART_S


async def test_all_who_wait_share_a_read() -> None:
    """A crowd asks the issuer once, the read goes on when some have left, and closing ends it."""
    source = Source("a")
    source.pause.clear()
    leaving = asyncio.create_task(source.has("a"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(source.has("a")) for _ in range(20)]
        await asyncio.sleep(0)
        source.pause.set()
    assert all(each.result() for each in asked)
    assert source.reads == 1

    source = Source("a")
    source.pause.clear()
    waiting = asyncio.create_task(source.has("a"))
    await asyncio.sleep(0)
    await source.jwks.aclose()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await source.jwks.aclose()


async def test_known_keys_are_good_while_the_issuer_is_away() -> None:
    """It is asked again, now and then."""
    source = Source("a")
    assert await source.has("a")
    source.can_be_reached = False
    source.now += KEYS_S
    for _ in range(10):
        assert await source.has("a")
    assert source.reads == 2

    source.now += RETRY_S
    source.can_be_reached = True
    source.publish("b")

    assert await source.has("b")


async def test_without_keys_nobody_can_tell(caplog: pytest.LogCaptureFixture) -> None:
    """That is an error of its own until they can be read; its reason is for the operator only."""
    source = Source("a")
    source.can_be_reached = False
    with caplog.at_level(logging.WARNING, logger="shardgate"):
        for _ in range(5):
            with pytest.raises(IssuerUnavailableError) as caught:
                await source.has("a")
            assert "unplugged" not in str(caught.value)
    assert "unplugged" in caplog.text
    assert source.reads == 1

    source.can_be_reached = True
    source.now += APART_S
    assert await source.has("a")


def decode(*jwks: object) -> tuple[VerificationKey, ...]:
    """Decode a set of these keys."""
    return decode_jwks(json.dumps({"keys": jwks}).encode())


def public(kid: str = "first", kind: str = "RSA", **members: object) -> dict[str, Any]:
    """Write a public key with further *members*."""
    return {**make_key(kid, kind).as_dict(private=False), **members}


@pytest.mark.parametrize(
    ("kind", "members", "algorithms"),
    [
        ("RSA", {}, {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}),
        ("RSA", {"alg": "PS256"}, {"PS256"}),
        ("P-256", {}, {"ES256"}),
        ("P-384", {}, {"ES384"}),
        ("P-521", {}, {"ES512"}),
        ("Ed25519", {}, {"EdDSA"}),
        ("Ed448", {}, {"EdDSA"}),
    ],
)
def test_a_key_tells_the_algorithms(
    kind: str, members: dict[str, Any], algorithms: set[str]
) -> None:
    """Not the token that is to be checked with it; what it declares is all that it is good for."""
    (key,) = decode(public(kind=kind, **members))

    assert key.kid == "first"
    assert key.algorithms == algorithms


@pytest.mark.parametrize(
    "jwk",
    [
        {"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "alg": "HS256"},
        {"kty": "oct", "k": "c2VjcmV0", "crv": "P-256"},
        public(use="enc"),
        public(alg="RSA-OAEP"),
        public(alg="HS256"),
        public(alg="none"),
        public(n=5),
        public(e="!"),
        {"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"},
        make_key("first").as_dict(private=True),
        {"kty": ["RSA"]},
        {},
        7,
        None,
    ],
)
def test_a_key_that_is_not_for_this_is_passed_over(jwk: object) -> None:
    """Secrets, keys to encrypt with, what cannot be decoded, and private keys."""
    kept = public("second")

    assert [key.kid for key in decode(jwk, kept)] == ["second"]


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"keys": {}}', b"<html>", b"[" * 100_000, b"\xff"]
)
def test_what_is_no_set_of_keys_is_refused(data: bytes) -> None:
    """It is an issuer that does not work, and not one without keys."""
    with pytest.raises(ValueError, match=r"."):
        decode_jwks(data)


async def test_a_key_is_chosen_by_its_name_and_algorithm() -> None:
    """A key of another kind that has the name is not the one; unnamed, there is one that fits."""
    keys = decode(public("a"), public("b"), public("b", "P-256"))

    async def read() -> Sequence[VerificationKey]:
        return keys

    for kid, algorithm, expected in (
        ("b", "ES256", keys[2]),
        ("b", "RS512", keys[1]),
        ("a", "ES256", None),
        ("c", "RS256", None),
        (None, "ES256", keys[2]),
        (None, "RS256", None),
    ):
        assert await IssuerKeys(read).find(kid, algorithm) == expected


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Make an authority that nobody else knows."""
    return trustme.CA()


@pytest.fixture
def tls_issuer(authority: trustme.CA) -> Generator[Issuer]:
    """Run an issuer with a certificate of the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with FaultyServer(tls=context).running() as server:
        yield Issuer(server)


@pytest.fixture
def trusting(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the authority, as an operator does."""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))


async def kids_over_tls(issuer: Issuer) -> list[str | None]:
    """Read the names of the keys with a client that is opened now."""
    async with open_client(2) as client:
        return [key.kid for key in await read_keys(client, issuer.settings, 2)]


@pytest.mark.usefixtures("trusting")
async def test_keys_of_a_trusted_issuer_come_over_tls(tls_issuer: Issuer) -> None:
    """`SSL_CERT_FILE` names who vouches; not even this machine may say what the keys are."""
    assert await kids_over_tls(tls_issuer) == ["first"]
    with FaultyServer().running() as plain:
        plain.objects[JWKS] = tls_issuer.server.objects[JWKS]
        tls_issuer.configure(issuer=tls_issuer.url, jwks_uri=f"{plain.url}{JWKS}")

        with pytest.raises(IssuerUnavailableError, match="not https"):
            await kids_over_tls(tls_issuer)
        assert plain.seen == []


async def test_an_issuer_that_nobody_vouches_for_is_not_asked(tls_issuer: Issuer) -> None:
    """Whoever sits in between could say anything."""
    with pytest.raises(IssuerUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        await kids_over_tls(tls_issuer)
    assert tls_issuer.server.seen == []
