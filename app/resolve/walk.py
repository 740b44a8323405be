"""Find the arrays below a root."""

import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from app.errors import DamagedError, StorageUnavailableError
from app.formats.contract import Fetch, Layout
from app.formats.zarr_sharding_indexed.layout import ZarrLayout
from app.model import ObjectRef
from app.resolve.containers import Containers
from app.storage.contract import ObjectReader


@dataclass(frozen=True, slots=True)
class Root:
    """A root, and all that is needed to look around below it."""

    ref: ObjectRef
    store: ObjectReader
    containers: Containers
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Visited:
    """An array at *path* below the root, or metadata there that cannot be understood."""

    path: str
    found: ZarrLayout | DamagedError


async def find_arrays(root: Root) -> AsyncGenerator[Visited]:
    """Visit every array below *root*, parents first and by name.

    Where the store cannot list, a group's consolidated metadata names what is below it.

    Raises: `StorageError`, also where there is neither listing nor consolidated metadata.
    """
    paths = [""]
    while paths:
        path = paths.pop()
        directory = root.ref.join(path)
        try:
            layout = await _open(root, directory)
        except DamagedError as damage:
            yield Visited(path, damage)
            continue
        if isinstance(layout, ZarrLayout) and layout.encloses:
            yield Visited(path, layout)
        else:
            paths += reversed(await _names_below(root.store, directory, path, layout))


async def _open(root: Root, directory: ObjectRef) -> Layout | None:
    for fmt in root.containers.formats:
        if (layout := await fmt.open(directory, root.fetch)) is not None:
            return layout
    return None


async def _names_below(
    store: ObjectReader, directory: ObjectRef, path: str, layout: Layout | None
) -> list[str]:
    prefix = ObjectRef(directory.bucket, f"{directory.key.rstrip('/')}/".lstrip("/"))
    start = f"{path}/" if path else ""
    try:
        return [
            start + listed.ref.key.removeprefix(prefix.key).rstrip("/")
            async for listed in store.list(prefix, delimiter="/")
            if listed.size is None
        ]
    except StorageUnavailableError as error:
        if not error.lasting or not isinstance(layout, ZarrLayout):
            raise
        names = [start + name for name in _consolidated(layout)]
        if not names:
            raise
        return names


def _consolidated(group: ZarrLayout) -> Iterator[str]:
    """Name the arrays in a group's consolidated metadata."""
    document = json.loads(group.node.value.served)
    consolidated = document.get("consolidated_metadata")
    nodes = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    for name, node in sorted((nodes if isinstance(nodes, dict) else {}).items()):
        if isinstance(node, dict) and node.get("node_type") == "array":
            yield name
