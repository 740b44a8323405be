"""`app.http.auth.authenticator`: bearer tokens, and callers who may read."""

import asyncio
import time
from math import inf

import pytest

from app.errors import StorageUnavailableError, UnauthenticatedError
from app.http.auth.access import Caller, Datasets, Identity, configured_caller
from app.http.auth.authenticator import Authenticator, BearerTokens, Hosts, SentToken
from app.http.auth.sigv4 import Signatures
from app.model import ObjectRef
from app.resolve.containers import Containers, Dataset
from tests.http.auth.people import caller

ANA = configured_caller("ana")


def configured() -> BearerTokens:
    """Know the token of Ana."""
    return BearerTokens({"ana": caller("secret"), "bob": caller("other")}, [])


@pytest.mark.parametrize("token", [b"", b"secre", b"\xff", b"x" * 100_000])
async def test_other_tokens_are_refused(token: bytes) -> None:
    """Whatever they look like."""
    with pytest.raises(UnauthenticatedError):
        await configured().identify(b"Bearer " + token)


async def test_the_digest_is_no_token() -> None:
    """Who reads the configuration learns no credentials."""
    digest = caller("secret").token_sha256[0]

    for token in digest.encode(), bytes.fromhex(digest):
        with pytest.raises(UnauthenticatedError):
            await configured().identify(b"Bearer " + token)


async def test_a_token_is_asked_of_each_who_may_know() -> None:
    """The first who knows it tells; afterwards nobody is asked."""
    asked = []

    async def never(token: str) -> Identity | None:
        asked.append(token)
        return None

    async def always(token: str) -> Identity | None:
        asked.append(token)
        return Identity(ANA, time.time() + 60)

    bearers = BearerTokens({}, [never, always, never])
    assert [await bearers.identify(b"Bearer a.b") for _ in range(2)] == [ANA, ANA]
    assert asked == ["a.b", "a.b"]


async def test_a_token_is_shown_in_a_header_or_a_path() -> None:
    """What is good in a path is not good as a header that looks like it."""
    bearers = configured()
    for shown in b"bearer secret", b"BEARER  secret ", "secret", "%73ecret":
        assert await bearers.identify(shown) == ANA

    assert bearers.cached(b"secret") is None


async def test_what_has_run_out_is_asked_for_again() -> None:
    """A token is recalled as long as it was said to be good."""

    async def once(_: str) -> Identity | None:
        return Identity(ANA, time.time() - 1)

    bearers = BearerTokens({}, [once])
    await bearers.identify(b"Bearer token")

    assert bearers.cached(b"Bearer token") is None


async def test_who_cannot_tell_is_no_refusal() -> None:
    """An issuer that is away says nothing of the token, and neither is it remembered."""
    failures = [StorageUnavailableError(ObjectRef("s3://a", "b"), "away")]

    async def away(_: str) -> Identity | None:
        if failures:
            raise failures.pop()
        return Identity(ANA, time.time() + 60)

    bearers = BearerTokens({}, [away])
    with pytest.raises(StorageUnavailableError):
        await bearers.identify(b"Bearer token")

    assert await bearers.identify(b"Bearer token") == ANA


async def test_memory_is_bounded() -> None:
    """Whoever signs many tokens does not fill it."""

    async def always(_: str) -> Identity | None:
        return Identity(ANA, time.time() + 60)

    bearers = BearerTokens({}, [always])
    for number in range(5000):
        await bearers.identify(b"Bearer %d" % number)

    assert len(bearers._cached) == 4096


async def test_what_is_spelled_at_length_is_not_remembered() -> None:
    """One token can be shown in many ways, each of which would take memory."""
    bearers = configured()
    shown = b"Bearer " + b" " * 5000 + b"secret"

    assert await bearers.identify(shown) == ANA
    assert bearers.cached(shown) is None


SENT = b"Bearer secret"

NOW = 100.0


def dataset(reader: str = "ana", name: str = "em") -> Dataset:
    """Let *reader* read."""
    root = ObjectRef("memory://store", "em")
    return Dataset(name, root, Containers([]), "auto", b"", readers=frozenset({reader}))


async def authenticator_of(until_s: float = inf, sent: SentToken = SENT) -> Authenticator:
    """Know who has *shown* a token, which is good until then."""

    async def tell(_: str) -> Identity:
        return Identity(ANA, until_s)

    bearers = BearerTokens({}, [tell])
    await bearers.identify(sent)
    return Authenticator(
        Datasets({"em": dataset()}), bearers, Signatures({}), Hosts("127.0.0.1", ())
    )


def cached(
    authenticator: Authenticator,
    now: float = NOW,
    *,
    reader: str = "ana",
    segment: bytes | None = None,
    sent: bytes = SENT,
    name: str = "em",
) -> Caller | None:
    """Ask who reads, without waiting."""
    headers = {b"host": b"localhost", b"authorization": sent}
    return authenticator.cached_reader(dataset(reader, name), headers, now, segment)


async def test_a_reader_is_cached_while_the_token_is_good() -> None:
    """For a second at most, by the clock of the event loop."""
    short = await authenticator_of(time.time() + 0.3)
    assert (cached(short), cached(short, NOW + 0.2)) == (ANA, ANA)
    await asyncio.sleep(0.35)
    assert cached(short, NOW + 0.2) == ANA
    assert cached(short, NOW + 0.4) is None

    expiring = await authenticator_of(time.time() + 0.3)
    assert cached(expiring) == ANA
    await asyncio.sleep(0.35)
    assert cached(expiring, NOW + 1) is None


async def test_who_may_not_read_is_not_cached() -> None:
    """Nor who names another host."""
    authenticator = await authenticator_of()

    assert cached(authenticator, reader="bob") is None
    headers = {b"host": b"evil.example", b"authorization": SENT}
    assert authenticator.cached_reader(dataset(), headers, NOW, None) is None


async def test_a_header_that_looks_like_a_path_is_no_token() -> None:
    """Nor becomes one when the same was sent in a path."""
    authenticator = await authenticator_of(sent="secret")

    assert cached(authenticator, segment=b"/~secret") == ANA
    assert cached(authenticator, sent=b"/~secret") is None


async def test_the_cache_of_readers_is_bounded() -> None:
    """However many datasets they read."""
    authenticator = await authenticator_of()
    for number in range(5000):
        assert cached(authenticator, name=f"em{number}") == ANA

    assert len(authenticator._readers) <= 4096
