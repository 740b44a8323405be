"""Everything that can go wrong, by what the catcher does about it.

ShardgateError
├── ConfigurationError            the operator mends the start: one line, exit code 2
├── RequestError                  the client mends its request
│   ├── BadKeyError
│   ├── BadHeaderError
│   ├── BadParameterError
│   ├── BadBodyError              it is not what it says, or not what belongs there
│   ├── DigestError               it is not what its checksum says
│   ├── LengthRequiredError
│   ├── TooLargeError
│   ├── SlowBodyError
│   ├── UnknownCodingError
│   ├── UnsupportedError          S3 has it, and this service has not
│   ├── ForeignPageError
│   ├── MisdirectedError          the service was asked under a name that is not its own
│   ├── UnauthenticatedError      no credentials that are good for anything
│   ├── SignatureError            S3's signature of the request is not right
│   ├── ForbiddenError            credentials that are good for other things
│   ├── TooManyRequestsError      as many of the same client are being answered
│   ├── PreconditionFailedError
│   ├── BadPartError              a part of an upload is missing, or another one
│   ├── PartOrderError
│   ├── UnknownUploadError
│   ├── UnknownDatasetError
│   ├── UnknownRepositoryError
│   ├── UnknownRefError
│   └── UnknownSessionError
├── ConflictError                 what is stored does not go together with what is to be written
├── CommitConflictError           others have committed what does not go together with a commit
├── ReadOnlyError                 what the key names cannot be written there
├── UnwritableError               the store cannot be written without losing data
├── NotAllowedError               the operator has not allowed what the data refer to
├── OfflineError                  the owner of the repository has taken it out of service
├── LockedError                   the owner of the repository lets nobody write to it
├── ClockSkewError                somebody's clock is wrong, who wrote to the repository, or ours
├── BusyError                     the client comes back later
├── IssuerUnavailableError        who signed a token does not tell its keys
├── OverdueError                  the answer took too long, whatever it waited for
├── StorageError                  the store did not give the bytes
│   ├── StorageDeniedError
│   ├── StorageThrottledError
│   ├── StorageUnavailableError
│   ├── StorageTimeoutError
│   ├── TruncatedReadError        fewer bytes arrived than were announced
│   ├── StorageRedirectError      the server sends us to a place that its root does not allow
│   ├── RangeNotSatisfiedError    the object ends before the range begins
│   ├── MetadataMissingError      metadata that were there are missing, and may come back
│   └── VersionChangedError       the object is no longer the one that was looked up
└── DamagedError                  the bytes arrived and cannot be right

An object that does not exist is a value, not an error.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from app.model import Fixed, ObjectRef, UnmodifiedSince, Version

_MOST_NAMED: Final = 3
"""So many conflicts are named in the text of an error; all are among its members."""


class ShardgateError(Exception):
    """The root of the tree."""


class ConfigurationError(ShardgateError):
    """A setting is wrong; the message is one line that names it."""


class RequestError(ShardgateError):
    """The request cannot be answered as it stands."""


class BadKeyError(RequestError):
    """The path is no key: not UTF-8, too long, or with ``..``, NUL or an empty segment in it."""


class BadHeaderError(RequestError):
    """A header of the request cannot be understood."""


class BadParameterError(RequestError):
    """A parameter of the request cannot be, or not with the others."""


class BadBodyError(RequestError):
    """The body of the request is not what it says, or no such chunk or document can be there."""


class DigestError(RequestError):
    """The body of the request is not what a checksum beside it says."""


class LengthRequiredError(RequestError):
    """The request does not tell how long its body is."""


class TooLargeError(RequestError):
    """The body of the request is larger than is taken."""


class SlowBodyError(RequestError):
    """The body of the request did not arrive in time."""


class UnknownCodingError(RequestError):
    """The body comes in a coding that cannot be stored there."""


class UnsupportedError(RequestError):
    """S3 has such a request, and this service has not."""


class ForeignPageError(RequestError):
    """A page would write that may not even read."""


class MisdirectedError(RequestError):
    """The host that the request names is none that `server.hosts` admits."""


class UnauthenticatedError(RequestError):
    """The request shows no credentials, or wrong ones, where some are needed."""


class SignatureError(RequestError):
    """The signature of the request cannot be taken; *code* is S3's name for the reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ForbiddenError(RequestError):
    """Who asks may see the dataset, and may not do this."""


class TooManyRequestsError(RequestError):
    """As many requests of the same client are being answered as may be at once."""


class PreconditionFailedError(RequestError):
    """What is stored is not in the state that the request demands."""


class BadPartError(RequestError):
    """A part of an upload was not uploaded, or is another one than the request tells."""


class PartOrderError(RequestError):
    """The request does not tell the parts of an upload in their order."""


class UnknownUploadError(RequestError):
    """No upload of that id goes on for the key."""


class UnknownDatasetError(RequestError):
    """No dataset of that name is configured."""


class UnknownRepositoryError(RequestError):
    """There is no Icechunk repository where one was asked for, or none that keeps such a thing."""


class UnknownRefError(RequestError):
    """The repository has no such branch, tag or snapshot."""


class UnknownSessionError(RequestError):
    """The repository has no such session, or no more."""


class ConflictError(ShardgateError):
    """What is to be written does not go together with what is stored."""


class CommitConflictError(ShardgateError):
    """The branch is not at the parent of a commit any more, and they do not go together."""

    def __init__(
        self, expected_parent: str, actual_parent: str, conflicts: Sequence[Mapping[str, object]]
    ) -> None:
        """Tell which snapshot the branch should be at, and is; each conflict as a document."""
        moved = f"the branch is at {actual_parent}, no longer at {expected_parent}"
        first = ", ".join(f"{each['kind']} at {each['path']}" for each in conflicts[:_MOST_NAMED])
        more = " and more" if len(conflicts) > _MOST_NAMED else ""
        super().__init__(f"{moved}, and this does not go together: {first}{more}")
        self.expected_parent = expected_parent
        self.actual_parent = actual_parent
        self.conflicts = conflicts


class ReadOnlyError(ShardgateError):
    """What the key names cannot be written there, by nobody."""


class UnwritableError(ShardgateError):
    """The store takes no writes, or would lose some: it does not heed conditions."""


class NotAllowedError(ShardgateError):
    """Data refer to objects elsewhere, which the settings do not allow to be read."""


class OfflineError(ShardgateError):
    """The repository says that it may not be read now."""


class LockedError(ShardgateError):
    """The repository says that it may not be written to now."""


class ClockSkewError(ShardgateError):
    """The repository tells of a time that has not come by our clock; what follows is later."""


class BusyError(ShardgateError):
    """All room for bytes in flight is taken, or for requests."""


class OverdueError(ShardgateError):
    """The answer has not begun in the time that one may take."""


class IssuerUnavailableError(ShardgateError):
    """The keys that an issuer signs tokens with cannot be read, so that nobody can tell theirs."""


class StorageError(ShardgateError):
    """The store did not give the bytes of *ref*; *reason* says why."""

    def __init__(self, ref: ObjectRef, reason: str) -> None:
        super().__init__(f"{ref}: {reason}")
        self.ref = ref
        self.reason = reason


class StorageDeniedError(StorageError):
    """The store refuses us the object. It may exist or not: never taken for absence."""


class StorageThrottledError(StorageError):
    """The store asks us to slow down."""


class StorageUnavailableError(StorageError):
    """The store cannot be reached, fails, or lacks the whole bucket or folder.

    *lasting* says that trying again at once would not help.
    """

    def __init__(self, ref: ObjectRef, reason: str, *, lasting: bool = False) -> None:
        super().__init__(ref, reason)
        self.lasting = lasting


class StorageTimeoutError(StorageError):
    """The store did not answer in time."""


class TruncatedReadError(StorageError):
    """The store closed the connection before all announced bytes had arrived."""


class StorageRedirectError(StorageError):
    """The server redirects to a URL that is not below the root, nor allowed by its settings."""


class RangeNotSatisfiedError(StorageError):
    """The object has only *size* bytes and ends before the asked range begins."""

    def __init__(self, ref: ObjectRef, size: int) -> None:
        super().__init__(ref, f"the range begins past the end of {size} bytes")
        self.size = size


class MetadataMissingError(StorageError):
    """Metadata that this process has seen are missing, and nobody removed them here."""

    def __init__(self, ref: ObjectRef) -> None:
        super().__init__(ref, "was there before and is missing now; it may come back")


class VersionChangedError(StorageError):
    """The object was replaced or removed since its index was read."""

    def __init__(self, ref: ObjectRef) -> None:
        super().__init__(ref, "replaced while it was being read")


class DamagedError(ShardgateError):
    """The bytes of *ref* cannot be right: a checksum, a bound, undecodable metadata."""

    def __init__(self, ref: ObjectRef, reason: str) -> None:
        super().__init__(f"{ref}: {reason}")
        self.ref = ref
        self.reason = reason


def lost(ref: ObjectRef, version: Version | UnmodifiedSince) -> VersionChangedError | DamagedError:
    """Make the error that *ref* is not there in *version*, which something told of."""
    if isinstance(version, Fixed | UnmodifiedSince):
        return DamagedError(ref, "is missing, or not as it was when it was referred to")
    return VersionChangedError(ref)
