"""Part t: chunks of zip archives and of reference sets, compared with those of an array."""

import asyncio
import io
import json
import time
import zipfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from shardgate.formats.zip.layout import Zip, ZipMembers
from shardgate.model import ObjectRef
from shardgate.read.metadata_cache import uncached_reads
from tests.support.read.stores import WatchedStore

from .data import INNER_BYTES, chunk_key, read_offsets
from .figures import Figure, Goal
from .load import Contestant, Request, check, run_rounds
from .servers import BUCKET, DATASET, Server, shardgate
from .throughput import ratio, read_bodies, speed

_ENTRIES: Final = 100_000
_ROUNDS: Final = 5
_MOST_NBYTES: Final = 64 * 1024**2
_ARRAY: Final = "shardgate, chunk of an array"
_ENTRY: Final = "shardgate, chunk that is an entry of an archive"
_SHARD: Final = "shardgate, chunk of a shard in an archive"
_REFERENCE: Final = "shardgate, chunk of a reference set"
_CONFIG: Final = """
[datasets.archive]
url = "s3://{bucket}/em.zarr.zip"
store = "nginx"

[datasets.references]
url = "s3://{bucket}/references.json"
store = "nginx"
format = "kerchunk"
virtual_chunk_prefixes = ["s3://{bucket}/em.zarr/"]
"""


def measure(home: Path, root: Path, store: Server, *, rounds: int, seconds: int) -> list[Figure]:
    """Archive the arrays, and compare the rates; then open an archive of many entries."""
    home.mkdir()
    archive, references = root.parent / "em.zarr.zip", root.parent / "references.json"
    _archive(archive, root)
    references.write_text(json.dumps(_refer(root)))
    with _contestants(home, root, store) as contestants:
        samples = run_rounds(home, contestants, rounds=rounds, seconds=seconds)
    archive.unlink()
    references.unlink()
    goal = Goal("at least", 0.9)
    return [
        *(speed("t", name, each) for name, each in samples.items()),
        ratio("t", "ratio of an entry to an array", samples[_ENTRY], samples[_ARRAY], goal),
        ratio("t", "ratio of a shard to an array", samples[_SHARD], samples[_ARRAY], goal),
        ratio("t", "ratio of a reference to an array", samples[_REFERENCE], samples[_ARRAY], goal),
        *asyncio.run(_open(_many())),
    ]


def _archive(path: Path, root: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("plain", "morton"):
            for file in (root / name).rglob("*"):
                archive.write(file, file.relative_to(root))


def _refer(root: Path) -> dict[str, object]:
    """Return references to the inner chunks of an array, by the keys of an unsharded one."""
    refs: dict[str, object] = {"zarr.json": (root / "plain" / "zarr.json").read_text()}
    for coords, (shard, offset) in read_offsets(root / "morton").items():
        url = f"s3://{BUCKET}/em.zarr/morton/{shard}"
        refs[chunk_key(coords)] = [url, offset, INNER_BYTES]
    return {"version": 1, "refs": refs}


@contextmanager
def _contestants(home: Path, root: Path, store: Server) -> Generator[list[Contestant]]:
    bodies = read_bodies(root / "plain")
    more = _CONFIG.format(bucket=BUCKET)
    with ExitStack() as running:
        server = running.enter_context(shardgate(home / "ours", store, more=more))
        contestants = [
            Contestant(
                name, "t", server, 200, [Request(f"{path}/{k}", {}, b) for k, b in bodies.items()]
            )
            for name, path in (
                (_ARRAY, f"/{DATASET}/morton"),
                (_ENTRY, "/archive/plain"),
                (_SHARD, "/archive/morton"),
                (_REFERENCE, "/references"),
            )
        ]
        for contestant in contestants:
            check(contestant)
        yield contestants


def _many() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for number in range(_ENTRIES):
            archive.writestr(f"array/c/{number // 316}/{number % 316}", b"chunk")
    return data.getvalue()


async def _open(data: bytes) -> list[Figure]:
    """Open an archive several times, each time anew."""
    ref, store = ObjectRef("memory://bucket", "many.zip"), WatchedStore()
    store.place(ref, data)
    seconds = []
    for _ in range(_ROUNDS):
        store.calls.clear()
        began = time.process_time()
        layout = await Zip(_MOST_NBYTES, _MOST_NBYTES).open(ref, uncached_reads(store))
        seconds.append(time.process_time() - began)
    assert layout is not None
    assert isinstance(layout, ZipMembers)
    opened = len(store.calls)
    directory = await layout.open_table(uncached_reads(store))
    names = sum(len(name) for name, _ in directory.names.below("", "", ""))
    held = (directory.nbytes - names) / _ENTRIES
    return [
        Figure.over("t", "an archive of 100,000 entries opened", "s", seconds, Goal("at most", 1)),
        Figure.over("t", "reads for that", "reads", [opened], Goal("at most", 2)),
        Figure.over("t", "an entry held, without its name", "bytes", [held], Goal("at most", 64)),
    ]
