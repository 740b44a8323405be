"""AWS Signature Version 4: in headers, in presigned URLs, and of aws-chunked frames."""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Final, NamedTuple, Self
from urllib.parse import parse_qsl, quote

from shardgate.auth.access import Caller, configured_caller
from shardgate.errors import SignatureError
from shardgate.settings import CallerSettings

ALGORITHM: Final = "AWS4-HMAC-SHA256"
SERVICE: Final = "s3"
TERMINAL: Final = "aws4_request"
LONGEST_S: Final = 7 * 24 * 3600  # longest validity of a presigned URL, as in S3
SKEW_S: Final = 15 * 60  # tolerated difference of a client's clock

_AUTHORIZATION: Final = "authorization"
_PRESIGNED: Final = re.compile(rb"(?i:(?:^|&)X-Amz-(?:Algorithm|Credential|Signature)=)")
_VERSION_2: Final = re.compile(rb"(?i:(?:^|&)AWSAccessKeyId=)")
_CREDENTIAL: Final = re.compile(rf"(.+)/([0-9]{{8}})/([!-.0-~]{{1,64}})/{SERVICE}/{TERMINAL}")
_PATH: Final = re.compile(r"[!-\"$-~]*")  # characters that clients do not encode
_PAYLOAD: Final = "x-amz-content-sha256"
_UNSIGNED: Final = "UNSIGNED-PAYLOAD"
_SIGNED_FRAMES: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
_SIGNED_TRAILERS: Final = f"{_SIGNED_FRAMES}-TRAILER"
_PAYLOADS: Final = re.compile(
    f"[0-9a-f]{{64}}|{_UNSIGNED}|{_SIGNED_FRAMES}|{_SIGNED_TRAILERS}"
    "|STREAMING-UNSIGNED-PAYLOAD-TRAILER"
)
_EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()

type Fields = Sequence[tuple[bytes, bytes]]
"""Headers in their order, as they were sent."""


class ReceivedRequest(NamedTuple):
    """Request as it arrived, decoded as far as signatures are over decoded text."""

    method: str
    path: str
    """Percent-encoded as it was sent: S3 signs it so."""
    parameters: Sequence[tuple[str, str]]
    headers: Mapping[str, Sequence[str]]
    """Values of each, by its name in lower case."""

    @classmethod
    def decode(cls, method: str, path: bytes, query: bytes, fields: Fields) -> Self:
        """Decode a request. Raises: `SignatureError` if the query is not UTF-8."""
        headers: dict[str, list[str]] = {}
        for name, value in fields:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        try:
            parameters = parse_qsl(query.decode(), keep_blank_values=True, errors="strict")
        except ValueError:
            raise SignatureError("SignatureDoesNotMatch", "the query is not UTF-8") from None
        return cls(method, path.decode("latin-1"), parameters, headers)

    def header(self, name: str) -> str | None:
        """Return the value of a header. Raises: `SignatureError` if it is repeated."""
        values = self.headers.get(name, ())
        if len(values) > 1:
            raise _bad_header(f"the header {name} is repeated")
        return values[0] if values else None

    def parameter(self, name: str) -> str | None:
        """Return a parameter by its name in any case. Raises: `SignatureError` if repeated."""
        values = [value for each, value in self.parameters if each.lower() == name.lower()]
        if len(values) > 1:
            raise _bad_parameter(f"{name} is repeated")
        return values[0] if values else None


class Claim(NamedTuple):
    """Signature of a request, and what it claims."""

    key_id: str
    timestamp: str
    """``YYYYMMDDTHHMMSSZ``."""
    region: str
    """As the client chose it."""
    signed_headers: Sequence[str]
    signature: str
    expires_s: int | None
    """Validity of a presigned URL; `None` for a request that is sent at once."""

    @property
    def date(self) -> str:
        """Day that the signing key is derived for."""
        return self.timestamp[:8]

    @property
    def scope(self) -> str:
        """Day, region and service that the signing key is derived for."""
        return f"{self.date}/{self.region}/{SERVICE}/{TERMINAL}"


def is_signed(query: bytes, fields: Fields) -> bool:
    """Return whether a request claims to have a signature of S3, of whatever version."""
    begins = [value.lstrip()[:4].upper() for name, value in fields if name == b"authorization"]
    return b"AWS4" in begins or b"AWS " in begins or _is_presigned(query)


def _is_presigned(query: bytes) -> bool:
    return bool(query) and bool(_PRESIGNED.search(query) or _VERSION_2.search(query))


def parse_claim(query: bytes, received: ReceivedRequest) -> Claim:
    """Parse the signature of a request that `is_signed`. Raises: `SignatureError`."""
    if not _is_presigned(query):
        return _parse_header(received)
    if _AUTHORIZATION in received.headers:
        raise SignatureError("InvalidArgument", "the request is signed in two ways")
    if _VERSION_2.search(query):
        raise _unknown_algorithm("AWS Signature Version 2")
    return _parse_query(received)


def _bad_header(reason: str) -> SignatureError:
    return SignatureError("AuthorizationHeaderMalformed", reason)


def _bad_parameter(reason: str) -> SignatureError:
    return SignatureError("AuthorizationQueryParametersError", reason)


def _unknown_algorithm(algorithm: str) -> SignatureError:
    reason = f"requests must be signed by {ALGORITHM}, found {algorithm[:40]!r}"
    return SignatureError("InvalidRequest", reason)


def _parse_header(received: ReceivedRequest) -> Claim:
    algorithm, _, rest = (received.header(_AUTHORIZATION) or "").strip().partition(" ")
    if algorithm != ALGORITHM:
        raise _unknown_algorithm(algorithm)
    pairs = [pair.strip().partition("=") for pair in rest.split(",")]
    fields = {name: value for name, _, value in pairs}
    expected = {"Credential", "SignedHeaders", "Signature"}
    if fields.keys() != expected or len(pairs) != len(fields):
        raise _bad_header("Authorization must have one Credential, SignedHeaders and Signature")
    if (timestamp := received.header("x-amz-date")) is None:
        raise SignatureError("AccessDenied", "the request has no x-amz-date")
    return _parse_fields(fields, timestamp, None, _bad_header)


def _parse_query(received: ReceivedRequest) -> Claim:
    fields = {}
    for name in ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature"):
        value = received.parameter(f"X-Amz-{name}")
        if value is None:
            raise _bad_parameter(f"X-Amz-{name} is missing")
        fields[name] = value
    if fields["Algorithm"] != ALGORITHM:
        raise _unknown_algorithm(fields["Algorithm"])
    expires = fields["Expires"]
    if not re.fullmatch("[0-9]{1,6}", expires) or not 1 <= int(expires) <= LONGEST_S:
        raise _bad_parameter(f"X-Amz-Expires is a number of seconds from 1 to {LONGEST_S}")
    return _parse_fields(fields, fields["Date"], int(expires), _bad_parameter)


def _parse_fields(
    fields: Mapping[str, str],
    timestamp: str,
    expires_s: int | None,
    error: Callable[[str], SignatureError],
) -> Claim:
    if not re.fullmatch("[0-9]{8}T[0-9]{6}Z", timestamp):
        raise error("the date of the signature is not of the form YYYYMMDDTHHMMSSZ")
    credential = _CREDENTIAL.fullmatch(fields["Credential"])
    if credential is None or credential[2] != timestamp[:8]:
        raise error(f"the credential is not KEY/{timestamp[:8]}/REGION/{SERVICE}/{TERMINAL}")
    key_id, _, region = credential.groups()
    names = fields["SignedHeaders"].split(";")
    if names != sorted({name.lower() for name in names}):
        raise error("the signed headers must be sorted, in lower case, each named once")
    if not re.fullmatch("[0-9a-f]{64}", fields["Signature"]):
        raise error("the signature is not 64 hexadecimal digits in lower case")
    return Claim(key_id, timestamp, region, names, fields["Signature"], expires_s)


class SignatureChain:
    """Checks the frames of an aws-chunked body: each signature is over the one before."""

    def __init__(self, key: bytes, claim: Claim, *, signs_trailers: bool) -> None:
        self.signs_trailers = signs_trailers
        """Whether trailers are signed too; if not, there must be none."""
        self._key = key
        self._signed_for = f"{claim.timestamp}\n{claim.scope}"
        self._last = claim.signature

    def check_chunk(self, data: bytes | memoryview, signature: bytes) -> None:
        """Check the *signature* of the next frame. Raises: `SignatureError`."""
        # The first digest is of the headers of the frame, which has none.
        self._check("PAYLOAD", f"{_EMPTY_SHA256}\n{hashlib.sha256(data).hexdigest()}", signature)

    def check_trailers(self, lines: bytes, signature: bytes) -> None:
        """Check the *signature* of trailers, lines of ``name:value``. Raises: `SignatureError`."""
        self._check("TRAILER", hashlib.sha256(lines).hexdigest(), signature)

    def _check(self, kind: str, digests: str, signature: bytes) -> None:
        text = f"{ALGORITHM}-{kind}\n{self._signed_for}\n{self._last}\n{digests}"
        expected = sign(self._key, text)
        if not hmac.compare_digest(expected.encode(), signature):
            reason = f"a signature in the body, of its {kind}, does not match"
            raise SignatureError("SignatureDoesNotMatch", reason)
        self._last = expected


class SignedRequest(NamedTuple):
    """Caller of a request whose signature matches."""

    caller: Caller
    frames: SignatureChain | None
    """Signatures of the frames of its body; `None` if only x-amz-content-sha256 is signed."""


class Signatures:
    """Checks signatures by the keys of *callers*.

    A signed request that is overheard can be repeated while its date is within 15 minutes of our
    clock, or a presigned URL until it expires: SigV4 leaves that to TLS.
    """

    def __init__(
        self, callers: Mapping[str, CallerSettings], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._known = {
            settings.access_key_id: (
                configured_caller(name),
                settings.secret_access_key.get_secret_value(),
            )
            for name, settings in callers.items()
            if settings.access_key_id is not None and settings.secret_access_key is not None
        }
        # Unknown key ids take as long as known ones, with a secret that matches nothing.
        self._unknown = (None, secrets.token_hex())
        self._derive_key = lru_cache(1024)(derive_key)

    def check(
        self,
        method: str,
        path: bytes,
        query: bytes,
        fields: Fields,
        client_paths: Sequence[bytes] = (),
    ) -> SignedRequest | None:
        """Return the signer of a request; `None` if unsigned. Raises: `SignatureError`.

        If a proxy has stripped *path*, one of *client_paths* is signed.
        """
        if not is_signed(query, fields):
            return None
        received = ReceivedRequest.decode(method, path, query, fields)
        claim = parse_claim(query, received)
        self._check_time(claim)
        _check_headers(claim, received)
        payload = _payload(claim, received)
        caller, secret = self._known.get(claim.key_id, self._unknown)
        key = self._derive_key(secret, claim.date, claim.region)
        matches = False
        for each in {path, *client_paths}:  # all of them, whichever matches
            sent = received._replace(path=each.decode("latin-1"))
            expected = sign(key, _text_to_sign(sent, claim, payload))
            matches |= hmac.compare_digest(expected, claim.signature)
        if caller is None:
            raise SignatureError("InvalidAccessKeyId", "the access key id is unknown")
        if not matches:
            reason = "the signature does not match the request and the key"
            raise SignatureError("SignatureDoesNotMatch", reason)
        frames = None
        if payload in {_SIGNED_FRAMES, _SIGNED_TRAILERS}:
            frames = SignatureChain(key, claim, signs_trailers=payload == _SIGNED_TRAILERS)
        return SignedRequest(caller, frames)

    def _check_time(self, claim: Claim) -> None:
        try:
            signed_at = datetime.fromisoformat(claim.timestamp).timestamp()
        except ValueError:
            raise _bad_header("the date of the signature is no date") from None
        age_s = self._clock() - signed_at
        if claim.expires_s is None:
            if abs(age_s) > SKEW_S:
                reason = f"the date of the request differs from our clock by more than {SKEW_S} s"
                raise SignatureError("RequestTimeTooSkewed", reason)
        elif age_s < -SKEW_S:
            raise SignatureError("AccessDenied", "Request is not yet valid")
        elif age_s > claim.expires_s:
            raise SignatureError("AccessDenied", "Request has expired")


def _check_headers(claim: Claim, received: ReceivedRequest) -> None:
    """Check that all necessary headers are signed, and that all signed headers are present."""
    signed = set(claim.signed_headers)
    needed = {"host", *(name for name in received.headers if name.startswith("x-amz-"))}
    if unsigned := ", ".join(sorted(needed - signed)):
        raise SignatureError("AccessDenied", f"headers are not signed: {unsigned}")
    if missing := ", ".join(sorted(signed - received.headers.keys())):
        raise SignatureError("SignatureDoesNotMatch", f"signed headers are missing: {missing}")


def _payload(claim: Claim, received: ReceivedRequest) -> str:
    """Return x-amz-content-sha256, or what stands for it in a presigned URL."""
    received.header("host")  # which must not be repeated
    payload = received.header(_PAYLOAD)
    if payload is None and claim.expires_s is None:
        raise SignatureError("MissingSecurityHeader", f"the request has no {_PAYLOAD}")
    if payload is not None and not _PAYLOADS.fullmatch(payload):
        reason = f"{_PAYLOAD} must be a SHA-256 digest, {_UNSIGNED}, or a supported STREAMING-…"
        raise SignatureError("InvalidArgument", reason)
    if received.parameter(_PAYLOAD) not in {None, _UNSIGNED}:
        raise SignatureError("InvalidArgument", f"{_PAYLOAD} of a presigned URL is {_UNSIGNED}")
    return payload or _UNSIGNED


def derive_key(secret: str, date: str, region: str) -> bytes:
    """Derive the signing key of one day and region."""
    key = f"AWS4{secret}".encode()
    for part in (date, region, SERVICE, TERMINAL):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def sign(key: bytes, text: str) -> str:
    """Return the signature of *text* in hexadecimal."""
    return hmac.digest(key, text.encode(), "sha256").hex()


def _text_to_sign(received: ReceivedRequest, claim: Claim, payload: str) -> str:
    """Return the text that the client has signed. Raises: `SignatureError`."""
    pairs = sorted(
        (quote(name, safe=""), quote(value, safe=""))
        for name, value in received.parameters
        if name.lower() != "x-amz-signature"
    )
    lines = [
        received.method,
        received.path,
        "&".join(f"{name}={value}" for name, value in pairs),
        *(
            f"{name}:{','.join(' '.join(value.split()) for value in received.headers[name])}"
            for name in claim.signed_headers
        ),
        "",
        ";".join(claim.signed_headers),
        payload,
    ]
    canonical = "\n".join(lines)
    if not _PATH.fullmatch(received.path) or not canonical.isascii():
        reason = "the path or a signed header has characters that clients must encode"
        raise SignatureError("SignatureDoesNotMatch", reason)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return f"{ALGORITHM}\n{claim.timestamp}\n{claim.scope}\n{digest}"
