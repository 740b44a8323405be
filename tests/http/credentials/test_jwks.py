"""`app.http.credentials.jwks`: when the keys of an issuer are read."""

import asyncio
import json
import logging

import pytest

from app.errors import IssuerUnavailableError
from app.http.credentials.jwks import APART_S, KEPT_S, RETRIED_S, Jwks
from app.http.credentials.verification_keys import VerificationKey, decode_jwks
from tests.http.credentials.issuing import make_key


class Source:
    """Where keys are read, with a clock that stands still."""

    def __init__(self, *kids: str) -> None:
        self.now = 1000.0
        self.reads = 0
        self.can_be_reached = True
        self.pause = asyncio.Event()
        self.pause.set()
        self.publish(*kids)
        self.jwks = Jwks(self.read, lambda: self.now)

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
    source.now += KEPT_S - 1
    assert await source.has("a")

    assert source.reads == 1


async def test_a_withdrawn_key_is_good_for_an_hour_at_most() -> None:
    """Then they are read anew before anything is believed."""
    source = Source("a")
    assert await source.has("a")
    source.publish("b")
    source.now += KEPT_S

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
    source.now += KEPT_S
    for _ in range(10):
        assert await source.has("a")
    assert source.reads == 2

    source.now += RETRIED_S
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
