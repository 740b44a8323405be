"""Expiration: old snapshots are listed no longer; their files are left to be collected."""

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from app.formats.icechunk.expiring import Expiring, plan_expiration
from app.formats.icechunk.fields import EPOCH
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.keys import MAIN
from app.formats.icechunk.repo_changes import ExpirationRan
from app.formats.icechunk.repo_info import RepoInfo
from app.resolve.icechunk.older_than import spell_moment
from app.resolve.icechunk.open_sessions import Sessions, find_sessions
from app.resolve.icechunk.repo_swap import Planned, RepoSwaps
from app.resolve.icechunk.repositories import OpenedRepository

__all__ = ["ExpireReport", "Expiring", "expire"]


@dataclass(frozen=True, slots=True)
class ExpireReport:
    """What has expired, or would."""

    executed: bool
    older_than: str
    oldest_session: str | None
    """The session that goes on and needs the history since a time before what was asked for."""
    snapshots: list[str]
    branches: list[str]
    tags: list[str]
    reparented: list[str]
    """Snapshots that come right after the first now."""


class _Found(NamedTuple):
    limit_us: int
    session_id: str | None
    change: ExpirationRan


async def expire(
    swaps: RepoSwaps, opened: OpenedRepository, expiring: Expiring, *, execute: bool
) -> ExpireReport:
    """Let snapshots expire, or only tell which would.

    Raises: what `RepoSwaps.update` does.
    """
    info = await fresh_info(swaps, opened)
    sessions = await find_sessions(swaps.store, opened, swaps.now_us())
    plan = partial(_plan, expiring, sessions, execute=execute)
    if execute:
        await swaps.store.demand_safety(opened.directory)
        found = await swaps.update(opened, plan)
    else:
        found = (await opened.think(opened.repo, partial(plan, info))).answer
    change = found.change
    return ExpireReport(
        execute,
        spell_moment(found.limit_us),
        found.session_id,
        sorted(map(encode_id, change.dropped)),
        sorted(change.deleted_branches),
        sorted(change.deleted_tags),
        sorted(map(encode_id, change.reparented)),
    )


async def fresh_info(swaps: RepoSwaps, opened: OpenedRepository) -> RepoInfo:
    """Read ``repo`` as it is now, if it may be changed.

    Raises: what `OpenedRepository.writable_info` does.
    """
    swaps.fetch.forget(opened.repo)
    return await opened.writable_info()


def _plan(
    expiring: Expiring, sessions: Sessions, info: RepoInfo, *, execute: bool
) -> Planned[_Found]:
    limit_us, session_id = _bounded(expiring, sessions, info)
    change = plan_expiration(info, expiring._replace(older_than_us=limit_us))
    return Planned(_Found(limit_us, session_id, change), change if execute else None)


def _bounded(expiring: Expiring, sessions: Sessions, info: RepoInfo) -> tuple[int, str | None]:
    """Keep what sessions are to be put on top of, where their branches have moved on or may go."""
    bound: tuple[int, str | None] = expiring.older_than_us, None
    for each in sessions.open:
        parent = info.snapshot(each.parent_id)
        stays = each.branch == MAIN.name or not expiring.branches
        is_tip = info.branches.get(each.branch) == each.parent_id
        if parent is not None and not (is_tip and stays):
            written_us = (parent.flushed_at - EPOCH) // timedelta(microseconds=1)
            bound = min(bound, (written_us, each.session_id), key=lambda found: found[0])
    return bound
