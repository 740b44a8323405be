"""Part t: chunks in zip archives, compared with the same chunks in a folder of the store."""

import asyncio
import io
import time
import zipfile
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from shardgate.formats.zip.layout import Zip, ZipMembers
from shardgate.model import ObjectRef
from shardgate.read.perform import DirectFetch
from tests.read.stores import WatchedStore

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


def measure(home: Path, root: Path, store: Server, *, rounds: int, seconds: int) -> list[Figure]:
    """Archive the arrays, and compare the rates; then open an archive of many entries."""
    home.mkdir()
    archive = root.parent / "em.zarr.zip"
    _archive(archive, {path: path.read_bytes() for path in _files(root)}, root)
    with _contestants(home, root, store) as contestants:
        samples = run_rounds(home, contestants, rounds=rounds, seconds=seconds)
    archive.unlink()
    goal = Goal("at least", 0.9)
    return [
        *(speed("t", name, each) for name, each in samples.items()),
        ratio("t", "ratio of an entry to an array", samples[_ENTRY], samples[_ARRAY], goal),
        ratio("t", "ratio of a shard to an array", samples[_SHARD], samples[_ARRAY], goal),
        *asyncio.run(_open(_many())),
    ]


def _files(root: Path) -> Iterable[Path]:
    return (
        path for name in ("plain", "morton") for path in (root / name).rglob("*") if path.is_file()
    )


def _archive(path: Path, files: dict[Path, bytes], root: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(str(file.relative_to(root)), data)


@contextmanager
def _contestants(home: Path, root: Path, store: Server) -> Generator[list[Contestant]]:
    bodies = read_bodies(root / "plain")
    more = f'\n[datasets.archive]\nurl = "s3://{BUCKET}/em.zarr.zip"\nstore = "nginx"\n'
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
        layout = await Zip(_MOST_NBYTES, _MOST_NBYTES).open(ref, DirectFetch(store))
        seconds.append(time.process_time() - began)
    assert layout is not None
    assert isinstance(layout.members, ZipMembers)
    directory = layout.members.directory
    names = sum(map(len, directory.names))
    held = (directory.nbytes - names) / _ENTRIES
    return [
        Figure.over("t", "an archive of 100,000 entries opened", "s", seconds, Goal("at most", 1)),
        Figure.over("t", "reads for that", "reads", [len(store.calls)], Goal("at most", 2)),
        Figure.over("t", "an entry held, without its name", "bytes", [held], Goal("at most", 64)),
    ]
