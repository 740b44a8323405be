"""What a request says of its signature: in the header Authorization, or in its query."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qsl

from app.errors import SignatureError

ALGORITHM: Final = "AWS4-HMAC-SHA256"
SERVICE: Final = "s3"
TERMINAL: Final = "aws4_request"
LONGEST_S: Final = 7 * 24 * 3600
"""A presigned URL may be good for so long, as in S3."""

_SCHEMES: Final = (b"AWS4", b"AWS ")
_AUTHORIZATION: Final = "authorization"
_DATE: Final = "x-amz-date"
_PRESIGNED: Final = re.compile(rb"(?i:(?:^|&)X-Amz-(?:Algorithm|Credential|Signature)=)")
_OLD: Final = re.compile(rb"(?i:(?:^|&)AWSAccessKeyId=)")
_OF_HEADER: Final = frozenset({"Credential", "SignedHeaders", "Signature"})
_OF_QUERY: Final = ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature")
SIGNATURE: Final = "x-amz-signature"
"""The one parameter that is not signed."""
_TIMESTAMP: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z", re.ASCII)
_REGION: Final = re.compile(r"[!-~]{1,64}")
_EXPIRES: Final = re.compile(r"[0-9]{1,6}", re.ASCII)
_HEX: Final = re.compile(r"[0-9a-f]{64}")


class Received(NamedTuple):
    """A request as it arrived, decoded as far as signatures are over decoded text."""

    method: str
    path: str
    """Percent-encoded as it was sent: S3 signs it so."""
    parameters: Sequence[tuple[str, str]]
    headers: Mapping[str, Sequence[str]]
    """The values of each, by its name in lower case."""

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Self:
        """Read the scope of an ASGI request.

        Raises: `SignatureError` for a query that is not UTF-8, which nobody can have signed.
        """
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        path = scope["raw_path"].decode("latin-1")
        try:
            query = scope["query_string"].decode()
            parameters = parse_qsl(query, keep_blank_values=True, errors="strict")
        except ValueError:
            raise SignatureError("SignatureDoesNotMatch", "the query is not UTF-8") from None
        return cls(scope["method"], path, parameters, headers)

    def header(self, name: str) -> str | None:
        """Give the value of a header that is there once at most.

        Raises: `SignatureError`.
        """
        values = self.headers.get(name, ())
        if len(values) > 1:
            raise malformed(f"the header {name} is repeated")
        return values[0] if values else None

    def parameter(self, name: str) -> str | None:
        """Give the value of a parameter, in whatever case, that is there once at most.

        Raises: `SignatureError`.
        """
        values = [value for each, value in self.parameters if each.lower() == name.lower()]
        if len(values) > 1:
            raise _bad_parameters(f"{name} is repeated")
        return values[0] if values else None


class Claim(NamedTuple):
    """Who signed a request, when, and what of it."""

    key_id: str
    timestamp: str
    """``YYYYMMDDTHHMMSSZ``."""
    region: str
    """As the client chose it."""
    signed_headers: Sequence[str]
    signature: str
    expires_s: int | None
    """How long a presigned URL is good; `None` for a request that is sent at once."""

    @property
    def date(self) -> str:
        """The day that the key is made for."""
        return self.timestamp[:8]


def is_claimed(scope: Mapping[str, Any]) -> bool:
    """Tell whether a request has a signature of S3, of whatever version."""
    return _is_in_header(scope) or _is_in_query(scope)


def read_claim(scope: Mapping[str, Any], received: Received) -> Claim:
    """Read what a request that is claimed to be signed says of that.

    Raises: `SignatureError`.
    """
    if not _is_in_query(scope):
        return _from_header(received)
    if _AUTHORIZATION in received.headers:
        raise SignatureError("InvalidArgument", "the request is signed in one way, not in two")
    if _OLD.search(scope["query_string"]):
        raise _unknown("AWS Signature Version 2")
    return _from_query(received)


def malformed(reason: str) -> SignatureError:
    """Make the error of a signature in headers that cannot be understood."""
    return SignatureError("AuthorizationHeaderMalformed", reason)


def _is_in_header(scope: Mapping[str, Any]) -> bool:
    return any(
        name == b"authorization" and value.lstrip()[:4].upper() in _SCHEMES
        for name, value in scope["headers"]
    )


def _is_in_query(scope: Mapping[str, Any]) -> bool:
    query = scope["query_string"]
    return bool(query) and bool(_PRESIGNED.search(query) or _OLD.search(query))


def _from_header(received: Received) -> Claim:
    algorithm, _, rest = (received.header(_AUTHORIZATION) or "").strip().partition(" ")
    if algorithm != ALGORITHM:
        raise _unknown(algorithm)
    pairs = [pair.strip().partition("=") for pair in rest.split(",")]
    told = {name: value for name, _, value in pairs}
    if told.keys() != _OF_HEADER or len(pairs) != len(told):
        raise malformed("Authorization has one Credential, SignedHeaders and Signature")
    if (timestamp := received.header(_DATE)) is None:
        raise SignatureError("AccessDenied", "the request has no x-amz-date")
    return _claim(told, timestamp, None, malformed)


def _from_query(received: Received) -> Claim:
    told = {}
    for name in _OF_QUERY:
        value = received.parameter(f"X-Amz-{name}")
        if value is None:
            raise _bad_parameters(f"X-Amz-{name} is missing")
        told[name] = value
    if told["Algorithm"] != ALGORITHM:
        raise _unknown(told["Algorithm"])
    expires = told["Expires"]
    if not _EXPIRES.fullmatch(expires) or not 1 <= int(expires) <= LONGEST_S:
        raise _bad_parameters(f"X-Amz-Expires is a number of seconds from 1 to {LONGEST_S}")
    return _claim(told, told["Date"], int(expires), _bad_parameters)


def _claim(told: Mapping[str, str], timestamp: str, expires_s: int | None, bad: Any) -> Claim:
    """Read what both ways have in common."""
    if not _TIMESTAMP.fullmatch(timestamp):
        raise bad("the date of the signature is YYYYMMDDTHHMMSSZ")
    match told["Credential"].rsplit("/", 4):
        case [key_id, date, region, service, terminal] if key_id and _REGION.fullmatch(region):
            pass
        case _:
            raise bad(f"the credential is KEY/YYYYMMDD/REGION/{SERVICE}/{TERMINAL}")
    if date != timestamp[:8]:
        raise bad("the credential is of another day than the request")
    if (service, terminal) != (SERVICE, TERMINAL):
        raise bad(f"the credential is for {SERVICE}/{TERMINAL}")
    names = told["SignedHeaders"].split(";")
    if names != sorted({name.lower() for name in names}):
        raise bad("the signed headers are named once each, in lower case, in their order")
    if not _HEX.fullmatch(told["Signature"]):
        raise bad("the signature is 64 hexadecimal digits, in lower case")
    return Claim(key_id, timestamp, region, names, told["Signature"], expires_s)


def _bad_parameters(reason: str) -> SignatureError:
    return SignatureError("AuthorizationQueryParametersError", reason)


def _unknown(algorithm: str) -> SignatureError:
    return SignatureError(
        "InvalidRequest", f"requests are signed by {ALGORITHM}, and not by {algorithm[:40]!r}"
    )
