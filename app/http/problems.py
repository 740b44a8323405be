"""Errors as responses: one table of statuses, RFC 9457 problem documents."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from app import errors
from app.errors import ShardgateError

STATUS: Final[dict[type[ShardgateError], HTTPStatus]] = {
    errors.BadKeyError: HTTPStatus.BAD_REQUEST,
    errors.BadHeaderError: HTTPStatus.BAD_REQUEST,
    errors.BadParameterError: HTTPStatus.BAD_REQUEST,
    errors.BadBodyError: HTTPStatus.BAD_REQUEST,
    errors.DigestError: HTTPStatus.BAD_REQUEST,
    errors.LengthRequiredError: HTTPStatus.LENGTH_REQUIRED,
    errors.TooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.SlowBodyError: HTTPStatus.REQUEST_TIMEOUT,
    errors.UnknownCodingError: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    errors.UnsupportedError: HTTPStatus.NOT_IMPLEMENTED,
    errors.ForeignPageError: HTTPStatus.FORBIDDEN,
    errors.MisdirectedError: HTTPStatus.MISDIRECTED_REQUEST,
    errors.UnauthenticatedError: HTTPStatus.UNAUTHORIZED,
    errors.SignatureError: HTTPStatus.FORBIDDEN,
    errors.ForbiddenError: HTTPStatus.FORBIDDEN,
    errors.TooManyRequestsError: HTTPStatus.TOO_MANY_REQUESTS,
    errors.PreconditionFailedError: HTTPStatus.PRECONDITION_FAILED,
    errors.BadPartError: HTTPStatus.BAD_REQUEST,
    errors.PartOrderError: HTTPStatus.BAD_REQUEST,
    errors.UnknownUploadError: HTTPStatus.NOT_FOUND,
    errors.UnknownDatasetError: HTTPStatus.NOT_FOUND,
    errors.UnknownRepositoryError: HTTPStatus.NOT_FOUND,
    errors.UnknownRefError: HTTPStatus.NOT_FOUND,
    errors.UnknownSessionError: HTTPStatus.NOT_FOUND,
    errors.ConflictError: HTTPStatus.CONFLICT,
    errors.CommitConflictError: HTTPStatus.CONFLICT,
    errors.ReadOnlyError: HTTPStatus.METHOD_NOT_ALLOWED,
    errors.UnwritableError: HTTPStatus.FORBIDDEN,
    errors.NotAllowedError: HTTPStatus.FORBIDDEN,
    errors.OfflineError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.LockedError: HTTPStatus.LOCKED,
    errors.ClockSkewError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.BusyError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.IssuerUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.OverdueError: HTTPStatus.GATEWAY_TIMEOUT,
    errors.StorageDeniedError: HTTPStatus.FORBIDDEN,
    errors.StorageThrottledError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.StorageUnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.StorageTimeoutError: HTTPStatus.GATEWAY_TIMEOUT,
    errors.TruncatedReadError: HTTPStatus.BAD_GATEWAY,
    errors.StorageRedirectError: HTTPStatus.BAD_GATEWAY,
    errors.RangeNotSatisfiedError: HTTPStatus.BAD_GATEWAY,
    errors.MetadataMissingError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.VersionChangedError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.DamagedError: HTTPStatus.BAD_GATEWAY,
    errors.ConfigurationError: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""Status of every leaf of the error tree."""

RETRY_AFTER_S: Final = 1
_RETRIED: Final = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)

type Headers = list[tuple[bytes, bytes]]


def status_of(error: ShardgateError) -> HTTPStatus:
    """Return the status of *error*."""
    return STATUS[type(error)]


def extension_members(error: Exception) -> Mapping[str, object]:
    """Return the members of a problem document that only this type of error has (RFC 9457 §3.2)."""
    if not isinstance(error, errors.CommitConflictError):
        return {}
    return {
        "expected_parent": error.expected_parent,
        "actual_parent": error.actual_parent,
        "conflicts": list(error.conflicts),
    }


def problem(
    status: HTTPStatus, detail: str, members: Mapping[str, object] | None = None
) -> tuple[Headers, bytes]:
    """Return the headers and body of a problem document, with extension *members*."""
    document = {"type": "about:blank", "title": status.phrase, "status": status, "detail": detail}
    body = json.dumps({**document, **(members or {})}).encode()
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", b"%d" % len(body)),
    ]
    return headers + status_headers(status), body


def status_headers(status: HTTPStatus) -> Headers:
    """Return the headers that every response with *status* has: Retry-After, WWW-Authenticate."""
    if status is HTTPStatus.UNAUTHORIZED:
        return [(b"www-authenticate", b'Bearer realm="shardgate"')]
    return [(b"retry-after", b"%d" % RETRY_AFTER_S)] if status in _RETRIED else []
