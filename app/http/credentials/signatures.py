"""Signatures of S3's clients (AWS Signature Version 4), in headers and in presigned URLs."""

import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from app.errors import SignatureError
from app.http.credentials.bearers import named
from app.http.credentials.caller import Caller
from app.http.credentials.claimed_signatures import (
    Claim,
    Received,
    is_claimed,
    malformed,
    read_claim,
)
from app.http.credentials.seals import Seal
from app.http.credentials.signing import derive_key, expected_signature, scope_of
from app.settings import CallerSettings

SKEW_S: Final = 15 * 60
"""How far the clock of a client may be from ours."""

_KEYS: Final = 1024
_PAYLOAD: Final = "x-amz-content-sha256"
_UNSIGNED: Final = "UNSIGNED-PAYLOAD"
_SEALED: Final = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
_SEALED_TRAILED: Final = f"{_SEALED}-TRAILER"
_PAYLOADS: Final = re.compile(
    f"[0-9a-f]{{64}}|{_UNSIGNED}|{_SEALED}|{_SEALED_TRAILED}|STREAMING-UNSIGNED-PAYLOAD-TRAILER"
)


@dataclass(frozen=True, slots=True)
class Signed:
    """A request whose signature is right."""

    caller: Caller
    seal: Seal | None
    """What the frames of its body are signed with, if they are.

    Otherwise the body is checked by x-amz-content-sha256 alone, which is signed itself.
    """


class Signatures:
    """Checks signatures by the keys of *callers*.

    Whoever overhears a signed request may repeat it while its date is within 15 minutes of our
    clock, or a presigned URL until it expires: that is how SigV4 works, and what TLS is for.
    """

    def __init__(
        self, callers: Mapping[str, CallerSettings], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._known = {
            settings.access_key_id: (
                named(name),
                settings.secret_access_key.get_secret_value(),
            )
            for name, settings in callers.items()
            if settings.access_key_id is not None and settings.secret_access_key is not None
        }
        self._unknown = (None, secrets.token_hex())
        self._derive_key = lru_cache(_KEYS)(derive_key)

    def check(self, scope: Mapping[str, Any]) -> Signed | None:
        """Tell who signed the ASGI request *scope*; `None` if it has no signature of S3.

        Raises: `SignatureError`.
        """
        if not is_claimed(scope):
            return None
        received = Received.of(scope)
        claim = read_claim(scope, received)
        self._check_time(claim)
        _check_headers(claim, received)
        payload = _payload(claim, received)
        caller, secret = self._known.get(claim.key_id, self._unknown)
        key = self._derive_key(secret, claim.date, claim.region)
        is_right = hmac.compare_digest(expected_signature(key, received, claim), claim.signature)
        if caller is None:
            raise SignatureError("InvalidAccessKeyId", "nobody here has the access key id")
        if not is_right:
            raise SignatureError(
                "SignatureDoesNotMatch", "the signature is not that of the request, by this key"
            )
        return Signed(caller, _seal(key, claim, payload))

    def _check_time(self, claim: Claim) -> None:
        try:
            signed_at = datetime.fromisoformat(claim.timestamp).timestamp()
        except ValueError:
            raise malformed("the date of the signature is none") from None
        age_s = self._clock() - signed_at
        if claim.expires_s is None:
            if abs(age_s) > SKEW_S:
                reason = f"the request is of a time more than {SKEW_S} s from that of this service"
                raise SignatureError("RequestTimeTooSkewed", reason)
        elif age_s < -SKEW_S:
            raise SignatureError("AccessDenied", "Request is not yet valid")
        elif age_s > claim.expires_s:
            raise SignatureError("AccessDenied", "Request has expired")


def _check_headers(claim: Claim, received: Received) -> None:
    """Return if all headers are signed that have to be, and all that are signed are there."""
    signed = set(claim.signed_headers)
    needed = {"host", *(name for name in received.headers if name.startswith("x-amz-"))}
    if needed - signed:
        names = ", ".join(sorted(needed - signed))
        raise SignatureError("AccessDenied", f"headers are not signed: {names}")
    if signed - received.headers.keys():
        names = ", ".join(sorted(signed - received.headers.keys()))
        raise SignatureError("SignatureDoesNotMatch", f"signed headers are missing: {names}")


def _payload(claim: Claim, received: Received) -> str:
    """Tell what the request says of its body, which is a part of what is signed."""
    received.header("host")
    told = received.header(_PAYLOAD)
    if told is None and claim.expires_s is None:
        raise SignatureError("MissingSecurityHeader", f"the request has no {_PAYLOAD}")
    if told is not None and not _PAYLOADS.fullmatch(told):
        reason = f"{_PAYLOAD} is a SHA-256 digest, {_UNSIGNED}, or one of STREAMING-… that is taken"
        raise SignatureError("InvalidArgument", reason)
    if received.parameter(_PAYLOAD) not in {None, _UNSIGNED}:
        raise SignatureError("InvalidArgument", f"{_PAYLOAD} of a presigned URL is {_UNSIGNED}")
    return told or _UNSIGNED


def _seal(key: bytes, claim: Claim, payload: str) -> Seal | None:
    if payload not in {_SEALED, _SEALED_TRAILED}:
        return None
    is_trailed = payload == _SEALED_TRAILED
    return Seal(key, claim.timestamp, scope_of(claim), claim.signature, is_trailed)
