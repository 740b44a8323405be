"""`shardgate.auth.authenticator`: bearer tokens, and callers who may read."""

import time
from collections.abc import Awaitable, Callable
from math import inf

import pytest

from shardgate.auth.access import Caller, Datasets, Identity, ServedDataset, configured_caller
from shardgate.auth.authenticator import Authenticator, BearerTokens, Hosts, SentToken
from shardgate.auth.sigv4 import Signatures
from shardgate.model import ObjectRef
from shardgate.read.containers import Containers
from shardgate.server.request import Request
from tests.support.auth.people import caller

ANA = configured_caller("ana")


def configured() -> BearerTokens:
    """Return bearer tokens of Ana and Bob."""
    return BearerTokens({"ana": caller("secret"), "bob": caller("other")}, [])


def known_until(until_s: float) -> Callable[[str], Awaitable[Identity]]:
    """Return an identifier that takes any token for Ana's until then."""

    async def identify(_: str) -> Identity:
        return Identity(ANA, until_s)

    return identify


async def test_token_is_asked_of_each_issuer_once() -> None:
    """Issuers are asked in turn until one knows the token, which is cached until it expires."""
    asked = []

    async def never(token: str) -> Identity | None:
        asked.append(token)
        return None

    bearers = BearerTokens({}, [never, known_until(time.time() + 60), never])
    assert [await bearers.identify(b"Bearer a.b") for _ in range(2)] == [ANA, ANA]
    assert asked == ["a.b"]

    bearers = BearerTokens({}, [known_until(time.time() - 1)])
    await bearers.identify(b"Bearer token")
    assert bearers.cached(b"Bearer token") is None


async def test_token_that_ends_while_it_is_identified_is_not_cached() -> None:
    """What was found before the end of a token is not kept after it."""

    async def identify(token: str) -> Identity | None:
        bearers.forget()
        return Identity(configured_caller("ann"), inf)

    bearers = BearerTokens({}, [identify])

    await bearers.identify(b"Bearer ended")

    assert bearers.cached(b"Bearer ended") is None


async def test_token_is_accepted_in_a_header_or_a_path() -> None:
    """A token is accepted in a header and in a path; a header that is too long is not cached."""
    bearers = configured()
    long = b"Bearer " + b" " * 5000 + b"secret"
    for shown in b"bearer secret", b"BEARER  secret ", "secret", "%73ecret", long:
        assert await bearers.identify(shown) == ANA

    assert bearers.cached(b"secret") is bearers.cached(long) is None


SENT = b"Bearer secret"
NOW = 100.0


def dataset(reader: str = "ana", name: str = "em") -> ServedDataset:
    """Return a dataset that *reader* may read."""
    root = ObjectRef("memory://store", "em")
    return ServedDataset(name, root, Containers([]), "auto", readers=frozenset({reader}))


async def authenticator_of(until_s: float = inf, sent: SentToken = SENT) -> Authenticator:
    """Return an authenticator that has cached the token *sent*, which is valid until then."""
    bearers = BearerTokens({}, [known_until(until_s)])
    await bearers.identify(sent)
    return over(bearers)


def over(bearers: BearerTokens) -> Authenticator:
    """Return an authenticator by *bearers* alone."""
    return Authenticator(
        Datasets({"em": dataset()}), bearers, Signatures({}), Hosts("127.0.0.1", ())
    )


def cached(
    authenticator: Authenticator,
    now: float = NOW,
    *,
    reader: str = "ana",
    segment: bytes = b"",
    sent: bytes = SENT,
    host: bytes = b"localhost",
    name: str = "em",
) -> Caller | None:
    """Return the cached reader, without waiting, of a token in the path or in a header."""
    headers = {b"host": host, b"authorization": sent}
    request = Request("GET", segment + b"/em/c", [], headers, b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", lambda: now)
        return authenticator.cached_reader(request, dataset(reader, name))


async def test_reader_is_cached_while_the_token_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader is cached for a second at most, by a clock that never jumps."""
    time_s = 1000.0
    monkeypatch.setattr("time.time", lambda: time_s)
    short = await authenticator_of(time_s + 0.3)
    assert (cached(short), cached(short, NOW + 0.2)) == (ANA, ANA)
    time_s += 0.35
    assert cached(short, NOW + 0.2) == ANA
    assert cached(short, NOW + 0.4) is None

    expiring = await authenticator_of(time_s + 0.3)
    assert cached(expiring) == ANA
    time_s += 0.35
    assert cached(expiring, NOW + 1) is None


async def test_refused_reader_is_not_cached() -> None:
    """No reader is cached without rights, by another Host, or for a header like a path."""
    authenticator = await authenticator_of()
    assert cached(authenticator, reader="bob") is None
    assert cached(authenticator, host=b"evil.example") is None

    authenticator = await authenticator_of(sent="secret")
    assert cached(authenticator, segment=b"/~secret") == ANA
    assert cached(authenticator, sent=b"/~secret") is None


async def test_the_caches_are_bounded() -> None:
    """Caches of readers and tokens keep at most 4,096 entries."""
    bearers = BearerTokens({}, [known_until(inf)])
    authenticator = over(bearers)
    await bearers.identify(SENT)
    for number in range(4100):
        assert cached(authenticator, name=f"em{number}") == ANA
    bearers.forget()
    assert sum(cached(authenticator, name=f"em{number}") == ANA for number in range(5000)) <= 4096

    tokens = [b"Bearer %d" % number for number in range(5000)]
    for token in tokens:
        await bearers.identify(token)
    assert sum(bearers.cached(token) is not None for token in tokens) == 4096
