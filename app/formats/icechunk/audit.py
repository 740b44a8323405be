"""Follow all that leads to something in a repository, from its refs to its chunks."""

from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Final

from app.errors import StorageUnavailableError
from app.formats.auditing import (
    ARRAYS,
    Auditor,
    Counted,
    Enclosed,
    Expected,
    Finding,
    Flaw,
    Unchecked,
)
from app.formats.icechunk.audit_manifest import Checked, Kept, ManifestCheck
from app.formats.icechunk.audit_refs import RefsAudit, audit_refs
from app.formats.icechunk.audit_snapshot import (
    AuditedSnapshot,
    AuditedSnapshotDecoder,
    Source,
    Wanted,
    find_misfits,
)
from app.formats.icechunk.chunk_files import ChunkFiles, list_files
from app.formats.icechunk.envelope import memory_nbytes
from app.formats.icechunk.ids import decode_id, encode_id
from app.formats.icechunk.index import Manifest, ManifestDecoder
from app.formats.icechunk.repository import Repository, named_by
from app.formats.icechunk.shards import enclose, place_of
from app.formats.icechunk.transaction_log import TransactionLogDecoder
from app.formats.icechunk.virtual import resolve
from app.formats.reading import DecodeError, Read, Weighable
from app.model import ByteRange, ObjectRef, Part, condition_of

_MOST_STATS: Final = 4096
"""Of chunk files, each asked for by itself where they cannot be listed."""


class Audit:
    """One look through *repository*; *chunks* hands over also chunks that have a checksum."""

    def __init__(self, repository: Repository, auditor: Auditor, *, chunks: bool) -> None:
        self._repository = repository
        self._auditor = auditor
        self._chunks = chunks
        self._manifests: dict[bytes, dict[Wanted, Source]] = {}
        """What is wanted of all that are listed or referred to."""
        self._told_by: dict[str, str] = {}
        """The key of the first snapshot or array that tells of a manifest."""
        self._arrays: set[bytes] = set()
        self._fitted: set[int] = set()
        """What was found to fit already: most of a snapshot is as in the one before."""
        self._done: dict[int, int] = {}
        """How much of an object was handed over already."""
        self._stats = 0
        self._is_sound = True
        """Whether all is known that refers to files."""

    async def findings(self) -> AsyncGenerator[Finding]:
        """Look through the repository, and note whether anything is wrong."""
        async for finding in self._look():
            self._is_sound &= not isinstance(finding, Flaw)
            yield finding

    async def _look(self) -> AsyncGenerator[Finding]:
        """Look through refs, then snapshots, then manifests, each thing once."""
        refs = await audit_refs(self._repository, self._auditor)
        for told in refs.findings:
            yield told
        async for finding in self._audit_snapshots(refs):
            yield finding
        yield Counted(ARRAYS, len(self._arrays))
        async for finding in self._audit_logs(refs):
            yield finding
        # What is listed only now holds all that the snapshots above can refer to.
        files = await self._list_chunks()
        async for finding in self._audit_manifests(files, self._follow(refs.prefixes)):
            yield finding
        if files is None:
            yield Unchecked("", "which files nothing refers to: the store cannot list")
        elif self._is_sound:
            yield Counted("unreferenced files", await self._count_unused(files, refs.parents))

    async def _audit_snapshots(self, refs: RefsAudit) -> AsyncGenerator[Finding]:
        """Audit all snapshots; where ``repo`` does not list them, one parent after the other."""
        todo = list(refs.parents)
        while todo:
            parents: dict[str, str | None] = {}
            reads = self._reads("snapshots", todo, AuditedSnapshotDecoder)
            async for read, found in self._auditor.read_each(reads):
                snapshot_id = _name(read.ref)
                yield Counted("snapshots", 1)
                if isinstance(found, AuditedSnapshot):
                    parents[snapshot_id] = found.parent_id
                    for finding in self._audit_snapshot(read.ref, found):
                        yield finding
                    continue
                why = refs.whys.get(snapshot_id, "another snapshot has it for its parent")
                reason = f"does not exist, and {why}" if found is None else found.reason
                yield Flaw(read.ref, f"@{snapshot_id}", reason)
            if refs.is_listed:
                return
            refs.parents |= parents
            named = (each for each in parents.values() if each is not None)
            todo = [each for each in dict.fromkeys(named) if each not in refs.parents]
            refs.parents |= dict.fromkeys(todo)

    def _audit_snapshot(self, ref: ObjectRef, found: AuditedSnapshot) -> Iterator[Finding]:
        snapshot_id, snapshot = _name(ref), found.snapshot
        for path, reason in found.faults:
            yield Flaw(ref, f"@{snapshot_id}{path}", reason)
        for object_id in snapshot.manifests:
            self._manifests.setdefault(object_id, {})
            self._told_by.setdefault(encode_id(object_id), f"@{snapshot_id}")
        for path, node in snapshot.nodes.items():
            if isinstance(node, DecodeError) or node.chunks is None:
                continue
            source = Source(snapshot_id, path, node)
            chunks = node.chunks
            self._arrays.add(node.node_id)
            state = hash((node.node_id, chunks.grid, chunks.manifests))
            is_listed = snapshot.manifests.issuperset(each.object_id for each in chunks.manifests)
            if state not in self._fitted or not is_listed:
                for reason in find_misfits(node, snapshot.manifests):
                    yield Flaw(ref, source.key, reason)
            self._fitted.add(state)
            for object_id, extents in chunks.manifests:
                wanted = Wanted(node.node_id, chunks.grid, extents)
                self._manifests.setdefault(object_id, {}).setdefault(wanted, source)
                self._told_by.setdefault(encode_id(object_id), source.key)

    async def _audit_logs(self, refs: RefsAudit) -> AsyncGenerator[Finding]:
        """Audit transaction logs; the first snapshot had none in version 1."""
        ids = dict.fromkeys([*refs.parents, *refs.pruned])
        reads = self._reads("transactions", ids, _decode_log)
        async for read, found in self._auditor.read_each(reads):
            snapshot_id = _name(read.ref)
            if found is None and refs.parents.get(snapshot_id) is not None:
                yield Flaw(read.ref, f"@{snapshot_id}", "the transaction log does not exist")
            elif isinstance(found, Exception):
                yield Flaw(read.ref, f"@{snapshot_id}", found.reason)

    async def _audit_manifests(
        self, files: ChunkFiles | None, follow: Callable[[str], ObjectRef]
    ) -> AsyncGenerator[Finding]:
        limit = self._repository.limit_nbytes
        chunk_file = partial(self._repository.file, "chunks")

        def check(object_id: bytes, _: int) -> ManifestCheck:
            ref = self._repository.file("manifests", object_id)
            wanted = self._manifests[object_id]
            decode = ManifestDecoder(object_id, limit)
            return ManifestCheck(ref, decode, wanted, chunk_file, files, follow, self._chunks)

        reads = self._reads("manifests", map(encode_id, self._manifests), check)
        async for read, found in self._auditor.read_each(reads):
            yield Counted("manifests", 1)
            if isinstance(found, Checked):
                for finding in found.findings:
                    if not isinstance(finding, Expected) or self._is_new(finding):
                        yield finding
                for kept in found.kept:
                    for finding in self._enclose(read.ref, found.manifest, kept, follow):
                        yield finding
                continue
            key = self._told_by[_name(read.ref)]
            reason = (
                "does not exist, and a snapshot refers to it" if found is None else found.reason
            )
            yield Flaw(read.ref, key, reason)
        if self._stats > _MOST_STATS:
            rest = self._stats - _MOST_STATS
            yield Unchecked("chunks", f"{rest} files of chunks: the store cannot list")

    def _is_new(self, expected: Expected) -> bool:
        """Tell whether *expected* is to be asked for, and not so many files were before."""
        place = expected.place
        target = hash((place.ref, place.version))
        if self._done.get(target, -1) >= place.byte_range.stop:
            return False
        self._done[target] = place.byte_range.stop
        if isinstance(place, Part) or condition_of(place.version) is not None:
            return True
        self._stats += 1
        return self._stats <= _MOST_STATS

    def _enclose(
        self,
        ref: ObjectRef,
        manifest: Manifest,
        kept: Kept,
        follow: Callable[[str], ObjectRef],
    ) -> Iterator[Enclosed]:
        """Hand over the shards, or chunks with checksums, that were not handed over before."""
        for row in kept.coords.tolist():
            coords = tuple(row)
            reference = manifest.lookup(kept.node_id, coords)
            if reference is None:
                continue
            place, data = place_of(self._repository, ref, manifest, reference, follow)
            if data is None:
                if (target := hash(place)) in self._done:
                    continue
                self._done[target] = 0
            yield Enclosed(kept.source.key, enclose(kept.source.node, coords, place), data)

    def _reads[T: Weighable](
        self,
        kind: str,
        ids: Collection[str] | Iterator[str],
        decoder: Callable[[bytes, int], Callable[[bytes], T]],
    ) -> Iterator[Read[T]]:
        limit = self._repository.limit_nbytes
        for each in ids:
            if (object_id := decode_id(each)) is not None:
                name = self._repository.file(kind, object_id)
                request, version = ByteRange(0, limit + 1), named_by(object_id)
                decode = decoder(object_id, limit)
                yield Read(kind.removesuffix("s"), name, request, decode, version, memory_nbytes)

    def _follow(self, prefixes: Mapping[str, str]) -> Callable[[str], ObjectRef]:
        return lambda location: resolve(location, self._repository.allowed, prefixes)

    async def _list_chunks(self) -> ChunkFiles | None:
        try:
            return await list_files(self._auditor.sizes("chunks/"))
        except StorageUnavailableError as error:
            if not error.lasting:
                raise
            return None

    async def _count_unused(self, files: ChunkFiles, snapshots: Collection[str]) -> int:
        count = files.unused
        known = {*snapshots, *map(encode_id, self._manifests)}
        for folder in ("snapshots/", "manifests/"):
            async for key, _ in self._auditor.sizes(folder):
                count += key.removeprefix(folder) not in known
        return count


def _decode_log(object_id: bytes, limit_nbytes: int) -> TransactionLogDecoder:
    return TransactionLogDecoder(encode_id(object_id), limit_nbytes)


def _name(ref: ObjectRef) -> str:
    return ref.key.rpartition("/")[2]
