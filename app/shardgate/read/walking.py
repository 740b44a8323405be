"""Walk the containers below a root, and the collections in them."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from itertools import batched
from typing import Final, NamedTuple

from shardgate.concurrency import bounded_gather, run_in_thread, yield_to_loop
from shardgate.errors import DamagedError, OfflineError, StorageUnusableError
from shardgate.formats.contract import Layout, StoredObjects, WalkedFormat
from shardgate.formats.members import Members, members_of
from shardgate.formats.reading import Opaque, Read
from shardgate.formats.surveying import LEFT_OUT, ChunkCollection, Description, Listing
from shardgate.model import SHARDED, ByteRange, ObjectRef, VirtualKey, join_path
from shardgate.read.containers import LIKE_A_CHUNK
from shardgate.read.listing import Root, list_names
from shardgate.read.member_store import UNREADABLE

_TRIED_AT_ONCE: Final = 64  # arrays of a catalog, in whose places containers may be
_READS: Final = 16


class OpenedContainer(NamedTuple):
    """A container, or the error that prevents opening it."""

    path: str
    found: Layout | Members | Exception
    listing: Listing


class Visited(NamedTuple):
    """A collection, or metadata that cannot be decoded."""

    path: str
    container: str
    found: ChunkCollection | DamagedError


async def find_containers(root: Root) -> AsyncGenerator[OpenedContainer]:
    """Open every container below *root*, parents first, by listing or by the metadata's names.
    Below a damaged one directories of chunks are passed over.
    """
    paths = [("", False)]
    known: set[str] = set()  # paths of arrays of `Containers.walked`
    count = 0
    while paths:
        count += 1
        await yield_to_loop(count)  # metadata of members need no reads
        path, is_doubtful = paths.pop()
        directory = root.ref.join(path)
        found = await _try_open(root, directory)
        if found is not None:
            yield OpenedContainer(path, found, partial(list_names, root, directory))
        if isinstance(found, Members):
            async for each in find_containers(root.within(found)):
                yield each._replace(path=join_path(path, each.path))
            continue
        if found is None and is_doubtful and LIKE_A_CHUNK.search(path):
            continue
        is_doubtful = isinstance(found, Exception) or (is_doubtful and found is None)
        layout = None if isinstance(found, Exception) else found
        if layout is None or not layout.encloses(VirtualKey("")):
            is_needed = not path and not is_doubtful
            names, arrays = await _directories(root, path, layout, is_needed=is_needed)
            every = {join_path(path, name): array for name, array in arrays.items()}
            new = {below: array for below, array in every.items() if below not in known}
            known |= new.keys()
            folders = [join_path(path, name) for name in reversed(names)]
            paths += [(folder, is_doubtful) for folder in folders if folder not in known]
            async for place, other in _try_places(root, [*new]):
                if other is None or isinstance(other, Exception):
                    listing = partial(list_names, root, root.ref.join(place))
                    yield OpenedContainer(place, new[place], listing)
                if other is not None and place != path:  # the container there counts
                    paths.append((place, is_doubtful))


async def _try_places(
    root: Root, paths: Sequence[str]
) -> AsyncGenerator[tuple[str, Members | Layout | Exception | None]]:
    """Look for containers in the places of arrays of a catalog, of which there may be very many."""
    for batch in batched(paths, _TRIED_AT_ONCE):
        places = [root.ref.join(path) for path in batch]
        found = await bounded_gather(partial(_try_open, root), places, limit=_READS)
        for each in zip(batch, found, strict=True):
            yield each


async def _try_open(root: Root, directory: ObjectRef) -> Members | Layout | Exception | None:
    """Open *directory*, or return the error that prevents it. Raises: `StorageError`."""
    containers = root.containers
    try:
        members = await containers.open_archive(directory, root.fetch)
        return members or await containers.open(directory, root.fetch)
    except UNREADABLE as error:
        if members_of(root.ref) is None and not isinstance(error, DamagedError):
            raise  # the store refuses, and not the source of one member
        return error


async def explain_emptiness(root: Root) -> str:
    """Return where containers were looked for, if there is none at *root* or below. Raises:
    `StorageError`, unless the store cannot list.
    """
    try:
        async with aclosing(find_containers(root)) as containers:
            async for _ in containers:
                return ""
    except StorageUnusableError as error:
        return describe_search(root, f"and not in folders below ({error.reason})")
    return describe_search(root)


def describe_search(root: Root, below: str = "and in all folders below") -> str:
    """Return where containers were looked for in a walk that has found none."""
    walked = root.containers.walked
    markers = root.containers.markers + (f", {walked.marker}" if walked else "")
    return f"{root.ref}: no container found: looked there {below} for {markers}"


async def find_collections(root: Root) -> AsyncGenerator[Visited]:
    """Visit every collection of every container below *root*. Raises: `StorageError`."""
    async for opened in find_containers(root):
        for visited in await collections_of(root, opened):
            yield visited


async def collections_of(root: Root, opened: OpenedContainer) -> Sequence[Visited]:
    """Describe the collections of one container."""
    path, layout, listing = opened
    if isinstance(layout, DamagedError):
        return [Visited(path, path, layout)]
    if isinstance(layout, Exception):
        return [_left_out(path, layout)]
    try:
        found = await layout.collections(root.fetch, listing, run_in_thread)
    except DamagedError as damage:
        return [Visited(path, path, damage)]
    except UNREADABLE as error:
        if not isinstance(layout, StoredObjects) or members_of(layout.directory) is None:
            raise  # the store refuses, and not the source of one member
        return [_left_out(path, error)]
    except OfflineError as offline:
        return [Visited(path, path, DamagedError(root.ref.join(path), str(offline)))]
    below = [each.description.path if isinstance(each, ChunkCollection) else "" for each in found]
    return [Visited(join_path(path, b), path, each) for b, each in zip(below, found, strict=True)]


def _left_out(path: str, error: Exception) -> Visited:
    description = Description("", "", LEFT_OUT, why_sharded=str(error))
    return Visited(path, path, ChunkCollection(description, None))


async def _directories(
    root: Root, path: str, layout: Layout | None, *, is_needed: bool
) -> tuple[Sequence[str], Mapping[str, Layout]]:
    """Return the directories right below *path*, or the containers that its metadata name, and the
    arrays of `Containers.walked` at and below it.

    A listing *is_needed* unless something is known already.
    """
    directory = root.ref.join(path).prefix
    containers = root.containers
    markers = {directory.join(name) for name in containers.marker_names}
    walked = containers.walked if layout is None else None
    names: list[str] = []
    arrays: Mapping[str, Layout] = {}
    try:
        with suppress(DamagedError):  # of a set, which tells it with its collections
            async with aclosing(root.list(directory, delimiter="/")) as listing:
                async for listed in listing:
                    name = listed.ref.key.removeprefix(directory.key).rstrip("/")
                    if walked and name == walked.marker:  # very many chunks may follow
                        return (), {"": walked.layout(directory)}
                    if walked and name == walked.catalog:
                        arrays = await _read_catalog(root, walked, directory)
                    is_archive = containers.is_archive(listed.ref.key)
                    if listed.size is None or (is_archive and listed.ref not in markers):
                        names.append(name)
    except StorageUnusableError:
        if walked:
            marker = Read("metadata", directory.join(walked.marker), ByteRange(0, 1), Opaque)
            if await root.fetch(marker) is not None:
                return (), {"": walked.layout(directory)}
            arrays = await _read_catalog(root, walked, directory)
        if arrays or (layout is None and not is_needed):
            return (), arrays
        below = None if layout is None else await run_in_thread(layout.names_below)
        if below is None:
            raise
        names = [*below]
    # No key has such parts, and one that begins with `SHARDED` names another object.
    is_top = not path and members_of(root.ref) is None
    odd = {"", ".", "..", *([SHARDED.rstrip("/")] if is_top else [])}
    sound = [
        name
        for name in names
        if odd.isdisjoint(name.split("/"))
        and (layout is None or not layout.encloses(VirtualKey(f"{name}/")))
    ]
    return sound, arrays


async def _read_catalog(
    root: Root, walked: WalkedFormat, directory: ObjectRef
) -> Mapping[str, Layout]:
    """Return the arrays in a catalog; none if it cannot be read: then each array is found by its
    own metadata.
    """
    with suppress(*UNREADABLE):
        return await walked.read_catalog(directory, root.fetch, run_in_thread)
    return {}
