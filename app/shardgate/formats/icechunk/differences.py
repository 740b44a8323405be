"""Differences between two versions of a repository, from the transaction logs in between.

As for the library, nodes that were created and deleted in between are left out, and of all others
each change counts, also what a later commit undid. Moves are those that both versions show.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

from shardgate.formats.icechunk.apply import StoredNodes, by_id
from shardgate.formats.icechunk.coords import Coords, union
from shardgate.formats.icechunk.transaction_log import TransactionLog
from shardgate.formats.reading import DecodeError


class ChangeKind(IntEnum):
    """Kinds of changes, in the order in which those of one path are listed."""

    DELETED = 0
    CREATED = 1
    MOVED = 2
    UPDATED = 3
    """Its metadata were replaced."""
    CHUNKS_UPDATED = 4
    """Chunks were written or deleted."""


class Difference(NamedTuple):
    """Change of a node, or of the chunks of an array."""

    path: str
    """In the later version, or if it has no such node, in the earlier one."""
    kind: ChangeKind
    is_array: bool
    former_path: str | None = None
    """Path of a moved node in the earlier version."""
    chunks: tuple[Coords, ...] = ()
    """Of `CHUNKS_UPDATED`, in batches; the same chunk may come twice."""


def find_differences(
    before: StoredNodes, after: StoredNodes, logs: Iterable[TransactionLog]
) -> list[Difference]:
    """List the differences, in order of paths; *logs* are those of all commits after *before*.

    Raises: `DecodeError` if no log has a node that only one version has: expiry in version 1 of the
    format drops logs.
    """
    then = by_id(before)
    now = by_id(after)
    nodes = then | now
    unexplained = then.keys() ^ now.keys()
    found: set[Difference] = set()
    chunks: dict[str, list[Coords]] = {}
    for log in logs:
        unexplained -= log.new_groups | log.new_arrays | log.deleted_groups | log.deleted_arrays
        by_kind = (
            (ChangeKind.DELETED, log.deleted_groups, log.deleted_arrays),
            (ChangeKind.CREATED, log.new_groups, log.new_arrays),
            (ChangeKind.UPDATED, log.updated_groups, log.updated_arrays),
        )
        for kind, groups, arrays in by_kind:
            for node_id in chain(groups, arrays):
                if (node := nodes.get(node_id)) is not None:
                    found.add(Difference(node.path, kind, node.array is not None))
        for node_id, batches in log.updated_chunks.items():
            if batches and (node := nodes.get(node_id)) is not None:
                chunks.setdefault(node.path, []).extend(batches)
    if unexplained:
        path = min(nodes[node_id].path for node_id in unexplained)
        raise DecodeError(
            f"{path} was created or deleted by a commit whose transaction log is lost"
        )
    for node_id in then.keys() & now.keys():
        source = then[node_id].path
        node = now[node_id]
        if node.path != source:
            is_array = node.array is not None
            found.add(Difference(node.path, ChangeKind.MOVED, is_array, source))
    written = (
        Difference(path, ChangeKind.CHUNKS_UPDATED, is_array=True, chunks=tuple(batches))
        for path, batches in chunks.items()
    )
    return sorted([*found, *written], key=lambda each: (each.path, each.kind, each.is_array))


class DiffPosition(NamedTuple):
    """Place in a list of differences."""

    number: int
    chunks: int = 0
    """Number of chunks of that difference that come before."""


def take_differences(
    differences: Sequence[Difference], start: DiffPosition, limit: int
) -> tuple[list[tuple[Difference, list[list[int]]]], DiffPosition | None]:
    """Return the differences from *start* on with the coordinates of their chunks, and the place of
    the next page; *limit* bounds the differences without chunks and the chunks, in all.
    """
    taken: list[tuple[Difference, list[list[int]]]] = []
    for index in range(start.number, len(differences)):
        each = differences[index]
        if limit == 0:
            return taken, DiffPosition(index)
        if each.kind is not ChangeKind.CHUNKS_UPDATED:
            taken.append((each, []))
            limit -= 1
            continue
        rows: list[list[int]] = []
        before = start.chunks if index == start.number else 0
        skipped = before
        batches = union(*each.chunks)
        for coords in batches:
            rows += coords[skipped : skipped + limit - len(rows)].tolist()
            skipped = max(0, skipped - len(coords))
        taken.append((each, rows))
        if before + len(rows) < sum(map(len, batches)):
            return taken, DiffPosition(index, before + len(rows))
        limit -= len(rows)
    return taken, None
