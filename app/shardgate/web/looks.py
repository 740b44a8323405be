"""Plan pictures of what a path names, and locate the chunks in them."""

import re
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import parse_qsl

from shardgate.concurrency import bounded_gather
from shardgate.errors import BadKeyError, BadParameterError, DamagedError, ShardgateError
from shardgate.formats.contract import Layout
from shardgate.formats.icechunk.keys import parse_ref
from shardgate.formats.reading import DecodeError
from shardgate.formats.surveying import Stateful
from shardgate.icechunk.repository import open_repository
from shardgate.model import VirtualKey, join_path
from shardgate.read.bodies import Entity, Selection
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.server.problems import RETRIED, status_of
from shardgate.server.request import check_key
from shardgate.web.nodes import NodeView, find_images, read_node, read_zarr
from shardgate.web.rendering import visible
from shardgate.web.sections import ENOUGH, Drawing, Indices, UndrawableError, draw_volume, draw_zarr

AT: Final = "at."  # begins the names of parameters with a position along an axis
READS: Final = 16  # concurrent reads for one picture


def read_indices(query: str) -> Indices:
    """Return the parameters ``at.NAME``; an empty one is none. Raises: `BadParameterError`."""
    indices = {}
    for name, value in parse_qsl(query):
        if name.startswith(AT):
            if not re.fullmatch("0|[1-9][0-9]{0,18}", value):
                raise BadParameterError(f"{visible(name, 40)}: {visible(value, 40)} is no index")
            indices[name.removeprefix(AT)] = int(value)
    return indices


class PictureName(NamedTuple):
    """Identifies a picture."""

    dataset: str
    path: VirtualKey
    """Of an array, image or volume; empty for the first one, or a ref for the first one in it."""
    at: tuple[tuple[str, int], ...] = ()
    """Chosen positions along other axes than those that it shows, sorted by their names."""


class Planner:
    """Plans pictures."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    async def name(self, dataset: Dataset, path: str, ref: str | None, at: Indices) -> PictureName:
        """Return the name of the picture of *path*, as of *ref* if there is one: ``branch.NAME``,
        ``tag.NAME``, or the id of a snapshot. Raises: `BadKeyError`, `BadParameterError`.
        """
        key = check_key(path.rstrip("/"))
        if ref is not None:
            key = await self._join_ref(dataset, key, ref)
        return PictureName(dataset.name, key, tuple(sorted(at.items())))

    async def plan(self, dataset: Dataset, name: PictureName) -> tuple[VirtualKey, Drawing]:
        """Return the plan of a picture, and the path of its node, in a repository as of a snapshot.

        Raises: `DecodeError`, `ShardgateError`; `BadParameterError` for an unknown position.
        """
        path = name.path
        is_node = path and not path.rpartition("/")[2].startswith("@")
        async for each in find_images(self._resolver, dataset, path):
            try:
                pinned = await self._pin(dataset, VirtualKey(each))
                drawing = await self._plan(dataset, pinned, dict(name.at))
                if not is_node:
                    drawing.check()  # else the next one may have a picture
            except BadParameterError:
                raise
            except (DecodeError, ShardgateError) as error:
                if is_node or may_pass(error):
                    raise
            else:
                return pinned, drawing
        raise UndrawableError("there is no array with two axes")

    async def locate(self, dataset: Dataset, drawing: Drawing) -> Mapping[str, Entity]:
        """Locate the chunks of *drawing* that exist, by their names."""
        names = drawing.chunks
        locate = partial(self.locate_chunk, dataset, drawing)
        located = zip(names, await bounded_gather(locate, names, limit=READS), strict=True)
        return {name: entity for name, entity in located if entity is not None}

    async def locate_chunk(self, dataset: Dataset, drawing: Drawing, name: str) -> Entity | None:
        """Locate the chunk *name* of *drawing*; `None` if it is not stored."""
        key = VirtualKey(join_path(drawing.directory, name))
        nothing = Selection(HTTPStatus.OK)
        async with self._resolver.open(dataset, key, lambda _: nothing) as opened:
            return None if opened is None else opened.entity

    async def _find(self, dataset: Dataset, path: str) -> tuple[Layout, str, str]:
        """Return the container of the node at *path*, its path, and that of the node below it."""
        key = VirtualKey(join_path(path, "zarr.json"))
        layout, rest, *_ = await self._resolver.find_container(dataset, key)
        return layout, key.removesuffix(rest).rstrip("/"), rest.rpartition("/")[0]

    async def _join_ref(self, dataset: Dataset, path: VirtualKey, ref: str) -> VirtualKey:
        """Return *path* as of *ref*. Raises: `BadParameterError` outside of a repository."""
        layout, container, inside = await self._find(dataset, path)
        if not isinstance(layout, Stateful) or inside.startswith("@"):
            raise BadParameterError("ref: the path has none, or does not lie in a repository")
        return check_key(join_path(container, join_path(_spell_ref(ref), inside)))

    async def _pin(self, dataset: Dataset, path: VirtualKey) -> VirtualKey:
        """Return *path*, in a repository as of the snapshot that its ref names now: all that is
        read for a picture is of that one.
        """
        layout, container, inside = await self._find(dataset, path)
        if not isinstance(layout, Stateful):
            return path
        ref = ""
        if inside.startswith("@"):
            ref, _, inside = inside.partition("/")
        opened = await open_repository(self._resolver.root(dataset), container)
        pinned = join_path(f"@{await opened.find(ref)}", inside)
        return VirtualKey(join_path(container, pinned))

    async def _plan(self, dataset: Dataset, path: VirtualKey, at: Indices) -> Drawing:
        if (volume := draw_volume(*await self._find(dataset, path), at)) is not None:
            return volume
        node = await read_node(self._resolver, dataset, path)
        if node is None or not node.array.axes:
            raise UndrawableError("there is neither an array nor an image")
        return await self._plan_level(dataset, node, at)

    async def _plan_level(self, dataset: Dataset, node: NodeView, at: Indices) -> Drawing:
        """Plan the picture of the coarsest level of *node* that has enough pixels."""
        drawing = None
        fault: Exception = UndrawableError("there is no level")
        for level in reversed(node.levels or ("",)):
            try:
                directory = join_path(node.path, level)
                # Pictures may be of larger documents than pages show.
                found = await read_zarr(self._resolver, dataset, directory, 8 * 1024**2)
                if found is None:
                    raise UndrawableError(f"there is no array {directory}")
                drawing = draw_zarr(found, directory, node, at)
            except (DecodeError, DamagedError, BadKeyError) as error:  # others may be sound
                fault = error
            else:
                if drawing.extent >= ENOUGH:
                    break
        if drawing is None:
            raise fault
        return drawing


def may_pass(error: Exception) -> bool:
    """Return whether the next attempt may succeed, so that the last result is kept until then."""
    if isinstance(error, ShardgateError):
        return status_of(error) in RETRIED
    return isinstance(error, TimeoutError)


def _spell_ref(ref: str) -> str:
    """Return *ref* as in keys. Raises: `BadParameterError`."""
    for _, segment in parse_ref(f"@{ref}") or parse_ref(ref):
        return segment
    raise BadParameterError(f"ref: {ref[:80]} is neither a branch, a tag nor a snapshot")
