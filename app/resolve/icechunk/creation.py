"""A new repository, where there is nothing yet."""

from datetime import timedelta
from typing import Final

from app.errors import ConflictError, DamagedError
from app.formats.icechunk.fields import EPOCH
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.layout import Icechunk
from app.formats.icechunk.refs import REPO
from app.formats.icechunk.repo_creation import (
    ROOT_ID,
    create_repo,
    first_snapshot,
    first_transaction_log,
)
from app.formats.icechunk.snapshot_header import SnapshotHeaderDecoder
from app.formats.reading import DecodeError
from app.model import ObjectRef
from app.resolve.icechunk.repo_swap import RepoSwaps
from app.resolve.resolver import Dataset
from app.storage.contract import ABSENT, CONFLICT, Found

_SNAPSHOT: Final = f"snapshots/{encode_id(ROOT_ID)}"
_TRANSACTION_LOG: Final = f"transactions/{encode_id(ROOT_ID)}"
_LIMIT_NBYTES: Final = 64 * 1024
"""Of the first snapshot, which has some hundred."""


async def create_repository(swaps: RepoSwaps, dataset: Dataset) -> str:
    """Make a repository at the root of *dataset*, and give the id of its first snapshot.

    Of many who try only one does it. What one left behind who died before, another goes on with.

    Raises: `ConflictError` where there is something already, or another was faster;
    `UnwritableError`, `StorageError`.
    """
    if not any(isinstance(each, Icechunk) for each in dataset.containers.formats):
        raise ConflictError(f"{dataset.name} is configured as {dataset.format}: not of Icechunk")
    root, store = dataset.root, swaps.store
    await store.demand_safety(root)
    await _demand_empty(swaps, root)
    now_us = swaps.now_us()
    log = first_transaction_log()
    await store.put(root.join(_TRANSACTION_LOG), [log], expected=ABSENT)
    snapshot = first_snapshot(now_us)
    if await store.put(root.join(_SNAPSHOT), [snapshot], expected=ABSENT) is CONFLICT:
        now_us = await _flushed_at_us(swaps, root.join(_SNAPSHOT))
    try:
        data = create_repo(now_us, max(now_us, swaps.now_us()))
        done = await store.put(root.join(REPO), [data], expected=ABSENT)
    finally:
        swaps.fetch.forget(root.join(REPO))
    if done is CONFLICT:
        raise ConflictError(f"there is a repository at {root} by now")
    return encode_id(ROOT_ID)


async def _demand_empty(swaps: RepoSwaps, root: ObjectRef) -> None:
    """Return if there is nothing at *root* but what an unfinished attempt leaves.

    Objects of no bytes that are called like folders count for nothing.
    """
    async for listed in swaps.store.list(root.prefix):
        name = listed.ref.key.removeprefix(root.prefix.key)
        if name == REPO:
            raise ConflictError(f"there is a repository at {root} already")
        is_marker = name.endswith("/") or not name
        if not (is_marker and not listed.size) and name not in (_SNAPSHOT, _TRANSACTION_LOG):
            raise ConflictError(f"{root} is not empty: there is {name}")


async def _flushed_at_us(swaps: RepoSwaps, ref: ObjectRef) -> int:
    """Read when the first snapshot was made that another has put there."""
    found = await swaps.store.get(ref)
    if not isinstance(found, Found):
        raise ConflictError(f"{ref} was there, and is gone")
    try:
        info = SnapshotHeaderDecoder(encode_id(ROOT_ID), _LIMIT_NBYTES)(found.data).info
    except DecodeError as error:
        raise DamagedError(ref, str(error)) from error
    return (info.flushed_at - EPOCH) // timedelta(microseconds=1)
