"""Folders of precomputed data whose shards are planned anew, with no service around."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.formats.contract import NewShard, ShardRewriter, Slot
from app.model import ByteRange, ObjectRef, VirtualKey
from app.resolve.containers import Containers
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.resolving import ROOT, known_formats

type Changes = Mapping[str, bytes | None]


async def rewrite(folder: Path, changes: Changes, *, is_large: bool = False) -> None:
    """Make *changes* by virtual keys; the objects of *folder* are what is stored.

    Shards are taken for small ones, or for large ones, however large they are.
    """
    fetch = DirectFetch(_load(folder))
    containers = Containers(known_formats(decoded_nbytes=2**24))
    waiting: dict[ShardRewriter[Any], dict[tuple[int, ...], bytes | None]] = {}
    for key, body in changes.items():
        slot = await containers.target(ROOT, VirtualKey(key), fetch)
        assert isinstance(slot, Slot)
        found: Any
        found, entry = slot
        shard = replace(found, large_nbytes=0) if is_large else found
        stored = None if body is None else shard.encode(entry, body, is_gzip=False)
        waiting.setdefault(shard, {})[entry] = stored
    for shard, entries in waiting.items():
        opened = await shard.open(entries, fetch)
        _store(folder, shard.ref, shard.plan(opened, entries))


def _load(folder: Path) -> MemoryStore:
    store = MemoryStore()
    for path in folder.rglob("*"):
        if path.suffix in {".shard", ".index", ".data"} or path.name == "info":
            store.place(ROOT.join(str(path.relative_to(folder))), path.read_bytes())
    return store


def _store(folder: Path, ref: ObjectRef, planned: NewShard | None) -> None:
    path = folder / ref.key.removeprefix(f"{ROOT.key}/")
    if planned is None:
        path.unlink(missing_ok=True)
        return
    old = path.read_bytes() if path.exists() else b""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(_bytes(old, planned.pieces)))


def _bytes(old: bytes, pieces: Iterable[Any]) -> Iterable[bytes]:
    return (old[slice(*piece)] if isinstance(piece, ByteRange) else piece for piece in pieces)
