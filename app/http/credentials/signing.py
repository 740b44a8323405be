"""What the signature of a request has to be: botocore's signer, over the request as received.

The one module of requests that knows botocore: signing is what botocore defines for its clients.
"""

import hmac
from typing import Any, Final
from urllib.parse import urlsplit

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from app.errors import SignatureError
from app.http.credentials.claimed_signatures import SERVICE, SIGNATURE, TERMINAL, Claim, Received

_URL: Final = "http://host"
"""What is signed of the host is the header."""


def derive_key(secret: str, date: str, region: str) -> bytes:
    """Make the key of one day and region, which botocore makes anew for each request."""
    key = f"AWS4{secret}".encode()
    for part in (date, region, SERVICE, TERMINAL):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def sign(key: bytes, text: str) -> str:
    """Sign *text*."""
    return hmac.digest(key, text.encode(), "sha256").hex()


def expected_signature(key: bytes, received: Received, claim: Claim) -> str:
    """Sign what the client says that it signed.

    Raises: `SignatureError`.
    """
    signer = _Signer(ReadOnlyCredentials(claim.key_id, "", None), SERVICE, claim.region)
    request = _rebuilt(received, claim)
    return sign(key, signer.string_to_sign(request, signer.canonical_request(request)))


def scope_of(claim: Claim) -> str:
    """Name the day, region and service that a key is made for."""
    return f"{claim.date}/{claim.region}/{SERVICE}/{TERMINAL}"


class _Signer(S3SigV4QueryAuth):
    """botocore's signer, for requests that have only those headers which were signed.

    That of presigned URLs does for all, as others have x-amz-content-sha256.
    """

    def headers_to_sign(self, request: AWSRequest) -> Any:
        return request.headers


def _rebuilt(received: Received, claim: Claim) -> AWSRequest:
    url = f"{_URL}{received.path}"
    headers = [(name, value) for name in claim.signed_headers for value in received.headers[name]]
    if urlsplit(url).path != received.path or not all(value.isascii() for _, value in headers):
        reason = "the path, or a signed header, is not as clients may spell it"
        raise SignatureError("SignatureDoesNotMatch", reason)
    request = AWSRequest(received.method, url)
    parameters = [pair for pair in received.parameters if pair[0].lower() != SIGNATURE]
    request.params = parameters  # type: ignore[assignment]  # names may repeat, which it knows
    request.context["timestamp"] = claim.timestamp
    for name, value in headers:
        request.headers[name] = value
    return request
