"""Status, metadata, flags and configuration of a repository, replaced by one swap of ``repo``."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from shardgate.auditing import note
from shardgate.errors import (
    BadBodyError,
    ConflictError,
    PreconditionFailedError,
    UnknownRepositoryError,
)
from shardgate.formats.documents import Json
from shardgate.formats.icechunk.config import check_patterns, parse_splitting, read_config
from shardgate.formats.icechunk.flexbuffers import decode_flexbuffer, encode_flexbuffer
from shardgate.formats.icechunk.metadata_items import encode_metadata
from shardgate.formats.icechunk.repo_info import Availability, RepoField, RepoInfo, Status, moment
from shardgate.formats.icechunk.repo_writer import FieldUpdate
from shardgate.formats.icechunk.repository_files import RepoRefs
from shardgate.formats.reading import DecodeError
from shardgate.icechunk.repo_swap import Feature, Planned, RepoFile, RepoSwaps
from shardgate.icechunk.repository import OpenedRepository
from shardgate.model import ETag
from shardgate.read.bodies import Demand

type Document = Mapping[str, Json]
type _Path = tuple[str, ...]
"""Names of the members that lead to a value: ``("manifest", "splitting")``."""
type _Changes = tuple[Document, Sequence[FieldUpdate]]
"""A document as it becomes, and the changes that lead to it; none if nothing changes."""


class Setting(NamedTuple):
    """Part of ``repo`` that is read and replaced as a JSON document."""

    describe: Callable[[RepoInfo], Document]
    change: Callable[[RepoInfo, Document, int], _Changes]
    """Called with the document that is wanted, and the time in µs since 1970."""


class TaggedDocument(NamedTuple):
    """A document, and the entity tag of this version of it."""

    document: Document
    etag: ETag

    @classmethod
    def of(cls, document: Document) -> "TaggedDocument":
        digest = blake2b(_spell(document).encode(), digest_size=12)
        return cls(document, ETag(f'"{digest.hexdigest()}"'))


def _spell(document: Json | Document) -> str:
    """Spell *document* in one way: unlike in Python, 1 is neither true nor 1.0."""
    return json.dumps(document, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Administration:
    """Reads and replaces the settings of one repository."""

    swaps: RepoSwaps
    opened: OpenedRepository

    async def read(self, setting: Setting) -> TaggedDocument:
        """Read a setting as of the cached ``repo``, also of a repository that is offline.

        Raises: `UnknownRepositoryError` for version 1 of the format, see `RepoSwaps.read`.
        """
        opened = self.opened
        if not isinstance(opened.repository.refs, RepoRefs):
            raise UnknownRepositoryError(
                f"{opened.directory} follows version 1 of the format, which has no such settings"
            )
        found = await opened.fetch(opened.repository.refs.read)
        if found is None or (info := found.value.spec) is None:
            raise UnknownRepositoryError(f"{opened.directory}: the repository no longer exists")
        return await opened.decode_in_thread(
            opened.repo, lambda: TaggedDocument.of(setting.describe(info)), is_long=info.is_long
        )

    async def replace(self, setting: Setting, wanted: Document, demand: Demand) -> TaggedDocument:
        """Replace a setting that meets *demand*. One that is as *wanted* stays as it is, whatever
        the demand: then the request is repeated, and has been fulfilled before.

        Raises: `PreconditionFailedError`, `BadBodyError`, see `RepoSwaps.update`.
        """

        def plan(file: RepoFile) -> Planned[TaggedDocument]:
            current = TaggedDocument.of(setting.describe(file.info))
            note(before=current.etag)
            document, changes = setting.change(file.info, wanted, self.swaps.now_us())
            if changes and (reason := demand((current.etag,))) is not None:
                raise PreconditionFailedError(reason)
            return Planned(TaggedDocument.of(document), changes)

        await self.swaps.store.verify_conditional_writes(self.opened.directory)
        replaced = (await self.swaps.update(self.opened, plan)).answer
        note(after=replaced.etag)
        return replaced


def _status_document(status: Status) -> Document:
    return {
        "availability": status.availability.name.lower(),
        "limited_availability_reason": status.reason,
        "set_at": f"{status.set_at:%Y-%m-%dT%H:%M:%S.%fZ}",
    }


def _change_status(info: RepoInfo, wanted: Document, now_us: int) -> _Changes:
    availability = Availability[str(wanted["availability"]).upper()]
    reason = wanted["limited_availability_reason"]
    if availability == info.status.availability and reason == info.status.reason:
        return _status_document(info.status), ()
    status = Status(availability, moment(now_us), None if reason is None else str(reason))
    replaced = {RepoField.STATUS: status}
    update = FieldUpdate("repo_status_changed", replaced, {"status": status})
    return _status_document(status), (update,)


def _describe_metadata(info: RepoInfo) -> Document:
    return info.metadata().decode()


def _change_metadata(info: RepoInfo, wanted: Document, _: int) -> _Changes:
    current = _describe_metadata(info)
    if _spell(current) == _spell(wanted):
        return current, ()
    try:
        encoded = encode_metadata(wanted)
    except ValueError as error:
        raise BadBodyError(f"metadata: {error}") from None
    replaced = {RepoField.METADATA: encoded}
    return wanted, (FieldUpdate("metadata_changed", replaced, {}),)


def _describe_flags(info: RepoInfo) -> Document:
    enabled = info.enabled_feature_flags()
    disabled = info.disabled_feature_flags()
    flags: dict[str, bool | None] = {}
    for feature in Feature:
        is_known = feature in enabled or feature in disabled
        flags[feature.name.lower()] = feature in enabled if is_known else None
    return flags


def _change_flags(info: RepoInfo, wanted: Document, _: int) -> _Changes:
    current = _describe_flags(info)
    enabled = set(info.enabled_feature_flags())
    disabled = set(info.disabled_feature_flags())
    updates: list[FieldUpdate] = []
    for feature in Feature:
        value = wanted[feature.name.lower()]
        if value == current[feature.name.lower()]:
            continue
        enabled.discard(feature)
        disabled.discard(feature)
        if value is True:
            enabled.add(feature)
        elif value is False:
            disabled.add(feature)
        replaced = {
            RepoField.ENABLED_FEATURE_FLAGS: sorted(enabled) or None,
            RepoField.DISABLED_FEATURE_FLAGS: sorted(disabled) or None,
        }
        fields = {"id": int(feature), "new_value": None if value is None else bool(value)}
        updates.append(FieldUpdate("feature_flag_changed", replaced, fields))
    return wanted, updates


def _describe_config(info: RepoInfo) -> Document:
    data = info.config_data()
    document = {} if data is None else decode_flexbuffer(data)
    if not isinstance(document, dict):
        raise DecodeError("the configuration is not an object")
    return document


type _U16 = Annotated[int, Field(ge=0, lt=2**16, strict=True)]
type _Options = dict[str, str]


class _ConfigPart(BaseModel, extra="forbid", strict=True):
    """Part of a configuration: the library does not open a repository whose types are wrong."""


class _Compression(_ConfigPart):
    algorithm: Literal["zstd"] | None = None
    level: Annotated[int, Field(ge=0, le=22)] | None = None


class _S3(_ConfigPart):
    region: str | None = None
    endpoint_url: str | None = None
    anonymous: bool
    allow_http: bool
    force_path_style: bool
    network_stream_timeout_seconds: _U16 | None = None
    requester_pays: bool
    checksum_algorithm: Literal["crc32", "crc32c", "crc64_nvme", "sha1", "sha256"] | None = None


class _ContainerStore(_ConfigPart):
    s3: _S3 | None = None
    s3_compatible: _S3 | None = None
    tigris: _S3 | None = None
    gcs: _Options | None = None
    azure: _Options | None = None
    http: _Options | None = None
    local_file_system: str | None = None


_PREFIXES: Final = {
    "s3": "s3://[^/]+/(.*/)?",
    "s3_compatible": "s3://[^/]+/(.*/)?",
    "tigris": "(s3|tigris)://[^/]+/(.*/)?",
    "gcs": "(gs|gcs)://[^/]+/(.*/)?",
    "azure": "(az|azure|abfs)://[^/]+/(.*/)?",
    "http": "https?://[^/]+/(.*/)?",
    "local_file_system": "file://[^/]*/.*[^/]/",
}


class _ContainerMember(_ConfigPart):
    name: str | None = None
    url_prefix: str
    store: _ContainerStore

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        """Check what the library demands when a container is set: it ignores any other."""
        stores = self.store.model_dump(exclude_unset=True)
        kind, value = next(iter(stores.items()), ("", None))
        if len(stores) > 1 or value is None:
            raise ValueError("store has one member, such as s3")
        if not re.fullmatch(_PREFIXES[kind], self.url_prefix):
            raise ValueError(f"url_prefix fits {kind} if it has the form {_PREFIXES[kind]}")
        return self


_CONTAINERS: Final = "virtual_chunk_containers"
_SPLITTING: Final = ("manifest", "splitting")
_SET_HERE: Final[Mapping[str, TypeAdapter[Any]]] = {
    "inline_chunk_threshold_bytes": TypeAdapter(_U16),
    "num_updates_per_repo_info_file": TypeAdapter(_U16),
    "compression": TypeAdapter(_Compression),
    _CONTAINERS: TypeAdapter(_ContainerMember),
}
"""Members of a configuration that the service sets, beside `manifest.splitting`."""


def _change_config(info: RepoInfo, wanted: Document, _: int) -> _Changes:
    current = _describe_config(info)
    if _spell(current) == _spell(wanted):
        return current, ()
    before = _members_of(current)
    after = _members_of(wanted)
    try:
        data = encode_flexbuffer(wanted) if wanted else None
        if data is not None:
            read_config(data)
        for path in sorted(before.keys() | after.keys()):
            is_kept = path in before and path in after
            if not is_kept or _spell(before[path]) != _spell(after[path]):
                _check_member(path, after)
    except (ValueError, DecodeError, ConflictError) as error:
        raise BadBodyError(f"config: {error}") from None
    return wanted, (FieldUpdate("config_changed", {RepoField.CONFIG: data}, {}),)


def _members_of(config: Document) -> dict[_Path, Json]:
    """Return the members of *config* that are set each by itself; `null` is as good as none."""
    found: dict[_Path, Json] = {}
    for name, value in config.items():
        if name == _CONTAINERS and isinstance(value, dict):
            found |= {(name, key): each for key, each in value.items()}
        elif name == "manifest" and isinstance(value, dict):
            found |= {(name, key): each for key, each in value.items() if each is not None}
        elif value is not None:
            found[name,] = value
    return found


def _check_member(path: _Path, after: Mapping[_Path, Json]) -> None:
    """Check a member that is changed, or removed. Raises: `ValueError`, `DecodeError`,
    `ConflictError`.
    """
    if path[0] not in _SET_HERE and path != _SPLITTING:
        raise ValueError(f"{'.'.join(path)} stays as it is here: only the library sets it")
    if path not in after:
        return
    if path == _SPLITTING:
        parse_splitting(after[path])
        check_patterns(after[path])
        return
    try:
        _SET_HERE[path[0]].validate_python(after[path])
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, [*path, *fault['loc']]))}: {fault['msg']}") from None


CONFIG: Final = Setting(_describe_config, _change_config)
STATUS: Final = Setting(lambda info: _status_document(info.status), _change_status)
METADATA: Final = Setting(_describe_metadata, _change_metadata)
FLAGS: Final = Setting(_describe_flags, _change_flags)
