"""One commit of a train: its files, made on top of the tip of a branch or of the commit before it.

A commit on a branch that has moved is rebased onto the new tip, unless the two conflict.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import batched
from typing import Final, NamedTuple, NoReturn, Self

from shardgate.concurrency import bounded_gather, is_large, run_in_thread
from shardgate.errors import (
    BadBodyError,
    CommitConflictError,
    ConflictError,
    DamagedError,
    UnknownRefError,
)
from shardgate.formats.documents import Json
from shardgate.formats.icechunk.apply import Applied, apply_changes
from shardgate.formats.icechunk.changes import ChangeSet
from shardgate.formats.icechunk.config import Config, parse_splitting
from shardgate.formats.icechunk.conflicts import CommitConflict, Policy, rebase
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.manifest import Manifest, ManifestDecoder
from shardgate.formats.icechunk.manifest_writer import (
    ArrayRewrite,
    Rewritten,
    needed_manifests,
    rewrite_manifests,
)
from shardgate.formats.icechunk.metadata_items import encode_metadata
from shardgate.formats.icechunk.repo_info import RepoInfo, SnapshotInfo
from shardgate.formats.icechunk.repo_writer import (
    NewSnapshot,
    WriteId,
    check_metadata,
    find_write,
    marked,
    moment_after,
)
from shardgate.formats.icechunk.repository_files import Repository
from shardgate.formats.icechunk.snapshot import (
    ManifestFile,
    StoredSnapshot,
    StoredSnapshotDecoder,
    weigh_stored,
    write_snapshot,
)
from shardgate.formats.icechunk.transaction_log import (
    TransactionLog,
    TransactionLogDecoder,
    merge_logs,
    write_transaction_log,
)
from shardgate.formats.reading import DecodeError, Versioned, Weighable
from shardgate.icechunk.chunk_files import new_object_id, put_new
from shardgate.icechunk.repo_swap import (
    Feature,
    RepoFile,
    RepoSwaps,
    check_feature,
    demand_readable,
)
from shardgate.icechunk.repository import OpenedRepository, read_snapshot, require_unlocked
from shardgate.read.budget import ByteBudget

_MAX_LOGS: Final = 10_000
_MAX_LOG_NBYTES: Final = 256 * 1024**2
_MEMORY_PER_BYTE: Final = 16
_PUTS_AT_ONCE: Final = 64
SHORT_NBYTES: Final = 32 * 1024
"""Size of files and changes up to which they are processed on the event loop."""
_FEW: Final = 1024
"""References of manifests up to which these are processed on the event loop."""


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """Branch, parent and options of a commit."""

    branch: str | None
    """`None` makes a detached snapshot, which no branch leads to and nothing is rebased onto."""
    parent_id: str
    message: str
    write_id: WriteId
    metadata: Mapping[str, Json] = field(default_factory=dict)
    policy: Policy = Policy.FAIL
    amend: bool = False
    """Replace the tip of the branch, which must be the parent."""
    allow_empty: bool = False
    moves_nodes: bool = False
    """True if the repository has to permit the feature `Feature.MOVE_NODE`."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """A new snapshot."""

    snapshot_id: str
    parent_id: str | None
    """The previous commit; after a rebase, not the one that the changes were made against."""

    @classmethod
    def of(cls, snapshot: SnapshotInfo) -> Self:
        return cls(snapshot.snapshot_id, snapshot.parent_id)


class PreparedCommit(NamedTuple):
    """A commit that is ready to become visible, and what those on top of it need to know of it."""

    write_id: WriteId
    change: NewSnapshot
    snapshot: StoredSnapshot
    log: TransactionLog


class BranchTip(NamedTuple):
    """Tip of a branch according to *file*, or a commit of a train on top of that."""

    file: RepoFile
    snapshot: SnapshotInfo
    ahead: tuple[PreparedCommit, ...] = ()
    """Commits that are not in *file*, oldest first."""

    @property
    def info(self) -> RepoInfo:
        return self.file.info

    @property
    def snapshot_id(self) -> str:
        return self.snapshot.snapshot_id

    def with_commit(self, prepared: PreparedCommit) -> "BranchTip":
        """Return the tip after one more commit."""
        ahead = (*self.ahead, prepared)
        return self._replace(snapshot=prepared.change.snapshot, ahead=ahead)

    def find_ahead(self, write_id: WriteId) -> SnapshotInfo | None:
        """Find the commit for *write_id* in `ahead`; raise `ConflictError` for another request."""
        for prepared in self.ahead:
            if prepared.write_id.text == write_id.text:
                if prepared.write_id != write_id:
                    raise ConflictError("another commit was made with the same Idempotency-Key")
                return prepared.change.snapshot
        return None

    def commits_since(self, snapshot_id: str) -> list[SnapshotInfo] | None:
        """List the commits after *snapshot_id*, earliest first; `None` if it is no ancestor."""
        chain = [prepared.change.snapshot for prepared in reversed(self.ahead)]
        below = chain[-1].parent_id if chain else self.snapshot_id
        if below == snapshot_id:
            return chain[::-1]
        for each in self.info.ancestry(below or "") or ():
            if each.snapshot_id == snapshot_id:
                return chain[::-1]
            chain.append(each)
        return None


def find_commit(
    request: CommitRequest, file: RepoFile, opened: OpenedRepository
) -> CommitResult | BranchTip:
    """Look up the commit that *request* has made before, or else the tip of its branch; without a
    branch the parent.

    Raises: `UnknownRefError`, `LockedError`, `BadBodyError`, `ConflictError` for an idempotency key
    that was used for another request, or a feature that is off, `DamagedError`.
    """
    info = file.info
    if (made := find_write(info, request.write_id)) is not None:
        return CommitResult.of(made)
    require_unlocked(info, opened.repo)
    if request.moves_nodes:
        check_feature(info, Feature.MOVE_NODE)
    if request.branch is None:
        if request.amend or not request.parent_id:
            raise BadBodyError("a commit without a branch has a parent_id, and amends nothing")
        if (parent := info.snapshot(request.parent_id)) is None:
            raise UnknownRefError(f"there is no snapshot {request.parent_id}")
        return BranchTip(file, parent)
    if (tip_id := info.branches.get(request.branch)) is None:
        raise UnknownRefError(f"there is no branch {request.branch} in {opened.directory}")
    if (snapshot := info.snapshot(tip_id)) is None:
        raise DamagedError(opened.repo, f"lists {tip_id}, the tip of a branch, not in order of ids")
    if request.amend and snapshot.parent_id is None:
        raise ConflictError(f"{tip_id} is the first commit, which cannot be amended")
    return BranchTip(file, snapshot)


class PreparedFile(NamedTuple):
    """A new file of a repository; what it decodes to stays in the cache for the next commit."""

    kind: str
    object_id: bytes
    data: bytes
    decode: Callable[[bytes], Weighable]
    value: Weighable | None


@dataclass(slots=True)
class PreparedFiles:
    """Files of a train, which are written together; large ones are written at once."""

    _swaps: RepoSwaps
    _repository: Repository
    _held: dict[tuple[str, bytes], PreparedFile] = field(default_factory=dict)
    """Files that are not written yet, by kind and id."""
    nbytes: int = 0
    """Size of these files."""

    def held(self, kind: str, object_id: bytes) -> PreparedFile | None:
        """Return a file that is not written yet."""
        return self._held.get((kind, object_id))

    async def add(self, files: Sequence[PreparedFile]) -> None:
        """Keep *files* for `write`, or write them if they are large.

        Raises: `ConflictError` if one could not be read again.
        """
        nbytes = 0
        for file in files:
            name = self._repository.file(file.kind, file.object_id)
            demand_readable(name, file.data, self._repository.limit_nbytes)
            nbytes += len(file.data)
        # Many small files cost one wait together; large ones would only take memory.
        if self.nbytes + nbytes <= 16 * 1024**2:
            self._held |= {(file.kind, file.object_id): file for file in files}
            self.nbytes += nbytes
        else:
            await bounded_gather(self._put, files, limit=_PUTS_AT_ONCE)

    async def write(self, *others: Callable[[], Awaitable[None]]) -> None:
        """Write all files that are kept, and await *others* at the same time."""
        writes: list[Callable[[], Awaitable[None]]]
        writes = [*others, *(partial(self._put, file) for file in self._held.values())]
        await bounded_gather(lambda write: write(), writes, limit=_PUTS_AT_ONCE)
        self._held = {}
        self.nbytes = 0

    async def _put(self, file: PreparedFile) -> None:
        repository = self._repository
        kind = file.kind
        object_id = file.object_id
        etag = await put_new(self._swaps.store, repository.file(kind, object_id), file.data)
        if file.value is not None:
            read = repository.read_of(kind, object_id, file.decode)
            self._swaps.reads.put(read, Versioned(file.value, etag, len(file.data)))


@dataclass(slots=True)
class CommitBuilder:
    """Makes the files of one commit, again for each tip that it is rebased onto.

    Manifests that a rebase does not affect are reused. Nothing refers to the files until the branch
    moves; those of failed commits are garbage.
    """

    opened: OpenedRepository
    changes: ChangeSet
    """Made against the parent."""
    request: CommitRequest
    swaps: RepoSwaps
    budget: ByteBudget
    _rewritten: dict[bytes, tuple[ArrayRewrite, Rewritten]] = field(default_factory=dict)
    _rebases: int = 0
    _is_long: bool = True
    """True if the steps of building may hold up the event loop."""

    async def build(self, tip: BranchTip, files: PreparedFiles) -> PreparedCommit:
        """Make the files of a commit on top of *tip*, whose own may be in *files* as well."""
        opened = self.opened
        request = self.request
        changes = self.changes
        check_metadata(request.metadata)
        may_be_empty = request.allow_empty
        tip_id = tip.snapshot_id
        base = tip.ahead[-1].snapshot if tip.ahead else await self._read_snapshot(tip_id)
        # The branch has moved since the changes were made.
        if tip_id != request.parent_id:
            if request.amend:
                self._refuse(tip_id, "branch_moved")
            self._rebases += 1
            may_be_empty |= not changes.is_empty  # all of it may give way to their changes
            changes = await self._rebase(changes, tip, base)
        config = config_of(opened, tip.info)
        self._is_long = max(base.nbytes, changes.nbytes) > SHORT_NBYTES
        is_long = self._is_long or config.splitting is not None
        applied = await opened.decode_in_thread(
            opened.repo,
            lambda: apply_changes(changes, base, parse_splitting(config.splitting)),
            is_long=is_long,
        )
        if applied.is_empty and not may_be_empty:
            raise BadBodyError("nothing changes, and allow_empty is not set")
        rewritten = await self._rewrite_all(applied, config.compression_level, files)
        amended = await opened.read_log(tip.snapshot.object_id) if request.amend else None
        name = opened.repository.file("snapshots", base.object_id)
        finish = partial(self._finish, tip, base, applied, rewritten, amended)
        is_long = self._is_long or amended is not None
        prepared, new = await opened.decode_in_thread(name, finish, is_long=is_long)
        await files.add(new)
        return prepared

    def _finish(
        self,
        tip: BranchTip,
        base: StoredSnapshot,
        applied: Applied,
        rewritten: Mapping[bytes, Rewritten],
        amended: TransactionLog | None,
    ) -> tuple[PreparedCommit, list[PreparedFile]]:
        """Make the snapshot and its log, and the files of both."""
        applied = applied.finish(rewritten)
        snapshot = self._snapshot(base, applied)
        log = applied.log if amended is None else merge_logs(amended, applied.log)
        object_id = snapshot.object_id
        limit = self.opened.repository.limit_nbytes
        data = write_snapshot(snapshot)
        decode = StoredSnapshotDecoder(object_id, limit)
        log_data = write_transaction_log(object_id, log)
        decode_log = TransactionLogDecoder(object_id, limit)
        files = [
            PreparedFile("snapshots", object_id, data, decode, snapshot),
            PreparedFile("transactions", object_id, log_data, decode_log, log),
        ]
        change = self._change(tip, snapshot)
        return PreparedCommit(self.request.write_id, change, snapshot, log), files

    async def _rewrite_all(
        self, applied: Applied, level: int, files: PreparedFiles
    ) -> dict[bytes, Rewritten]:
        async def rewrite(array: ArrayRewrite) -> tuple[bytes, Rewritten]:
            before, rewritten = self._rewritten.get(array.node_id, (None, None))
            if rewritten is None or before != array:
                rewritten = await self._rewrite(array, level, applied.manifest_files, files)
                self._rewritten[array.node_id] = array, rewritten
            return array.node_id, rewritten

        return dict(await bounded_gather(rewrite, applied.rewrites))

    async def _rewrite(
        self,
        array: ArrayRewrite,
        level: int,
        known: Mapping[bytes, ManifestFile],
        files: PreparedFiles,
    ) -> Rewritten:
        opened = self.opened
        needed = sorted(await run_in_thread(needed_manifests, array, is_long=self._is_long))
        nbytes = 256 * len(array.changes.coords)  # columns, sorted and merged
        # Sizes are those of compressed files, of which columns take up to 16 times.
        nbytes += sum(_MEMORY_PER_BYTE * known[each].size_bytes for each in needed if each in known)
        count = sum(known[each].num_chunk_refs for each in needed if each in known)
        is_long = self._is_long or nbytes > _MEMORY_PER_BYTE * SHORT_NBYTES or count > _FEW
        async with self.budget.room(nbytes):
            read = await bounded_gather(lambda each: self._read_manifest(each, files), needed)
            manifests = dict(zip(needed, read, strict=True))
            rewrite = partial(rewrite_manifests, array, manifests, new_object_id, level)
            name = opened.directory.join(f"manifests ({array.path})")
            rewritten, contents = await opened.decode_in_thread(name, rewrite, is_long=is_long)
            limit = opened.repository.limit_nbytes
            # Decoded at once for the next commit, but not if that would take long.
            is_decoded = not is_large(files.nbytes + sum(map(len, contents.values())))
            prepare = partial(_manifest_files, contents, limit, is_decoded=is_decoded)
            new = await run_in_thread(prepare, is_long=is_long)
            await files.add(new)
        return rewritten

    async def _read_manifest(self, object_id: bytes, files: PreparedFiles) -> Manifest:
        repository = self.opened.repository
        fetch = self.opened.fetch
        if (file := files.held("manifests", object_id)) is None:
            return await repository.manifest(object_id, fetch)
        if isinstance(file.value, Manifest):
            return file.value
        decode = partial(ManifestDecoder(object_id, repository.limit_nbytes), file.data)
        return await self.opened.decode_in_thread(repository.file("manifests", object_id), decode)

    async def _read_snapshot(self, snapshot_id: str) -> StoredSnapshot:
        repository = self.opened.repository
        found = await read_snapshot(repository, snapshot_id, self.opened.fetch)
        if found is None:
            name = repository.directory.join(f"snapshots/{snapshot_id}")
            raise DamagedError(name, "does not exist, and the repository lists it")
        return found

    async def _rebase(self, changes: ChangeSet, tip: BranchTip, base: StoredSnapshot) -> ChangeSet:
        """Turn *changes* of the parent into changes of *base*; raise `CommitConflictError`."""
        opened = self.opened
        request = self.request
        tip_id = tip.snapshot_id
        list_commits = partial(tip.commits_since, request.parent_id)
        is_long = tip.info.is_long
        chain = await opened.decode_in_thread(opened.repo, list_commits, is_long=is_long)
        if chain is None:
            self._refuse(tip_id, "parent_not_in_history")
        logs = await self._read_logs(chain, tip)
        parent = await self._read_snapshot(request.parent_id)
        nbytes = parent.nbytes + base.nbytes + changes.nbytes + sum(log.nbytes for log in logs)
        rebased = await opened.decode_in_thread(
            opened.repo,
            lambda: rebase(changes, parent, logs, base, request.policy),
            is_long=nbytes > SHORT_NBYTES,
        )
        if isinstance(rebased, ChangeSet):
            return rebased
        raise CommitConflictError(request.parent_id, tip_id, list(map(asdict, rebased)))

    async def _read_logs(
        self, chain: Sequence[SnapshotInfo], tip: BranchTip
    ) -> list[TransactionLog]:
        """Read the logs of *chain*; those of expired snapshots may be deleted."""
        ahead = {each.snapshot.object_id: each.log for each in tip.ahead}
        wanted = [
            object_id
            for info in chain
            for object_id in (*info.pruned_ancestor_tx_logs, info.object_id)
            if object_id not in ahead
        ]
        logs = list[TransactionLog]()
        nbytes = 0
        if len(wanted) > _MAX_LOGS:
            self._refuse(tip.snapshot_id, "too_many_commits")
        for batch in batched(wanted, 8):  # so that a limit is noticed early
            read = await bounded_gather(self.opened.find_log, batch)
            found = [log for log in read if log is not None]
            if len(found) < len(read):
                self._refuse(tip.snapshot_id, "missing_transaction_log")
            logs += found
            nbytes += sum(log.nbytes for log in found)
            if nbytes > _MAX_LOG_NBYTES:
                self._refuse(tip.snapshot_id, "too_many_changes")
        return [*logs, *ahead.values()]

    def _refuse(self, tip_id: str, kind: str) -> NoReturn:
        whole = asdict(CommitConflict(kind, "/"))
        raise CommitConflictError(self.request.parent_id, tip_id, [whole])

    def _snapshot(self, base: StoredSnapshot, applied: Applied) -> StoredSnapshot:
        request = self.request
        try:
            metadata = encode_metadata(marked(request.metadata, request.write_id, self._rebases))
            newest = f"snapshot {encode_id(base.object_id)}"
            now_us = self.swaps.now_us()
            flushed_at_us = moment_after(base.flushed_at_us, now_us, newest)
        except ValueError as error:
            raise BadBodyError(f"metadata: {error}") from None
        return StoredSnapshot(
            new_object_id(),
            dict(sorted(applied.nodes.items(), key=lambda item: item[0].encode())),
            applied.manifest_files,
            flushed_at_us,
            request.message,
            metadata,
            base.extra,
            weigh_stored(applied.nodes, applied.manifest_files),
        )

    def _change(self, tip: BranchTip, snapshot: StoredSnapshot) -> NewSnapshot:
        new = SnapshotInfo(
            snapshot.object_id,
            tip.snapshot.parent if self.request.amend else tip.snapshot.object_id,
            snapshot.flushed_at_us,
            snapshot.message,
            snapshot.metadata,
            tip.snapshot.pruned_ancestor_tx_logs if self.request.amend else (),
        )
        return NewSnapshot(self.request.branch, new, self.request.amend)


def _manifest_files(
    contents: Mapping[bytes, bytes], limit_nbytes: int, *, is_decoded: bool
) -> list[PreparedFile]:
    files: list[PreparedFile] = []
    for object_id, data in contents.items():
        decode = ManifestDecoder(object_id, limit_nbytes)
        value = None
        if is_decoded:
            with suppress(DecodeError):  # `demand_readable` has the reason
                value = decode(data)
        files.append(PreparedFile("manifests", object_id, data, decode, value))
    return files


def config_of(opened: OpenedRepository, info: RepoInfo) -> Config:
    """Return the configuration in *info*. Raises: `DamagedError`."""
    if isinstance(info.config, Config):
        return info.config
    raise DamagedError(opened.repo, str(info.config))
