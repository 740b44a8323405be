"""`shardgate.auth.sigv4`: signatures of bodies and of their frames."""

import hashlib
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final
from uuid import uuid4

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.auth.sigv4 import SignatureChain
from shardgate.errors import BadBodyError, SignatureError
from shardgate.server.body import decode_aws_chunked
from tests.support.auth.people import KEY_ID, SECRET, signing_service
from tests.support.auth.sigv4 import Headers, Request, Scope, Signer, check, seed_of

SIGNER: Final = Signer()
SEALED: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
TRAILED: Final = f"{SEALED}-TRAILER"
PUT: Final = Request("PUT", "/lab/k", payload=SEALED)
PIECES: Final = (b"a" * 65536, b"a" * 1024)


def seal_of(request: Request) -> SignatureChain:
    """Return the signature chain with which the service checks the body of *request*."""
    signed = check(SIGNER.signed(request))
    assert signed is not None
    assert signed.frames is not None
    return signed.frames


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
    """Decode frames with the service's code."""
    return decode_aws_chunked(data, length, seal_of(replace(PUT, payload=payload)))


EXAMPLE: Final = Request(
    "PUT",
    "/examplebucket/chunkObject.txt",
    headers=(
        ("host", "s3.amazonaws.com"),
        ("x-amz-storage-class", "REDUCED_REDUNDANCY"),
        ("content-encoding", "aws-chunked"),
        ("x-amz-decoded-content-length", "66560"),
    ),
)


@pytest.mark.parametrize(
    ("header", "trailers", "signatures"),
    [
        (
            ("content-length", "66824"),
            None,
            (
                b"ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
                b"0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
                b"b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
            ),
        ),
        (
            ("x-amz-trailer", "x-amz-checksum-crc32c"),
            [("x-amz-checksum-crc32c", "sOO8/Q==")],
            (
                b"b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
                b"1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
                b"2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
                b"d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435",
            ),
        ),
    ],
)
def test_chunk_signatures_equal_the_published_examples(
    header: tuple[str, str], trailers: Headers | None, signatures: tuple[bytes, ...]
) -> None:
    """Signed frames equal the examples that Amazon publishes, and their bodies are accepted."""
    payload = SEALED if trailers is None else TRAILED
    request = replace(EXAMPLE, headers=(*EXAMPLE.headers, header), payload=payload)
    data = framed(PIECES, trailers, request)
    body, read = decode_aws_chunked(data, 66560, seal_of(request))

    assert trailers or (len(data), read) == (66824, {})
    assert all(signature in data for signature in signatures)
    assert body == b"".join(PIECES)


BODIES: Final = st.lists(st.binary(min_size=1, max_size=40), max_size=4)
SOME_TRAILERS: Final = st.none() | st.lists(
    st.tuples(st.sampled_from(["x-amz-checksum-crc32", "a"]), st.text("Aa0/=", max_size=8)),
    max_size=2,
    unique_by=lambda trailer: trailer[0],
)


@settings(max_examples=40)
@given(BODIES, SOME_TRAILERS, st.data())
def test_changed_byte_of_a_signed_body_is_refused(
    pieces: list[bytes], trailers: Headers | None, data: st.DataObject
) -> None:
    """Signed frames decode to their body and trailers; with a changed byte they are refused."""
    payload, body = SEALED if trailers is None else TRAILED, b"".join(pieces)
    right = framed(pieces, trailers)
    decoded = unframed(right, len(body), payload)
    told = {name.encode(): value.encode() for name, value in trailers or ()}
    assert decoded[0] == body
    assert told.items() <= decoded[1].items()
    at = data.draw(st.integers(0, len(right) - 1))
    bits = data.draw(st.integers(1, 255))
    wrong = right[:at] + bytes([right[at] ^ bits]) + right[at + 1 :]

    with suppress(BadBodyError, SignatureError):
        assert unframed(wrong, len(body), payload) == decoded


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
def test_reordered_or_missing_frame_is_refused(data: bytes, length: int) -> None:
    """Frames that are moved, repeated, left out, unsigned or of another request are refused."""
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
def test_changed_trailer_is_refused(old: bytes, new: bytes) -> None:
    """Signed trailers that are changed, moved, added or left out are refused."""
    with pytest.raises(SignatureError):
        unframed(FRAMES, 6, TRAILED)
    assert unframed(TRAILED_FRAMES, 3, TRAILED)[0] == b"abc"
    assert old in TRAILED_FRAMES

    with pytest.raises(SignatureError):
        unframed(TRAILED_FRAMES.replace(old, new), 3, TRAILED)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve two empty folders to the holder of the key."""
    with (
        signing_service(tmp_path_factory.mktemp("data")) as served,
        httpx.Client(base_url=served.url, timeout=20) as opened,
    ):
        yield opened


class Sender:
    """Sends signed requests to the service."""

    def __init__(self, client: httpx.Client) -> None:
        timestamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._signer = Signer(KEY_ID, SECRET, timestamp)
        self._client = client

    def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *more: tuple[str, str],
        signed: str | None = None,
    ) -> httpx.Response:
        """Sign the digest of *body*, or *signed* instead of it, and *more* headers."""
        request = self._request(method, path, signed or hashlib.sha256(body).hexdigest(), *more)
        return self._deliver(self._signer.signed(request), body)

    def stream(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        trailers: Headers | None = None,
        instead: tuple[bytes, bytes] = (b"", b""),
    ) -> httpx.Response:
        """Sign *body* in frames of 64 KiB, and send the second of *instead* for the first."""
        more = [("x-amz-decoded-content-length", str(len(body)))]
        payload = SEALED if trailers is None else TRAILED
        scope = self._signer.signed(self._request(method, path, payload, *more))
        pieces = [body[at : at + 65536] for at in range(0, len(body), 65536)]
        data = self._signer.frames(seed_of(scope), pieces, trailers)
        return self._deliver(scope, data.replace(*instead, 1))

    def _request(self, method: str, path: str, payload: str, *more: tuple[str, str]) -> Request:
        host = ("host", f"{self._client.base_url.host}:{self._client.base_url.port}")
        path, _, query = path.partition("?")
        return Request(method, path, query, (host, *more), payload)

    def _deliver(self, scope: Scope, body: bytes) -> httpx.Response:
        path = (scope["raw_path"] + b"?" + scope["query_string"]).decode().removesuffix("?")
        return self._client.request(
            scope["method"], path, content=body, headers=dict(scope["headers"])
        )


@pytest.fixture
def sender(client: httpx.Client) -> Sender:
    """Return a sender that signs with the current time."""
    return Sender(client)


@pytest.fixture
def path() -> str:
    """Return a new key."""
    return f"/lab/{uuid4()}"


@pytest.mark.parametrize("size", [0, 3, 200_000])
@pytest.mark.parametrize("trailers", [None, []])
def test_signed_frames_are_stored(
    sender: Sender, path: str, size: int, trailers: Headers | None
) -> None:
    """A PUT with signed frames stores its body, of any size."""
    body = bytes(range(250)) * (size // 250) + b"x" * (size % 250)

    assert sender.stream("PUT", path, body, trailers=trailers).status_code == 200
    assert sender.send("GET", path).content == body


def test_wrong_or_missing_frames_are_refused(sender: Sender, path: str) -> None:
    """A wrong frame is SignatureDoesNotMatch, missing ones are 411; neither stores anything."""
    wrong = sender.stream("PUT", path, b"a" * 200_000, instead=(b"aaa", b"aab"))

    assert wrong.status_code == 403
    assert "<Code>SignatureDoesNotMatch</Code>" in wrong.text
    assert sender.send("PUT", path, b"abc", signed=SEALED).status_code == 411
    assert sender.send("GET", path).status_code == 404


DELETION: Final = b"<Delete><Object><Key>kept</Key></Object></Delete>"
OF_A_KEY: Final = "/lab/kept"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", OF_A_KEY, b"abc"),
        ("POST", "/lab?delete", DELETION),
        ("PUT", "/lab/k?partNumber=1&uploadId=UPLOAD", b"abc"),
        ("POST", "/lab/k?uploadId=UPLOAD", b"<CompleteMultipartUpload/>"),
        ("POST", "/api/datasets", b'{"name": "repo"}'),
        ("POST", "/api/datasets/REPO/chunks", b"abc"),
        ("POST", "/api/datasets/REPO/commits", b'{"message": "", "changes": []}'),
        ("POST", "/api/datasets/REPO/sessions", b"{}"),
        ("PUT", "/REPO/@session.SESSION/zarr.json", b"{}"),
    ],
)
def test_body_that_differs_from_its_signature_is_refused(
    sender: Sender, made: dict[str, str], method: str, path: str, body: bytes
) -> None:
    """A body that differs from its signed digest is 400; changed signed frames are 403 or 415."""
    for name, value in made.items():
        path = path.replace(name, value)

    told = sender.send(method, path, body, signed=hashlib.sha256(b"other").hexdigest())
    assert told.status_code == 400
    assert "x-amz-content-sha256" in told.text
    framed_wrongly = sender.stream(method, path, body, instead=(body, body[::-1]))
    assert framed_wrongly.status_code in {403, 415}
    assert sender.send("GET", OF_A_KEY).text == "kept"


@pytest.fixture(scope="module")
def made(client: httpx.Client) -> dict[str, str]:
    """Create the objects that requests refer to, by signed requests of each kind."""
    sender = Sender(client)
    assert sender.stream("PUT", OF_A_KEY, b"kept").status_code == 200
    upload = sender.send("POST", "/lab/k?uploads").text
    assert sender.stream("POST", "/api/datasets", b'{"name": "repo"}').status_code == 201
    session = sender.send("POST", "/api/datasets/repo/sessions", b"{}").json()["session_id"]
    with httpx.Client(base_url=client.base_url, proxy=str(client.base_url)) as proxied:
        assert Sender(proxied).send("GET", OF_A_KEY).text == "kept"
    return {
        "UPLOAD": upload.partition("<UploadId>")[2].partition("<")[0],
        "REPO": "repo",
        "SESSION": session,
    }
