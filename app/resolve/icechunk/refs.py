"""Branches and tags of a repository, listed and changed."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final, Literal

from app.errors import (
    BadBodyError,
    ConflictError,
    PreconditionFailedError,
    UnknownRefError,
)
from app.formats.icechunk.ids import decode_id
from app.formats.icechunk.keys import MAIN, Branch, Tag
from app.formats.icechunk.repo_info import RepoInfo
from app.formats.icechunk.repo_writer import RefChange
from app.model import ETag
from app.resolve.bodies import Demand
from app.resolve.icechunk.repo_swap import Planned, RepoSwaps
from app.resolve.icechunk.repository import DOCUMENTED, OpenedRepository

_MAX_NAME_NBYTES: Final = 255
_UNREACHABLE: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]|^\.{0,2}$")


@dataclass(frozen=True, slots=True)
class NamedRef:
    """Branch or tag, and its snapshot."""

    name: str
    snapshot_id: str


@dataclass(frozen=True, slots=True)
class BranchPage:
    """Page of branches, by name."""

    __pydantic_config__ = DOCUMENTED
    branches: list[NamedRef]
    next: str | None
    """`after` of the next page, if there is one."""


@dataclass(frozen=True, slots=True)
class TagPage:
    """Page of tags, by name."""

    __pydantic_config__ = DOCUMENTED
    tags: list[NamedRef]
    next: str | None
    """`after` of the next page, if there is one."""


async def read_refs(
    opened: OpenedRepository, kind: type[Branch | Tag], after: str | None, limit: int
) -> tuple[list[NamedRef], str | None]:
    """Read up to *limit* of the branches, or tags, behind the name *after*; and the next name."""
    await opened.info()
    refs = await opened.repository.refs.named(kind, opened.fetch, opened.listing)
    names = sorted(name for name in refs if after is None or name > after)
    page = [NamedRef(name, refs[name]) for name in names[:limit]]
    return page, names[limit - 1] if len(names) > limit else None


class Feature(IntEnum):
    """Operations that the owner of a repository can forbid, by number in the specification."""

    CREATE_TAG = 4
    DELETE_TAG = 5


@dataclass(frozen=True, slots=True)
class RefChanges:
    """Changes branches and tags of one repository."""

    swaps: RepoSwaps
    opened: OpenedRepository

    async def create(self, kind: Literal["branch", "tag"], name: str, snapshot_id: str) -> NamedRef:
        """Create a branch or tag; raise `ConflictError` if there is, or was, one of that name."""

        def check(info: RepoInfo) -> None:
            if kind == "tag":
                _check_feature(info, Feature.CREATE_TAG)
            refs = info.tags if kind == "tag" else info.branches
            if name in refs:
                raise ConflictError(f"there is a {kind} {name!r} already")
            if kind == "tag" and name in info.deleted_tags():
                raise ConflictError(f"there was a tag {name!r}: its name cannot be used again")

        _check_name(name)
        created: Literal["branch_created", "tag_created"]
        created = "tag_created" if kind == "tag" else "branch_created"
        return await self._set(created, name, snapshot_id, check)

    async def reset_branch(self, name: str, snapshot_id: str, demand: Demand) -> NamedRef:
        """Move a branch that meets *demand* to another snapshot."""
        check = partial(_check_tip, name, demand)
        return await self._set("branch_reset", name, snapshot_id, check)

    async def delete_branch(self, name: str, demand: Demand | None) -> None:
        """Delete a branch other than ``main``; its snapshots stay."""

        def plan(info: RepoInfo) -> Planned[None]:
            _check_tip(name, demand, info)
            return Planned(None, RefChange("branch_deleted", name))

        if name == MAIN.name:
            raise ConflictError(f"the branch {name} can be reset, but not be deleted")
        await self.swaps.update(self.opened, plan)

    async def delete_tag(self, name: str) -> None:
        """Delete a tag, whose name cannot be used again; raise `ConflictError` if forbidden."""

        def plan(info: RepoInfo) -> Planned[None]:
            _check_feature(info, Feature.DELETE_TAG)
            if info.tags.get(name) is None:
                raise UnknownRefError(f"there is no tag {name!r}")
            return Planned(None, RefChange("tag_deleted", name))

        await self.swaps.update(self.opened, plan)

    async def _set(
        self,
        kind: Literal["branch_created", "branch_reset", "tag_created"],
        name: str,
        snapshot_id: str,
        check: Callable[[RepoInfo], None],
    ) -> NamedRef:
        if (object_id := decode_id(snapshot_id)) is None:
            raise BadBodyError(f"{snapshot_id[:40]!r} is no id of a snapshot")

        def plan(info: RepoInfo) -> Planned[NamedRef]:
            check(info)
            if info.snapshot(snapshot_id) is None:
                raise UnknownRefError(f"there is no snapshot {snapshot_id}")
            return Planned(NamedRef(name, snapshot_id), RefChange(kind, name, object_id))

        return await self.swaps.update(self.opened, plan)


def _check_name(name: str) -> None:
    """Raise `BadBodyError` for names that no URL can contain, though the library admits them."""
    if _UNREACHABLE.search(name):
        raise BadBodyError(f"no ref is called {name!r}: no URL would lead to it")
    if len(name.encode()) > _MAX_NAME_NBYTES:
        raise BadBodyError(f"the name of a ref has more than {_MAX_NAME_NBYTES} bytes")


def _check_feature(info: RepoInfo, feature: Feature) -> None:
    if feature in info.disabled_feature_flags():
        name = feature.name.lower()
        raise ConflictError(f"the repository forbids it: the feature flag {name} is off")


def _check_tip(name: str, demand: Demand | None, info: RepoInfo) -> None:
    if (current := info.branches.get(name)) is None:
        raise UnknownRefError(f"there is no branch {name!r}")
    if demand is not None and not demand((ETag(f'"{current}"'),)):
        raise PreconditionFailedError(f"the branch {name!r} is at {current}")
