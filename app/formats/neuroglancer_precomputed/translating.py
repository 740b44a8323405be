"""An ``info`` that clients write, turned into the form that is stored: with its sharding."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import BadBodyError, ConflictError
from app.formats.documents import begins_like_json
from app.formats.neuroglancer_precomputed.meanings import meaning_of
from app.formats.neuroglancer_precomputed.metadata import (
    Info,
    is_sharded,
    parse_info,
    parse_sharding,
    path_of,
)
from app.formats.reading import DecodeError, Fetch

type Json = Any


@dataclass(frozen=True, slots=True)
class InfoTranslator:
    """Keeps the sharding of all that is stored in shards, and what its bytes mean."""

    async def translate(self, given: bytes, stored: bytes | None, _: Fetch) -> bytes:
        """Give the document *given*, with the sharding of all that *stored* names as well.

        What it does not name any more is forgotten, and its shards stay where they are. What is
        no ``info`` of this format is stored as it is given.

        Raises: `BadBodyError`, `ConflictError`.
        """
        old = None if stored is None else _parse_stored(stored)
        if old is None and not begins_like_json(given):
            return given
        document, new = _parse(given)
        if old is None or not _keep(old, document, new):
            return given
        translated = json.dumps(document).encode()
        _parse(translated)
        return translated


def _parse_stored(stored: bytes) -> Info | None:
    """Understand what is stored; what nobody understands is kept by nobody."""
    try:
        return parse_info(json.loads(stored), stored)
    except (ValueError, RecursionError):
        return None


def _parse(given: bytes) -> tuple[Json, Info | None]:
    """Understand what is given.

    Raises: `BadBodyError`.
    """
    try:
        document = json.loads(given)
        return document, parse_info(document, given)
    except DecodeError as error:
        raise BadBodyError(f"the info: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadBodyError(f"the info is no JSON: {error}") from None


def _keep(old: Info, document: Json, new: Info | None) -> bool:
    """Put the sharding of members of *old* into those of *document*; tell whether any was.

    Raises: `ConflictError`.
    """
    members = _by_place(new)
    is_any = False
    for name, member in old.members:
        if not is_sharded(member):
            continue
        if member is old.document and not members[name, path_of(member)]:
            raise ConflictError(f"what is stored in shards is {name}, and no other @type")
        if here := members[name, path_of(member)]:
            found = here.pop(0)
            _check(name, (old.document, member), (document, found))
            found["sharding"] = member["sharding"]
            is_any = True
    return is_any


def _by_place(info: Info | None) -> Mapping[tuple[str, str | None], list[Json]]:
    found: defaultdict[tuple[str, str | None], list[Json]] = defaultdict(list)
    for name, member in () if info is None else info.members:
        found[name, path_of(member)].append(member)
    return found


def _check(name: str, old: tuple[Json, Json], new: tuple[Json, Json]) -> None:
    """Return if the bytes in the shards of the member *name* still mean the same.

    Raises: `ConflictError`.
    """
    (_, before), (_, after) = old, new
    called = f"{name} {before.get('key', '')}".strip()
    sharding = after.get("sharding")
    if sharding is not None and not _is_same_sharding(before["sharding"], sharding):
        raise ConflictError(f"{called} is stored in shards, and its sharding cannot change")
    meaning, expected = meaning_of(name, *new), meaning_of(name, *old)
    changed = [aspect for aspect, value in expected.items() if meaning[aspect] != value]
    if changed:
        raise ConflictError(f"{called} is stored in shards, and {changed[0]} cannot change")


def _is_same_sharding(old: Json, new: Json) -> bool:
    try:
        return old["@type"] == new["@type"] and parse_sharding(old) == parse_sharding(new)
    except (DecodeError, AttributeError, KeyError, TypeError):
        return False
