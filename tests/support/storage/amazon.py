"""The hosts of Amazon's S3, in front of a SeaweedFS that has the objects of one region.

They answer requests for a bucket elsewhere as S3 does: an endpoint of another region 301, the
endpoint of all regions 307 while the bucket is new, and a signature for another region 400.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.support.seaweedfs import REGION, SeaweedFS
from tests.support.storage.listening import Handler, Listener

HOSTS: Final = (
    "*.s3.amazonaws.com",
    *(f"*.s3.{each}.amazonaws.com" for each in (REGION, "eu-west-1")),
)
"""Names in the certificate."""
_HOST: Final = re.compile(r"[a-z]+\.s3(?:\.(?P<region>[a-z0-9-]+))?\.amazonaws\.com")
_SCOPE: Final = re.compile(r"Credential=[^/%]+(?:/|%2F)[0-9]{8}(?:/|%2F)([a-z0-9-]+)(?:/|%2F)s3")


class Answered(NamedTuple):
    """A request, and the status of its answer."""

    method: str
    host: str
    status: int


class Amazon:
    """Counts requests, and passes those for the right region on."""

    def __init__(self, seaweedfs: SeaweedFS, tls: ssl.SSLContext) -> None:
        self.upstream = urlsplit(seaweedfs.endpoint_url).netloc
        self.named = REGION
        """Region that is named in redirects."""
        self.is_new = False
        """Whether the endpoint of all regions does not know the bucket yet."""
        self.seen: list[Answered] = []
        self.looked_up: set[str] = set()
        """Hosts whose addresses were asked for."""
        self._server = Listener(_Handler, self)
        self.url = self._server.url.replace("http", "https")
        self._server.socket = tls.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )

    @property
    def refused(self) -> list[Answered]:
        """Requests that were for another region."""
        return [each for each in self.seen if each.status in (301, 307, 400)]

    def be_resolved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the running event loop find all hosts here."""
        address = ("127.0.0.1", self._server.server_port)

        async def look_up(host: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
            self.looked_up.add(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address)]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)

    @contextmanager
    def running(self) -> Generator["Amazon"]:
        """Answer requests until the context ends."""
        with self._server.running():
            yield self


class _Handler(Handler[Amazon]):
    def answer(self) -> None:
        owner, body = self.server.owner, self.body()
        host = self.headers["Host"]
        parsed = _HOST.fullmatch(host)
        region = parsed and parsed["region"]
        scope = _SCOPE.search(f"{self.path} {self.headers.get('Authorization', '')}")
        if parsed is not None and (owner.is_new if region is None else region != REGION):
            self._redirect(307 if owner.is_new else 301)
        elif scope is not None and scope[1] != REGION:
            self._refuse_signature()
        else:
            self._pass_on(body)

    def _redirect(self, status: int) -> None:
        code = "TemporaryRedirect" if status == 307 else "PermanentRedirect"
        endpoint = f"bucket.s3-{self.server.owner.named}.amazonaws.com"
        headers = {"x-amz-bucket-region": self.server.owner.named}
        if status == 307:
            headers["Location"] = "https://elsewhere.example/key"
        self._refuse(status, code, f"<Endpoint>{endpoint}</Endpoint>", headers)

    def _refuse_signature(self) -> None:
        is_presigned = "Authorization" not in self.headers
        code = (
            "AuthorizationQueryParametersError" if is_presigned else "AuthorizationHeaderMalformed"
        )
        self._refuse(400, code, f"<Region>{self.server.owner.named}</Region>", {})

    def _refuse(self, status: int, code: str, members: str, headers: dict[str, str]) -> None:
        document = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code>{members}</Error>'.encode()
        self._send(status, {**headers, "Content-Length": str(len(document))}, document)

    def _pass_on(self, body: bytes) -> None:
        with closing(self.begin_upstream(self.server.owner.upstream)) as upstream:
            upstream.endheaders(body)
            answer = upstream.getresponse()
            data = answer.read()
        headers = {
            name: value for name, value in answer.getheaders() if name != "Transfer-Encoding"
        }
        if self.command != "HEAD":
            headers["Content-Length"] = str(len(data))
        self._send(answer.status, headers, data)

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.server.owner.seen.append(Answered(self.command, self.headers["Host"], status))
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(body)
