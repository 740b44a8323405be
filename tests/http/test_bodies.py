"""`app.http.bodies`: what of a body is in memory is counted before it is there."""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import pytest

from app.errors import BadBodyError, BusyError, LengthRequiredError, SlowBodyError, TooLargeError
from app.http.bodies import Incoming, lingering_writer
from app.http.disconnect import ClientGoneError
from app.resolve.budget import ByteBudget, ByteReservation

MIB = 1024**2


class Client:
    """Sends *pieces*, and tells how often it was asked to, and what was held then."""

    def __init__(self, pieces: Sequence[bytes], budget: ByteBudget | None = None) -> None:
        self._pieces = list(pieces)
        self._budget = budget
        self.asked: list[int] = []
        self.heard: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        """Give the next piece."""
        self.asked.append(self._budget.held_bytes if self._budget else 0)
        if not self._pieces:
            return {"type": "http.disconnect"}
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    async def send(self, message: dict[str, Any]) -> None:
        """Hear a part of the answer."""
        self.heard.append(message)


def incoming(client: Client, length: int, *, timeout_s: float = 1) -> Incoming:
    """Announce *length* bytes."""
    given = {b"content-length": b"%d" % length}
    return Incoming(client.receive, given, timeout_s=timeout_s)


async def read(client: Client, length: int, budget: ByteBudget | None = None) -> bytes:
    """Read a body of which *length* bytes are announced."""
    held = ByteReservation(budget or ByteBudget(10 * MIB, wait_s=0.01))
    try:
        return await incoming(client, length).read(length, held)
    finally:
        await held.release()


async def test_what_arrives_is_counted_as_it_does() -> None:
    """Who announces much and sends little holds little."""
    budget = ByteBudget(100 * MIB, wait_s=0.01)
    client = Client([bytes(MIB)] * 4, budget)

    assert len(await read(client, 4 * MIB, budget)) == 4 * MIB
    assert client.asked == [MIB, 2 * MIB, 3 * MIB, 4 * MIB]
    assert budget.held_bytes == 0


async def test_nothing_is_read_for_which_there_is_no_room() -> None:
    """The client is not even asked for the body."""
    budget = ByteBudget(MIB, wait_s=0.01)
    await budget.acquire(MIB)
    client = Client([b"abc"])

    with pytest.raises(BusyError):
        await read(client, 3, budget)
    assert client.asked == []


@pytest.mark.parametrize("pieces", [[b"abcd"], [b"ab"], [b"abc", b"d"], [b"a", b"b"], [b""]])
async def test_another_length_than_was_announced_is_refused(pieces: list[bytes]) -> None:
    """More bytes, or fewer."""
    with pytest.raises(BadBodyError):
        await read(Client(pieces), 3)


async def test_a_client_that_leaves_is_gone() -> None:
    """What it has sent is no body."""
    with pytest.raises(ClientGoneError):
        await read(Client([]), 3)


async def test_no_body_is_not_asked_for() -> None:
    """It has arrived."""
    client = Client([])

    assert await read(client, 0) == b""
    assert client.asked == []


async def test_a_silence_is_not_waited_for() -> None:
    """Longer than is said."""

    async def never() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    body = Incoming(never, {b"content-length": b"3"}, timeout_s=0.02)
    with pytest.raises(SlowBodyError):
        await body.read(3, ByteReservation(ByteBudget(MIB, wait_s=1)))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, LengthRequiredError),
        ({b"transfer-encoding": b"chunked"}, LengthRequiredError),
        ({b"transfer-encoding": b"chunked", b"content-length": b"3"}, LengthRequiredError),
        ({b"content-length": b"-3"}, LengthRequiredError),
        ({b"content-length": b"3, 3"}, LengthRequiredError),
        ({b"content-length": b"5"}, TooLargeError),
    ],
)
def test_the_length_is_told_and_bounded(given: dict[bytes, bytes], error: type[Exception]) -> None:
    """Before anything is read."""
    with pytest.raises(error):
        Incoming(None, given, timeout_s=1).length(4)


@pytest.mark.parametrize("pieces", [[b"abc", b"de"], [b"abcd", b"ef"]])
async def test_a_body_that_tells_where_it_ends_is_bounded(pieces: list[bytes]) -> None:
    """Its length need not be announced."""
    client = Client(pieces)
    body = Incoming(client.receive, {b"transfer-encoding": b"chunked"}, timeout_s=1)
    held = ByteReservation(ByteBudget(MIB, wait_s=1))
    if sum(map(len, pieces)) > 5:
        with pytest.raises(BadBodyError):
            await body.read_framed(5, held)
    else:
        assert await body.read_framed(5, held) == b"abcde"


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_connection_with_an_unread_body_is_closed(is_read: bool) -> None:  # noqa: FBT001
    """What still arrives is dropped first, or the answer could be lost."""
    client = Client([b"abc"] * 3)
    body = incoming(client, 9)
    if is_read:
        await body.read(9, ByteReservation(ByteBudget(MIB, wait_s=1)))
    await lingering_writer(client.send, body)(HTTPStatus.OK, [], b"answer")
    start, *rest = client.heard

    assert ((b"connection", b"close") in start["headers"]) is not is_read
    assert b"".join(each["body"] for each in rest) == b"answer"
    assert len(client.asked) == 3
    assert not rest[-1].get("more_body")
