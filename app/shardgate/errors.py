"""Errors, by the party that can act on them; `shardgate.server.problems` gives each leaf a status.

These have others below them:

ShardgateError
├── RequestError
└── ObjectError
    └── StorageError

An object that does not exist is a value, not an error.
"""

from collections.abc import Mapping, Sequence

from shardgate.model import Fixed, ObjectRef, UnmodifiedSince, Version


def install_command(extra: str) -> str:
    """Return the command that installs *extra*, in a checkout: there is no package on PyPI yet."""
    return f"pip install '.[{extra}]'"


class ShardgateError(Exception):
    """Base class of all errors of this service."""


class ConfigurationError(ShardgateError):
    """Settings are wrong; each argument is a line that names one."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class RequestError(ShardgateError):
    """The client must change its request."""


class BadKeyError(RequestError):
    """The path is not a valid key: not UTF-8, too long, or with ``..``, NUL or an empty segment."""


class BadHeaderError(RequestError):
    """A header of the request is malformed."""


class BadParameterError(RequestError):
    """A parameter of the request is invalid, alone or together with the others."""


class BadBodyError(RequestError):
    """The body is malformed, or cannot be stored under the key."""


class DigestError(RequestError):
    """The body does not match its checksum."""


class LengthRequiredError(RequestError):
    """The request has no length of its body."""


class TooLargeError(RequestError):
    """The body of the request is too large, or the object would be with it."""


class SlowBodyError(RequestError):
    """The body of the request did not arrive in time."""


class UnknownCodingError(RequestError):
    """The content coding of the body cannot be stored."""


class UnsupportedError(RequestError):
    """The operation exists in S3 but not in this service."""


class ForeignPageError(RequestError):
    """A page of an origin that CORS does not allow tries to write."""


class MisdirectedError(RequestError):
    """The host of the request is not one of `server.hosts`."""


class UnauthenticatedError(RequestError):
    """Credentials are missing or invalid."""


class SignatureError(RequestError):
    """The signature of the request cannot be taken; *code* is S3's name for the reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ForbiddenError(RequestError):
    """The credentials are valid but do not permit this."""


class TooManyRequestsError(RequestError):
    """The client has too many concurrent requests, or too many for the next *wait_s*."""

    def __init__(self, reason: str, wait_s: int = 1) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class PreconditionFailedError(RequestError):
    """The stored object does not meet a precondition of the request."""


class PreconditionRequiredError(RequestError):
    """The write could erase what others wrote, as no precondition names a version."""


class BadPartError(RequestError):
    """A part of an upload is missing, or differs from the one in the request."""


class PartOrderError(RequestError):
    """The parts of an upload are not listed in ascending order."""


class UnknownUploadError(RequestError):
    """The key has no upload of that id."""


class UnknownDatasetError(RequestError):
    """No dataset of that name is configured."""


class UnknownRepositoryError(RequestError):
    """The path has no Icechunk repository, or one whose format lacks the feature."""


class UnknownRefError(RequestError):
    """The repository has no such branch, tag or snapshot."""


class UnknownSessionError(RequestError):
    """The repository has no such session, or it has ended."""


class UnknownTokenError(RequestError):
    """The caller has made no such token, or it has expired."""


class ConflictError(ShardgateError):
    """The write conflicts with the stored state."""


class CommitConflictError(ShardgateError):
    """The branch has moved, and the commits since then conflict with this one."""

    def __init__(
        self, expected_parent: str, actual_parent: str, conflicts: Sequence[Mapping[str, object]]
    ) -> None:
        found = f"the branch is at {actual_parent}, no longer at {expected_parent}"
        first = ", ".join(f"{each['kind']} at {each['path']}" for each in conflicts[:3])
        more = " and more" if conflicts[3:] else ""
        super().__init__(f"{found}, and this does not go together: {first}{more}")
        self.expected_parent = expected_parent
        self.actual_parent = actual_parent
        self.conflicts = conflicts

    def __reduce__(self) -> tuple[object, ...]:
        # By default pickle makes an error again of its message.
        return type(self), (self.expected_parent, self.actual_parent, self.conflicts)


class ReadOnlyError(ShardgateError):
    """The key can never be written."""


class UnwritableError(ShardgateError):
    """The store does not support writes, or does not honour preconditions."""


class NotAllowedError(ShardgateError):
    """A virtual reference leads to an object that the settings do not allow."""


class OfflineError(ShardgateError):
    """The repository is offline."""


class LockedError(ShardgateError):
    """The repository is read-only."""


class ClockSkewError(ShardgateError):
    """The repository has a time that is later than the clock of this process."""


class BusyError(ShardgateError):
    """The limit of concurrent requests, or of bytes in flight, is reached."""


class OverdueError(ShardgateError):
    """The response did not begin in time."""


class IssuerUnavailableError(ShardgateError):
    """The keys of a token issuer cannot be read."""


class TokenRecordsError(ShardgateError):
    """The records of tokens cannot be read or written at the moment."""


class ObjectError(ShardgateError):
    """The object *ref* cannot be used, because of *reason*."""

    def __init__(self, ref: ObjectRef, reason: str) -> None:
        super().__init__(f"{ref}: {reason}")
        self.ref = ref
        self.reason = reason


class StorageError(ObjectError):
    """The store did not return the bytes of the object."""


class StorageDeniedError(StorageError):
    """The store denies access; the object may exist, so this is never taken for absence."""


class StorageSkewError(StorageError):
    """The store refuses signatures of this machine, whose clock differs from that of the store."""


class StorageThrottledError(StorageError):
    """The store throttles requests."""


class StorageUnavailableError(StorageError):
    """The store is unreachable or fails; it may recover."""


class StorageUnusableError(StorageError):
    """The store lacks the bucket or a needed feature, or refuses; a retry would not help."""


class StorageTimeoutError(StorageError):
    """The store did not answer in time."""


class TruncatedReadError(StorageError):
    """The store closed the connection before all announced bytes had arrived."""


class StorageRedirectError(StorageError):
    """The server redirects in a circle, or out of the root and the URLs in `redirects`."""


class RangeNotSatisfiedError(StorageError):
    """The object has *size* bytes and ends before the range begins."""

    def __init__(self, ref: ObjectRef, size: int) -> None:
        super().__init__(ref, f"the range begins past the end of {size} bytes")
        self.size = size


class MetadataMissingError(StorageError):
    """Metadata that this process has read before are missing, or an error page is in the place of
    those of a named format.
    """

    def __init__(
        self, ref: ObjectRef, reason: str = "was there before and is missing now; it may come back"
    ) -> None:
        super().__init__(ref, reason)


class VersionChangedError(StorageError):
    """The object was replaced or removed since its index was read."""

    def __init__(self, ref: ObjectRef, lasting_reason: str = "") -> None:
        """With a *lasting_reason* it will look so whenever it is read."""
        super().__init__(ref, lasting_reason or "replaced while it was being read")
        self.is_immutable = bool(lasting_reason)


class DamagedError(ObjectError):
    """The bytes of the object are invalid: a checksum, a bound, undecodable metadata."""


def lost(
    ref: ObjectRef, version: Version | UnmodifiedSince, cause: StorageError | None = None
) -> VersionChangedError | DamagedError:
    """Return the error for *ref* that is missing in *version*; damage if metadata refer to it."""
    if isinstance(version, Fixed | UnmodifiedSince):
        return DamagedError(ref, "is missing, or not as it was when it was referred to")
    return cause if isinstance(cause, VersionChangedError) else VersionChangedError(ref)
