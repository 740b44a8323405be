"""Signed bodies as a server receives them."""

import threading
import tracemalloc
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from pydantic import SecretStr

from shardgate.errors import StorageUnavailableError
from shardgate.model import ObjectRef
from shardgate.settings import StoreSettings
from shardgate.storage.refusals import Refusal
from shardgate.storage.s3_client import S3Client, shared_loader
from tests.support.storage.listening import Handler, Listener

MIB: Final = 1024**2
BODY: Final = bytes(range(256)) * 4096 * 8
REF: Final = ObjectRef("s3://bucket", "some/key of ours")
OPERATIONS: Final[dict[str, dict[str, Any]]] = {
    "put_object": {"Metadata": {"ids": "one"}, "IfMatch": '"e"'},
    "upload_part": {"UploadId": "id", "PartNumber": 3},
}


@dataclass
class Heard:
    """Requests that a server received, and its behaviour."""

    url: str = ""
    keeps: bool = True
    continues: bool = True
    """Whether bodies are asked for with ``100 Continue``."""
    refuses: bool = False
    """Whether requests are refused before their bodies."""
    error: bytes = b""
    """Error document with which all requests are refused."""
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)


class _Handler(Handler[Heard]):
    def handle_expect_100(self) -> bool:
        heard = self.server.owner
        if heard.refuses:
            heard.requests.append((dict(self.headers), b""))
            self.send_response(412)
            self.send_header("Content-Length", "0")
            self.end_headers()
            self.close_connection = True
            return False
        return super().handle_expect_100() if heard.continues else True

    def answer(self) -> None:
        heard = self.server.owner
        if heard.keeps:
            heard.requests.append((dict(self.headers), self.body()))
        else:
            nbytes = int(self.headers["Content-Length"])
            while nbytes:
                nbytes -= len(self.rfile.read(min(nbytes, 64 * 1024)))
        self.send_response(403 if heard.error else 200)
        self.send_header("ETag", '"e"')
        self.send_header("Content-Length", str(len(heard.error)))
        self.end_headers()
        self.wfile.write(heard.error)


@pytest.fixture
def heard() -> Generator[Heard]:
    """Start a server."""
    listener = Listener(_Handler, made := Heard())
    made.url = listener.url
    with listener.running():
        yield made


@pytest.fixture
async def s3(heard: Heard) -> AsyncGenerator[S3Client]:
    """Open a client of the server with a key."""
    key = {"access_key_id": "id", "secret_access_key": SecretStr("secret")}
    async with aclosing(S3Client(StoreSettings(endpoint_url=heard.url, **key))) as opened:
        yield opened


@pytest.mark.parametrize("nbytes", [0, 1, MIB - 1, MIB, MIB + 1, 8 * MIB])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_bodies_of_any_size_are_sent_and_signed(
    heard: Heard, s3: S3Client, operation: str, nbytes: int
) -> None:
    """The digest of each body is signed, and only a large one has ``Expect``."""
    for size in (9, nbytes):
        await s3.send(REF, operation, Body=BODY[:size], **OPERATIONS[operation])

    (small, _), (headers, body) = heard.requests
    is_large = nbytes >= MIB
    assert headers.keys() - small.keys() == ({"Expect"} if is_large else set())
    assert small.keys() <= headers.keys()
    assert small.get("Content-Type") == headers.get("Content-Type")
    assert body == BODY[:nbytes]
    assert headers["X-Amz-Content-SHA256"] == sha256(body).hexdigest()


@pytest.mark.parametrize(("operation", "nbytes"), [("upload_part", 9), ("put_object", 8 * MIB)])
async def test_body_is_sent_to_a_server_that_never_asks_for_it(
    heard: Heard, s3: S3Client, operation: str, nbytes: int
) -> None:
    """A server that never answers ``100 Continue`` is sent the body all the same."""
    heard.continues = False

    answer = await s3.send(REF, operation, Body=BODY[:nbytes], **OPERATIONS[operation])

    assert not isinstance(answer, Refusal)
    assert heard.requests[0][1] == BODY[:nbytes]


async def test_first_request_reads_no_description_of_s3(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new client has botocore's descriptions of S3; its first request reads no file of them."""
    shared_loader.cache_clear()
    async with aclosing(S3Client(StoreSettings(endpoint_url=heard.url, anonymous=True))) as s3:
        monkeypatch.setattr(shared_loader(), "file_loader", None)

        await s3.send(REF, "put_object", Body=b"body")

    assert heard.requests[0][1] == b"body"


async def test_large_body_of_a_refused_request_is_not_sent(heard: Heard, s3: S3Client) -> None:
    """A server that refuses a request by its head gets no large body, and its answer counts."""
    heard.refuses = True

    answer = await s3.send(REF, "put_object", Body=BODY, IfMatch='"e"')

    assert isinstance(answer, Refusal)
    assert answer.status == 412


async def test_a_large_body_is_not_copied(heard: Heard, s3: S3Client) -> None:
    """Sending a large body takes less than half of its size in memory."""
    heard.keeps = False
    await s3.send(REF, "put_object", Body=BODY[:9])
    tracemalloc.start()
    await s3.send(REF, "put_object", Body=BODY)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < len(BODY) / 2


async def test_anonymous_body_is_not_signed(heard: Heard) -> None:
    """An anonymous client sends a large body without a signature."""
    async with aclosing(S3Client(StoreSettings(endpoint_url=heard.url, anonymous=True))) as s3:
        await s3.send(REF, "put_object", Body=BODY)

    ((headers, body),) = heard.requests
    assert body == BODY
    assert "Authorization" not in headers


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_large_body_is_not_hashed_on_the_event_loop(
    s3: S3Client, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """The digest of a large body is computed in a thread, and used by botocore's signer."""
    hashed: list[str] = []
    payload, digest = S3SigV4Auth.payload, sha256

    def hash_in_signer(signer: S3SigV4Auth, request: AWSRequest) -> Any:
        hashed.append("signer")
        return payload(signer, request)

    def hash_in_thread(body: bytes) -> Any:
        hashed.append("loop" if threading.current_thread() is here else "thread")
        return digest(body)

    here = threading.current_thread()
    monkeypatch.setattr(S3SigV4Auth, "payload", hash_in_signer)
    monkeypatch.setattr("shardgate.storage.s3_client.sha256", hash_in_thread)
    for size in (9, len(BODY)):
        await s3.send(REF, operation, Body=BODY[:size], **OPERATIONS[operation])

    assert hashed == ["signer", "thread"]


@pytest.mark.parametrize(
    "document", [b"<Error>?</Error>", b"<ErrorResponse>?</ErrorResponse>", b"?"]
)
@pytest.mark.parametrize("operation", ["put_object", "delete_object"])
async def test_deep_error_document_of_a_server_means_that_it_is_unavailable(
    heard: Heard, s3: S3Client, document: bytes, operation: str
) -> None:
    """An error document of elements nested 10,000 deep raises StorageUnavailableError."""
    heard.error = document.replace(b"?", b"<a>" * 10_000 + b"</a>" * 10_000)

    with pytest.raises(StorageUnavailableError):
        await s3.send(REF, operation)
