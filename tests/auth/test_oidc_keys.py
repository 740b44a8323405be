"""`shardgate.auth.oidc`: keys of issuers, over TLS too, and their algorithms."""

import asyncio
import gzip
import json
import logging
import ssl
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import httpx
import jwt
import pytest
from joserfc.jwk import RSAKey

from shardgate.auth import oidc
from shardgate.auth.oidc import (
    APART_S,
    KEYS_S,
    RETRY_S,
    IssuerKeys,
    Issuers,
    VerificationKey,
    decode_jwks,
    open_client,
    read_keys,
)
from shardgate.errors import ConfigurationError, IssuerUnavailableError, UnauthenticatedError
from shardgate.settings import IssuerSettings
from tests.support.auth.issuing import AUDIENCE, DISCOVERY, JWKS, Issuer, make_key
from tests.support.storage.faulty import LONGEST_S, Fault, FaultyServer

IMPATIENT_S = 0.3


@pytest.fixture
def issuer(faulty: FaultyServer) -> Issuer:
    """Return an issuer whose server can be made to fail."""
    return Issuer(faulty)


@pytest.fixture
async def client() -> AsyncGenerator[httpx.AsyncClient]:
    """Open a client."""
    async with open_client(LONGEST_S) as client:
        yield client


async def kids(client: httpx.AsyncClient, settings: IssuerSettings) -> list[str | None]:
    """Return the ids of the keys."""
    return [key.kid for key in await read_keys(client, settings, LONGEST_S)]


async def test_keys_are_read_from_configured_url(issuer: Issuer, client: httpx.AsyncClient) -> None:
    """Keys are read from `jwks_uri` (Discovery §4), or from a `jwks_url` of the settings alone."""
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
        *(Fault.DENY, Fault.ERROR, Fault.STALL, Fault.STALL_BODY),
        *(Fault.RESET, Fault.CUT, Fault.GARBAGE),
        *(b"", b"<html></html>", b"[" * 100_000, gzip.compress(b"{}", mtime=0), b"\xff\xfe"),
    ],
)
async def test_failing_issuer_is_unavailable(
    issuer: Issuer, client: httpx.AsyncClient, path: str, wrong: Fault | bytes
) -> None:
    """An issuer that fails, stalls or sends no JSON document raises IssuerUnavailableError."""
    if isinstance(wrong, bytes):
        issuer.server.objects[path] = wrong
    else:
        issuer.server.fail(wrong, path=path)
    is_silent = wrong in {Fault.STALL, Fault.STALL_BODY}

    with pytest.raises(IssuerUnavailableError):
        await read_keys(client, issuer.settings, IMPATIENT_S if is_silent else LONGEST_S)


@pytest.mark.parametrize("path", [DISCOVERY, JWKS])
async def test_redirect_or_large_document_is_refused(
    issuer: Issuer, client: httpx.AsyncClient, path: str
) -> None:
    """A redirect or a document that is too large raises IssuerUnavailableError."""
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
async def test_configuration_of_another_issuer_is_refused(
    issuer: Issuer, client: httpx.AsyncClient, configuration: object
) -> None:
    """A discovery document with another issuer, or whose `jwks_uri` is no safe URL, is refused."""
    said = json.dumps(configuration).replace("{url}", issuer.url)
    issuer.server.objects[DISCOVERY] = said.encode()

    with pytest.raises(IssuerUnavailableError):
        await kids(client, issuer.settings)
    assert issuer.reads() == 0


@pytest.mark.parametrize(("path", "fault"), [("/", "has a slash"), ("", "has no slash")])
async def test_slash_of_another_issuer_is_named(
    issuer: Issuer, client: httpx.AsyncClient, path: str, fault: str
) -> None:
    """A discovery document whose issuer has a slash too many or too few is refused in words."""
    settings = IssuerSettings(url=f"{issuer.url}{'' if path else '/'}", audience="shardgate")
    issuer.configure(issuer=f"{issuer.url}{path}", jwks_uri=f"{issuer.url}{JWKS}")

    with pytest.raises(ConfigurationError, match=f"its name '{issuer.url}{path}' {fault}"):
        await kids(client, settings)


@pytest.mark.parametrize("path", ["/policy/v2.0", "/policy/v2.0/.well-known/openid-configuration"])
async def test_configuration_elsewhere_is_read(
    issuer: Issuer, client: httpx.AsyncClient, path: str
) -> None:
    """The keys are found by a configuration at another path than that below the issuer's name."""
    name = f"{issuer.url}/tenant/v2.0/"
    document = {"issuer": name, "jwks_uri": f"{issuer.url}{JWKS}"}
    issuer.server.objects[f"/policy/v2.0{DISCOVERY}"] = json.dumps(document).encode()
    discovery_url = f"{issuer.url}{path}"
    settings = IssuerSettings(url=name, audience="shardgate", discovery_url=discovery_url)

    assert await kids(client, settings) == ["first"]


@pytest.mark.parametrize("kid", ["first", None])
async def test_key_that_replaces_another_is_read(
    issuer: Issuer, client: httpx.AsyncClient, kid: str | None
) -> None:
    """A new key under the id of the old one, or without an id, is read soon after it signs."""
    now = 0.0
    keys = IssuerKeys(partial(read_keys, client, issuer.settings, LONGEST_S), lambda: now)
    verifier = oidc.Issuer("lab", issuer.settings, keys)
    new = RSAKey.import_key({**make_key("second").as_dict(private=True), "kid": "first"})

    async def verify(key: RSAKey | None = None) -> oidc.Claims:
        token = issuer.sign(key=key, header={"kid": kid})
        claimed = jwt.decode_complete(token, options={"verify_signature": False})
        return await verifier.verify(token, claimed, AUDIENCE)

    await verify()
    issuer.publish(new)
    with pytest.raises(UnauthenticatedError, match="is not signed by its issuer"):
        await verify(new)
    now = APART_S

    assert (await verify(new))["sub"] == "ada"


class Source:
    """A source of keys with a clock that tests set."""

    def __init__(self, *kids: str) -> None:
        self.now = 1000.0
        self.reads = 0
        self.can_be_reached = True
        self.pause = asyncio.Event()
        self.pause.set()
        self.publish(*kids)
        self.jwks = IssuerKeys(self.read, lambda: self.now)

    def publish(self, *kids: str) -> None:
        """Set the keys."""
        jwks = {"keys": [make_key(kid, "P-256").as_dict(private=False) for kid in kids]}
        self.keys = decode_jwks(json.dumps(jwks).encode())

    async def read(self) -> tuple[VerificationKey, ...]:
        """Read the keys."""
        self.reads += 1
        await self.pause.wait()
        if not self.can_be_reached:
            raise IssuerUnavailableError("unplugged")
        return self.keys

    async def has(self, kid: str) -> bool:
        """Return whether a key is found."""
        return await self.jwks.find(kid, "ES256") is not None


async def test_keys_are_read_once_an_hour() -> None:
    """Keys are read again after an hour, or soon after a token names an unknown one."""
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


async def test_unknown_keys_cause_few_reads() -> None:
    """However many unknown key ids tokens name, keys are read once in each `APART_S`."""
    source = Source("a")
    for second in range(100):
        for each in range(10):
            assert not await source.has(f"invented {second} {each}")
        source.now += 1

    assert source.reads == 100 / APART_S


async def test_concurrent_requests_share_a_read() -> None:
    """Concurrent requests share one read of keys; closing ends it, a cancelled request does not."""
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


async def test_known_keys_are_used_while_the_issuer_is_unavailable() -> None:
    """Keys stay in use while the issuer is unavailable, which is asked again after `RETRY_S`."""
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


async def test_unread_keys_are_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    """Until keys can be read there are none; the reason is logged, and is not in the error."""
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
def test_key_determines_its_algorithms(
    kind: str, members: dict[str, Any], algorithms: set[str]
) -> None:
    """The type of a key, or the `alg` that it declares, determines its algorithms."""
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
def test_unsuitable_key_is_ignored(jwk: object) -> None:
    """Symmetric, private, malformed and encryption keys of a JWKS are ignored."""
    kept = public("second")

    assert [key.kid for key in decode(jwk, kept)] == ["second"]


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"keys": {}}', b"<html>", b"[" * 100_000, b"\xff"]
)
def test_invalid_jwks_is_refused(data: bytes) -> None:
    """Data that are no JWKS raise ValueError."""
    with pytest.raises(ValueError, match=r"."):
        decode_jwks(data)


async def test_a_key_is_chosen_by_its_name_and_algorithm() -> None:
    """A key is found by id and algorithm, or by the algorithm alone if exactly one key has it."""
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


async def test_keys_are_read_over_tls_of_a_trusted_authority(
    tls: ssl.SSLContext, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are read over TLS of an authority in `SSL_CERT_FILE` only, and not from a plain URL."""
    with FaultyServer(tls=tls).running() as server, FaultyServer().running() as plain:
        issuer = Issuer(server)
        async with open_client(LONGEST_S) as client:
            with pytest.raises(IssuerUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
                await kids(client, issuer.settings)
        assert server.seen == []

        monkeypatch.setenv("SSL_CERT_FILE", ca_file)
        async with open_client(LONGEST_S) as client:
            assert await kids(client, issuer.settings) == ["first"]
            plain.objects[JWKS] = server.objects[JWKS]
            issuer.configure(issuer=issuer.url, jwks_uri=f"{plain.url}{JWKS}")
            with pytest.raises(IssuerUnavailableError, match="not https"):
                await kids(client, issuer.settings)
        assert plain.seen == []


@pytest.mark.parametrize(
    ("name", "value"), [("SSL_CERT_FILE", "/nowhere"), ("ALL_PROXY", "ftp://127.0.0.1:1")]
)
def test_unusable_environment_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Certificates or a proxy of the environment that cannot be used stop the start, in words."""
    monkeypatch.setenv(name, value)
    settings = IssuerSettings(url="https://login.example", audience="shardgate")

    with pytest.raises(ConfigurationError, match="SSL_CERT_FILE, SSL_CERT_DIR or a proxy") as error:
        Issuers({"lab": settings})
    assert (f"{name} is {value}" in str(error.value)) == (name == "SSL_CERT_FILE")
