"""The file `repo`: refs, snapshots, the operations of late ("Repo Info File")."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from app.formats.documents import Json
from app.formats.icechunk.config import Config, read_config
from app.formats.icechunk.envelope import FileType, open_envelope
from app.formats.icechunk.fields import Status, read_backup, read_status
from app.formats.icechunk.flatbuffer import U8, U16, U32, Buffer, Table, required
from app.formats.icechunk.ids import decode_id, encode_id
from app.formats.icechunk.metadata_items import read_metadata
from app.formats.icechunk.ops_log import Update, read_update
from app.formats.icechunk.snapshot_list import SnapshotInfo, SnapshotList
from app.formats.reading import DecodeError

_SPEC_VERSION: Final = 0
_TAGS: Final = 1
_BRANCHES: Final = 2
_DELETED_TAGS: Final = 3
_STATUS: Final = 5
_METADATA: Final = 6
_LATEST_UPDATES: Final = 7
_REPO_BEFORE_UPDATES: Final = 8
_CONFIG: Final = 9
_DISABLED_FEATURE_FLAGS: Final = 11

_SPEC_VERSIONS: Final = (1, 2)
_REF_NBYTES: Final = 256


class NamedSnapshots(Mapping[str, str]):
    """The ids of snapshots by the names of branches, or of tags.

    A damaged ref is not among those that are named or counted, but looking it up raises
    `DecodeError`: only a ref that is not there is a `KeyError`.
    """

    __slots__ = ("_ids", "faults")

    def __init__(self, ids: Mapping[str, str], faults: Mapping[str, str]) -> None:
        self._ids = ids
        self.faults = faults
        """What is wrong with damaged refs, by their names."""

    def __getitem__(self, name: str) -> str:
        if (fault := self.faults.get(name)) is not None:
            raise DecodeError(f"the ref {name!r} is damaged: {fault}")
        return self._ids[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


@dataclass(frozen=True, slots=True)
class RepoInfo:
    """One version of `repo`.

    It is read anew after each commit, so snapshots, updates and metadata are read when asked for;
    that takes some ten microseconds for each, and raises `DecodeError`.
    """

    payload: bytes
    limit_nbytes: int
    """Of the payload, and so of what is decoded from it."""
    version: int
    """Of the specification that the file follows."""
    spec_version: int
    """Of the specification that the repository follows."""
    branches: NamedSnapshots
    tags: NamedSnapshots
    status: Status
    repo_before_updates: str | None
    """The file in `overwritten/` that has the updates before those of this file."""
    config: Config | DecodeError
    """What is used of the configuration, or what is wrong with that."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the value holds."""
        config_nbytes = 0 if isinstance(self.config, DecodeError) else self.config.nbytes
        refs = len(self.branches) + len(self.tags)
        return len(self.payload) + _REF_NBYTES * refs + config_nbytes

    def deleted_tags(self) -> list[str]:
        """Name the tags that were deleted, whose names cannot be used again."""
        return list(self.root().texts(_DELETED_TAGS))

    def disabled_feature_flags(self) -> list[int]:
        """List the numbers of the features that this repository must not be changed by."""
        return self.root().numbers(_DISABLED_FEATURE_FLAGS, U16)

    def snapshots(self) -> Iterator[SnapshotInfo]:
        """Give all snapshots, by their ids; also those that no ref leads to any more."""
        return self._snapshots().every()

    def snapshot(self, snapshot_id: str) -> SnapshotInfo | None:
        """Find a snapshot; `None` if this repository has none of that id."""
        snapshots, index = self._find(snapshot_id)
        return None if index is None else snapshots.info(index)

    def ancestry(self, snapshot_id: str) -> Iterator[SnapshotInfo] | None:
        """Give a snapshot, its parent and so on; `None` if there is no such snapshot.

        The iterator raises `DecodeError` where a parent is no snapshot, or its own ancestor.
        """
        snapshots, index = self._find(snapshot_id)
        return None if index is None else snapshots.ancestry(index)

    def updates(self) -> Iterator[Update]:
        """Give the operations that this file tells of, newest first."""
        return map(read_update, self.root().tables(_LATEST_UPDATES))

    def metadata(self) -> dict[str, Json]:
        """Decode what people say of the repository."""
        return read_metadata(self.root(), _METADATA, self.version).decode()

    def root(self) -> Table:
        """Give the table that everything hangs on."""
        return Buffer(self.payload, self.limit_nbytes).root

    def _snapshots(self) -> SnapshotList:
        return SnapshotList(self.root(), self.version)

    def _find(self, snapshot_id: str) -> tuple[SnapshotList, int | None]:
        snapshots, data = self._snapshots(), decode_id(snapshot_id)
        return snapshots, None if data is None else snapshots.find(data)


@dataclass(frozen=True, slots=True)
class RepoInfoDecoder:
    """Reads a file `repo` whose payload has at most *limit_nbytes*."""

    limit_nbytes: int

    def __call__(self, data: bytes) -> RepoInfo:
        """Decode a whole file.

        Raises: `DecodeError`.
        """
        version, payload = open_envelope(data, FileType.REPO_INFO, self.limit_nbytes)
        root = Buffer(payload, self.limit_nbytes).root
        spec_version = root.number(_SPEC_VERSION, U8)
        if spec_version not in _SPEC_VERSIONS:
            raise DecodeError(f"the repository follows version {spec_version}, not 1 or 2")
        for slot, name in ((_DELETED_TAGS, "deleted_tags"), (_LATEST_UPDATES, "latest_updates")):
            required(root.vector(slot, U32.size), name)
        snapshots = SnapshotList(root, version)
        return RepoInfo(
            payload,
            self.limit_nbytes,
            version,
            spec_version,
            branches=self._read_refs(root, _BRANCHES, "branches", snapshots),
            tags=self._read_refs(root, _TAGS, "tags", snapshots),
            status=read_status(required(root.table(_STATUS), "status")),
            repo_before_updates=read_backup(root, _REPO_BEFORE_UPDATES),
            config=_read_config(root),
        )

    def _read_refs(
        self, root: Table, slot: int, name: str, snapshots: SnapshotList
    ) -> NamedSnapshots:
        """Read refs; of those with one name the first counts."""
        required(root.at(slot), name)
        ids: dict[str, str] = {}
        faults: dict[str, str] = {}
        for ref in root.tables(slot):
            name = required(ref.text(0), "name of a ref")
            if name in ids or name in faults:
                continue
            try:
                ids[name] = encode_id(snapshots.id_at(ref.number(1, U32)))
            except DecodeError as error:
                faults[name] = str(error)
        return NamedSnapshots(ids, faults)


def _read_config(root: Table) -> Config | DecodeError:
    """Read the configuration at once, for it may be large; few need it, so damage is a value."""
    try:
        config = root.data(_CONFIG)
        return Config() if config is None else read_config(config)
    except DecodeError as error:
        return DecodeError(str(error))
