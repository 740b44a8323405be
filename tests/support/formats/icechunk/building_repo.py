"""Icechunk's file `repo` and transaction logs, built from the specification."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.support.formats.icechunk.building import (
    REPO_INFO,
    Number,
    Numbers,
    Struct,
    Structs,
    envelope,
    payload,
)

NOON = 1_700_000_000_000_000
U8, U16, U32, I32, U64 = (partial(Number, kind) for kind in "BHIiQ")
U16s, U32s = partial(Numbers, "H"), partial(Numbers, "I")

type Fields = dict[int, Any]
"""Fields of a table by slot."""


def ref(name: str, index: int) -> Fields:
    """Return a branch or a tag."""
    return {0: name, 1: U32(index)}


def item(name: str, value: bytes) -> Fields:
    """Return a metadata item."""
    return {0: name, 1: value}


def snapshot(
    snapshot_id: bytes, parent: int | None = -1, message: str = "", more: Fields | None = None
) -> Fields:
    """Return a snapshot in `repo`; with *parent* `None` the field is absent."""
    place = None if parent is None else I32(parent)
    return {0: Struct(snapshot_id), 1: place, 2: U64(NOON), 3: message, **(more or {})}


def update(kind: int, body: Fields, backup: str | None = None, at: int = NOON) -> Fields:
    """Return an operation."""
    return {0: U8(kind), 1: body, 2: U64(at), 3: backup}


FIRST = b"first snapsh"


@dataclass(frozen=True)
class Repo:
    """The file `repo`; *more* adds fields, or removes those that are `None`."""

    branches: Sequence[Fields] = (ref("main", 0),)
    tags: Sequence[Fields] = ()
    deleted_tags: Sequence[str] = ()
    snapshots: Sequence[Fields] = (snapshot(FIRST),)
    status: Fields = field(default_factory=lambda: {0: U8(0), 1: U64(NOON)})
    updates: Sequence[Fields] = (update(1, {}),)
    more: Fields = field(default_factory=dict)
    version: int = 2

    def payload(self) -> bytes:
        """Encode the FlatBuffer."""
        fields: Fields = {
            0: U8(2),
            1: self.tags,
            2: self.branches,
            3: self.deleted_tags,
            4: self.snapshots,
            5: self.status,
            7: self.updates,
        }
        return payload(fields | self.more)

    def file(self) -> bytes:
        """Encode the file."""
        return envelope(self.payload(), REPO_INFO, version=self.version)


def transaction_log(more: Fields) -> bytes:
    """Encode the payload of a transaction log with only the fields *more*."""
    fields: Fields = {0: Struct(FIRST), 7: []}
    fields |= {slot: Structs([], 8) for slot in range(1, 7)}
    return payload(fields | more)


def changed_chunks(node_id: bytes, chunks: Sequence[Sequence[int]]) -> Fields:
    """Return the changed chunks of an array."""
    return {0: Struct(node_id), 1: [{0: U32s(coords)} for coords in chunks]}
