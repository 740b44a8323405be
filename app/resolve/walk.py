"""Find the collections below a root."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from app.errors import DamagedError, OfflineError, StorageUnavailableError
from app.formats.contract import Layout
from app.formats.reading import Fetch
from app.formats.surveying import Collection, Listing
from app.model import ObjectRef, VirtualKey
from app.resolve.containers import Containers
from app.storage.contract import ObjectReader


@dataclass(frozen=True, slots=True)
class Root:
    """A root, and all that is needed to look around below it."""

    ref: ObjectRef
    store: ObjectReader
    containers: Containers
    fetch: Fetch

    def key_of(self, ref: ObjectRef) -> str:
        """Spell the key of the object *ref* below the root."""
        return ref.key.removeprefix(self.ref.prefix.key)


@dataclass(frozen=True, slots=True)
class Visited:
    """A collection, or metadata that cannot be understood."""

    path: str
    """Below the root."""
    container: str
    """The path of the container it is in."""
    found: Collection | DamagedError


class Opened(NamedTuple):
    """A container, or what cannot be opened."""

    path: str
    """Below the root."""
    found: Layout | DamagedError


async def find_containers(root: Root) -> AsyncGenerator[Opened]:
    """Open every container below *root*, parents first and by name.

    Where the store cannot list, the metadata of a container names what is below it; what of that
    is no container is passed over.

    Raises: `StorageError`, also where there is neither listing nor such metadata.
    """
    paths = [""]
    while paths:
        path = paths.pop()
        try:
            layout = await root.containers.open(root.ref.join(path), root.fetch)
        except DamagedError as damage:
            yield Opened(path, damage)
            continue
        if layout is not None:
            yield Opened(path, layout)
        if layout is None or not layout.encloses(VirtualKey("")):
            paths += reversed([_join(path, name) for name in await _below(root, path, layout)])


async def find_collections(root: Root) -> AsyncGenerator[Visited]:
    """Visit every collection of every container below *root*.

    Raises: `StorageError`.
    """
    async for opened in find_containers(root):
        for visited in await collections_of(root, opened):
            yield visited


async def collections_of(root: Root, opened: Opened) -> Sequence[Visited]:
    """Describe what is in a container itself."""
    path, layout = opened.path, opened.found
    if isinstance(layout, DamagedError):
        return [Visited(path, path, layout)]
    try:
        found = await layout.collections(root.fetch, listing_of(root, path))
    except DamagedError as damage:
        return [Visited(path, path, damage)]
    except OfflineError as offline:
        return [Visited(path, path, DamagedError(root.ref.join(path), str(offline)))]
    return [_visit(path, each) for each in found]


def listing_of(root: Root, path: str) -> Listing:
    """Give the names of what is stored in the container at *path*."""
    return partial(list_names, root.store, root.ref.join(path))


async def list_names(store: ObjectReader, container: ObjectRef, prefix: str) -> AsyncGenerator[str]:
    """Name the objects below *prefix* in *container*, relative to that; see `Listing`."""
    start = container.prefix
    async for listed in store.list(ObjectRef(start.bucket, start.key + prefix)):
        yield listed.ref.key.removeprefix(start.key)


def _visit(container: str, found: Collection | DamagedError) -> Visited:
    below = found.description.path if isinstance(found, Collection) else ""
    return Visited(_join(container, below), container, found)


async def _below(root: Root, path: str, layout: Layout | None) -> Sequence[str]:
    """Name the directories right below *path* that can hold containers of their own."""
    names = [name for name in await _directories(root, path, layout) if _is_canonical(name)]
    return [n for n in names if layout is None or not layout.encloses(VirtualKey(f"{n}/"))]


async def _directories(root: Root, path: str, layout: Layout | None) -> Sequence[str]:
    """Name the directories right below *path*, or the containers that its metadata tells of."""
    directory = root.ref.join(path).prefix
    try:
        return [
            listed.ref.key.removeprefix(directory.key).rstrip("/")
            async for listed in root.store.list(directory, delimiter="/")
            if listed.size is None
        ]
    except StorageUnavailableError as error:
        if error.lasting and layout is None and path:
            return ()
        if not error.lasting or layout is None or (names := layout.names_below()) is None:
            raise
        return names


def _is_canonical(name: str) -> bool:
    """Tell whether *name* leads down: keys with other parts are served to nobody."""
    return {"", ".", ".."}.isdisjoint(name.split("/"))


def _join(path: str, name: str) -> str:
    return f"{path}/{name}".strip("/")
