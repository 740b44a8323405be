"""Plan pictures of what a path names, and locate the chunks in them."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import parse_qsl

from shardgate.concurrency import bounded_gather
from shardgate.errors import BadKeyError, BadParameterError, DamagedError, ShardgateError
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
_INDEX: Final = re.compile("0|[1-9][0-9]{0,18}", re.ASCII)
READS: Final = 16  # concurrent reads for one picture
_MOST_DOCUMENT_NBYTES: Final = 8 * 1024**2


def read_indices(query: str) -> Indices:
    """Return the parameters ``at.NAME``; an empty one is none. Raises: `BadParameterError`."""
    indices = {}
    for name, value in parse_qsl(query):
        if name.startswith(AT):
            if not _INDEX.fullmatch(value):
                raise BadParameterError(f"{visible(name, 40)}: {visible(value, 40)} is no index")
            indices[name.removeprefix(AT)] = int(value)
    return indices


class PictureName(NamedTuple):
    """Identifies a picture."""

    dataset: str
    path: VirtualKey
    """Of an array, image or volume; empty for the first one, or a ref for the first one in it."""
    at: tuple[tuple[str, int], ...] = ()
    """Chosen positions along other axes than those that it shows, sorted."""

    @property
    def indices(self) -> Indices:
        """*at*, by the names of the axes."""
        return dict(self.at)


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
                drawing = await self._plan(dataset, pinned, name.indices)
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
        located: dict[str, Entity] = {}

        async def locate(name: str) -> None:
            if (entity := await self.locate_chunk(dataset, drawing, name)) is not None:
                located[name] = entity

        await bounded_gather(locate, drawing.chunks, limit=READS)
        return located

    async def locate_chunk(self, dataset: Dataset, drawing: Drawing, name: str) -> Entity | None:
        """Locate the chunk *name* of *drawing*; `None` if it is not stored."""
        key = VirtualKey(join_path(drawing.directory, name))
        async with self._resolver.open(dataset, key, _select_nothing) as opened:
            return None if opened is None else opened.entity

    async def _join_ref(self, dataset: Dataset, path: VirtualKey, ref: str) -> VirtualKey:
        """Return *path* as of *ref*. Raises: `BadParameterError` outside of a repository."""
        key = VirtualKey(join_path(path, "zarr.json"))
        layout, rest, *_ = await self._resolver.find_container(dataset, key)
        if not isinstance(layout, Stateful) or rest.startswith("@"):
            raise BadParameterError("ref: the path has none, or does not lie in a repository")
        joined = join_path(_spell_ref(ref), rest.rpartition("/")[0])
        return check_key(join_path(key.removesuffix(rest).rstrip("/"), joined))

    async def _pin(self, dataset: Dataset, path: VirtualKey) -> VirtualKey:
        """Return *path*, in a repository as of the snapshot that its ref names now: all that is
        read for a picture is of that one.
        """
        key = VirtualKey(join_path(path, "zarr.json"))
        layout, rest, *_ = await self._resolver.find_container(dataset, key)
        if not isinstance(layout, Stateful):
            return path
        container = key.removesuffix(rest).rstrip("/")
        ref, _, below = rest.partition("/") if rest.startswith("@") else ("", "", rest)
        opened = await open_repository(self._resolver.root(dataset), container)
        inside = join_path(f"@{await opened.find(ref)}", below.rpartition("/")[0])
        return VirtualKey(join_path(container, inside))

    async def _plan(self, dataset: Dataset, path: VirtualKey, at: Indices) -> Drawing:
        key = VirtualKey(join_path(path, "zarr.json"))
        layout, rest, *_ = await self._resolver.find_container(dataset, key)
        container = key.removesuffix(rest)
        if (volume := draw_volume(layout, container, rest.rpartition("/")[0], at)) is not None:
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
                found = await read_zarr(self._resolver, dataset, directory, _MOST_DOCUMENT_NBYTES)
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


def _select_nothing(_: Entity) -> Selection:
    return Selection(HTTPStatus.OK)
