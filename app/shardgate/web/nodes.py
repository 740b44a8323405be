"""Nodes as people and viewers see them: groups, images, arrays, and precomputed collections."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, NamedTuple

from shardgate.concurrency import bounded_gather, is_large, run_in_thread
from shardgate.errors import BadKeyError, DamagedError, ShardgateError
from shardgate.formats.documents import Json, parse_json
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.v2 import ARRAY, ATTRIBUTES, GROUP, array_document, group_document
from shardgate.model import ByteRange, ETag, VirtualKey, join_path
from shardgate.read.bodies import Entity, Selection
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.server.conditions import whole_of
from shardgate.server.request import check_key
from shardgate.survey.arrays import NO_ARRAY, ArrayView
from shardgate.survey.images import Channel, OmeImage, read_ome, view_volume
from shardgate.survey.inspect import MAX_COLLECTIONS, summarize

MOST_NBYTES: Final = 2 * 1024**2  # largest document that is shown
_PRECOMPUTED: Final = {
    "neuroglancer_annotations_v1": "annotations",
    "neuroglancer_skeletons": "skeletons",
    "neuroglancer_legacy_mesh": "meshes",
    "neuroglancer_multilod_draco": "meshes",
}


class ServedDocument(NamedTuple):
    """A JSON object as it is served."""

    etag: ETag
    members: dict[str, Json]


@dataclass(frozen=True, slots=True)
class NodeView:
    """A group, array, or precomputed collection."""

    path: str
    """Key of its folder, without a slash at its end."""
    kind: str
    """``group``, ``image`` (a group with OME-Zarr multiscales), ``array``, ``volume``, or the kind
    of another precomputed collection: ``meshes``, ``skeletons``, ``annotations``; ``document`` for
    one that is neither.
    """
    document: dict[str, Json]
    array: ArrayView = NO_ARRAY
    """The array, or the finest level of an image or volume; without a shape where there is none, or
    its metadata are damaged.
    """
    channels: Sequence[Channel] = ()
    levels: Sequence[str] = ()
    """Paths of the arrays of an image, below it, finest first."""
    document_name: str = "zarr.json"

    @property
    def value_unit(self) -> str:
        """Unit of the values of an array, by the attribute ``units`` of CF; empty without one."""
        match self.document:
            case {"attributes": {"units": str(unit)}}:
                return unit
        return ""


async def read_node(resolver: Resolver, dataset: Dataset, path: str) -> NodeView | None:
    """Read the node at *path*; `None` if there is none. Raises: `ShardgateError`."""
    name = "zarr.json"
    found = await read_document(resolver, dataset, join_path(path, name))
    if found is None:
        info = await read_document(resolver, dataset, join_path(path, "info"))
        if info is not None:
            return _precomputed_node(path, info.members)
        name = ARRAY
        found = await _read_zarr2(resolver, dataset, path)
    if found is None:
        return None
    document = found.members
    if document.get("node_type") == "array":
        node = NodeView(path, "array", document, document_name=name)
        return await _read_array(resolver, dataset, node)
    if document.get("node_type") != "group":
        return NodeView(path, "document", document)
    name = GROUP if name == ARRAY else name
    group = NodeView(path, "group", document, document_name=name)
    image = read_ome(document)
    return group if image is None else await _read_image(resolver, dataset, group, image)


async def _read_image(
    resolver: Resolver, dataset: Dataset, group: NodeView, image: OmeImage
) -> NodeView:
    """Return the node of an *image*, whose finest level may be absent; *group* without any, or if
    they differ in the number of dimensions.
    """
    for level in image.levels[:8]:  # a read each, until one exists
        with suppress(BadKeyError, DamagedError, DecodeError):  # the next level may be sound
            finest = join_path(group.path, level)
            found = await read_zarr(resolver, dataset, finest)
            if found is not None:
                array = image.place(ArrayView.of_zarr(found.members), level)
                if array is None:
                    return group
                return replace(
                    group, kind="image", array=array, channels=image.channels, levels=image.levels
                )
    return group


async def _read_array(resolver: Resolver, dataset: Dataset, node: NodeView) -> NodeView:
    """Return *node* with its array, and the axes of the nearest image that it is a level of."""
    with suppress(DecodeError):  # the rest of the page shows the damage
        node = replace(node, array=ArrayView.of_zarr(node.document))
    for parent in islice(_parents(node.path), 3):  # groups that may be the image
        found = None
        with suppress(ShardgateError):  # of the group: the array is sound
            if node.document_name == ARRAY:
                found = await _read_zarr2(resolver, dataset, parent)
            else:
                found = await read_document(resolver, dataset, join_path(parent, "zarr.json"))
        if found is None or (image := read_ome(found.members)) is None:
            continue
        level = node.path.removeprefix(parent).removeprefix("/")
        if (array := image.place(node.array, level)) is not None:
            # A viewer that opens the array alone has all its dimensions in common with others.
            axes = [replace(axis, is_local=False) for axis in array.axes]
            array = replace(array, axes=axes, is_level=True)
            return replace(node, array=array, channels=image.channels)
    return node


def _precomputed_node(path: str, info: dict[str, Json]) -> NodeView | None:
    if (kind := _PRECOMPUTED.get(str(info.get("@type")))) is not None:
        return NodeView(path, kind, info, document_name="info")
    if (volume := view_volume(info)) is None:
        return None
    return NodeView(path, "volume", info, volume, document_name="info")


def _parents(path: str) -> Iterator[str]:
    """Yield the folders above *path*, the nearest first, up to the ref where it names one."""
    while path and not path.rpartition("/")[2].startswith("@"):
        path = path.rpartition("/")[0]
        yield path


async def read_zarr(
    resolver: Resolver, dataset: Dataset, path: str, most_nbytes: int = MOST_NBYTES
) -> ServedDocument | None:
    """Read the document of the Zarr node at *path*, that of v2 in the form of v3; `None` if there
    is none. Raises: see `read_document`.
    """
    key = join_path(path, "zarr.json")
    found = await read_document(resolver, dataset, key, most_nbytes)
    return found or await _read_zarr2(resolver, dataset, path, most_nbytes)


async def _read_zarr2(
    resolver: Resolver, dataset: Dataset, path: str, most_nbytes: int = MOST_NBYTES
) -> ServedDocument | None:
    """Read the Zarr v2 node at *path*; an array of invalid metadata has none of its members."""

    async def read(name: str) -> ServedDocument | None:
        try:
            return await read_document(resolver, dataset, join_path(path, name), most_nbytes)
        except DamagedError:
            if name != ATTRIBUTES:  # these cost no array or group
                raise
            return None

    array, group, named = await bounded_gather(read, (ARRAY, GROUP, ATTRIBUTES))
    attributes = {} if named is None else named.members
    if array is not None:
        members: dict[str, Json] = {"node_type": "array", "attributes": attributes}
        with suppress(DecodeError):  # the rest of the page shows the damage
            members = array_document(array.members, attributes)
        return ServedDocument(array.etag, members)
    if group is not None:
        return ServedDocument(group.etag, group_document(attributes))
    return None


async def read_document(
    resolver: Resolver, dataset: Dataset, key: str, most_nbytes: int = MOST_NBYTES
) -> ServedDocument | None:
    """Read the JSON object at *key*; `None` if there is none. Raises: `BadKeyError`,
    `DamagedError`, also for more than *most_nbytes*.
    """
    if (found := await read_body(resolver, dataset, check_key(key), most_nbytes)) is None:
        return None
    etag, data = found
    try:
        document = await run_in_thread(parse_json, data, is_long=is_large(len(data)))
    except ValueError as error:
        raise DamagedError(dataset.root.join(key), f"is no JSON: {error}") from error
    return ServedDocument(etag, document) if isinstance(document, dict) else None


async def read_body(
    resolver: Resolver, dataset: Dataset, key: VirtualKey, most_nbytes: int
) -> tuple[ETag, bytes] | None:
    """Read *key* without its content coding; `None` if there is no such key. Raises:
    `DamagedError` for more than *most_nbytes*.
    """

    def choose(entity: Entity) -> Selection | None:
        if entity.length > most_nbytes:
            ref = dataset.root.join(key)
            raise DamagedError(ref, f"has {entity.length} bytes, more than {most_nbytes}")
        return None if entity.coding else whole_of(entity.length)

    reading = ByteRange(0, most_nbytes)
    async with resolver.open(dataset, key, choose, reading) as opened:
        if opened is None:
            return None
        etag = opened.entity.etag
        body = opened.body
        if not isinstance(body, bytes):
            body = b"".join([bytes(piece) async for piece in body])
        return etag, body


async def find_images(
    resolver: Resolver, dataset: Dataset, path: str, most: int = MAX_COLLECTIONS
) -> AsyncGenerator[str]:
    """Yield *path*, then images, arrays and containers of volumes of the first *most* below it."""
    yield path
    folder = VirtualKey(f"{path}/" if path else "")
    overview = await summarize(resolver, dataset, folder, most=most)
    known = {path}
    for each in overview.collections:
        found = each.container if each.node is None else each.node
        found = found if each.image is None else each.image
        if each.found.format and found not in known:
            known.add(found)
            yield found
