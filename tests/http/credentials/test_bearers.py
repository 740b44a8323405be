"""`app.http.credentials.bearers`: whose a token is."""

import time
from math import inf

import pytest

from app.errors import StorageUnavailableError, UnauthenticatedError
from app.http.credentials.bearers import Bearers, Known, named
from app.model import ObjectRef
from tests.http.credentials.people import caller

ANA = named("ana")


def configured() -> Bearers:
    """Know the token of Ana."""
    return Bearers({"ana": caller("secret"), "bob": caller("other")}, [])


async def test_a_token_is_known_by_its_digest() -> None:
    """Only the digest is configured."""
    assert await configured().identify(b"Bearer secret") == ANA


async def test_a_caller_keeps_the_public_rule_and_their_own() -> None:
    """Nothing else is granted."""
    assert (await configured().identify(b"Bearer secret")).grants == {"public", "ana"}


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


async def test_what_was_found_is_recalled() -> None:
    """Once it is known, nobody waits."""
    bearers = configured()
    assert bearers.recall(b"Bearer secret") is None
    await bearers.identify(b"Bearer secret")

    assert bearers.recall(b"Bearer secret") == Known(ANA, inf)


async def test_a_token_is_asked_of_each_who_may_know() -> None:
    """The first who knows it tells; afterwards nobody is asked."""
    asked = []

    async def never(token: str) -> Known | None:
        asked.append(token)
        return None

    async def always(token: str) -> Known | None:
        asked.append(token)
        return Known(ANA, time.time() + 60)

    bearers = Bearers({}, [never, always, never])
    assert [await bearers.identify(b"Bearer a.b") for _ in range(2)] == [ANA, ANA]
    assert asked == ["a.b", "a.b"]


async def test_a_token_is_shown_in_a_header_or_a_path() -> None:
    """What is good in a path is not good as a header that looks like it."""
    bearers = configured()
    for shown in b"bearer secret", b"BEARER  secret ", "secret", "%73ecret":
        assert await bearers.identify(shown) == ANA

    assert bearers.recall(b"secret") is None


async def test_what_has_run_out_is_asked_for_again() -> None:
    """A token is recalled as long as it was said to be good."""

    async def once(_: str) -> Known | None:
        return Known(ANA, time.time() - 1)

    bearers = Bearers({}, [once])
    await bearers.identify(b"Bearer token")

    assert bearers.recall(b"Bearer token") is None


async def test_who_cannot_tell_is_no_refusal() -> None:
    """An issuer that is away says nothing of the token, and neither is it remembered."""
    failures = [StorageUnavailableError(ObjectRef("s3://a", "b"), "away")]

    async def away(_: str) -> Known | None:
        if failures:
            raise failures.pop()
        return Known(ANA, time.time() + 60)

    bearers = Bearers({}, [away])
    with pytest.raises(StorageUnavailableError):
        await bearers.identify(b"Bearer token")

    assert await bearers.identify(b"Bearer token") == ANA


async def test_memory_is_bounded() -> None:
    """Whoever signs many tokens does not fill it."""

    async def always(_: str) -> Known | None:
        return Known(ANA, time.time() + 60)

    bearers = Bearers({}, [always])
    for number in range(5000):
        await bearers.identify(b"Bearer %d" % number)

    assert len(bearers.remembered) == 4096


async def test_what_is_spelled_at_length_is_not_remembered() -> None:
    """One token can be shown in many ways, each of which would take memory."""
    bearers = configured()
    shown = b"Bearer " + b" " * 5000 + b"secret"

    assert await bearers.identify(shown) == ANA
    assert bearers.recall(shown) is None
