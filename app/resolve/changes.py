"""Changes of inner chunks: which of those that wait are made, and what becomes of each."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from app.errors import PreconditionFailedError
from app.formats.contract import Entry, OpenShard, ShardRewriter
from app.model import ETag, ObjectRef, Stored, VirtualKey
from app.resolve.entity import Demand, Entity


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """An inner chunk that is to be stored, or taken away where *data* is `None`."""

    key: VirtualKey
    entry: Entry
    data: bytes | None
    demand: Demand | None = None
    done: "asyncio.Future[ETag | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Gives the version of the inner chunk that is stored then, `None` if it is no more."""


type Request = tuple[Change, ...]
"""Changes of one shard that may not go one without the other."""


class SortedOut(NamedTuple):
    """Which changes are made, in the order in which they came."""

    made: dict[Entry, bytes | None]
    refused: set[Change]
    relies_on_old: bool
    """Whether a change is refused, or needs nothing to be done, for what the indexes say."""


def sort_out(
    shard: ShardRewriter[Any], old: OpenShard | None, changes: Sequence[Change]
) -> SortedOut:
    """Hold demands against the shard as it is when the changes before have been made."""
    made: dict[Entry, bytes | None] = {}
    refused = set()
    for change in changes:
        entry = change.entry
        if change.demand is not None:
            if entry not in made:
                names = _names(shard, old, entry)
            else:
                names = () if made[entry] is None else (_unlike(),)
            if not change.demand(names):
                refused.add(change)
                continue
        made[entry] = change.data
    deleted = [entry for entry, data in made.items() if data is None]
    idle = [entry for entry in deleted if old is None or old.lookup(entry) is None]
    for entry in idle:
        del made[entry]
    return SortedOut(made, refused, bool(refused or idle))


def _names(shard: ShardRewriter[Any], old: OpenShard | None, entry: Entry) -> tuple[ETag, ...]:
    """Name the version of an inner chunk, nothing where there is none."""
    if old is None or (place := old.lookup(entry)) is None:
        return ()
    return Entity.at(Stored(shard.ref, place, old.etag)).names


def tell(
    change: Change, shard: ObjectRef, sorted_out: SortedOut, places: Mapping[Entry, Stored]
) -> None:
    """Let who waits for *change* of *shard* hear what came of it."""
    if change.done.done():
        return
    if change in sorted_out.refused:
        refusal = PreconditionFailedError(
            f"{change.key}: the inner chunk of the shard {shard} is not as the request demands"
        )
        change.done.set_exception(refusal)
        change.done.exception()  # or asyncio logs it where nobody waits any more
    elif change.data is None:
        change.done.set_result(None)
    elif sorted_out.made.get(change.entry) is change.data and change.entry in places:
        change.done.set_result(Entity.at(places[change.entry]).etag)
    else:  # another change of the same rewrite came after it
        change.done.set_result(_unlike())


def _unlike() -> ETag:
    """Name a version that nobody will see, for it was overwritten at once."""
    return ETag(f'"{secrets.token_hex(16)}"')


def fail(requests: Sequence[Request], error: Exception) -> None:
    """Let all hear of *error* who still wait."""
    for change in _undone(requests):
        change.done.set_exception(error)
        change.done.exception()  # as above


def cancel(requests: Sequence[Request]) -> None:
    """Let nobody wait any more."""
    for change in _undone(requests):
        change.done.cancel()


def _undone(requests: Sequence[Request]) -> Iterator[Change]:
    return (change for request in requests for change in request if not change.done.done())
