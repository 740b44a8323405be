"""What S3 says of objects and of writes."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from app.errors import (
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
)
from app.model import ETag, ObjectRef
from app.storage.ranges import version
from app.storage.refusals import NO_KEY, Refusal
from app.storage.s3.client import Answer, S3Client
from app.storage.s3.write_ids import WriteIds, parse_ids

_NOT_FOUND: Final = 404
_PRECONDITION_FAILED: Final = 412
_GONE_CODES: Final = frozenset({NO_KEY, "NoSuchUpload"})
"""An upload that is gone has lost a race, or its owner's patience: all begins anew."""
_PASSING_CODES: Final = frozenset(
    {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout"}
)
_BARE: Final = re.compile('[^"]+')


class Seen(NamedTuple):
    """An object as it is now."""

    etag: ETag
    size: int
    ids: WriteIds


async def look(client: S3Client, ref: ObjectRef) -> Seen | None:
    """Ask for version, size and the ids of writes."""
    answer = await client.ask(ref, "head_object")
    if isinstance(answer, Refusal):
        if answer.status == _NOT_FOUND and await _is_absent(client, ref):
            return None
        raise failure(ref, answer)
    headers, size = _headers(answer), int(answer.get("ContentLength", 0))
    if b"etag" not in headers:
        raise StorageUnavailableError(ref, "the answer has no ETag, which S3 always sends")
    return Seen(version(headers, size), size, parse_ids(answer.get("Metadata", {})))


async def _is_absent(client: S3Client, ref: ObjectRef) -> bool:
    """Ask by GET for the error document that proves absence; the answer to a HEAD has none."""
    answer = await client.ask(ref, "get_object", Range="bytes=0-0")
    if isinstance(answer, Refusal):
        return answer.is_no_such_key
    answer["Body"].close()
    return False


def etag_of(answer: Mapping[str, Any]) -> ETag | None:
    """Take the version out of what was answered to a write."""
    told = str(answer.get("CopyObjectResult", answer).get("ETag") or "")
    if not told or told.startswith("W/"):
        return None
    return ETag(f'"{told}"' if _BARE.fullmatch(told) else told)


def server_of(answer: Answer) -> str:
    """Name the server as it does."""
    return _headers(answer).get(b"server", b"").decode("latin-1")


def is_refused(answer: Answer | Refusal) -> bool:
    """Tell whether a condition was seen not to hold, or what it is about is gone."""
    if not isinstance(answer, Refusal):
        return False
    return answer.status == _PRECONDITION_FAILED or answer.code in _GONE_CODES


def failure(ref: ObjectRef, refusal: Refusal) -> StorageError:
    """Class a refusal that is not about a condition."""
    if refusal.code in _PASSING_CODES:
        return StorageUnavailableError(ref, f"the server answered {refusal.status} {refusal.code}")
    return refusal.failure(ref)


def may_pass(error: StorageError) -> bool:
    """Tell whether a write can be sent again, once it was looked for."""
    if isinstance(error, StorageUnavailableError):
        return not error.lasting
    return isinstance(error, StorageThrottledError | StorageTimeoutError)


def _headers(answer: Answer) -> dict[bytes, bytes]:
    told = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return {k.lower().encode("latin-1"): str(v).encode("latin-1") for k, v in told.items()}
