"""The commits that the refs of a repository are at."""

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime

from app.errors import UnknownRefError
from app.formats.surveying import State
from app.resolve.icechunk.repositories import OpenedRepository


@dataclass(frozen=True, slots=True)
class Tip:
    """A branch or a tag, and the commit it is at."""

    ref: str
    """As keys spell it: ``@tag.v1``."""
    snapshot_id: str
    message: str
    flushed_at: datetime | None
    """`None` where the snapshot is not there."""


async def read_tips(opened: OpenedRepository, states: Iterable[State]) -> list[Tip]:
    """Read the commit of each of *states*."""
    return [await _read_tip(opened, state) for state in states]


async def _read_tip(opened: OpenedRepository, state: State) -> Tip:
    try:
        async with aclosing(opened.ancestry(state.snapshot_id)) as ancestors:
            newest = await anext(ancestors)
    except UnknownRefError:
        return Tip(state.ref, state.snapshot_id, "", None)
    return Tip(state.ref, state.snapshot_id, newest.message, newest.flushed_at)
