"""Signed bodies as a server receives them."""

import threading
import tracemalloc
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from pydantic import SecretStr

from app.model import ObjectRef
from app.settings import StoreSettings
from app.storage.s3_client import S3Client

MIB: Final = 1024**2
BODY: Final = bytes(range(256)) * 4096 * 8
REF: Final = ObjectRef("s3://bucket", "some/key of ours")
OPERATIONS: Final[dict[str, dict[str, Any]]] = {
    "put_object": {"Metadata": {"ids": "one"}, "IfMatch": '"e"'},
    "upload_part": {"UploadId": "id", "PartNumber": 3},
}


class Heard:
    """A server that takes all, and keeps it if it is to."""

    def __init__(self) -> None:
        heard = self
        self.keeps = True
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                nbytes = int(self.headers["Content-Length"])
                if heard.keeps:
                    body = self.rfile.read(nbytes)
                    heard.requests.append((self.path, dict(self.headers), body))
                else:
                    while nbytes:
                        nbytes -= len(self.rfile.read(min(nbytes, 64 * 1024)))
                self.send_response(200)
                self.send_header("ETag", '"e"')
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def heard() -> Generator[Heard]:
    """Start a server."""
    made = Heard()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture
async def s3(heard: Heard) -> AsyncGenerator[S3Client]:
    """Speak to the server with a key."""
    key = {"access_key_id": "id", "secret_access_key": SecretStr("secret")}
    async with aclosing(S3Client(StoreSettings(endpoint_url=heard.url, **key))) as opened:
        yield opened


def signed(url: str, headers: dict[str, str], body: bytes) -> str:
    """Sign with botocore's own signer what was signed, and hash the body anew for that."""
    signer = S3SigV4Auth(Credentials("id", "secret"), "s3", "us-east-1")
    names = headers["Authorization"].split("SignedHeaders=")[1].split(",")[0].split(";")
    known = {name.lower(): value for name, value in headers.items()}
    request = AWSRequest("PUT", url, {name: known[name] for name in names}, body)
    del request.headers["x-amz-content-sha256"]
    request.headers["x-amz-content-sha256"] = signer.payload(request)
    request.context["timestamp"] = known["x-amz-date"]
    canonical = signer.canonical_request(request)
    return signer.signature(signer.string_to_sign(request, canonical), request)


@pytest.mark.parametrize("nbytes", [0, 1, MIB - 1, MIB, MIB + 1, 8 * MIB])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_bodies_of_any_size_are_sent_and_signed(
    heard: Heard, s3: S3Client, operation: str, nbytes: int
) -> None:
    """Digest and signature are those of botocore, and the headers those of a small body."""
    for size in (9, nbytes):
        await s3.send(REF, operation, Body=BODY[:size], **OPERATIONS[operation])

    (_, small, _), (path, headers, body) = heard.requests
    assert small.keys() == headers.keys()
    assert small.get("Content-Type") == headers.get("Content-Type")
    assert body == BODY[:nbytes]
    assert headers["X-Amz-Content-SHA256"] == sha256(body).hexdigest()
    assert headers["Authorization"].endswith(signed(heard.url + path, headers, body))


async def test_a_large_body_is_not_copied(heard: Heard, s3: S3Client) -> None:
    """It takes next to no memory besides its own."""
    heard.keeps = False
    await s3.send(REF, "put_object", Body=BODY[:9])
    tracemalloc.start()
    await s3.send(REF, "put_object", Body=BODY)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < len(BODY) / 2


async def test_without_a_key_nothing_is_signed(heard: Heard) -> None:
    """A large body is sent all the same."""
    async with aclosing(S3Client(StoreSettings(endpoint_url=heard.url, anonymous=True))) as s3:
        await s3.send(REF, "put_object", Body=BODY)

    ((_, headers, body),) = heard.requests
    assert body == BODY
    assert "Authorization" not in headers


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_large_body_is_not_hashed_on_the_event_loop(
    s3: S3Client, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """The signer of botocore, which would, is given the digest that a thread has computed."""
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
    monkeypatch.setattr("app.storage.s3_client.sha256", hash_in_thread)
    for size in (9, len(BODY)):
        await s3.send(REF, operation, Body=BODY[:size], **OPERATIONS[operation])

    assert hashed == ["signer", "thread"]
