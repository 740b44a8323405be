"""Branches, tags and the status of a repository, changed one at a time."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final

from app.errors import (
    BadBodyError,
    ConflictError,
    PreconditionFailedError,
    UnknownRefError,
)
from app.formats.icechunk.ids import decode_id, encode_id
from app.formats.icechunk.keys import MAIN
from app.formats.icechunk.repo_info import Availability, RepoInfo
from app.formats.icechunk.repo_writer import (
    BranchCreated,
    BranchDeleted,
    BranchReset,
    StatusChanged,
    TagCreated,
    TagDeleted,
)
from app.model import ETag
from app.resolve.entity import Demand
from app.resolve.icechunk.named_refs import Named
from app.resolve.icechunk.repo_swap import Planned, RepoSwaps
from app.resolve.icechunk.repositories import OpenedRepository

MAX_NAME_NBYTES: Final = 255
_UNREACHABLE: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]|^\.{0,2}$")


class Feature(IntEnum):
    """What the owner of a repository may forbid, by the numbers of the specification."""

    CREATE_TAG = 4
    DELETE_TAG = 5


@dataclass(frozen=True, slots=True)
class RefChanges:
    """Changes what names snapshots in one repository."""

    swaps: RepoSwaps
    opened: OpenedRepository

    async def create_branch(self, name: str, snapshot_id: str) -> Named:
        """Make a branch at a snapshot.

        Raises: `BadBodyError`, `ConflictError` where there is one of that name, `UnknownRefError`
        for no snapshot, and what `RepoSwaps.update` does.
        """
        demand_name(name)
        plan = partial(_plan_branch, name, _object_id(snapshot_id))
        return await self.swaps.update(self.opened, plan)

    async def reset_branch(self, name: str, snapshot_id: str, demand: Demand) -> Named:
        """Put a branch that fulfils *demand* at another snapshot.

        Raises: `BadBodyError`, `PreconditionFailedError`, `UnknownRefError`; see `RepoSwaps`.
        """
        plan = partial(_plan_reset, name, _object_id(snapshot_id), demand)
        return await self.swaps.update(self.opened, plan)

    async def delete_branch(self, name: str, demand: Demand | None) -> None:
        """Take a branch away; its snapshots stay.

        Raises: `ConflictError` for ``main``, `PreconditionFailedError`, `UnknownRefError`; see
        `RepoSwaps`.
        """
        if name == MAIN.name:
            raise ConflictError(f"the branch {name} can be reset, but not be deleted")
        await self.swaps.update(self.opened, partial(_plan_no_branch, name, demand))

    async def create_tag(self, name: str, snapshot_id: str) -> Named:
        """Make a tag at a snapshot.

        Raises: `BadBodyError`, `ConflictError` where there is or was one of that name, or none may
        be made; `UnknownRefError` for no snapshot; see `RepoSwaps`.
        """
        demand_name(name)
        plan = partial(_plan_tag, name, _object_id(snapshot_id))
        return await self.swaps.update(self.opened, plan)

    async def delete_tag(self, name: str) -> None:
        """Take a tag away, its name for ever.

        Raises: `ConflictError` where none may be deleted, `UnknownRefError`; see `RepoSwaps`.
        """
        await self.swaps.update(self.opened, partial(_plan_no_tag, name))

    async def set_status(self, availability: Availability, reason: str | None) -> None:
        """Say what may be done with the repository, also one that is locked.

        Raises: see `RepoSwaps`.
        """
        change = StatusChanged(availability, reason)
        await self.swaps.update(self.opened, lambda _: Planned(None, change))


def demand_name(name: str) -> None:
    """Return if a new branch or tag can be called *name*.

    Raises: `BadBodyError` for what no URL leads to, though the library lets it be.
    """
    if _UNREACHABLE.search(name):
        raise BadBodyError(f"no ref is called {name!r}: no URL would lead to it")
    if len(name.encode()) > MAX_NAME_NBYTES:
        raise BadBodyError(f"the name of a ref has more than {MAX_NAME_NBYTES} bytes")


def demand_feature(info: RepoInfo, feature: Feature) -> None:
    """Return if the owner of the repository lets it be changed like that.

    Raises: `ConflictError`.
    """
    if feature in info.disabled_feature_flags():
        name = feature.name.lower()
        raise ConflictError(f"the repository forbids it: the feature flag {name} is off")


def find_branch(info: RepoInfo, name: str) -> str:
    """Give the id of the snapshot that a branch is at.

    Raises: `UnknownRefError`.
    """
    return _find(info.branches.get, "branch", name)


def _plan_branch(name: str, object_id: bytes, info: RepoInfo) -> Planned[Named]:
    if name in info.branches or name in info.branches.faults:
        raise ConflictError(f"there is a branch {name!r} already")
    _demand_snapshot(info, object_id)
    return Planned(Named(name, encode_id(object_id)), BranchCreated(name, object_id))


def _plan_reset(name: str, object_id: bytes, demand: Demand, info: RepoInfo) -> Planned[Named]:
    _demand_tip(info, name, demand)
    _demand_snapshot(info, object_id)
    return Planned(Named(name, encode_id(object_id)), BranchReset(name, object_id))


def _plan_no_branch(name: str, demand: Demand | None, info: RepoInfo) -> Planned[None]:
    _demand_tip(info, name, demand)
    return Planned(None, BranchDeleted(name))


def _plan_tag(name: str, object_id: bytes, info: RepoInfo) -> Planned[Named]:
    demand_feature(info, Feature.CREATE_TAG)
    if name in info.tags or name in info.tags.faults:
        raise ConflictError(f"there is a tag {name!r} already")
    if name in info.deleted_tags():
        raise ConflictError(f"there was a tag {name!r}: its name cannot be used again")
    _demand_snapshot(info, object_id)
    return Planned(Named(name, encode_id(object_id)), TagCreated(name, object_id))


def _plan_no_tag(name: str, info: RepoInfo) -> Planned[None]:
    demand_feature(info, Feature.DELETE_TAG)
    _find(info.tags.get, "tag", name)
    return Planned(None, TagDeleted(name))


def _demand_tip(info: RepoInfo, name: str, demand: Demand | None) -> None:
    current = find_branch(info, name)
    if demand is not None and not demand((ETag(f'"{current}"'),)):
        raise PreconditionFailedError(f"the branch {name!r} is at {current}")


def _demand_snapshot(info: RepoInfo, object_id: bytes) -> None:
    if info.snapshot(encode_id(object_id)) is None:
        raise UnknownRefError(f"there is no snapshot {encode_id(object_id)}")


def _find(get: Callable[[str], str | None], kind: str, name: str) -> str:
    if (found := get(name)) is None:
        raise UnknownRefError(f"there is no {kind} {name!r}")
    return found


def _object_id(text: str) -> bytes:
    if (object_id := decode_id(text)) is None:
        raise BadBodyError(f"{text[:40]!r} is no id of a snapshot")
    return object_id
