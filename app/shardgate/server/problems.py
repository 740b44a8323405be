"""Errors as responses: one table of statuses, RFC 9457 problem documents."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

from shardgate import errors
from shardgate.errors import ShardgateError
from shardgate.server.request import Headers, Response

STATUS: Final[Mapping[type[ShardgateError], HTTPStatus]] = {
    errors.BadKeyError: HTTPStatus.BAD_REQUEST,
    errors.BadHeaderError: HTTPStatus.BAD_REQUEST,
    errors.BadParameterError: HTTPStatus.BAD_REQUEST,
    errors.BadBodyError: HTTPStatus.BAD_REQUEST,
    errors.DigestError: HTTPStatus.BAD_REQUEST,
    errors.BadPartError: HTTPStatus.BAD_REQUEST,
    errors.PartOrderError: HTTPStatus.BAD_REQUEST,
    errors.LengthRequiredError: HTTPStatus.LENGTH_REQUIRED,
    errors.TooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.SlowBodyError: HTTPStatus.REQUEST_TIMEOUT,
    errors.UnknownCodingError: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    errors.UnsupportedError: HTTPStatus.NOT_IMPLEMENTED,
    errors.ForeignPageError: HTTPStatus.FORBIDDEN,
    errors.SignatureError: HTTPStatus.FORBIDDEN,
    errors.ForbiddenError: HTTPStatus.FORBIDDEN,
    errors.UnwritableError: HTTPStatus.FORBIDDEN,
    errors.NotAllowedError: HTTPStatus.FORBIDDEN,
    errors.StorageDeniedError: HTTPStatus.FORBIDDEN,
    errors.MisdirectedError: HTTPStatus.MISDIRECTED_REQUEST,
    errors.UnauthenticatedError: HTTPStatus.UNAUTHORIZED,
    errors.TooManyRequestsError: HTTPStatus.TOO_MANY_REQUESTS,
    errors.PreconditionFailedError: HTTPStatus.PRECONDITION_FAILED,
    errors.PreconditionRequiredError: HTTPStatus.PRECONDITION_REQUIRED,
    errors.UnknownUploadError: HTTPStatus.NOT_FOUND,
    errors.UnknownDatasetError: HTTPStatus.NOT_FOUND,
    errors.UnknownRepositoryError: HTTPStatus.NOT_FOUND,
    errors.UnknownRefError: HTTPStatus.NOT_FOUND,
    errors.UnknownSessionError: HTTPStatus.NOT_FOUND,
    errors.UnknownTokenError: HTTPStatus.NOT_FOUND,
    errors.ConflictError: HTTPStatus.CONFLICT,
    errors.CommitConflictError: HTTPStatus.CONFLICT,
    errors.ReadOnlyError: HTTPStatus.METHOD_NOT_ALLOWED,
    errors.OfflineError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.ClockSkewError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.BusyError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.IssuerUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.TokenRecordsError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.StorageSkewError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.StorageThrottledError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.StorageUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.TruncatedReadError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.MetadataMissingError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.VersionChangedError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.LockedError: HTTPStatus.LOCKED,
    errors.OverdueError: HTTPStatus.GATEWAY_TIMEOUT,
    errors.StorageTimeoutError: HTTPStatus.GATEWAY_TIMEOUT,
    errors.ConfigurationError: HTTPStatus.FAILED_DEPENDENCY,
    errors.StorageUnusableError: HTTPStatus.FAILED_DEPENDENCY,
    errors.StorageRedirectError: HTTPStatus.FAILED_DEPENDENCY,
    errors.RangeNotSatisfiedError: HTTPStatus.FAILED_DEPENDENCY,
    errors.DamagedError: HTTPStatus.FAILED_DEPENDENCY,
}
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
