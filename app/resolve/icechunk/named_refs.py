"""The branches and tags of a repository, and where it says that virtual references lead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from app.errors import DamagedError, UnknownRepositoryError
from app.formats.icechunk.config import VirtualContainer
from app.formats.icechunk.refs import unescape
from app.formats.icechunk.repo_info import NamedSnapshots
from app.formats.icechunk.virtual import Allowed, is_allowed
from app.resolve.icechunk.repositories import OpenedRepository, open_repository
from app.resolve.inspect import DamageReport
from app.resolve.walk import Root

_REFS: Final = "refs/"
_TAG: Final = "refs/tag."
_DELETED: Final = "/ref.json.deleted"


@dataclass(frozen=True, slots=True)
class Named:
    """A branch or a tag, and the snapshot it is at."""

    name: str
    snapshot_id: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A branch or a tag that cannot be understood, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class BranchPage:
    """Some branches, by name."""

    branches: list[Named]
    damaged: list[Fault]
    next: str | None
    """The last of them, where there are more."""


@dataclass(frozen=True, slots=True)
class TagPage:
    """Some tags, by name."""

    tags: list[Named]
    damaged: list[Fault]
    deleted: list[str]
    """All that were deleted; their names cannot be used again."""
    next: str | None
    """The last of them, where there are more."""


@dataclass(frozen=True, slots=True)
class ContainerReport:
    """Where virtual references may lead, as a repository is configured."""

    name: str | None
    url_prefix: str
    store: str
    """The kind of store: ``s3``, ``local_file_system``."""
    allowed: bool
    """Whether this service follows them."""


async def read_branches(opened: OpenedRepository, after: str | None, limit: int) -> BranchPage:
    """Read up to *limit* of the branches behind the name *after*."""
    await opened.info()
    refs = await opened.repository.refs.branches(opened.fetch, opened.listing)
    branches, last = _page(refs, after, limit)
    return BranchPage(branches, _faults(refs), last)


async def read_tags(opened: OpenedRepository, after: str | None, limit: int) -> TagPage:
    """Read up to *limit* of the tags behind the name *after*."""
    deleted = await _deleted_tags(opened)
    refs = await opened.repository.refs.tags(opened.fetch, opened.listing)
    tags, last = _page(refs, after, limit)
    return TagPage(tags, _faults(refs), deleted, last)


async def list_containers(root: Root, path: str) -> list[ContainerReport | DamageReport]:
    """Tell where virtual references of the repository at *path* may lead, if there is one.

    Of URLs only that is told which can be no secret.
    """
    try:
        opened = await open_repository(root, path)
        await opened.info()
        containers = await opened.repository.refs.containers(opened.fetch)
    except UnknownRepositoryError:
        return []
    except DamagedError as damage:
        return [DamageReport(path, str(damage.ref), damage.reason)]
    allowed = opened.repository.allowed
    return [_container(each, allowed) for each in containers]


def _container(container: VirtualContainer, allowed: Sequence[Allowed]) -> ContainerReport:
    name, url = container.name, container.url_prefix
    is_followed = is_allowed(url, allowed)
    return ContainerReport(name, _without_secrets(url), container.store, allowed=is_followed)


async def _deleted_tags(opened: OpenedRepository) -> list[str]:
    """Read the list of them; version 1 has a file for each instead."""
    if (info := await opened.info()) is not None:
        return await opened.think(opened.repo, info.deleted_tags)
    names = [name async for name in opened.listing(_REFS) if name.endswith(_DELETED)]
    return sorted(unescape(name.removeprefix(_TAG).removesuffix(_DELETED)) for name in names)


def _page(refs: Mapping[str, str], after: str | None, limit: int) -> tuple[list[Named], str | None]:
    names = sorted(name for name in refs if after is None or name > after)
    page = [Named(name, refs[name]) for name in names[:limit]]
    return page, names[limit - 1] if len(names) > limit else None


def _faults(refs: Mapping[str, str]) -> list[Fault]:
    """Tell what is wrong with refs; only those of version 2 lie beside others."""
    return (
        [Fault(*fault) for fault in refs.faults.items()] if isinstance(refs, NamedSnapshots) else []
    )


def _without_secrets(url: str) -> str:
    """Leave out credentials, and what some servers take for a signature."""
    scheme, separator, rest = url.partition("://")
    rest = rest.partition("?")[0].partition("#")[0]
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"
