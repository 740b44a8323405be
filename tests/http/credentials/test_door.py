"""`app.http.credentials.door`: tokens in paths, and visitors."""

import time
from math import inf

import pytest

from app.http.cors import Hosts
from app.http.credentials.access import Datasets
from app.http.credentials.bearers import Bearers, Known, Shown, named
from app.http.credentials.door import Asked, Door, split_token, without_token
from app.http.credentials.signatures import Signatures
from app.model import ObjectRef
from app.resolve.containers import Containers
from app.resolve.resolver import Dataset

ANA = named("ana")
SHOWN = b"Bearer secret"
ASKED: Asked = ("em", SHOWN, False)
NOW = 100.0


def dataset(reader: str = "ana") -> Dataset:
    """Let *reader* read."""
    root = ObjectRef("memory://store", "em")
    return Dataset("em", root, Containers([]), "auto", b"", readers=frozenset({reader}))


async def door_of(until_s: float = inf, shown: Shown = SHOWN) -> Door:
    """Know who has *shown* a token, which is good until then."""

    async def tell(_: str) -> Known:
        return Known(ANA, until_s)

    bearers = Bearers({}, [tell])
    await bearers.identify(shown)
    return Door(Datasets({"em": dataset()}), bearers, Signatures({}), Hosts("127.0.0.1", ()))


@pytest.mark.parametrize(
    ("raw_path", "token", "rest"),
    [
        (b"/~abc/em/c/0", "abc", b"/em/c/0"),
        (b"/~abc/", "abc", b"/"),
        (b"/~abc", "abc", b""),
        (b"/~/em", "", b"/em"),
        (b"/~a%2Fb%3D/em/c%2F0", "a%2Fb%3D", b"/em/c%2F0"),
        (b"/%7Eabc/em", "abc", b"/em"),
        (b"/~abc//em", "abc", b"//em"),
    ],
)
def test_a_token_is_the_first_segment(raw_path: bytes, token: str, rest: bytes) -> None:
    """It begins with a tilde, as no dataset does; the rest stays as it was sent."""
    scope = without_token({"raw_path": raw_path, "path": ""})

    assert (scope["token"], scope["raw_path"]) == (token, rest)
    assert split_token(raw_path) == (raw_path.removesuffix(rest), rest)


@pytest.mark.parametrize("raw_path", [b"/em/c/0", b"/", b"/em/~abc/c"])
def test_no_token_is_nothing(raw_path: bytes) -> None:
    """What follows a dataset is a key."""
    assert split_token(raw_path) == (None, raw_path)


def test_what_is_not_ascii_is_taken_apart_as_well() -> None:
    """Some clients send what they should percent-encode."""
    scope = without_token({"raw_path": b"/~a/em/\xc3\xa9%20", "path": "/~a/em/\u00e9 "})

    assert (scope["raw_path"], scope["path"]) == (b"/em/\xc3\xa9%20", "/em/\u00e9 ")


async def test_a_visitor_is_looked_at_once_a_second() -> None:
    """By the clock of the event loop."""
    door = await door_of()

    assert door.recall(dataset(), ASKED, NOW) == ANA
    assert door.visitors == {ASKED: (ANA, NOW + 1)}


async def test_a_visitor_stays_no_longer_than_the_token_is_good() -> None:
    """However short that is."""
    door = await door_of(time.time() + 0.5)

    assert door.recall(dataset(), ASKED, NOW) == ANA
    assert NOW < door.visitors[ASKED][1] <= NOW + 0.5


async def test_who_may_not_read_is_no_visitor() -> None:
    """Whoever they are."""
    door = await door_of()

    assert door.recall(dataset("bob"), ASKED, NOW) is None
    assert door.visitors == {}


async def test_a_header_that_looks_like_a_path_is_no_token() -> None:
    """Nor becomes one when the same is shown in a path."""
    door = await door_of(shown="secret")

    assert door.recall(dataset(), ("em", b"/~secret", True), NOW) == ANA
    assert door.recall(dataset(), ("em", b"/~secret", False), NOW) is None
    assert ("em", b"/~secret", False) not in door.visitors


async def test_the_memory_of_visitors_is_bounded() -> None:
    """However many datasets they see."""
    door = await door_of()
    for number in range(5000):
        door.recall(dataset(), (f"em{number}", SHOWN, False), NOW)

    assert len(door.visitors) <= 4096
