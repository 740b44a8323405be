"""`app.http.auth.oidc`: which keys of issuers are read, when, and what they are good for."""

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import IssuerUnavailableError
from app.http.auth.oidc import (
    ALGORITHMS,
    APART_S,
    KEYS_S,
    RETRY_S,
    IssuerKeys,
    VerificationKey,
    decode_jwks,
    open_client,
    read_keys,
)
from app.settings import IssuerSettings
from tests.http.auth.issuing import (
    AUDIENCE,
    DISCOVERY,
    JWKS,
    Issuer,
    make_key,
)
from tests.storage.faulty import Fault, FaultyServer

TIMEOUT_S = 0.3


@pytest.fixture
def issuer(faulty: FaultyServer) -> Issuer:
    """Give an issuer that goes wrong when told to."""
    return Issuer(faulty)


@pytest.fixture
async def client() -> AsyncGenerator[httpx.AsyncClient]:
    """Open a client."""
    async with open_client(TIMEOUT_S) as client:
        yield client


async def kids(client: httpx.AsyncClient, settings: IssuerSettings) -> list[str | None]:
    """Read the names of the keys."""
    return [key.kid for key in await read_keys(client, settings, TIMEOUT_S)]


async def test_keys_are_where_the_configuration_says(
    issuer: Issuer, client: httpx.AsyncClient
) -> None:
    """It is found below the URL of the issuer."""
    assert await kids(client, issuer.settings) == ["first"]
    assert [seen.path for seen in issuer.server.seen] == [DISCOVERY, JWKS]


async def test_a_slash_at_the_end_belongs_to_the_name_only(
    issuer: Issuer, client: httpx.AsyncClient
) -> None:
    """The configuration has one slash before it (OpenID Connect Discovery §4)."""
    issuer.configure(issuer=f"{issuer.url}/", jwks_uri=f"{issuer.url}{JWKS}")

    assert await kids(client, IssuerSettings(url=f"{issuer.url}/", audience="x")) == ["first"]


async def test_keys_may_be_where_the_settings_say(
    issuer: Issuer, client: httpx.AsyncClient
) -> None:
    """Then no configuration is read."""
    settings = IssuerSettings(
        url="https://elsewhere.example",
        audience=AUDIENCE,
        jwks_url=f"{issuer.url}{JWKS}",
    )

    assert await kids(client, settings) == ["first"]
    assert issuer.reads(DISCOVERY) == 0


@pytest.mark.parametrize("path", [DISCOVERY, JWKS])
@pytest.mark.parametrize(
    "fault",
    [
        Fault.DENY,
        Fault.ERROR,
        Fault.STALL,
        Fault.STALL_BODY,
        Fault.RESET,
        Fault.CUT,
        Fault.GARBAGE,
    ],
)
async def test_an_issuer_that_fails_cannot_be_reached(
    issuer: Issuer, client: httpx.AsyncClient, path: str, fault: Fault
) -> None:
    """However it fails, and soon."""
    issuer.server.fail(fault, path=path)

    with pytest.raises(IssuerUnavailableError):
        await kids(client, issuer.settings)


@pytest.mark.parametrize("path", [DISCOVERY, JWKS])
async def test_a_redirect_is_not_followed(
    issuer: Issuer, client: httpx.AsyncClient, path: str
) -> None:
    """It could lead to where nobody but we can go."""
    issuer.server.objects["/other/place"] = issuer.server.objects[path]
    issuer.server.redirects[path] = f"{issuer.url}/other/place"

    with pytest.raises(IssuerUnavailableError, match="302"):
        await kids(client, issuer.settings)
    assert issuer.reads("/other/place") == 0


@pytest.mark.parametrize("path", [DISCOVERY, JWKS])
@pytest.mark.parametrize("faults", [[], [Fault.CHUNKED]])
async def test_a_huge_document_is_refused(
    issuer: Issuer, client: httpx.AsyncClient, path: str, faults: list[Fault]
) -> None:
    """Whether it says its length or not."""
    issuer.server.objects[path] += b" " * 1024**2
    for fault in faults:
        issuer.server.fail(fault, path=path)

    with pytest.raises(IssuerUnavailableError, match="more than"):
        await kids(client, issuer.settings)


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


@pytest.mark.parametrize("path", [DISCOVERY, JWKS])
@pytest.mark.parametrize(
    "body", [b"", b"<html></html>", b"[" * 100_000, gzip.compress(b"{}", mtime=0), b"\xff\xfe"]
)
async def test_what_is_no_document_is_refused(
    issuer: Issuer, client: httpx.AsyncClient, path: str, body: bytes
) -> None:
    """A page that says to log in first, for example."""
    issuer.server.objects[path] = body

    with pytest.raises(IssuerUnavailableError):
        await kids(client, issuer.settings)


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


async def test_keys_are_read_once() -> None:
    """They are kept for an hour."""
    source = Source("a")

    assert await source.has("a")
    source.now += KEYS_S - 1
    assert await source.has("a")

    assert source.reads == 1


async def test_a_withdrawn_key_is_good_for_an_hour_at_most() -> None:
    """Then they are read anew before anything is believed."""
    source = Source("a")
    assert await source.has("a")
    source.publish("b")
    source.now += KEYS_S

    assert not await source.has("a")


async def test_a_new_key_is_found() -> None:
    """One that is not known makes the keys be read."""
    source = Source("a")
    assert await source.has("a")
    source.publish("a", "b")
    source.now += APART_S

    assert await source.has("b")


async def test_a_flood_of_unknown_keys_reads_them_seldom() -> None:
    """Anybody can invent a name of a key."""
    source = Source("a")
    for second in range(100):
        for each in range(10):
            assert not await source.has(f"invented {second} {each}")
        source.now += 1

    assert source.reads == 100 / APART_S


async def test_all_who_wait_share_a_read() -> None:
    """A crowd at the start asks the issuer once."""
    source = Source("a")
    source.pause.clear()

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(source.has("a")) for _ in range(20)]
        await asyncio.sleep(0)
        source.pause.set()

    assert all(each.result() for each in asked)
    assert source.reads == 1


async def test_a_read_goes_on_when_all_have_left() -> None:
    """Clients that come and go keep the keys from nobody."""
    source = Source("a")
    source.pause.clear()
    leaving = asyncio.create_task(source.has("a"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    source.pause.set()

    assert await source.has("a")
    assert source.reads == 1


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


async def test_without_keys_nobody_can_tell() -> None:
    """That is an error of its own, until they can be read."""
    source = Source("a")
    source.can_be_reached = False
    for _ in range(5):
        with pytest.raises(IssuerUnavailableError):
            await source.has("a")
    assert source.reads == 1

    source.can_be_reached = True
    source.now += APART_S

    assert await source.has("a")


async def test_the_reason_is_for_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    """A client does not learn what our network looks like."""
    source = Source("a")
    source.can_be_reached = False

    with (
        caplog.at_level(logging.WARNING, logger="app"),
        pytest.raises(IssuerUnavailableError) as caught,
    ):
        await source.has("a")

    assert "unplugged" in caplog.text
    assert "unplugged" not in str(caught.value)


async def test_closing_ends_a_read() -> None:
    """Nothing is left behind."""
    source = Source("a")
    source.pause.clear()
    waiting = asyncio.create_task(source.has("a"))
    await asyncio.sleep(0)

    await source.jwks.aclose()
    await asyncio.wait([waiting])

    assert waiting.cancelled()
    await source.jwks.aclose()


def decode(*jwks: object) -> tuple[VerificationKey, ...]:
    """Decode a set of these keys."""
    return decode_jwks(json.dumps({"keys": jwks}).encode())


def public(kid: str = "first", kind: str = "RSA", **members: object) -> dict[str, Any]:
    """Write a public key with further *members*."""
    return {**make_key(kid, kind).as_dict(private=False), **members}


@pytest.mark.parametrize(
    ("kind", "algorithms"),
    [
        ("RSA", {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}),
        ("P-256", {"ES256"}),
        ("P-384", {"ES384"}),
        ("P-521", {"ES512"}),
        ("Ed25519", {"EdDSA"}),
        ("Ed448", {"EdDSA"}),
    ],
)
def test_a_key_tells_the_algorithms(kind: str, algorithms: set[str]) -> None:
    """Not the token that is to be checked with it."""
    (key,) = decode(public(kind=kind))

    assert key.kid == "first"
    assert key.algorithms == algorithms


def test_a_key_may_be_for_one_algorithm() -> None:
    """What it declares is all that it is good for."""
    (key,) = decode(public(alg="PS256"))

    assert key.algorithms == {"PS256"}


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


async def find(
    keys: Sequence[VerificationKey], kid: str | None, algorithm: str
) -> VerificationKey | None:
    """Find a key among those of an issuer."""

    async def read() -> Sequence[VerificationKey]:
        return keys

    return await IssuerKeys(read).find(kid, algorithm)


async def test_a_key_is_chosen_by_its_name_and_algorithm() -> None:
    """A key of another kind that has the name is not the one; unnamed, there is one that fits."""
    keys = decode(public("a"), public("b"), public("b", "P-256"))

    assert await find(keys, "b", "ES256") == keys[2]
    assert await find(keys, "b", "RS512") == keys[1]
    assert await find(keys, "a", "ES256") is None
    assert await find(keys, "c", "RS256") is None
    assert await find(keys, None, "ES256") == keys[2]
    assert await find(keys, None, "RS256") is None


VALUES = st.none() | st.integers() | st.text(max_size=12) | st.lists(st.text(), max_size=2)

MEMBERS = st.sampled_from(["kty", "crv", "alg", "use", "kid", "n", "e", "x", "y"])

KINDS = st.sampled_from(["RSA", "P-256", "Ed25519", "Ed448"])


@given(KINDS, st.dictionaries(MEMBERS, VALUES))
def test_no_key_is_too_odd(kind: str, members: dict[str, object]) -> None:
    """It is passed over, or is good for nothing but what only its owner can do."""
    for key in decode({**public("first", kind), **members}):
        assert key.algorithms <= ALGORITHMS
