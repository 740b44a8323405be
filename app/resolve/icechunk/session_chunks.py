"""The chunks of a session: found in the journal or the parent, written to the journal."""

import asyncio
import secrets
from typing import Final, NamedTuple

from app.errors import BadBodyError, BusyError, ConflictError, DamagedError
from app.formats.icechunk.ids import OBJECT_ID_NBYTES
from app.formats.icechunk.manifest import Inlined, Native
from app.formats.icechunk.payloads import Inlaid
from app.formats.icechunk.repository import named_by
from app.formats.icechunk.session import ChunkAddress, Entry, Open, Sealed, SessionView, version_of
from app.model import ByteRange, ETag, Inline, Part, Referenced, Stored, UnmodifiedSince
from app.resolve.bodies import Entity
from app.resolve.icechunk.session import Session, demand_open, is_journaled
from app.storage.contract import ABSENT, CONFLICT, Absent, Conflict, Expected

_POLL_S: Final = 0.05
_LONGEST_POLL_S: Final = 1.0
_GRACE_S: Final = 10.0
"""So long after a lease is over who waits for a commit gives up."""


class FoundChunk(NamedTuple):
    """What a session has at a place now."""

    entity: Entity | None
    entry_etag: ETag | None
    """The version of the entry that tells, if one does."""

    def fits(self, expected: Expected) -> bool:
        """Tell whether it is in the version *expected*."""
        if expected is None:
            return True
        etag = None if self.entity is None else self.entity.etag
        return etag == (None if isinstance(expected, Absent) else expected)

    @property
    def entry_expected(self) -> ETag | Absent:
        """The only version of the entry that may be replaced."""
        return self.entry_etag or ABSENT


async def find_chunk(session: Session, view: SessionView, address: ChunkAddress) -> FoundChunk:
    """Find the chunk at *address*, by what the store says now.

    Raises: `DamagedError`, `NotAllowedError`, `StorageError`.
    """
    node, coords = address
    if is_journaled(view.session):
        kept = await session.journal.get(session.place, node.node_id, coords)
        if kept is not None:
            return FoundChunk(entity_of(session, kept.entry), kept.etag)
    return FoundChunk(await _find_in_parent(session, address), None)


def entity_of(session: Session, entry: Entry) -> Entity | None:
    """Tell where the bytes are that *entry* tells of."""
    match entry:
        case None:
            return None
        case Inlaid(data):
            return Entity.at(Inline(data, version_of(data)))
        case Native(chunk_id, byte_range):
            file = session.repository.file("chunks", chunk_id)
            return Entity.at(Stored(file, byte_range, named_by(chunk_id)))


async def write_chunk(
    session: Session, view: SessionView, address: ChunkAddress, data: bytes, expected: Expected
) -> ETag | Conflict:
    """Write a chunk; when this returns it will be in the commit.

    Raises: `BadBodyError`, `BusyError`, `ConflictError`, `UnknownSessionError`, `StorageError`.
    """
    demand_open(view.session)
    if not data:
        raise BadBodyError("a chunk has one byte at least")
    before: ETag | Absent | None = None
    if expected is not None:
        found = await find_chunk(session, view, address)
        if not found.fits(expected):
            return CONFLICT
        before = found.entry_expected
    entry = await _store(session, view, data)
    if await _journal(session, address, entry, before) is not None:
        return CONFLICT
    entity = entity_of(session, entry)
    return CONFLICT if entity is None else entity.etag


async def delete_chunk(
    session: Session, view: SessionView, address: ChunkAddress, expected: ETag | None
) -> Conflict | None:
    """Take a chunk away; see `write_chunk`."""
    demand_open(view.session)
    node, coords = address
    if expected is not None:
        found = await find_chunk(session, view, address)
        if not found.fits(expected):
            return CONFLICT
        return await _journal(session, address, None, found.entry_expected)
    if await has_parent_chunk(session, address):
        return await _journal(session, address, None, None)
    await session.journal.remove(session.place, node.node_id, coords)
    await _confirm(session, address, None)
    return None


async def has_parent_chunk(session: Session, address: ChunkAddress) -> bool:
    """Tell whether the parent has a chunk at *address*."""
    node, coords = address
    if node.chunks is None or not node.manifests:
        return False
    repository, fetch = session.repository, session.fetch
    return await repository.lookup(node.node_id, node.chunks, coords, fetch) is not None


async def _store(session: Session, view: SessionView, data: bytes) -> Entry:
    """Write the bytes of a chunk, unless they are to be in the journal."""
    if len(data) <= view.session.inline_nbytes:
        return Inlaid(data)
    chunk_id = secrets.token_bytes(OBJECT_ID_NBYTES)
    file = session.repository.file("chunks", chunk_id)
    if isinstance(await session.store.put(file, [data], expected=ABSENT), Conflict):
        raise BusyError("no id was free")
    return Native(chunk_id, ByteRange(0, len(data)))


async def _journal(
    session: Session, address: ChunkAddress, entry: Entry, expected: Expected
) -> Conflict | None:
    """Write an entry, and make sure that it counts."""
    node, coords = address
    place, journal = session.place, session.journal
    lost = await journal.put(place, node.node_id, coords, entry, expected=expected)
    if lost is None:
        await _confirm(session, address, entry)
    return lost


async def _confirm(session: Session, address: ChunkAddress, entry: Entry) -> None:
    """Return if what was written before this was called is, or will be, in the commit.

    A commit that is under way may have come before or after: its outcome tells.

    Raises: `ConflictError` if it is not, `BusyError` where nobody knows.
    """
    view = await settled(session)
    if isinstance(view.session.state, Open):
        await session.renew(view.session)
    elif isinstance(view.session.state, Sealed):
        raise BusyError("the commit of the session broke off: commit it again")
    elif not await _is_committed(session, view, address, entry):
        raise ConflictError("the session was committed before this could be written")


async def settled(session: Session) -> SessionView:
    """Wait until no commit is under way, or the one that is has broken off."""
    view, pause_s = await session.refresh(), _POLL_S
    while isinstance(state := view.session.state, Sealed):
        if state.until_s + _GRACE_S < session.clock():
            break
        await asyncio.sleep(pause_s)
        pause_s = min(_LONGEST_POLL_S, 2 * pause_s)
        view = await session.refresh()
    return view


async def _is_committed(
    session: Session, view: SessionView, address: ChunkAddress, entry: Entry
) -> bool:
    """Tell whether the snapshot that was committed has what *entry* says."""
    node = next(iter(view.among({address.node.node_id})), None)
    if node is None or node.chunks is None:
        return False
    found = await session.repository.lookup(
        node.node_id, node.chunks, address.coords, session.fetch
    )
    if found is None:
        return entry is None
    manifest, reference = found
    if isinstance(reference, Inlined):
        return entry == Inlaid(manifest.read(reference.place))
    return entry == reference


async def _find_in_parent(session: Session, address: ChunkAddress) -> Entity | None:
    node, coords = address
    if node.chunks is None or not node.manifests:
        return None
    repository, fetch = session.repository, session.fetch
    found = await repository.find(node.node_id, node.chunks, coords, fetch)
    return None if found is None else await _follow(session, found[1])


async def _follow(session: Session, referenced: Referenced) -> Entity:
    """Name the version of what is referred to, which takes a look where many will do."""
    place = referenced.place
    if isinstance(place, Part):
        ref, byte_range, version = place
        stat = await session.store.stat(ref)
        if stat is None or stat.size < byte_range.stop or _is_newer(stat.modified_s, version):
            raise DamagedError(ref, "is missing, or not as it was when it was referred to")
        place = Stored(ref, byte_range, stat.etag)
    elif isinstance(place, Inline):
        place = Inline(place.data, version_of(place.data))
    return Entity.at(place).referenced(referenced.by, is_lasting=False)


def _is_newer(modified_s: int | None, version: UnmodifiedSince | None) -> bool:
    return version is not None and (modified_s is None or modified_s > version.epoch_s)
