"""Chunk files, written before the commit that refers to them; without one they are garbage."""

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Final

from shardgate.concurrency import bounded_gather, take
from shardgate.errors import BadBodyError, BusyError
from shardgate.formats.icechunk.ids import OBJECT_ID_NBYTES, decode_id, encode_id
from shardgate.formats.icechunk.repository_files import Repository
from shardgate.icechunk.repository import OpenedRepository
from shardgate.model import ETag, ObjectRef
from shardgate.storage.contract import ABSENT, Conflict, ObjectStore

_MAX_STATS: Final = 256
"""More chunk files than this are looked up by listing instead of one request each."""
_PAGE: Final = 1000


async def put_chunk(store: ObjectStore, opened: OpenedRepository, body: bytes) -> bytes:
    """Write a chunk file, which must not be empty, and return its id of 12 bytes."""
    if not body:
        raise BadBodyError("a chunk must have at least one byte: the library refuses empty ones")
    await opened.writable_info()
    chunk_id = new_object_id()
    await put_new(store, opened.repository.file("chunks", chunk_id), body)
    return chunk_id


async def chunk_lengths(
    store: ObjectStore, repository: Repository, wanted: Sequence[bytes]
) -> dict[bytes, int]:
    """Return the lengths in bytes of those chunk files of *wanted* that exist."""
    if len(wanted) <= _MAX_STATS:
        return await _stat(store, repository, wanted)
    # A listing for each of 32 letters can run beside the others.
    by_letter = await asyncio.to_thread(_group_by_letter, wanted)
    parts = await bounded_gather(partial(_list, store, repository), by_letter)
    lengths: dict[bytes, int] = {}
    for part in parts:
        lengths |= part
    return lengths


def _group_by_letter(wanted: Sequence[bytes]) -> list[list[bytes]]:
    """Group ids by the first letter of their names, which spells the first five bits."""
    return [list(some) for _, some in groupby(sorted(wanted), lambda chunk_id: chunk_id[0] >> 3)]


async def _stat(
    store: ObjectStore, repository: Repository, wanted: Sequence[bytes]
) -> dict[bytes, int]:
    stats = await bounded_gather(
        lambda chunk_id: store.stat(repository.file("chunks", chunk_id)), wanted
    )
    found = zip(wanted, stats, strict=True)
    return {chunk_id: stat.size for chunk_id, stat in found if stat is not None}


async def _list(
    store: ObjectStore, repository: Repository, wanted: Sequence[bytes]
) -> dict[bytes, int]:
    """Find *wanted* of one first letter in a listing; after too many names ask one by one."""
    listed = store.list(repository.directory.join(f"chunks/{encode_id(wanted[0])[0]}"))
    found = dict[bytes, int]()
    left = set(wanted)
    # After 100 names listed for each wanted one, single requests are cheaper.
    for _ in range(1 + 100 * len(wanted) // _PAGE):
        page = await take(listed, _PAGE)
        for each in page:
            chunk_id = decode_id(each.ref.key.rpartition("/")[2])
            if chunk_id in left and each.size is not None:
                found[chunk_id] = each.size
                left.remove(chunk_id)
        if len(page) < _PAGE:
            return found
    return {**found, **await _stat(store, repository, sorted(left))}


async def put_new(store: ObjectStore, name: ObjectRef, data: bytes) -> ETag:
    """Write an object whose name has a random id, and return its version."""
    if isinstance(etag := await store.put(name, [data], expected=ABSENT), Conflict):
        raise BusyError(f"{name}: an object of this random id exists already")
    return etag


def new_object_id() -> bytes:
    """Return a random id for a file of a repository."""
    return secrets.token_bytes(OBJECT_ID_NBYTES)
