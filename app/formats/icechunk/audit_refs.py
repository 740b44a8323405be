"""What ``repo``, or the files of refs, say that cannot be right, and which snapshots they name."""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from app.errors import DamagedError, StorageUnavailableError
from app.formats.auditing import Auditor, Finding, Flaw, Unchecked
from app.formats.icechunk.envelope import memory_nbytes
from app.formats.icechunk.keys import MAIN, Branch, Ref, Tag, spell_ref
from app.formats.icechunk.refs import FileRefs, RepoRefs, unescape
from app.formats.icechunk.repo_info import NamedSnapshots, RepoInfo, RepoInfoDecoder
from app.formats.icechunk.repository import Repository
from app.formats.reading import DecodeError, Read
from app.model import ByteRange, ObjectRef

_MOST_BACKUPS: Final = 10_000


@dataclass(slots=True)
class RefsAudit:
    """The refs of a repository, and what came out."""

    is_listed: bool
    """Whether all snapshots are named here; else parents lead on."""
    findings: list[Finding] = field(default_factory=list)
    parents: dict[str, str | None] = field(default_factory=dict)
    """All snapshots that are named, those first that refs are at."""
    whys: dict[str, str] = field(default_factory=dict)
    """Why a snapshot has to be there."""
    pruned: list[str] = field(default_factory=list)
    """Snapshots that expired, and whose transaction logs may still be there."""
    prefixes: dict[str, str] = field(default_factory=dict)
    """The URLs that named containers of virtual chunks begin with."""

    def name(self, snapshot_id: str, why: str, parent_id: str | None = None) -> None:
        """Take note of a snapshot."""
        self.parents[snapshot_id] = parent_id or self.parents.get(snapshot_id)
        self.whys.setdefault(snapshot_id, why)

    def teller(self, ref: ObjectRef) -> "Callable[[str, str], None]":
        """Give what takes note of a key, and of what is wrong with *ref*."""
        return lambda key, reason: self.findings.append(Flaw(ref, key, reason))

    async def take_containers(self, repository: Repository, auditor: Auditor) -> None:
        """Learn where virtual references may lead, as far as the repository is concerned."""
        try:
            containers = await repository.refs.containers(auditor.fetch)
        except DamagedError as error:
            self.findings.append(Flaw(error.ref, "", f"the configuration: {error.reason}"))
        else:
            self.prefixes = {each.name: each.url_prefix for each in containers if each.name}


async def audit_refs(repository: Repository, auditor: Auditor) -> RefsAudit:
    """Look through the refs.

    Raises: `OfflineError`, and any `StorageError`.
    """
    match repository.refs:
        case RepoRefs() as refs:
            found = await _audit_repo(refs, auditor)
        case FileRefs() as refs:
            found = await _audit_files(refs, auditor)
        case _:
            found = RefsAudit(is_listed=False)
    await found.take_containers(repository, auditor)
    return found


async def _audit_files(refs: FileRefs, auditor: Auditor) -> RefsAudit:
    """Look through the files of refs; without a listing only ``main`` is known to have one."""
    found = RefsAudit(is_listed=False)
    async for ref in _named(auditor, found):
        key = spell_ref(ref._replace(name=unescape(ref.name)))
        try:
            target = await refs.resolve(ref, auditor.fetch)
        except DamagedError as error:
            found.findings.append(Flaw(error.ref, key, error.reason))
        else:
            if target is not None:
                found.name(target.snapshot_id, f"{key} is at it")
    return found


async def _named(auditor: Auditor, found: RefsAudit) -> AsyncGenerator[Branch | Tag]:
    """Give refs by the names that their files have."""
    yield MAIN
    try:
        async for key, _ in auditor.sizes("refs/"):
            kind, _, name = key.removeprefix("refs/").removesuffix("/ref.json").partition(".")
            if key.endswith("/ref.json") and kind in ("branch", "tag"):
                ref = Branch(name) if kind == "branch" else Tag(name)
                if ref != MAIN:
                    yield ref
    except StorageUnavailableError as error:
        if not error.lasting:
            raise
        found.findings.append(Unchecked("", "refs other than main: the store cannot list"))


async def _audit_repo(refs: RepoRefs, auditor: Auditor) -> RefsAudit:
    found = RefsAudit(is_listed=True)
    info = await refs.info(auditor.fetch)
    if info is None:
        return found
    tell = found.teller(refs.read.ref)
    for kind, named in ((Branch, info.branches), (Tag, info.tags)):
        _take_refs(kind, named, found, tell)
    for each in _each(info.snapshots, tell):
        found.name(each.snapshot_id, "repo lists it", each.parent_id)
        found.pruned += each.pruned_ancestor_tx_logs
    for snapshot_id in _find_cycles(found.parents):
        tell(f"@{snapshot_id}", "it is its own ancestor")
    if MAIN.name not in info.branches and MAIN.name not in info.branches.faults:
        tell(spell_ref(MAIN), "there is no such branch")
    for part in (info.metadata, info.deleted_tags, info.disabled_feature_flags):
        try:
            part()
        except DecodeError as error:
            tell("", f"{part.__name__}: {error}")
    _audit_updates(info, tell)
    await _audit_backups(refs, info, auditor, found)
    return found


def _take_refs(
    kind: Callable[[str], Ref],
    refs: NamedSnapshots,
    found: RefsAudit,
    tell: Callable[[str, str], None],
) -> None:
    for name, reason in refs.faults.items():
        tell(spell_ref(kind(name)), reason)
    for name, snapshot_id in refs.items():
        found.name(snapshot_id, f"{spell_ref(kind(name))} is at it")


def _each[T](give: Callable[[], Iterable[T]], tell: Callable[[str, str], None]) -> Iterator[T]:
    """Give all that can be read, and tell of what cannot."""
    try:
        items = iter(give())
    except DecodeError as error:
        tell("", str(error))
        return
    while True:
        try:
            yield next(items)
        except StopIteration:
            return
        except DecodeError as error:
            tell("", str(error))


def _find_cycles(parents: dict[str, str | None]) -> Iterator[str]:
    """Find the snapshots from which parents lead back to themselves; one of each circle."""
    seen: dict[str, int] = {}
    for number, start in enumerate(parents):
        at: str | None = start
        while at is not None and at not in seen:
            seen[at] = number
            at = parents.get(at)
        if at is not None and seen[at] == number:
            yield at


def _audit_updates(info: RepoInfo, tell: Callable[[str, str], None]) -> None:
    for _ in _each(info.updates, lambda key, reason: tell(key, f"an update: {reason}")):
        pass


async def _audit_backups(
    refs: RepoRefs, info: RepoInfo, auditor: Auditor, found: RefsAudit
) -> None:
    """Follow the operations back through the files that were overwritten.

    No data depend on them, and people clear them away: that one is missing is no damage.
    """
    seen: set[str] = set()
    decode = RepoInfoDecoder(refs.limit_nbytes)
    while (name := info.repo_before_updates) is not None:
        ref = refs.directory.join(f"overwritten/{name}")
        if name in seen or len(seen) == _MOST_BACKUPS:
            found.findings.append(Flaw(ref, "", "the operations before it lead back to it"))
            return
        seen.add(name)
        request = ByteRange(0, refs.limit_nbytes + 1)
        read = Read("backup", ref, request, decode, memory_nbytes=memory_nbytes)
        try:
            backup = await auditor.fetch(read)
        except DamagedError as error:
            found.findings.append(Flaw(error.ref, "", error.reason))
            return
        if backup is None:
            why = f"operations before those in {ref}, which does not exist"
            found.findings.append(Unchecked("overwritten", why))
            return
        info = backup.value
        _audit_updates(info, found.teller(ref))
