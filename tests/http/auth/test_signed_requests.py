"""Signed bodies and callers of issuers, at the service."""

import hashlib
import itertools
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import pytest

from app.settings import DatasetSettings, Settings
from tests.http.auth.issuing import JWKS, Issuer, issuing, make_key
from tests.http.auth.signing_service import KEY_ID, SECRET, signing_service
from tests.http.auth.sigv4 import (
    Headers,
    Request,
    Scope,
    Signer,
    seed_of,
)
from tests.serving import serving
from tests.storage.faulty import Fault

SEALED: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"

TRAILED: Final = f"{SEALED}-TRAILER"

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve two empty folders to who signs."""
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
        """Sign the digest of *body*, or what is *signed* instead of it, and *more* headers."""
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
    """Sign as of now."""
    return Sender(client)


@pytest.fixture
def path() -> str:
    """Name a key that is not there."""
    return f"/lab/key{next(_numbers)}"


@pytest.mark.parametrize("size", [0, 3, 70_000, 1_000_000])
@pytest.mark.parametrize("trailers", [None, []])
def test_signed_frames_are_stored(
    sender: Sender, path: str, size: int, trailers: Headers | None
) -> None:
    """Small ones and large ones."""
    body = bytes(range(250)) * (size // 250) + b"x" * (size % 250)

    assert sender.stream("PUT", path, body, trailers=trailers).status_code == 200
    assert sender.send("GET", path).content == body


@pytest.mark.parametrize("size", [3, 200_000])
def test_a_wrong_frame_is_not_stored(sender: Sender, path: str, size: int) -> None:
    """Neither is any other of that body; the answer is S3's."""
    answer = sender.stream("PUT", path, b"a" * size, instead=(b"aaa", b"aab"))

    assert answer.status_code == 403
    assert "<Code>SignatureDoesNotMatch</Code>" in answer.text
    assert sender.send("GET", path).status_code == 404


@pytest.mark.parametrize(("checksum", "status"), [(b"NSRBwg==", 200), (b"NSRBwh==", 400)])
def test_frames_that_are_not_signed_are_summed_up(
    sender: Sender, path: str, checksum: bytes, status: int
) -> None:
    """As botocore sends them over TLS; the request itself is signed."""
    body = b"3\r\nabc\r\n0\r\nx-amz-checksum-crc32:%b\r\n\r\n" % checksum
    more = [("x-amz-decoded-content-length", "3"), ("x-amz-trailer", "x-amz-checksum-crc32")]
    payload = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"

    assert sender.send("PUT", path, body, *more, signed=payload).status_code == status


def test_a_body_that_announces_frames_has_them(sender: Sender, path: str) -> None:
    """Else nothing of it would be signed."""
    answer = sender.send("PUT", path, b"abc", signed=SEALED)

    assert answer.status_code == 411
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
def test_every_body_is_what_was_signed(
    sender: Sender, made: dict[str, str], method: str, path: str, body: bytes
) -> None:
    """Whatever takes it; where signed frames are not taken at all, they are refused."""
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
    """Make what requests are about, with signed requests of each kind."""
    sender = Sender(client)
    assert sender.stream("PUT", OF_A_KEY, b"kept").status_code == 200
    upload = sender.send("POST", "/lab/k?uploads").text
    assert sender.stream("POST", "/api/datasets", b'{"name": "repo"}').status_code == 201
    session = sender.send("POST", "/api/datasets/repo/sessions", b"{}").json()["session_id"]
    return {
        "UPLOAD": upload.partition("<UploadId>")[2].partition("<")[0],
        "REPO": "repo",
        "SESSION": session,
    }


def test_a_request_in_absolute_form_is_signed_by_its_path(
    client: httpx.Client, made: dict[str, str]
) -> None:
    """As those are that are sent to proxies."""
    url = client.base_url
    with httpx.Client(base_url=url, proxy=str(url)) as proxied:
        assert Sender(proxied).send("GET", OF_A_KEY).text == "kept"


TEXT = b"what the lab may read"


class Lab(NamedTuple):
    """A service, and the issuer that it trusts."""

    issuer: Issuer
    url: str

    def read(self, token: str | None, path: str = "/em/text.txt") -> httpx.Response:
        """Ask with *token*, or without one."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx.get(f"{self.url}{path}", headers=headers)

    def mint(self, token: str | None, dataset: str = "em") -> httpx.Response:
        """Ask for a token with *token*, or without one."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx.post(f"{self.url}/api/tokens", json={"dataset": dataset}, headers=headers)


def serve_lab(folder: Path, issuer: Issuer) -> Settings:
    """Serve what the lab may read, and what only its head may."""
    for name in "em", "secret":
        (folder / name).mkdir()
        (folder / name / "text.txt").write_bytes(TEXT)
    return Settings(
        issuers={"sso": issuer.settings},
        datasets={
            "em": DatasetSettings(url=str(folder / "em"), read=("sso:lab",)),
            "secret": DatasetSettings(url=str(folder / "secret"), read=("sso:head",)),
        },
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    """Run both."""
    with issuing() as issuer:
        settings = serve_lab(tmp_path_factory.mktemp("lab"), issuer)
        with serving(settings) as url:
            yield Lab(issuer, url)


@pytest.fixture(scope="module")
def ada(lab: Lab) -> str:
    """Give the token of somebody in the lab."""
    return lab.issuer.sign({"groups": ["lab"]})


def test_what_others_may_read_is_not_there(lab: Lab, ada: str) -> None:
    """As what does not exist at all."""
    assert lab.read(ada, "/secret/text.txt").status_code == 404
    assert lab.mint(ada, "secret").status_code == 404


def test_a_minted_token_reads_by_its_path(lab: Lab, ada: str) -> None:
    """And as a bearer token; nothing else can be done with it."""
    minted = lab.mint(ada).json()

    assert lab.read(None, minted["paths"]["em"] + "text.txt").content == TEXT
    assert lab.read(minted["token"]).content == TEXT
    assert lab.read(minted["token"], "/secret/text.txt").status_code == 404
    assert lab.mint(minted["token"]).status_code == 403


def test_when_the_issuer_is_away_all_come_back_later(tmp_path: Path) -> None:
    """None is refused: readers would take that for an answer."""
    with issuing() as issuer, serving(serve_lab(tmp_path, issuer)) as url:
        issuer.server.fail(Fault.ERROR, path=JWKS)
        token = issuer.sign({"groups": ["lab"]})
        answers = [Lab(issuer, url).read(token), Lab(issuer, url).mint(token)]

    assert [answer.status_code for answer in answers] == [503, 503]
    assert all("Retry-After" in answer.headers for answer in answers)
    assert all(issuer.url not in answer.text for answer in answers)


def test_a_key_that_is_changed_is_noticed(tmp_path: Path) -> None:
    """The keys are read when the first token comes, and not before."""
    with issuing() as issuer, serving(serve_lab(tmp_path, issuer)) as url:
        issuer.publish(make_key("second"))
        token = issuer.sign({"groups": ["lab"]}, key=make_key("second"))

        assert Lab(issuer, url).read(token).content == TEXT
