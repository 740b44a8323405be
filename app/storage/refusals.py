"""What a server says in place of an object, or does not say, as our errors."""

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from app.errors import (
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedReadError,
)
from app.model import ObjectRef
from app.storage.http1.errors import CutOffError, ExchangeError, ForbiddenError
from app.storage.http1.response import Response
from app.storage.ranges import parse_unsatisfied

type Method = Literal["GET", "HEAD"]

NO_KEY: Final = "NoSuchKey"
"""The only code that proves absence in S3: what stands before the server answers 404 as well."""

_DOCUMENT_BYTES: Final = 16 * 1024
_WITHOUT_DOCUMENT: Final = frozenset({304, 412, 416})
_DENIED: Final = frozenset({401, 403, 407})
_DENIED_CODES: Final = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
_NOT_FOUND: Final = 404
_TOO_MANY: Final = 429
_THROTTLED_CODES: Final = frozenset({"SlowDown", "Throttling", "RequestLimitExceeded"})
_SERVER_FAULT: Final = 500
_OF_PROXIES: Final = frozenset({204, 404, 410})
"""Statuses that proxies answer for a moment too, but not with an error document of S3."""
_CODE: Final = re.compile(rb"<Error[\s>].*?<Code>([A-Za-z0-9.]{1,64})</Code>", re.DOTALL)
_MESSAGE: Final = re.compile(rb"<Message>([^<]{0,512})</Message>")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer without the object: its status, and what S3's error document says."""

    method: Method
    status: int
    code: str = ""
    message: str = ""
    """The server's words; they may repeat parts of a signature, so we do not repeat them."""
    size: int | None = None
    """Size of the object, as a 416 tells it."""

    @property
    def is_no_such_key(self) -> bool:
        """Whether S3 itself says that the object does not exist."""
        return self.status == _NOT_FOUND and self.code == NO_KEY

    def failure(self, ref: ObjectRef) -> StorageError:
        """Class a refusal that is about neither absence, version nor range."""
        reason = f"the server answered {self.status} {self.code}".rstrip()
        if self.status in _DENIED or self.code in _DENIED_CODES:
            return StorageDeniedError(ref, reason)
        if self.status == _TOO_MANY or self.code in _THROTTLED_CODES:
            return StorageThrottledError(ref, reason)
        may_pass = self.status in _OF_PROXIES and not self.code
        lasting = self.status < _SERVER_FAULT and not may_pass
        return StorageUnavailableError(ref, reason, lasting=lasting)


async def read_refusal(method: Method, response: Response) -> Refusal:
    """Read what little of an error document is of use, and give the connection back."""
    document = b""
    try:
        if method == "GET" and response.status not in _WITHOUT_DOCUMENT:
            async for piece in response.pieces():
                document += piece
                if len(document) >= _DOCUMENT_BYTES:
                    break
    except (ExchangeError, OSError):
        document = b""  # the status says enough
    finally:
        response.release()
    code, message = _CODE.search(document), _MESSAGE.search(document)
    return Refusal(
        method,
        response.status,
        code[1].decode() if code else "",
        message[1].decode(errors="replace") if message else "",
        parse_unsatisfied(response.headers.get(b"content-range", b"")),
    )


@contextmanager
def translated(ref: ObjectRef) -> Iterator[None]:
    """Turn what an exchange raises into our errors."""
    try:
        yield
    except TimeoutError as error:
        raise StorageTimeoutError(ref, "the server is silent") from error
    except CutOffError as error:
        raise TruncatedReadError(ref, str(error)) from error
    except ForbiddenError as error:
        raise StorageDeniedError(ref, str(error)) from error
    except ExchangeError as error:
        raise StorageUnavailableError(ref, str(error)) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        lasting = isinstance(error, ssl.SSLError)
        raise StorageUnavailableError(ref, reason, lasting=lasting) from error
