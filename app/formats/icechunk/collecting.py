"""Which snapshots nothing leads to any more."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from app.formats.icechunk.lineage import Lineage, tips
from app.formats.icechunk.repo_changes import GcRan
from app.formats.icechunk.repo_info import RepoInfo


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of the snapshots that `repo` lists."""

    kept: frozenset[bytes]
    logs: frozenset[bytes]
    """Snapshots whose transaction logs are needed; some of them expired."""
    change: GcRan


def may_have_collected(info: RepoInfo, latest: timedelta) -> bool:
    """Tell whether anybody may have collected garbage in the *latest* time before the last update.

    Raises: `DecodeError`.
    """
    since: datetime | None = None
    for update in info.updates():
        since = since or update.updated_at - latest
        if update.updated_at < since:
            return False
        if update.kind == "gc_ran":
            return True
    return info.repo_before_updates is not None


def plan_collection(info: RepoInfo, also: Collection[bytes]) -> Remains:
    """Find the snapshots that stay: what refs lead to, and those in *also*, wherever they are.

    These do without ancestors that go, as the library lets them.

    Raises: `DecodeError`.
    """
    lineage = Lineage.of(info)
    snapshots = lineage.snapshots
    kept = {each for each in also if each in snapshots}
    reached = set[bytes]()
    for tip in {*tips(info.branches).values(), *tips(info.tags).values()}:
        for each in lineage.ancestry(tip):
            if each in reached:
                break
            reached.add(each)
    kept |= reached
    reparented = {}
    for each in kept - reached:
        before = (older for older in lineage.ancestry(each) if older != each and older in kept)
        if (since := next(before, None)) != snapshots[each].parent_id:
            reparented[each] = lineage.reparented(each, since)
    logs = set(kept)
    for each in kept:
        new = reparented.get(each)
        logs.update(snapshots[each].pruned_logs if new is None else new.pruned_ancestor_tx_logs)
    return Remains(
        frozenset(kept), frozenset(logs), GcRan(frozenset(snapshots.keys() - kept), reparented)
    )
