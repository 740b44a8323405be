"""Immutable files of a repository: snapshots, manifests, and the chunks that these refer to."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from app.errors import DamagedError, NotAllowedError
from app.formats.icechunk.envelope import memory_nbytes
from app.formats.icechunk.ids import decode_id, encode_id
from app.formats.icechunk.keys import Ref, SnapshotId, decoded_twice, spell_ref
from app.formats.icechunk.manifest import (
    Inlined,
    Manifest,
    ManifestDecoder,
    Native,
    Reference,
    Virtual,
)
from app.formats.icechunk.refs import Refs
from app.formats.icechunk.snapshot import Chunks, Snapshot, SnapshotDecoder
from app.formats.icechunk.virtual import Allowed, resolve
from app.formats.reading import DecodeError, Fetch, Read, Weighable
from app.model import ByteRange, Condition, ETag, Fixed, Inline, ObjectRef, Part, Referenced, Stored


@dataclass(frozen=True, slots=True)
class Repository:
    """An opened repository."""

    directory: ObjectRef
    refs: Refs
    limit_nbytes: int
    allowed: tuple[Allowed, ...]

    def file(self, kind: str, object_id: bytes) -> ObjectRef:
        """Return the name of a file in the folder *kind*."""
        return self.directory.join(f"{kind}/{encode_id(object_id)}")

    async def snapshot(self, ref: Ref, fetch: Fetch) -> Snapshot | None:
        """Read the snapshot of *ref*; see `dated_snapshot`."""
        found = await self.dated_snapshot(ref, fetch)
        return found and found[0]

    async def dated_snapshot(self, ref: Ref, fetch: Fetch) -> tuple[Snapshot, int] | None:
        """Read the snapshot of *ref*, and when *ref* was set, in s; `None` without such a ref."""
        found = await self.refs.resolve(ref, fetch)
        if found is None and (twice := decoded_twice(ref)) is not None:
            found = await self.refs.resolve(twice, fetch)
        object_id = None if found is None else decode_id(found.snapshot_id)
        if found is None or object_id is None:
            return None
        decode = SnapshotDecoder(object_id, self.limit_nbytes)
        snapshot = await self.read("snapshots", object_id, decode, fetch)
        if snapshot is None and not isinstance(ref, SnapshotId):
            name = self.file("snapshots", object_id)
            raise DamagedError(name, f"does not exist, but {spell_ref(ref)} refers to it")
        if snapshot is None:
            return None
        return snapshot, found.modified_s or snapshot.flushed_at_s

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
        name = self.file(kind, object_id)
        version = named_by(object_id)
        request = ByteRange(0, self.limit_nbytes + 1)
        read = Read(kind.removesuffix("s"), name, request, decode, version, memory_nbytes)
        found = await fetch(read)
        return None if found is None else found.value

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
            return name, await self.refer(manifest, reference, fetch)
        except DecodeError as error:
            raise self._damage(manifest.object_id, node_id, coords, error) from error

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

    async def refer(self, manifest: Manifest, reference: Reference, fetch: Fetch) -> Referenced:
        """Return the location of *reference*. Raises: `DecodeError`, `NotAllowedError`."""
        match reference:
            case Native(chunk_id, byte_range):
                place = Stored(self.file("chunks", chunk_id), byte_range, named_by(chunk_id))
                return Referenced(place, "", is_lasting=True)
            case Inlined(place):
                etag = ETag(f'"{encode_id(manifest.object_id)}-{place.start:x}-{place.length:x}"')
                return Referenced(Inline(manifest.read(place), etag), "", is_lasting=True)
            case Virtual(location, byte_range, checksum):
                ref = await self._resolve(location, fetch)
                by = blake2b("/".join(ref).encode(), digest_size=8).hexdigest()
                foreign = foreign_place(ref, byte_range, checksum)
                return Referenced(foreign, by, is_lasting=isinstance(foreign, Stored))

    def _damage(
        self, manifest_id: bytes, node_id: bytes, coords: tuple[int, ...], error: DecodeError
    ) -> DamagedError:
        reason = f"chunk {list(coords)} of node {encode_id(node_id)}: {error}"
        return DamagedError(self.file("manifests", manifest_id), reason)

    async def _resolve(self, location: str, fetch: Fetch) -> ObjectRef:
        """Find the object at *location*; the configuration is read only if that needs it."""
        with suppress(NotAllowedError):
            return resolve(location, self.allowed)
        containers = await self.refs.containers(fetch)
        prefixes = {each.name: each.url_prefix for each in containers if each.name is not None}
        return resolve(location, self.allowed, prefixes)


def named_by(object_id: bytes) -> Fixed:
    """Return the version of the immutable file *object_id*."""
    return Fixed(ETag(f'"{encode_id(object_id)}"'))


def foreign_place(
    ref: ObjectRef, byte_range: ByteRange, checksum: Condition | None
) -> Stored | Part:
    """Return the location of a virtual reference; only an ETag pins the version of *ref*."""
    if isinstance(checksum, str):
        return Stored(ref, byte_range, Fixed(checksum, checksum))
    return Part(ref, byte_range, checksum)
