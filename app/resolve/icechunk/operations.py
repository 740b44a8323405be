"""Operations on a repository, page by page: in ``repo``, and in its backups."""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple

from app.errors import BadParameterError, UnknownRepositoryError
from app.formats.icechunk.envelope import memory_nbytes
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.repo_info import (
    RepoInfo,
    RepoInfoDecoder,
    Status,
    Update,
    Value,
    is_backup,
)
from app.formats.reading import DecodeError, Read
from app.model import ByteRange, ETag, Fixed, ObjectRef
from app.resolve.icechunk.repository import OpenedRepository

_FILES_AT_ONCE: Final = 100
_SEPARATOR: Final = "~"


@dataclass(frozen=True, slots=True)
class SetStatus:
    """Status that an operation has set."""

    availability: str
    set_at: datetime
    limited_availability_reason: str | None


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation on a repository."""

    kind: str
    updated_at: datetime
    backup: str | None
    """File in ``overwritten/`` with the state after it; `None` for the current state, and for
    operations that were listed by a migration."""
    fields: dict[str, str | int | bool | SetStatus | None]


@dataclass(frozen=True, slots=True)
class OperationsPage:
    """Page of operations, newest first."""

    operations: list[Operation]
    next: str | None
    """Parameter `after` of the next page, if there is one; stays valid."""
    ends_early: str | None
    """Reason for which older operations cannot be read, if there are some."""


class _Position(NamedTuple):
    name: str | None
    before: datetime | None


class _FilePage(NamedTuple):
    operations: list[Operation]
    is_all: bool
    oldest: datetime | None


async def read_operations(
    opened: OpenedRepository, after: str | None, limit: int
) -> OperationsPage:
    """Read up to *limit* operations before *after*; format version 1 has no log of them."""
    place, newer = _parse(after), None
    operations: list[Operation] = []
    for _ in range(_FILES_AT_ONCE):
        ref = _file(opened, place.name)
        if (info := await _read(opened, place.name, ref)) is None:
            return OperationsPage(operations, None, f"{ref} does not exist")
        decode = partial(_decode, info, place, newer, limit - len(operations))
        page = await opened.decode_in_thread(ref, decode)
        operations += page.operations
        if page.is_all and info.repo_before_updates is None:
            return OperationsPage(operations, None, None)
        last = operations[-1].updated_at if operations else place.before
        if not page.is_all:
            return OperationsPage(operations, _spell(_Position(place.name, last)), None)
        place, newer = _Position(info.repo_before_updates, last), page.oldest or newer
    return OperationsPage(operations, _spell(place), None)


def _decode(info: RepoInfo, place: _Position, newer: datetime | None, limit: int) -> _FilePage:
    """Return up to *limit* operations of a file; raise `DecodeError` unless older than *newer*."""
    operations: list[Operation] = []
    for update in info.updates():
        if newer is not None and update.updated_at >= newer:
            raise DecodeError(f"the operation of {newer} came after that of {update.updated_at}")
        newer = update.updated_at
        if place.before is not None and update.updated_at >= place.before:
            continue
        if len(operations) == limit:
            return _FilePage(operations, is_all=False, oldest=newer)
        operations.append(_operation(update, place.name))
    return _FilePage(operations, is_all=True, oldest=newer)


def _operation(update: Update, name: str | None) -> Operation:
    fields = {key: _field(value) for key, value in update.fields.items()}
    return Operation(update.kind, update.updated_at, update.backup_path or name, fields)


def _field(value: Value) -> str | int | bool | SetStatus | None:
    if isinstance(value, Status):
        return SetStatus(value.availability.name.lower(), value.set_at, value.reason)
    return encode_id(value) if isinstance(value, bytes) else value


def _file(opened: OpenedRepository, name: str | None) -> ObjectRef:
    return opened.repo if name is None else opened.directory.join(f"overwritten/{name}")


async def _read(opened: OpenedRepository, name: str | None, ref: ObjectRef) -> RepoInfo | None:
    if (info := await opened.info()) is None:
        raise UnknownRepositoryError(
            f"{opened.directory} follows version 1 of the format, which has no log of operations"
        )
    if name is None:
        return info
    limit = opened.repository.limit_nbytes
    version = Fixed(ETag(f'"{name}"'))
    decode = RepoInfoDecoder(limit)
    request = ByteRange(0, limit + 1)
    read = Read("repo-backup", ref, request, decode, version, memory_nbytes)
    found = await opened.fetch(read)
    return None if found is None else found.value


def _spell(place: _Position) -> str:
    before = "" if place.before is None else f"{place.before:%Y-%m-%dT%H:%M:%S.%fZ}"
    return before if place.name is None else f"{before}{_SEPARATOR}{place.name}"


def _parse(after: str | None) -> _Position:
    if after is None:
        return _Position(None, None)
    text, separator, name = after.partition(_SEPARATOR)
    if separator and not is_backup(name):
        raise BadParameterError("after: no page of operations ended with it")
    try:
        before = datetime.fromisoformat(text) if text else None
    except ValueError:
        raise BadParameterError("after: it begins with no time") from None
    if before is not None and before.tzinfo is None:
        before = before.replace(tzinfo=UTC)
    return _Position(name if separator else None, before)
