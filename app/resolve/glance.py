"""A short look at a dataset: the first things in it, and no longer than it may take."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

import orjson

from app.errors import DamagedError, ShardgateError
from app.formats.documents import Json
from app.formats.surveying import Description, Stateful
from app.model import ByteRange, VirtualKey
from app.resolve.entity import Coding, Entity
from app.resolve.icechunk.history import RefTip, read_tips
from app.resolve.icechunk.repositories import open_repository
from app.resolve.resolver import Dataset, Resolver
from app.resolve.walk import Opened, Visited, collections_of, find_containers

MOST_COLLECTIONS: Final = 8
MOST_REPOSITORIES: Final = 4
MOST_REFS: Final = 8
"""So many branches and tags of a repository are told."""

_MAIN: Final = "@branch.main"
_DOCUMENT_NBYTES: Final = 1024 * 1024


class SeenGroup(NamedTuple):
    """The group that an array is right below."""

    key: str
    is_image: bool = False
    """Whether it is an OME-Zarr image, of version 0.5 on, and its arrays are levels."""
    is_consolidated: bool = False
    """Whether its metadata have those of all below in them."""


@dataclass(frozen=True, slots=True)
class SeenCollection:
    """An array or the like, or why it cannot be understood."""

    path: str
    """Below the root."""
    container: str
    """The path of the container it is in."""
    node: str | None
    """The key of the Zarr v3 node that it is, in a repository below `main`."""
    group: SeenGroup | None
    """What that node is in; `None` where it is the root itself."""
    found: Description | DamagedError


@dataclass(frozen=True, slots=True)
class SeenRepository:
    """An Icechunk repository, and its first refs."""

    path: str
    tips: Sequence[RefTip]
    refs: int
    """How many there are."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What was seen of a dataset."""

    collections: Sequence[SeenCollection]
    repositories: Sequence[SeenRepository]
    is_all: bool
    """Whether there is nothing else."""
    reason: str = ""
    """Why not more could be seen."""


class _All(NamedTuple):
    reads: ByteRange | None


async def glance(resolver: Resolver, dataset: Dataset, within_s: float) -> Glance:
    """Look at *dataset*; what fails or takes longer is told as a reason beside what was seen."""
    look, is_all, reason = _Look(resolver, dataset), False, ""
    try:
        async with asyncio.timeout(within_s):
            is_all = await look.around()
    except TimeoutError:
        reason = f"the store has told no more within {within_s:g} s"
    except ShardgateError as error:
        reason = str(error)
    return Glance(tuple(look.collections), tuple(look.repositories), is_all, reason)


class _Look:
    """What has been seen so far."""

    def __init__(self, resolver: Resolver, dataset: Dataset) -> None:
        self._resolver = resolver
        self._dataset = dataset
        self._root = resolver.root(dataset)
        self._groups: dict[str, SeenGroup] = {}
        self.collections: list[SeenCollection] = []
        self.repositories: list[SeenRepository] = []

    async def around(self) -> bool:
        """Look until there is enough; tell whether that was all."""
        if not self._dataset.containers.formats:
            await self._resolver.check_reachable(self._dataset)
            return True
        async with aclosing(find_containers(self._root)) as containers:
            async for opened in containers:
                is_all = await self._see_repository(opened) and await self._see_collections(opened)
                if not is_all:
                    return False
        return True

    async def _see_repository(self, opened: Opened) -> bool:
        if not isinstance(opened.found, Stateful):
            return True
        if len(self.repositories) == MOST_REPOSITORIES:
            return False
        repository = await open_repository(self._root, opened.path)
        states = await opened.found.states(repository.fetch, repository.listing)
        tips = await read_tips(repository, islice(states, MOST_REFS))
        self.repositories.append(SeenRepository(opened.path, tips, len(states)))
        return True

    async def _see_collections(self, opened: Opened) -> bool:
        is_versioned = isinstance(opened.found, Stateful)
        for visited in await collections_of(self._root, opened):
            if len(self.collections) == MOST_COLLECTIONS:
                return False
            await self._see(visited, is_versioned=is_versioned)
        return True

    async def _see(self, visited: Visited, *, is_versioned: bool) -> None:
        path, container, found = visited.path, visited.container, visited.found
        if isinstance(found, DamagedError):
            self.collections.append(SeenCollection(path, container, None, None, found))
            return
        below, node = path.removeprefix(container).strip("/"), None
        if is_versioned:
            node = f"{container}/{_MAIN}/{below}".strip("/")
        elif found.description.format == "zarr" and not below:  # those of the draft have one root
            node = path
        group = await self._group(node) if node is not None and path else None
        self.collections.append(SeenCollection(path, container, node, group, found.description))

    async def _group(self, node: str) -> SeenGroup:
        key = node.rpartition("/")[0]
        if key not in self._groups:
            document = await self._read(f"{key}/zarr.json".lstrip("/"))
            self._groups[key] = understand(key, document)
        return self._groups[key]

    async def _read(self, key: str) -> bytes:
        """Read a small document; nothing where there is none."""
        opening = self._resolver.open(self._dataset, VirtualKey(key), _choose)
        async with opening as opened:
            return opened.body if opened is not None and isinstance(opened.body, bytes) else b""


def _choose(entity: Entity) -> _All | None:
    if entity.coding is Coding.GZIP:
        return None
    return _All(ByteRange(0, entity.length) if entity.length <= _DOCUMENT_NBYTES else None)


def understand(key: str, document: bytes) -> SeenGroup:
    """Tell what the metadata *document* of the group *key* say of it."""
    try:
        group = orjson.loads(document)
    except ValueError:
        return SeenGroup(key)
    scales = _member(_member(_member(group, "attributes"), "ome"), "multiscales")
    return SeenGroup(
        key,
        is_image=isinstance(scales, list) and bool(scales),
        is_consolidated=_member(group, "consolidated_metadata") is not None,
    )


def _member(document: Json, name: str) -> Json:
    return document.get(name) if isinstance(document, dict) else None
