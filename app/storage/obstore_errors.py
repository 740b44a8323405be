"""What obstore raises, as our errors; none of its exceptions goes further.

It tells nothing but text: whatever class a failure has depends on what stands in there. Texts
repeat URLs, which may hold signatures, so that they are not repeated.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from app.errors import (
    StorageDeniedError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedReadError,
)
from app.model import ObjectRef
from app.storage.refusals import Refusal

_ABSENT: Final = 404
_UNSATISFIED: Final = 416
_STATUS: Final = re.compile(r"status code: ([0-9]{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_ABOUT_RANGE: Final = ("Wanted range starting at", "Failed to parse value for CONTENT_RANGE")
_KINDS: Final[tuple[tuple[tuple[str, ...], type[StorageError], str], ...]] = (
    (("token request", "redential"), StorageDeniedError, "no credentials to send"),
    (("kind: Timeout", "TimedOut"), StorageTimeoutError, "the server is silent"),
    (("body error",), TruncatedReadError, "the connection closed in the middle"),
    (
        ("Received non-partial response", "Requested "),
        StorageUnavailableError,
        "the server sent another range than was asked for",
    ),
    (("HTTP error",), StorageUnavailableError, "the server gave no answer"),
)
"""What a text without a status says, most telling first."""


@contextmanager
def translated(ref: ObjectRef) -> Iterator[None]:
    """Turn obstore's exceptions into ours."""
    try:
        yield
    except (BaseError, FileNotFoundError, ValueError) as error:
        raise _failure(ref, error) from error


def refusal_of(error: Exception) -> Refusal | None:
    """Take the status of the answer, and the code in its document, out of the text."""
    text = str(error)
    if (status := _STATUS.search(text)) is None:
        return None
    code = _CODE.search(text)
    return Refusal("GET", int(status[1]), code[1] if code else "")


def is_about_range(error: Exception) -> bool:
    """Tell whether the object may be too short for the range that was asked for."""
    refusal = refusal_of(error)
    if refusal is not None:
        return refusal.status == _UNSATISFIED
    return _says(error, _ABOUT_RANGE)


def no_bucket(ref: ObjectRef) -> StorageUnavailableError:
    """Tell that not only the object is missing."""
    return StorageUnavailableError(ref, "there is no such bucket", lasting=True)


def _failure(ref: ObjectRef, error: Exception) -> StorageError:
    refusal = refusal_of(error)
    if refusal is not None:
        return no_bucket(ref) if refusal.status == _ABSENT else refusal.failure(ref)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return StorageDeniedError(ref, "the server refuses")
    for phrases, kind, reason in _KINDS:
        if _says(error, phrases):
            return kind(ref, reason)
    first = str(error).partition("\n")[0]
    reason = type(error).__name__ if "://" in first else first
    return StorageUnavailableError(ref, reason, lasting=True)


def _says(error: Exception, phrases: tuple[str, ...]) -> bool:
    text = str(error)
    return any(phrase in text for phrase in phrases)
