"""How large bodies are signed and sent, as a server sees it."""

import threading
import tracemalloc
from collections.abc import Generator
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
from app.storage.s3.client import S3Client

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


def client(heard: Heard, *, anonymous: bool = False) -> S3Client:
    """Speak to the server, with a key or without."""
    keys = {} if anonymous else {"access_key_id": "id", "secret_access_key": SecretStr("secret")}
    return S3Client(StoreSettings(endpoint_url=heard.url, anonymous=anonymous, **keys))


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
    heard: Heard, operation: str, nbytes: int
) -> None:
    """The digest is that of the bytes that arrive, and the signature the one of botocore."""
    s3 = client(heard)
    await s3.ask(REF, operation, Body=BODY[:nbytes], **OPERATIONS[operation])
    await s3.aclose()

    ((path, headers, body),) = heard.requests
    assert body == BODY[:nbytes]
    assert headers["X-Amz-Content-SHA256"] == sha256(body).hexdigest()
    assert headers["Authorization"].endswith(signed(heard.url + path, headers, body))


async def test_large_bodies_have_the_headers_of_small_ones(heard: Heard) -> None:
    """It cannot be told from them how a body was sent."""
    s3 = client(heard)
    for body in (BODY[:9], BODY):
        await s3.ask(REF, "put_object", Body=body)
    await s3.aclose()

    (_, small, _), (_, large, _) = heard.requests
    assert small.keys() == large.keys()
    assert small.get("Content-Type") == large.get("Content-Type")


async def test_without_a_key_nothing_is_signed(heard: Heard) -> None:
    """A large body is sent all the same."""
    s3 = client(heard, anonymous=True)
    await s3.ask(REF, "put_object", Body=BODY)
    await s3.aclose()

    ((_, headers, body),) = heard.requests
    assert body == BODY
    assert "Authorization" not in headers


async def test_what_is_sent_is_not_copied(heard: Heard) -> None:
    """A large body takes next to no memory besides its own."""
    heard.keeps = False
    s3 = client(heard)
    await s3.ask(REF, "put_object", Body=BODY[:9])
    tracemalloc.start()
    await s3.ask(REF, "put_object", Body=BODY)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await s3.aclose()

    assert peak < len(BODY) / 2
