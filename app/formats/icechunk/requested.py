"""The changes that one request asks for, which may be of a million chunks: read without a model.

What is told of many chunks is read as columns, each checked as a whole; single items are only
looked at to tell which is wrong.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import orjson

from app.errors import BadBodyError
from app.formats.icechunk.payload_columns import read_coords, read_payloads
from app.formats.icechunk.payloads import Payloads
from app.formats.icechunk.updated_chunks import Coords


class PutNode(NamedTuple):
    """A node that is to be there, with these metadata."""

    path: str
    document: bytes
    """Its ``zarr.json``."""
    is_array: bool


class DeleteNode(NamedTuple):
    """A node that is to be gone, and all below it."""

    path: str


class SetChunks(NamedTuple):
    """Chunks of an array that are to refer to something else, or to nothing."""

    path: str
    coords: Coords
    payloads: Payloads


type Edit = PutNode | DeleteNode | SetChunks
"""One change; each is made to what the ones before have left."""

_COLUMNS: Final = {
    "chunk_id": "chunk_ids",
    "offset": "offsets",
    "length": "lengths",
    "inline": "inlines",
    "location": "locations",
    "etag": "etags",
    "last_modified": "last_modified",
}
"""What the members of one chunk are called, and the columns of many."""
_KINDS: Final = ("chunk_id", "inline", "location")


def read_edits(items: object) -> list[Edit]:
    """Read the list ``changes`` of a request, decoded from JSON.

    Raises: `BadBodyError`, which tells where something is wrong.
    """
    edits: list[Edit] = []
    for number, item in enumerate(_demand(items, list, "changes is a list of objects")):
        where = f"changes[{number}]"
        members = dict(_demand(item, dict, f"{where} is an object"))
        op = members.pop("op", None)
        if (read := _OPS.get(op) if isinstance(op, str) else None) is None:
            raise BadBodyError(f"{where}.op is one of {', '.join(_OPS)}")
        edits.append(read(where, members))
    return edits


def _read_put_node(where: str, members: dict[str, Any]) -> PutNode:
    path, document = _take(where, members, "path", "metadata")
    node_type = _demand(document, dict, f"{where}.metadata is an object").get("node_type")
    if node_type not in ("array", "group"):
        raise BadBodyError(f"{where}.metadata.node_type is array or group")
    try:
        spelled = orjson.dumps(document)
    except orjson.JSONEncodeError:
        raise BadBodyError(f"{where}.metadata nests too deep") from None
    return PutNode(_path(where, path), spelled, node_type == "array")


def _read_delete_node(where: str, members: dict[str, Any]) -> DeleteNode:
    (path,) = _take(where, members, "path")
    return DeleteNode(_path(where, path))


def _read_put_chunks(where: str, members: dict[str, Any]) -> SetChunks:
    """Read chunks that are told one by one in ``chunks``, or as columns."""
    path = _path(where, members.pop("path", None))
    if "chunks" not in members:
        coords = read_coords(where, members.pop("coords", None))
        return SetChunks(path, coords, read_payloads(where, members, len(coords)))
    (chunks,) = _take(where, members, "chunks")
    where = f"{where}.chunks"
    entries = _demand(chunks, list, f"{where} is a list of objects")
    shapes = _shapes(where, entries)
    by_kind = {kind: [entry for entry in entries if kind in entry] for kind in _KINDS}
    coords = read_coords(where, [entry["coords"] for some in by_kind.values() for entry in some])
    payloads: list[Payloads] = []
    for kind, some in by_kind.items():
        names = {name for shape in shapes if kind in shape for name in shape if name in _COLUMNS}
        columns = {_COLUMNS[name]: [entry.get(name) for entry in some] for name in names}
        if some:
            payloads.append(read_payloads(where, columns, len(some)))
    return SetChunks(path, coords, Payloads.joined(payloads))


def _read_delete_chunks(where: str, members: dict[str, Any]) -> SetChunks:
    path, coords = _take(where, members, "path", "coords")
    found = read_coords(where, coords)
    return SetChunks(_path(where, path), found, Payloads.gone(len(found)))


def _shapes(where: str, entries: list[Any]) -> set[tuple[str, ...]]:
    """Give the members that chunks have which are told one by one, each set of them once."""
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise BadBodyError(f"{where}[{number}] is an object")
    shapes = set(map(tuple, entries))
    for shape in shapes:
        what = None
        if not {"coords"} <= set(shape) <= {"coords", *_COLUMNS}:
            what = f"is an object of coords, {', '.join(_COLUMNS)}"
        elif sum(kind in shape for kind in _KINDS) != 1:
            what = f"has one of {', '.join(_KINDS)}"
        if what is not None:
            number = next(i for i, entry in enumerate(entries) if tuple(entry) == shape)
            raise BadBodyError(f"{where}[{number}] {what}")
    return shapes


_OPS: Final[Mapping[str, Callable[[str, dict[str, Any]], Edit]]] = {
    "put_node": _read_put_node,
    "delete_node": _read_delete_node,
    "put_chunks": _read_put_chunks,
    "delete_chunks": _read_delete_chunks,
}


def _take(where: str, members: dict[str, Any], *names: str) -> list[Any]:
    """Give the members *names*, which are all that there are."""
    if members.keys() != set(names):
        raise BadBodyError(f"{where} has op, {', '.join(names)}, and nothing else")
    return [members[name] for name in names]


def _demand[T](value: object, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise BadBodyError(what)
    return value


def _path(where: str, path: object) -> str:
    """Give the *path* of a node, in its only spelling."""
    if isinstance(path, str) and (path == "/" or _is_path(path)):
        return path
    raise BadBodyError(f"{where}: {str(path)[:80]!r} is no path of a node, such as /a/b")


def _is_path(path: str) -> bool:
    head, *segments = path.split("/")
    return not head and {"", ".", ".."}.isdisjoint(segments) and "\0" not in path
