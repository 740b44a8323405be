"""Status, metadata, flags and configuration of a repository, replaced by one swap of ``repo``."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

from shardgate.errors import BadBodyError, PreconditionFailedError, UnknownRepositoryError
from shardgate.formats.documents import Json
from shardgate.formats.icechunk.config import parse_splitting, read_config
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
        """Read a setting, also of a repository that is offline.

        Raises: `UnknownRepositoryError` for version 1 of the format, see `RepoSwaps.read`.
        """
        opened = self.opened
        if not isinstance(opened.repository.refs, RepoRefs):
            raise UnknownRepositoryError(
                f"{opened.directory} follows version 1 of the format, which has no such settings"
            )
        return await self.swaps.look_up(
            opened, lambda file: TaggedDocument.of(setting.describe(file.info))
        )

    async def replace(self, setting: Setting, wanted: Document, demand: Demand) -> TaggedDocument:
        """Replace a setting that meets *demand*. One that is as *wanted* stays as it is, whatever
        the demand: then the request is repeated, and has been fulfilled before.

        Raises: `PreconditionFailedError`, `BadBodyError`, see `RepoSwaps.update`.
        """

        def plan(file: RepoFile) -> Planned[TaggedDocument]:
            current = TaggedDocument.of(setting.describe(file.info))
            document, changes = setting.change(file.info, wanted, self.swaps.now_us())
            if changes and (reason := demand((current.etag,))) is not None:
                raise PreconditionFailedError(reason)
            return Planned(TaggedDocument.of(document), changes)

        await self.swaps.store.verify_conditional_writes(self.opened.directory)
        return await self.swaps.update(self.opened, plan)


def _describe_status(info: RepoInfo) -> Document:
    return _status_document(info.status)


def _status_document(status: Status) -> Document:
    return {
        "availability": status.availability.name.lower(),
        "limited_availability_reason": status.reason,
        "set_at": f"{status.set_at:%Y-%m-%dT%H:%M:%S.%fZ}",
    }


def _change_status(info: RepoInfo, wanted: Document, now_us: int) -> _Changes:
    availability = Availability[str(wanted["availability"]).upper()]
    reason = wanted["limited_availability_reason"]
    status = Status(availability, moment(now_us), None if reason is None else str(reason))
    if status == Status(info.status.availability, status.set_at, info.status.reason):
        return _describe_status(info), ()
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
    return {
        feature.name.lower(): None if feature not in [*enabled, *disabled] else feature in enabled
        for feature in Feature
    }


def _change_flags(info: RepoInfo, wanted: Document, _: int) -> _Changes:
    current = _describe_flags(info)
    lists = {True: set(info.enabled_feature_flags()), False: set(info.disabled_feature_flags())}
    updates: list[FieldUpdate] = []
    for feature in Feature:
        value = wanted[feature.name.lower()]
        if value == current[feature.name.lower()]:
            continue
        for setting, numbers in lists.items():
            numbers.discard(feature)
            if setting is value:
                numbers.add(feature)
        replaced = {
            RepoField.ENABLED_FEATURE_FLAGS: sorted(lists[True]) or None,
            RepoField.DISABLED_FEATURE_FLAGS: sorted(lists[False]) or None,
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


def _change_config(info: RepoInfo, wanted: Document, _: int) -> _Changes:
    current = _describe_config(info)
    if _spell(current) == _spell(wanted):
        return current, ()
    before = _set_by_library(current)
    after = _set_by_library(wanted)
    for name in sorted(before.keys() | after.keys()):
        if _spell(before.get(name)) != _spell(after.get(name)):
            raise BadBodyError(f"config: {name} stays as it is here: only the library sets it")
    try:
        data = encode_flexbuffer(wanted) if wanted else None
        if data is not None:
            parse_splitting(read_config(data).splitting)
    except (ValueError, DecodeError) as error:
        raise BadBodyError(f"config: {error}") from None
    return wanted, (FieldUpdate("config_changed", {RepoField.CONFIG: data}, {}),)


def _set_by_library(config: Document) -> dict[str, Json]:
    """Return the members of *config* that only the library uses, and would not open a repository
    without, if they had other types; those of `manifest` beside the others.
    """
    others = {name: value for name, value in config.items() if name not in SET_HERE}
    manifest = others.pop("manifest", None)
    if isinstance(manifest, dict):
        others |= {f"manifest.{name}": each for name, each in manifest.items()}
        others.pop("manifest.splitting", None)
    return others


SET_HERE: Final = frozenset(
    {
        *("inline_chunk_threshold_bytes", "num_updates_per_repo_info_file", "compression"),
        "virtual_chunk_containers",
    }
)
"""Members of a configuration that the service sets, beside `manifest.splitting`."""
CONFIG: Final = Setting(_describe_config, _change_config)
STATUS: Final = Setting(_describe_status, _change_status)
METADATA: Final = Setting(_describe_metadata, _change_metadata)
FLAGS: Final = Setting(_describe_flags, _change_flags)
