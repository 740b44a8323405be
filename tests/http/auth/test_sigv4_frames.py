"""`app.http.auth.sigv4`: signatures of the frames of a body."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BadBodyError, SignatureError
from app.http.auth.sigv4 import ChunkSigner
from app.http.body import decode_aws_chunked
from tests.http.auth.checking import check
from tests.http.auth.sigv4 import (
    UNSIGNED,
    Headers,
    Request,
    Signer,
    seed_of,
)

SIGNER: Final = Signer()
SEALED: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"

TRAILED: Final = f"{SEALED}-TRAILER"

PUT: Final = Request("PUT", "/lab/k", payload=SEALED)

PIECES: Final = (b"a" * 65536, b"a" * 1024)

TRAILERS: Final = [("x-amz-checksum-crc32c", "sOO8/Q==")]


def seal_of(request: Request, signer: Signer = SIGNER) -> ChunkSigner:
    """Let the service check a request, whose body it will check by the seal."""
    signed = check(signer.signed(request))
    assert signed is not None
    assert signed.chunks is not None
    return signed.chunks


def framed(
    pieces: Sequence[bytes], trailers: Headers | None = None, request: Request = PUT
) -> bytes:
    """Sign a request and the frames of its body."""
    payload = SEALED if trailers is None else TRAILED
    request = replace(request, payload=payload)
    return SIGNER.frames(seed_of(SIGNER.signed(request)), pieces, trailers)


def unframed(
    data: bytes, length: int, payload: str = SEALED
) -> tuple[bytes, Mapping[bytes, bytes]]:
    """Let the service take the frames off."""
    return decode_aws_chunked(data, length, seal_of(replace(PUT, payload=payload)).chain())


def test_the_example_of_the_specification() -> None:
    """The signatures of frames that Amazon publishes are what tests sign, and are right."""
    request = Request(
        "PUT",
        "/examplebucket/chunkObject.txt",
        headers=(
            ("host", "s3.amazonaws.com"),
            ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
            ("content-encoding", "aws-chunked"),
            ("x-amz-decoded-content-length", "66560"),
            ("content-length", "66824"),
        ),
        payload=SEALED,
    )
    data = framed(PIECES, request=request)

    assert len(data) == 66824
    for signature in (
        b"ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
        b"0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
        b"b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
    ):
        assert signature in data
    assert decode_aws_chunked(data, 66560, seal_of(request).chain()) == (b"".join(PIECES), {})


def test_the_example_with_trailers() -> None:
    """So is that of a checksum behind the body."""
    request = Request(
        "PUT",
        "/examplebucket/chunkObject.txt",
        headers=(
            ("host", "s3.amazonaws.com"),
            ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
            ("content-encoding", "aws-chunked"),
            ("x-amz-decoded-content-length", "66560"),
            ("x-amz-trailer", "x-amz-checksum-crc32c"),
        ),
        payload=TRAILED,
    )
    data = framed(PIECES, TRAILERS, request)

    for signature in (
        b"b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
        b"1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
        b"2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
        b"d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435",
    ):
        assert signature in data
    assert decode_aws_chunked(data, 66560, seal_of(request).chain())[0] == b"".join(PIECES)


@pytest.mark.parametrize("payload", ["0" * 64, UNSIGNED, "STREAMING-UNSIGNED-PAYLOAD-TRAILER"])
def test_other_bodies_have_no_signatures_in_them(payload: str) -> None:
    """They are compared with the digest that is signed, or not at all, as their client chose."""
    signed = check(SIGNER.signed(replace(PUT, payload=payload)))

    assert signed is not None
    assert signed.chunks is None


BODIES: Final = st.lists(st.binary(min_size=1, max_size=40), max_size=4)

SOME_TRAILERS: Final = st.none() | st.lists(
    st.tuples(st.sampled_from(["x-amz-checksum-crc32", "a"]), st.text("Aa0/=", max_size=8)),
    max_size=2,
    unique_by=lambda trailer: trailer[0],
)


@given(BODIES, SOME_TRAILERS)
def test_bodies_arrive_whole(pieces: list[bytes], trailers: Headers | None) -> None:
    """However they are cut into frames."""
    payload, body = SEALED if trailers is None else TRAILED, b"".join(pieces)

    found, read = unframed(framed(pieces, trailers), len(body), payload)
    assert found == body
    told = {name.encode(): value.encode() for name, value in trailers or ()}
    assert told.items() <= read.items()


@given(BODIES, SOME_TRAILERS, st.data())
def test_no_byte_of_a_body_can_be_changed(
    pieces: list[bytes], trailers: Headers | None, data: st.DataObject
) -> None:
    """Nor of a size, a signature or a trailer, unless it means the same."""
    payload, body = SEALED if trailers is None else TRAILED, b"".join(pieces)
    right = framed(pieces, trailers)
    at = data.draw(st.integers(0, len(right) - 1))
    bits = data.draw(st.integers(1, 255))
    wrong = right[:at] + bytes([right[at] ^ bits]) + right[at + 1 :]

    try:
        found = unframed(wrong, len(body), payload)
    except (BadBodyError, SignatureError):
        return
    assert found == unframed(right, len(body), payload)


FRAMES: Final = framed([b"abc", b"def"])

FIRST: Final = FRAMES[: FRAMES.index(b"abc") + 5]

SECOND: Final = FRAMES[len(FIRST) : FRAMES.index(b"def") + 5]

LAST: Final = FRAMES[len(FIRST) + len(SECOND) :]


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (SECOND + FIRST + LAST, 6),
        (SECOND + LAST, 3),
        (FIRST + LAST, 3),
        (FIRST + FIRST + SECOND + LAST, 9),
        (LAST, 0),
        (b"3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n", 6),
        (FIRST + SECOND + b"0\r\n\r\n", 6),
        (FIRST + b"3;chunk-signature=\r\ndef\r\n" + LAST, 6),
        (FRAMES.replace(b"chunk-signature", b"chunk-signatur"), 6),
        (framed([b"abc", b"def"], request=replace(PUT, path="/lab/other")), 6),
        (FRAMES.removesuffix(b"\r\n") + b"x-amz-checksum-crc32:AAAAAA==\r\n\r\n", 6),
    ],
)
def test_frames_are_a_chain(data: bytes, length: int) -> None:
    """Each is signed over the one before, the first over the request; nothing follows the last."""
    with pytest.raises(SignatureError) as refused:
        unframed(data, length)

    assert refused.value.code == "SignatureDoesNotMatch"


TRAILED_FRAMES: Final = framed([b"abc"], [("a", "1"), ("b", "2")])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"a:1\r\n", b""),
        (b"a:1\r\n", b"a:1\r\na:1\r\n"),
        (b"a:1\r\n", b"a:2\r\n"),
        (b"a:1\r\nb:2\r\n", b"b:2\r\na:1\r\n"),
        (b"x-amz-trailer-signature:", b"x-amz-trailer-signature:0"),
        (b"x-amz-trailer-signature:", b"x-amz-trailer-signatur:"),
        (b"a:1\r\nb:2\r\n", b""),
        (b"\r\n\r\n", b"\r\nc:3\r\n\r\n"),
    ],
)
def test_trailers_are_signed_together(old: bytes, new: bytes) -> None:
    """Their signature comes last."""
    assert unframed(TRAILED_FRAMES, 3, TRAILED)[0] == b"abc"
    assert old in TRAILED_FRAMES

    with pytest.raises(SignatureError):
        unframed(TRAILED_FRAMES.replace(old, new), 3, TRAILED)


def test_trailers_that_are_announced_as_signed_are() -> None:
    """A body that ends without them is not what its client sent."""
    with pytest.raises(SignatureError):
        unframed(FRAMES, 6, TRAILED)
