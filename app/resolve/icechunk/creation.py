"""Creation of a repository in an empty place ("Initialize New Repository")."""

from typing import Final

from app.errors import ConflictError, DamagedError
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.layout import Icechunk
from app.formats.icechunk.repo_info import encode_metadata
from app.formats.icechunk.repo_writer import ROOT_ID, ROOT_MESSAGE, ROOT_METADATA, create_repo
from app.formats.icechunk.repository import REPO
from app.formats.icechunk.snapshot import SnapshotHeaderDecoder, StoredSnapshot, write_snapshot
from app.formats.icechunk.transaction_log import TransactionLog, write_transaction_log
from app.formats.reading import DecodeError
from app.model import ObjectRef
from app.resolve.containers import Dataset
from app.resolve.icechunk.repo_swap import RepoSwaps
from app.storage.contract import ABSENT, CONFLICT, Found

_SNAPSHOT: Final = f"snapshots/{encode_id(ROOT_ID)}"
_TRANSACTION_LOG: Final = f"transactions/{encode_id(ROOT_ID)}"
_NO_CHANGES: Final = TransactionLog(*6 * (frozenset(),), updated_chunks={}, former_paths=())
_LIMIT_NBYTES: Final = 64 * 1024
"""Bound of the first snapshot, which has some hundred bytes."""


async def create_repository(swaps: RepoSwaps, dataset: Dataset) -> str:
    """Create a repository at the root of *dataset*, and return the id of its first snapshot.

    Of several callers one succeeds. An attempt that stopped halfway can be completed by another.

    Raises: `ConflictError` where the root is not empty, or another caller was faster;
    `UnwritableError`, `StorageError`.
    """
    if not any(isinstance(each, Icechunk) for each in dataset.containers.formats):
        raise ConflictError(f"{dataset.name} is configured as {dataset.format}: not of Icechunk")
    root, store = dataset.root, swaps.store
    await store.verify_conditional_writes(root)
    await _check_empty(swaps, root)
    now_us = swaps.now_us()
    log = write_transaction_log(ROOT_ID, _NO_CHANGES)
    await store.put(root.join(_TRANSACTION_LOG), [log], expected=ABSENT)
    metadata = encode_metadata(ROOT_METADATA)
    first = StoredSnapshot(ROOT_ID, {}, {}, now_us, ROOT_MESSAGE, metadata)
    snapshot = write_snapshot(first)
    if await store.put(root.join(_SNAPSHOT), [snapshot], expected=ABSENT) is CONFLICT:
        now_us = await _read_flushed_at_us(swaps, root.join(_SNAPSHOT))
    try:
        data = create_repo(now_us, max(now_us, swaps.now_us()))
        done = await store.put(root.join(REPO), [data], expected=ABSENT)
    finally:
        swaps.fetch.forget(root.join(REPO))
    if done is CONFLICT:
        raise ConflictError(f"another request has created a repository at {root}")
    return encode_id(ROOT_ID)


async def _check_empty(swaps: RepoSwaps, root: ObjectRef) -> None:
    """Return if *root* is empty, but for an unfinished attempt and empty folder objects."""
    async for listed in swaps.store.list(root.prefix):
        name = listed.ref.key.removeprefix(root.prefix.key)
        if name == REPO:
            raise ConflictError(f"there is a repository at {root} already")
        is_marker = name.endswith("/") or not name
        if not (is_marker and not listed.size) and name not in (_SNAPSHOT, _TRANSACTION_LOG):
            raise ConflictError(f"{root} is not empty: there is {name}")


async def _read_flushed_at_us(swaps: RepoSwaps, ref: ObjectRef) -> int:
    found = await swaps.store.get(ref)
    if not isinstance(found, Found):
        raise ConflictError(f"{ref} was deleted during the creation of a repository")
    try:
        header = SnapshotHeaderDecoder(ROOT_ID, _LIMIT_NBYTES)(found.data)
    except DecodeError as error:
        raise DamagedError(ref, str(error)) from error
    return header.flushed_at_us
