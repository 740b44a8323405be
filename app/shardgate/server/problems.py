"""Errors as responses: one table of statuses, RFC 9457 problem documents."""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final, NamedTuple

from shardgate import errors
from shardgate.errors import ShardgateError
from shardgate.server.request import Headers, Response

_BY_STATUS: Final[Mapping[HTTPStatus, Sequence[type[ShardgateError]]]] = {
    HTTPStatus.BAD_REQUEST: (
        errors.BadKeyError,
        errors.BadHeaderError,
        errors.BadParameterError,
        errors.BadBodyError,
        errors.DigestError,
        errors.BadPartError,
        errors.PartOrderError,
    ),
    HTTPStatus.LENGTH_REQUIRED: (errors.LengthRequiredError,),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: (errors.TooLargeError,),
    HTTPStatus.REQUEST_TIMEOUT: (errors.SlowBodyError,),
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: (errors.UnknownCodingError,),
    HTTPStatus.NOT_IMPLEMENTED: (errors.UnsupportedError,),
    HTTPStatus.FORBIDDEN: (
        errors.ForeignPageError,
        errors.SignatureError,
        errors.ForbiddenError,
        errors.UnwritableError,
        errors.NotAllowedError,
        errors.StorageDeniedError,
    ),
    HTTPStatus.MISDIRECTED_REQUEST: (errors.MisdirectedError,),
    HTTPStatus.UNAUTHORIZED: (errors.UnauthenticatedError,),
    HTTPStatus.TOO_MANY_REQUESTS: (errors.TooManyRequestsError,),
    HTTPStatus.PRECONDITION_FAILED: (errors.PreconditionFailedError,),
    HTTPStatus.NOT_FOUND: (
        errors.UnknownUploadError,
        errors.UnknownDatasetError,
        errors.UnknownRepositoryError,
        errors.UnknownRefError,
        errors.UnknownSessionError,
        errors.UnknownTokenError,
    ),
    HTTPStatus.CONFLICT: (errors.ConflictError, errors.CommitConflictError),
    HTTPStatus.METHOD_NOT_ALLOWED: (errors.ReadOnlyError,),
    HTTPStatus.SERVICE_UNAVAILABLE: (
        errors.OfflineError,
        errors.ClockSkewError,
        errors.BusyError,
        errors.IssuerUnavailableError,
        errors.TokenRecordsError,
        errors.StorageSkewError,
        errors.StorageThrottledError,
        errors.StorageUnavailableError,
        errors.TruncatedReadError,
        errors.MetadataMissingError,
        errors.VersionChangedError,
    ),
    HTTPStatus.LOCKED: (errors.LockedError,),
    HTTPStatus.GATEWAY_TIMEOUT: (errors.OverdueError, errors.StorageTimeoutError),
    HTTPStatus.FAILED_DEPENDENCY: (
        errors.ConfigurationError,
        errors.StorageUnusableError,
        errors.StorageRedirectError,
        errors.RangeNotSatisfiedError,
        errors.DamagedError,
    ),
}
STATUS: Final = {error: status for status, kinds in _BY_STATUS.items() for error in kinds}
"""Status of every leaf of the error tree."""

RETRIED: Final = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
"""Statuses of what can pass."""


class Failure(NamedTuple):
    """Failure that a response explains."""

    status: HTTPStatus
    detail: str
    """The reason, in one sentence."""
    error: ShardgateError | None = None
    members: Mapping[str, object] = {}
    """Extension members of its problem document."""
    is_shared: bool = False
    """Whether caches may keep the response, which is then the same for every ``Accept``."""


def status_of(error: ShardgateError) -> HTTPStatus:
    """Return the status of *error*."""
    return STATUS[type(error)]


def extension_members(error: Exception) -> Mapping[str, object]:
    """Return the extension members of the problem document of *error* (RFC 9457 §3.2)."""
    if not isinstance(error, errors.CommitConflictError):
        return {}
    return {
        "expected_parent": error.expected_parent,
        "actual_parent": error.actual_parent,
        "conflicts": list(error.conflicts),
    }


def problem(failure: Failure) -> Response:
    """Return the problem document of *failure*."""
    status = failure.status
    document = {
        "type": "about:blank",
        "title": status.phrase,
        "status": status,
        "detail": failure.detail,
        **failure.members,
    }
    # Names of objects may have characters that UTF-8 cannot encode.
    body = json.dumps(document, ensure_ascii=False).encode(errors="replace")
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", b"%d" % len(body)),
    ]
    return Response(status, headers + status_headers(status), body)


def status_headers(status: HTTPStatus) -> Headers:
    """Return the headers that every response with *status* has: Retry-After, WWW-Authenticate."""
    if status is HTTPStatus.UNAUTHORIZED:
        return [(b"www-authenticate", b'Bearer realm="shardgate"')]
    return [(b"retry-after", b"1")] if status in RETRIED else []
