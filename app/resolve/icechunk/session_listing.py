"""The keys of a session in the order of their bytes."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from app.concurrency import bounded_gather
from app.formats.icechunk.array import Grid
from app.formats.icechunk.coords import Coords
from app.formats.icechunk.keys import DOCUMENT
from app.formats.icechunk.manifest import Inlined, Native, Virtual
from app.formats.icechunk.session import SessionView, ViewedNode, version_of
from app.formats.listing import Window
from app.model import ETag
from app.resolve.icechunk.journal import ListedEntry
from app.resolve.icechunk.session import Session, is_journaled
from app.resolve.icechunk.session_chunks import entity_of

_BATCH: Final = 256
_MOST_INDEX: Final = 2**62


class ListedKey(NamedTuple):
    """A key, or the beginning of several that were folded."""

    key: str
    nbytes: int | None
    """`None` where keys were folded."""
    etag: ETag | None = None


class _Block(NamedTuple):
    """Keys of a node that follow one another."""

    start: str
    node: ViewedNode
    is_document: bool


@dataclass(frozen=True, slots=True)
class ListedChunks:
    """The chunks that an array has, and what the journal tells of them."""

    rows: Coords
    journaled: dict[tuple[int, ...], ListedEntry]


async def list_keys(
    session: Session, view: SessionView, window: Window
) -> AsyncGenerator[ListedKey]:
    """Give the wanted keys of *view*, and of the journal as it is now."""
    folded = None
    for block in await asyncio.to_thread(_blocks, view, window):
        if (start := window.fold(block.start)) is None:
            async for listed in _list_block(session, view, block, window):
                if listed.nbytes is not None or listed.key != folded:
                    yield listed
                folded = listed.key if listed.nbytes is None else folded
        elif start != folded and window.opens(start) and await _is_any(session, view, block, start):
            folded = start
            yield ListedKey(start, None)


async def list_chunks(session: Session, view: SessionView, node: ViewedNode) -> ListedChunks:
    """List the chunks of an array, by their coords in C order."""
    journaled = {}
    if is_journaled(view.session):
        journal = session.journal.listed(session.place, node.node_id)
        journaled = {each.coords: each async for each in journal}
    stored = []
    for object_id, _ in node.manifests:
        manifest = await session.repository.manifest(object_id, session.fetch)
        shape = () if node.grid is None else node.grid.shape
        stored.append(manifest.coords(node.node_id, len(shape)))
    rows = await asyncio.to_thread(_overlay, node, stored, journaled)
    return ListedChunks(rows, journaled)


def _blocks(view: SessionView, window: Window) -> list[_Block]:
    found = []
    for path in view.paths():
        if (node := view.node(path)) is None:
            continue
        found.append(_Block(node.folder + DOCUMENT, node, is_document=True))
        if node.grid is not None:
            found.append(_Block(node.folder + node.grid.keys.beginning(), node, is_document=False))
    wanted = (block for block in found if window.meets(block.start))
    return sorted(wanted, key=attrgetter("start"))


async def _is_any(session: Session, view: SessionView, block: _Block, folded: str) -> bool:
    """Tell whether there is a key in *block*, all of which begin with *folded*."""
    if block.is_document or (block.node.folder + DOCUMENT).startswith(folded):
        return True
    return len((await list_chunks(session, view, block.node)).rows) > 0


async def _list_block(
    session: Session, view: SessionView, block: _Block, window: Window
) -> AsyncGenerator[ListedKey]:
    node = block.node
    if block.is_document or node.grid is None:
        if window.admits(block.start):
            yield ListedKey(block.start, len(node.document), node.etag)
        return
    chunks, keys = await list_chunks(session, view, node), node.grid.keys
    shape = node.grid.shape
    grid = Grid(chunks.rows, (1,) * len(shape), shape, lambda at: node.folder + keys.beginning(at))
    walk = grid.walk(window)

    async def look(coords: tuple[int, ...]) -> ListedKey | None:
        key = grid.spell(coords)
        if (folded := window.fold(key)) is not None:
            return ListedKey(folded, None) if window.opens(folded) else None
        return await _look(session, node, coords, key, chunks) if window.admits(key) else None

    while batch := await asyncio.to_thread(_take, walk):
        for listed in await bounded_gather(look, batch):
            if listed is not None:
                yield listed


async def _look(
    session: Session, node: ViewedNode, coords: tuple[int, ...], key: str, chunks: ListedChunks
) -> ListedKey | None:
    """Tell the size of a chunk, and its version if that takes no look at the object itself."""
    if (listed := chunks.journaled.get(coords)) is not None:
        place, journal = session.place, session.journal
        kept = await journal.get(place, node.node_id, coords, listed.etag)
        entity = None if kept is None else entity_of(session, kept.entry)
        return None if entity is None else ListedKey(key, entity.length, entity.etag)
    if node.chunks is None:
        return None
    found = await session.repository.lookup(node.node_id, node.chunks, coords, session.fetch)
    if found is None:
        return None
    manifest, reference = found
    match reference:
        case Inlined(byte_range):
            data = manifest.read(byte_range)
            return ListedKey(key, len(data), version_of(data))
        case Native(_, byte_range):
            entity = entity_of(session, reference)
            return ListedKey(key, byte_range.length, entity and entity.etag)
        case Virtual(_, byte_range, _):
            return ListedKey(key, byte_range.length)


def _overlay(
    node: ViewedNode, stored: list[Coords], journaled: dict[tuple[int, ...], ListedEntry]
) -> Coords:
    """Put the chunks that the journal has over those that are *stored* in the parent."""
    shape = () if node.grid is None else node.grid.shape
    ndim = len(shape)
    changed = _rows(list(journaled), ndim)
    present = _rows([coords for coords, each in journaled.items() if not each.is_gone], ndim)
    old = np.concatenate([_rows([], ndim), *stored])
    if len(old) and len(changed):
        old = old[~_are_among(old, changed)]
    rows = np.concatenate([old, present])
    rows = rows[(rows < np.array(shape, np.uint64)).all(axis=1)]
    return np.unique(rows, axis=0) if ndim else rows[:1]


def _rows(coords: list[tuple[int, ...]], ndim: int) -> Coords:
    fitting = [each for each in coords if len(each) == ndim]
    return np.array(fitting, np.uint32).reshape(len(fitting), ndim)


def _are_among(rows: Coords, others: Coords) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Tell which of *rows* are in *others*."""
    both = np.concatenate([rows, others])
    if not both.shape[1]:
        return np.ones(len(rows), np.bool_)
    _, index = np.unique(both, axis=0, return_inverse=True)
    index = index.reshape(-1)
    return np.isin(index[: len(rows)], index[len(rows) :])


def _take(walk: Iterator[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return list(islice(walk, _BATCH))
