"""Responses without an object, and the errors that they and failed exchanges mean."""

import re
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Literal

from shardgate.errors import (
    StorageDeniedError,
    StorageError,
    StorageSkewError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    StorageUnusableError,
    TruncatedReadError,
)
from shardgate.model import ObjectRef
from shardgate.storage.http1_client import (
    CutOffError,
    ExchangeError,
    ForbiddenAddressError,
    HttpResponse,
)
from shardgate.storage.http_headers import parse_unsatisfied

type HttpMethod = Literal["GET", "HEAD", "PUT"]

NO_SUCH_KEY: Final = "NoSuchKey"
"""The only code that proves absence in S3: proxies in front of it answer 404 too."""
FAILURES: Final = (ExchangeError, OSError)
"""What an exchange with a server raises; see `storage_error`."""

_DENIED_CODES: Final = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
_THROTTLED_CODES: Final = frozenset({"SlowDown", "Throttling", "RequestLimitExceeded"})
_TRANSIENT_CODES: Final = {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout"}
_TEMPORARY_CODES: Final = _DENIED_CODES | _THROTTLED_CODES | _TRANSIENT_CODES
_CODE: Final = re.compile(rb"<Error[\s>].*?<Code>([A-Za-z0-9.]{1,64})</Code>", re.DOTALL)
_MESSAGE: Final = re.compile(rb"<Message>([^<]{0,512})</Message>")
_REGION: Final = re.compile(rb"<Region>([^<]{1,64})</Region>")
_REGION_NAME: Final = re.compile("[a-z0-9-]{1,64}")
_NOT_ABSENT: Final = re.compile("expired|to perform: (?!s3:ListBucket)", re.IGNORECASE)
"""In messages of AccessDenied that do not depend on the existence of the object."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A response without the object: its status, and the code of S3's error document."""

    method: HttpMethod
    status: int
    code: str = ""
    message: str = ""
    """Message of the server; never shown, since it may hold parts of a signature."""
    size: int | None = None
    """Size of the object according to a 416."""
    skew_s: int = 0
    """Seconds by which the clock of the server, if it checks signatures, is ahead of ours."""
    region: str = ""
    """Region of the bucket, if the refusal is for a request to another one."""

    @property
    def may_mean_suffix(self) -> bool:
        """True if a server that knows no suffix ranges can refuse one in this way."""
        if self.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            return not self.code  # of a program that does not expect them
        return self.status in {400, 405, 416, 422, 501} and self.code not in _TEMPORARY_CODES

    @property
    def may_hide_absence(self) -> bool:
        """True if S3 can answer so for an absent key where the caller may not list.

        It answers other codes to wrong keys and signatures. A response to HEAD tells no code.
        """
        is_denied = (self.method, self.status) == ("GET", HTTPStatus.FORBIDDEN) and (
            self.code in ("", "AccessDenied")
        )
        return is_denied and not _NOT_ABSENT.search(self.message)

    def failure(self, ref: ObjectRef) -> StorageError:
        """Return the error for a refusal that is about neither absence, version nor range."""
        reason = f"the server answered {self.status} {self.code}".rstrip()
        if self.region:
            reason += f"; the bucket is in {self.region}: set region to that, and endpoint_url, if "
            reason += "there is one, to a server of that region"
        is_denied = self.status in {401, 403, 407}
        # Signatures of URLs are valid for 15 minutes, and URLs are used for 5.
        is_skewed = is_denied and abs(self.skew_s) > 10 * 60
        if is_skewed or self.code == "RequestTimeTooSkewed":
            difference = f"{abs(self.skew_s)} s {'ahead of' if self.skew_s < 0 else 'behind'}"
            reason += f"; the clock of this machine is {difference} the server's"
            return StorageSkewError(ref, reason)
        if is_denied or self.code in _DENIED_CODES:
            return StorageDeniedError(ref, reason)
        if self.status == HTTPStatus.TOO_MANY_REQUESTS or self.code in _THROTTLED_CODES:
            return StorageThrottledError(ref, reason)
        is_transient = (
            # 501 and 505 say what the server never does.
            (self.status >= HTTPStatus.INTERNAL_SERVER_ERROR and self.status not in {501, 505})
            or self.code in _TRANSIENT_CODES
            # Proxies send these for a while, without an error document of S3.
            or (self.status in {204, 404, 408, 410, 425} and not self.code)
        )
        kind = StorageUnavailableError if is_transient else StorageUnusableError
        return kind(ref, reason)


def no_bucket(ref: ObjectRef) -> StorageUnusableError:
    """Return the error for *ref* in a bucket that does not exist."""
    return StorageUnusableError(ref, "there is no such bucket")


def no_credentials(ref: ObjectRef, reason: str) -> StorageDeniedError:
    """Return the error for *ref* that could only be read without credentials."""
    hint = "--anonymous, or anonymous = true in [stores.NAME], reads public data without any"
    return StorageDeniedError(ref, f"no credentials to send: {reason}; {hint}")


async def read_refusal(method: HttpMethod, response: HttpResponse) -> Refusal:
    """Read and release a response that is no success; its document may be lost."""
    document = b""
    try:
        if method != "HEAD" and response.status not in {304, 412, 416}:  # all is in the headers
            async for piece in response.pieces():
                document += piece
                if len(document) >= 16 * 1024:
                    break
    except FAILURES:
        document = b""  # the status is enough
    finally:
        response.release()
    size = parse_unsatisfied(response.headers.get(b"content-range", b""))
    code, message = parse_document(document)
    header = response.headers.get(b"x-amz-bucket-region", b"")
    named = [each.decode("latin-1") for each in (header, *_REGION.findall(document))]
    region = other_region(response.status, code, *named)
    return Refusal(method, response.status, code, message, size, region=region)


def parse_document(document: bytes) -> tuple[str, str]:
    """Return the code and the message of an error document of S3, each empty if it has none."""
    code = _CODE.search(document)
    message = _MESSAGE.search(document)
    return (
        code[1].decode() if code else "",
        message[1].decode(errors="replace") if message else "",
    )


def other_region(status: int, code: str, *named: str) -> str:
    """Return the first region in *named* of a refusal that is for a request to another region."""
    # Codes for the signature, or the endpoint, of another region than the bucket's begin so.
    codes = ("AuthorizationHeader", "AuthorizationQuery", "IllegalLocation")
    is_other = status in {301, 302, 307} or code.startswith(codes)
    return next(filter(_REGION_NAME.fullmatch, named), "") if is_other else ""


def storage_error(ref: ObjectRef, error: ExchangeError | OSError) -> StorageError:
    """Return the error that a failed exchange about *ref* means."""
    match error:
        case TimeoutError():
            return StorageTimeoutError(ref, "the server is silent")
        case CutOffError():
            return TruncatedReadError(ref, str(error))
        case ForbiddenAddressError():
            return StorageDeniedError(ref, str(error))
        case ExchangeError():
            return StorageUnavailableError(ref, str(error))
    reason = error.strerror or type(error).__name__
    is_closed = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    is_refused = isinstance(error, ssl.SSLError) and not is_closed
    kind = StorageUnusableError if is_refused else StorageUnavailableError
    return kind(ref, reason)
