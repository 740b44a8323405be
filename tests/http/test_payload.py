"""`app.http.payload`: how a body is wrapped."""

import gzip

import pytest

from app.errors import UnknownCodingError
from app.http.payload import Coding, read_payload
from app.resolve.budget import ByteBudget, ByteReservation
from tests.http.test_bodies import MIB, Client, incoming


@pytest.mark.parametrize(
    ("encoding", "signed", "coding"),
    [
        (None, None, (False, False)),
        ("identity", None, (False, False)),
        ("", None, (False, False)),
        ("gzip", None, (True, False)),
        ("X-GZip", None, (True, False)),
        ("aws-chunked", None, (False, True)),
        ("gzip,aws-chunked", None, (True, True)),
        ("aws-chunked, gzip", None, (True, True)),
        (None, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", (False, True)),
        ("gzip", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", (True, True)),
        (None, "UNSIGNED-PAYLOAD", (False, False)),
    ],
)
def test_codings(encoding: str | None, signed: str | None, coding: tuple[bool, bool]) -> None:
    """A body is gzip or not, and framed or not."""
    given = {b"content-encoding": encoding, b"x-amz-content-sha256": signed}
    headers = {name: value.encode() for name, value in given.items() if value is not None}

    assert Coding.parse(headers) == coding


@pytest.mark.parametrize("encoding", [b"br", b"deflate", b"gzip, gzip", b"zstd, aws-chunked"])
def test_other_codings_are_refused(encoding: bytes) -> None:
    """What cannot be undone for whoever reads it is not stored."""
    with pytest.raises(UnknownCodingError):
        Coding.parse({b"content-encoding": encoding})


async def test_what_is_in_memory_twice_is_counted_twice() -> None:
    """A body beside its frames, and gzip beside what it holds."""
    body = gzip.compress(bytes(MIB))
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    given = {
        b"content-encoding": b"gzip, aws-chunked",
        b"content-length": b"%d" % len(framed),
        b"x-amz-decoded-content-length": b"%d" % len(body),
    }
    budget = NotingBudget(10 * MIB, wait_s=1)
    arriving = incoming(Client([framed]), len(framed))
    payload = await read_payload(arriving, given, ByteReservation(budget), most_nbytes=2 * MIB)

    assert payload == (body, True)
    assert budget.held == [len(framed), len(framed) + len(body), len(body) + MIB]


class NotingBudget(ByteBudget):
    """Notes what is held whenever that has grown."""

    def __init__(self, max_bytes: int, *, wait_s: float) -> None:
        super().__init__(max_bytes, wait_s=wait_s)
        self.held: list[int] = []

    async def acquire(self, nbytes: int, *, held_nbytes: int = 0) -> None:
        """Acquire, and note."""
        await super().acquire(nbytes, held_nbytes=held_nbytes)
        self.held.append(self.held_bytes)
