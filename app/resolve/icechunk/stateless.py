"""Commits of what was written before, by anybody: each reference is looked at first."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from app.errors import DamagedError, UnknownRefError
from app.formats.icechunk.changes import (
    ChangeSet,
    Edit,
    check_inlaid,
    check_natives,
    check_virtual,
    demand_of_natives,
    edit,
)
from app.formats.icechunk.config import Config
from app.formats.icechunk.ids import NODE_ID_NBYTES
from app.formats.icechunk.repo_info import RepoInfo
from app.resolve.icechunk.chunk_files import ChunkFiles
from app.resolve.icechunk.commit_request import CommitRequest, Committed
from app.resolve.icechunk.committing import Committer
from app.resolve.icechunk.rebasing import read_snapshot
from app.resolve.icechunk.repositories import OpenedRepository


class StatelessCommits:
    """Commits what one request tells."""

    def __init__(self, committer: Committer, files: ChunkFiles) -> None:
        self._committer = committer
        self._files = files

    async def commit(
        self, opened: OpenedRepository, edits: Sequence[Edit], request: CommitRequest
    ) -> Committed:
        """Commit *edits* of the parent; an empty id of that is the one of the tip.

        Raises: `BadBodyError` and `NotAllowedError` for references that lead nowhere,
        `UnknownRefError`, and what `Committer.commit` raises.
        """
        seen = await self._committer.look(opened, request)
        if isinstance(seen, Committed):
            return seen
        request = replace(request, parent_id=request.parent_id or seen.snapshot_id)
        parent = None
        if await _is_listed(opened, seen.info, request.parent_id):
            parent = await read_snapshot(opened, request.parent_id)
        if parent is None:
            raise UnknownRefError(f"there is no snapshot {request.parent_id}")
        changes = await asyncio.to_thread(edit, parent, edits, _new_node_id)
        await self._check(opened, seen.info, changes)
        return await self._committer.commit(opened, changes, request, seen)

    async def _check(self, opened: OpenedRepository, info: RepoInfo, changes: ChangeSet) -> None:
        """Return if all that *changes* refer to is there, and may be referred to."""
        config = info.config
        if not isinstance(config, Config):
            raise DamagedError(opened.repo, str(config))
        allowed = opened.repository.allowed
        await asyncio.to_thread(check_inlaid, changes, config.inline_chunk_threshold_bytes)
        await asyncio.to_thread(check_virtual, changes, allowed, config.containers)
        wanted = await asyncio.to_thread(demand_of_natives, changes)
        lengths = await self._files.lengths(opened, info, wanted)
        if any(lengths.get(chunk_id, 0) < least for chunk_id, least in wanted.items()):
            await asyncio.to_thread(check_natives, changes, lengths)


async def _is_listed(opened: OpenedRepository, info: RepoInfo, snapshot_id: str) -> bool:
    return await opened.think(opened.repo, lambda: info.snapshot(snapshot_id)) is not None


def _new_node_id() -> bytes:
    return secrets.token_bytes(NODE_ID_NBYTES)
