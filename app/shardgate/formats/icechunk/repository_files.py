"""Refs of a repository, all in ``repo`` or in version 1 a file for each, and its immutable files:
snapshots, manifests, and the chunks that these refer to.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import unquote

from shardgate.errors import DamagedError, NotAllowedError, OfflineError
from shardgate.formats.documents import Marked, begins_like_page, check_not_blank, parse_json
from shardgate.formats.icechunk.config import MAX_NBYTES, VirtualContainer, read_yaml_config
from shardgate.formats.icechunk.flatbuffers import MAGIC, memory_nbytes
from shardgate.formats.icechunk.ids import decode_id, encode_id
from shardgate.formats.icechunk.keys import (
    MAIN,
    Branch,
    Ref,
    SnapshotId,
    Tag,
    decoded_twice,
    spell_ref,
)
from shardgate.formats.icechunk.manifest import (
    InlineChunk,
    Manifest,
    ManifestDecoder,
    Native,
    Reference,
    Virtual,
)
from shardgate.formats.icechunk.repo_info import Availability, RepoInfo, RepoInfoDecoder
from shardgate.formats.icechunk.snapshot import Chunks, Snapshot, SnapshotDecoder
from shardgate.formats.members import refer
from shardgate.formats.reading import DecodeError, Fetch, Opaque, Read, Weighable
from shardgate.formats.references import Allowed, resolve
from shardgate.formats.surveying import Listing
from shardgate.model import ByteRange, ETag, Fixed, Inline, ObjectRef, Part, Referenced, Stored

REPO: Final = "repo"
_MARKS: Final = re.compile(r"^@?(branch\.|tag\.)?")
_ESCAPED: Final = re.compile(r"[^ !$&'()+,\-.0-9:;=@A-Z_a-z]")


class RefTarget(NamedTuple):
    """Snapshot of a ref."""

    snapshot_id: str
    modified_s: int | None = None
    """Time at which the file of a branch was written; its snapshot can be older."""


@dataclass(frozen=True, slots=True)
class RepoMarkerDecoder:
    """Decodes a file ``repo`` whose FlatBuffer may have *limit_nbytes*."""

    limit_nbytes: int

    def __call__(self, data: bytes) -> Marked[RepoInfo]:
        check_not_blank(data)
        if not (data.startswith(MAGIC) or MAGIC.startswith(data)):
            return Marked(is_page=begins_like_page(data))
        return Marked(RepoInfoDecoder(self.limit_nbytes)(data))


@dataclass(frozen=True, slots=True)
class Beside:
    """Decodes nothing; a cache key of its own for the look-up of ``repo`` after *ref*."""

    ref: Branch | Tag

    def __call__(self, data: bytes) -> Opaque:
        return Opaque(data)


@dataclass(frozen=True, slots=True)
class RefFile:
    """Decoded file of a ref."""

    snapshot_id: str
    nbytes: int = 256


def read_ref_file(data: bytes) -> RefFile:
    """Decode the JSON of a ref in version 1. Raises: `DecodeError`."""
    try:
        document = parse_json(data)
    except ValueError as error:
        raise DecodeError(f"invalid JSON: {error}") from None
    snapshot_id = document.get("snapshot") if isinstance(document, dict) else None
    if not isinstance(snapshot_id, str) or decode_id(snapshot_id) is None:
        raise DecodeError(f"expected the id of a snapshot, found {str(document)[:80]}")
    return RefFile(snapshot_id)


@dataclass(frozen=True, slots=True)
class RepoRefs:
    """The refs of a repository in version 2."""

    directory: ObjectRef
    limit_nbytes: int

    @property
    def read(self) -> Read[Marked[RepoInfo]]:
        decode = RepoMarkerDecoder(self.limit_nbytes)
        request = ByteRange(0, self.limit_nbytes + 1)
        ref = self.directory.join(REPO)
        return Read("repo", ref, request, decode, None, memory_nbytes, is_marker=True)

    async def info(self, fetch: Fetch) -> RepoInfo | None:
        """Read ``repo``. Raises: `OfflineError`."""
        return (await self._info(fetch))[0]

    async def _info(
        self, fetch: Fetch, *, allow_stale: bool = False
    ) -> tuple[RepoInfo | None, int | None]:
        found = await fetch(self.read, allow_stale=allow_stale)
        if found is None or (info := found.value.spec) is None:
            return None, None
        if info.status.availability is Availability.OFFLINE:
            raise OfflineError(f"{self.directory} is offline: {info.status.reason or 'no reason'}")
        return info, found.modified_s

    async def resolve(self, ref: Ref, fetch: Fetch) -> RefTarget | None:
        """Look up *ref*; the id of a snapshot is its own target."""
        # A snapshot never changes: its readers need not ask for a newer ``repo`` now and then.
        info, modified_s = await self._info(fetch, allow_stale=isinstance(ref, SnapshotId))
        if info is None:
            return None
        if isinstance(ref, SnapshotId):
            return RefTarget(ref.text)
        found = (info.branches if isinstance(ref, Branch) else info.tags).get(ref.name)
        if found is None:
            return None
        return RefTarget(found, modified_s if isinstance(ref, Branch) else None)

    async def named(
        self, kind: type[Branch | Tag], fetch: Fetch, _: Listing | None = None
    ) -> Mapping[str, str]:
        """Return the ids of snapshots by the names of branches, or of tags."""
        if (info := await self.info(fetch)) is None:
            return {}
        return info.branches if kind is Branch else info.tags

    async def containers(self, fetch: Fetch) -> Sequence[VirtualContainer]:
        if (info := await self.info(fetch)) is None:
            return ()
        if isinstance(info.config, DecodeError):
            raise DamagedError(self.directory.join(REPO), str(info.config)) from info.config
        return info.config.containers


def _escape(name: str) -> str:
    """Escape *name* as the library does for all stores but S3, local folders included."""
    return _ESCAPED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)


def _unescape(stored: str) -> str:
    """Return the name of a ref by that of its file, escaped or not."""
    name = unquote(stored)
    return name if _escape(name) == stored else stored


@dataclass(frozen=True, slots=True)
class FileRefs:
    """The refs of a repository in version 1."""

    directory: ObjectRef

    def read(self, ref: Branch | Tag) -> Read[RefFile]:
        name = self.directory.join(f"refs/{type(ref).__name__.lower()}.{ref.name}/ref.json")
        read = Read("ref", name, ByteRange(0, 64 * 1024), read_ref_file)  # it has 30 bytes
        # The file of the branch main marks a repository, as the file repo does.
        return read._replace(kind=REPO, is_marker=True) if ref == MAIN else read

    async def resolve(self, ref: Ref, fetch: Fetch) -> RefTarget | None:
        """Read the file of *ref*, whose name is escaped or not."""
        if isinstance(ref, SnapshotId):
            return RefTarget(ref.text)
        if "/" in ref.name:
            return None
        # S3 has the plain name, all other stores of the library the escaped one.
        for name in dict.fromkeys((ref.name, _escape(ref.name))):
            if (found := await self._resolve(ref._replace(name=name), fetch)) is not None:
                return found
        repo = self.directory.join(REPO)
        if await fetch(Read("repo-beside", repo, ByteRange(0, 1), Beside(ref))) is not None:
            raise DamagedError(repo, "the repository was migrated to version 2")  # opens it again
        return None

    async def _resolve(self, ref: Branch | Tag, fetch: Fetch) -> RefTarget | None:
        """Read the file of *ref*. A deleted tag keeps its file, and has a tombstone beside it."""
        found = await fetch(self.read(ref))
        if found is None:
            return None
        if isinstance(ref, Tag):
            name = self.read(ref).ref
            tombstone = name._replace(key=f"{name.key}.deleted")
            if await fetch(Read("ref-deleted", tombstone, None, Opaque)) is not None:
                return None
        modified_s = found.modified_s if isinstance(ref, Branch) else None
        return RefTarget(found.value.snapshot_id, modified_s)

    async def named(
        self, kind: type[Branch | Tag], fetch: Fetch, listing: Listing | None = None
    ) -> Mapping[str, str]:
        """Return the ids of snapshots by the names of refs; without a *listing* only ``main``."""
        if listing is None:
            main = await self.resolve(MAIN, fetch) if kind is Branch else None
            return {} if main is None else {MAIN.name: main.snapshot_id}
        start = f"refs/{kind.__name__.lower()}."
        found = {}
        async for key in listing("refs/"):
            if key.startswith(start) and key.endswith("/ref.json"):
                stored = key.removeprefix(start).removesuffix("/ref.json")
                target = None if "/" in stored else await self._resolve(kind(stored), fetch)
                if target is not None:
                    found[_unescape(stored)] = target.snapshot_id
        return found

    async def containers(self, fetch: Fetch) -> Sequence[VirtualContainer]:
        """Read ``config.yaml``, if there is one."""
        name = self.directory.join("config.yaml")
        request = ByteRange(0, MAX_NBYTES + 1)
        # YAML takes 10 µs a byte.
        found = await fetch(Read("config", name, request, read_yaml_config, is_slow=True))
        return () if found is None else found.value.containers


@dataclass(frozen=True, slots=True)
class Repository:
    """An opened repository."""

    directory: ObjectRef
    refs: RepoRefs | FileRefs
    limit_nbytes: int
    allowed: tuple[Allowed, ...]

    def file(self, kind: str, object_id: bytes) -> ObjectRef:
        """Return the name of a file in the folder *kind*."""
        return self.directory.join(f"{kind}/{encode_id(object_id)}")

    async def dated_snapshot(
        self, ref: Ref, fetch: Fetch, *, is_sharded: bool = False
    ) -> tuple[Snapshot, int] | None:
        """Read the snapshot of *ref*, and when *ref* was set, in s; `None` without such a ref.
        *is_sharded* is that of `Snapshot`.
        """
        found = await self.refs.resolve(ref, fetch)
        if found is None and (twice := decoded_twice(ref)) is not None:
            found = await self.refs.resolve(twice, fetch)
        object_id = None if found is None else decode_id(found.snapshot_id)
        if found is None or object_id is None:
            return None
        decode = SnapshotDecoder(object_id, self.limit_nbytes, is_sharded)
        snapshot = await self.read("snapshots", object_id, decode, fetch)
        if snapshot is not None:
            return snapshot, found.modified_s or snapshot.flushed_at_s
        if isinstance(ref, SnapshotId):
            return None
        name = self.file("snapshots", object_id)
        raise DamagedError(name, f"does not exist, but {spell_ref(ref)} refers to it")

    async def suggest_ref(self, spelled: str, fetch: Fetch) -> str:
        """Return how the ref that *spelled* may mean is written in keys, or how all are."""
        name = unquote(_MARKS.sub("", spelled))
        for ref in (Branch(name), Tag(name)):
            if await self.refs.resolve(ref, fetch) is not None:
                return f"write {spell_ref(ref)}"
        return "refs are spelled @branch.NAME, @tag.NAME or @SNAPSHOTID"

    async def manifest(self, object_id: bytes, fetch: Fetch) -> Manifest:
        """Read a manifest that a snapshot refers to. Raises: `DamagedError`, also without it."""
        decode = ManifestDecoder(object_id, self.limit_nbytes)
        manifest = await self.read("manifests", object_id, decode, fetch)
        if manifest is None:
            name = self.file("manifests", object_id)
            raise DamagedError(name, "does not exist, but a snapshot refers to it")
        return manifest

    async def read[T: Weighable](
        self, kind: str, object_id: bytes, decode: Callable[[bytes], T], fetch: Fetch
    ) -> T | None:
        """Read a file in the folder *kind*, which is never replaced."""
        found = await fetch(self.read_of(kind, object_id, decode))
        return None if found is None else found.value

    def read_of[T: Weighable](
        self, kind: str, object_id: bytes, decode: Callable[[bytes], T]
    ) -> Read[T]:
        name = self.file(kind, object_id)
        version = named_by(object_id)
        request = ByteRange(0, self.limit_nbytes + 1)
        return Read(kind.removesuffix("s"), name, request, decode, version, memory_nbytes)

    async def find(
        self, node_id: bytes, chunks: Chunks, coords: tuple[int, ...], fetch: Fetch
    ) -> tuple[ObjectRef, Referenced] | None:
        """Find the manifest and the location of the chunk at *coords*; the first manifest counts.
        Raises: `DamagedError`, `NotAllowedError`.
        """
        found = await self.lookup(node_id, chunks, coords, fetch)
        if found is None:
            return None
        manifest, reference = found
        name = self.file("manifests", manifest.object_id)
        try:
            # Most references need no container, which takes a read of the configuration.
            with suppress(NotAllowedError):
                return name, self.refer(manifest, reference)
            return name, self.refer(manifest, reference, await self.containers(fetch))
        except DecodeError as error:
            raise self._damage(manifest.object_id, node_id, coords, error) from error

    async def containers(self, fetch: Fetch) -> dict[str, str]:
        """Return the prefixes of the virtual chunk containers that have a name."""
        containers = await self.refs.containers(fetch)
        return {each.name: each.url_prefix for each in containers if each.name is not None}

    async def lookup(
        self, node_id: bytes, chunks: Chunks, coords: tuple[int, ...], fetch: Fetch
    ) -> tuple[Manifest, Reference] | None:
        """Find the reference of the chunk at *coords*, and its manifest. Raises: `DamagedError`."""
        for object_id, _ in filter(lambda each: each.covers(coords), chunks.manifests):
            manifest = await self.manifest(object_id, fetch)
            try:
                reference = manifest.lookup(node_id, coords)
            except DecodeError as error:
                raise self._damage(object_id, node_id, coords, error) from error
            if reference is not None:
                return manifest, reference
        return None

    def refer(
        self, manifest: Manifest, reference: Reference, containers: Mapping[str, str] | None = None
    ) -> Referenced:
        """Return the location of *reference*; of a virtual one only an ETag pins the version.
        Raises: `DecodeError`, `NotAllowedError`, also where *containers* are needed and absent.
        """
        match reference:
            case Native(chunk_id, byte_range):
                place = Stored(self.file("chunks", chunk_id), byte_range, named_by(chunk_id))
                return Referenced(place, "", is_immutable=True)
            case InlineChunk(data, start):
                etag = ETag(f'"{encode_id(manifest.object_id)}-{start:x}-{len(data):x}"')
                return Referenced(Inline(data, etag), "", is_immutable=True)
            case Virtual(location, byte_range, checksum):
                ref = resolve(location, self.allowed, containers)
                if not isinstance(checksum, str):
                    return refer(Part(ref, byte_range, checksum))
                pinned = Stored(ref, byte_range, Fixed(checksum, checksum))
                return refer(Part(ref, byte_range))._replace(place=pinned, is_immutable=True)

    def _damage(
        self, manifest_id: bytes, node_id: bytes, coords: tuple[int, ...], error: DecodeError
    ) -> DamagedError:
        reason = f"chunk {list(coords)} of node {encode_id(node_id)}: {error}"
        return DamagedError(self.file("manifests", manifest_id), reason)


def named_by(object_id: bytes) -> Fixed:
    """Return the version of the immutable file *object_id*."""
    return Fixed(ETag(f'"{encode_id(object_id)}"'))
