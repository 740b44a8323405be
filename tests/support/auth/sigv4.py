"""An S3 client that signs requests, written from the specification, and the service's check."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, unquote_plus

import pytest
from pydantic import SecretStr

from shardgate.auth.sigv4 import Signatures, SignedRequest
from shardgate.errors import SignatureError
from shardgate.settings import CallerSettings

NOW: Final = datetime(2013, 5, 24, tzinfo=UTC).timestamp()
KEY_ID: Final = "AKIAIOSFODNN7EXAMPLE"
SECRET: Final = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
OF_NOTHING: Final = hashlib.sha256(b"").hexdigest()
UNSIGNED: Final = "UNSIGNED-PAYLOAD"
_ALGORITHM: Final = "AWS4-HMAC-SHA256"
HOST: Final = ("host", "examplebucket.s3.amazonaws.com")

type Headers = Sequence[tuple[str, str]]
type Scope = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A request to sign and send."""

    method: str = "GET"
    path: str = "/lab/c/0/0"
    query: str = ""
    headers: Headers = (HOST,)
    payload: str = OF_NOTHING

    def scope(self, *more: tuple[str, str]) -> Scope:
        """Return the ASGI scope of the request."""
        return {
            "type": "http",
            "method": self.method,
            "raw_path": self.path.encode(),
            "query_string": self.query.encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in (*self.headers, *more)],
        }


@dataclass(frozen=True)
class Signer:
    """A client that signs with one key."""

    key_id: str = KEY_ID
    secret: str = SECRET
    timestamp: str = "20130524T000000Z"
    region: str = "us-east-1"
    service: str = "s3"
    terminal: str = "aws4_request"

    @property
    def scope(self) -> str:
        """Return the scope of the signing key."""
        return f"{self.timestamp[:8]}/{self.region}/{self.service}/{self.terminal}"

    def key(self) -> bytes:
        """Derive the signing key."""
        key = b"AWS4" + self.secret.encode()
        for part in self.scope.split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        return key

    def sign(self, text: str) -> str:
        """Sign any text."""
        return hmac.new(self.key(), text.encode(), hashlib.sha256).hexdigest()

    def frames(self, seed: str, pieces: Sequence[bytes], trailers: Headers | None = None) -> bytes:
        """Frame a body whose request has the signature *seed*; trailers are signed as well."""
        framed = []
        for piece in (*pieces, b""):
            digests = f"{OF_NOTHING}\n{hashlib.sha256(piece).hexdigest()}"
            seed = self._link("PAYLOAD", seed, digests)
            framed.append(b"%x;chunk-signature=%b\r\n" % (len(piece), seed.encode()))
            framed.append(piece + b"\r\n")
        if trailers is None:
            return b"".join(framed)
        lines = "".join(f"{name}:{value}\n" for name, value in trailers)
        seed = self._link("TRAILER", seed, hashlib.sha256(lines.encode()).hexdigest())
        last = f"{lines}x-amz-trailer-signature:{seed}\n\n".replace("\n", "\r\n")
        return b"".join(framed).removesuffix(b"\r\n") + last.encode()

    def _link(self, kind: str, last: str, digests: str) -> str:
        head = f"{_ALGORITHM}-{kind}\n{self.timestamp}\n{self.scope}"
        return self.sign(f"{head}\n{last}\n{digests}")

    def signed(self, request: Request, *, unsigned: Headers = ()) -> Scope:
        """Sign all headers of *request* in a header, and add *unsigned* ones."""
        told = [("x-amz-date", self.timestamp), ("x-amz-content-sha256", request.payload)]
        request = replace(request, headers=(*request.headers, *told))
        names = _names(request.headers)
        value = (
            f"{_ALGORITHM} Credential={self.key_id}/{self.scope}, "
            f"SignedHeaders={names}, Signature={self.signature(request)}"
        )
        return request.scope(("authorization", value), *unsigned)

    def presigned(self, request: Request, expires: int | str = 900) -> Scope:
        """Sign the request in its query."""
        told = {
            "X-Amz-Algorithm": _ALGORITHM,
            "X-Amz-Credential": f"{self.key_id}/{self.scope}",
            "X-Amz-Date": self.timestamp,
            "X-Amz-Expires": str(expires),
            "X-Amz-SignedHeaders": _names(request.headers),
        }
        pairs = [f"{name}={_spelled(value)}" for name, value in told.items()]
        query = "&".join([*filter(None, [request.query]), *pairs])
        request = replace(request, query=query, payload=UNSIGNED)
        return replace(request, query=f"{query}&X-Amz-Signature={self.signature(request)}").scope()

    def signature(self, request: Request) -> str:
        """Return the signature of a request."""
        lines = [
            request.method,
            request.path,
            _canonical(request.query),
            *(f"{name}:{value}" for name, value in _joined(request.headers)),
            "",
            _names(request.headers),
            request.payload,
        ]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return self.sign(f"{_ALGORITHM}\n{self.timestamp}\n{self.scope}\n{digest}")


PLAIN: Final = Request()


def authorization(scope: Scope) -> str:
    """Return the Authorization header of a signed request."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    return headers[b"authorization"].decode()


def seed_of(scope: Scope) -> str:
    """Return the signature of a request."""
    return authorization(scope).rpartition("=")[2]


def with_header(scope: Scope, name: str, value: str | None) -> Scope:
    """Replace a header, or remove it."""
    kept = [(k, v) for k, v in scope["headers"] if k != name.encode()]
    new = [] if value is None else [(name.encode(), value.encode())]
    return {**scope, "headers": [*kept, *new]}


def _spelled(text: str) -> str:
    return quote(text, safe="-_.~")


def _canonical(query: str) -> str:
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    spelled = [(_spelled(unquote_plus(k)), _spelled(unquote_plus(v))) for k, _, v in pairs]
    return "&".join(f"{k}={v}" for k, v in sorted(spelled))


def _joined(headers: Headers) -> Iterable[tuple[str, str]]:
    for name in sorted({name.lower() for name, _ in headers}):
        values = (" ".join(v.split()) for k, v in headers if k.lower() == name)
        yield name, ",".join(values)


def _names(headers: Headers) -> str:
    return ";".join(name for name, _ in _joined(headers))


CALLERS: Final = {
    "ann": CallerSettings(access_key_id=KEY_ID, secret_access_key=SecretStr(SECRET)),
    "bob": CallerSettings(access_key_id="B0B", secret_access_key=SecretStr("another")),
    "tim": CallerSettings(token_sha256=("0" * 64,)),
}


def check_by(signatures: Signatures, scope: Scope) -> SignedRequest | None:
    """Let *signatures* check a request."""
    return signatures.check(
        scope["method"], scope["raw_path"], scope["query_string"], scope["headers"]
    )


def check(scope: Scope, *, at: float = NOW) -> SignedRequest | None:
    """Check a request with the service's code at some time."""
    return check_by(Signatures(CALLERS, clock=lambda: at), scope)


def who(scope: Scope, *, at: float = NOW) -> str | None:
    """Return the name of the caller who signed."""
    signed = check(scope, at=at)
    return None if signed is None else signed.caller.name


def code_of(scope: Scope, *, at: float = NOW) -> str:
    """Return S3's error code of a request that is refused."""
    with pytest.raises(SignatureError) as refused:
        check(scope, at=at)
    return refused.value.code
