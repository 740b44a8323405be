"""Decompression bombs in bodies, sessions and repository files are refused within bounded memory.

Stored gzip chunks are tested beside their formats.
"""

import gzip
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import brotli
import httpx
import pytest
import zstandard
from pydantic import ByteSize

from shardgate.formats.icechunk.manifest import ManifestDecoder
from shardgate.formats.icechunk.repo_info import REPO, RepoInfoDecoder
from shardgate.formats.icechunk.snapshot import (
    SnapshotDecoder,
    SnapshotHeaderDecoder,
    StoredSnapshotDecoder,
)
from shardgate.formats.icechunk.transaction_log import TransactionLogDecoder
from shardgate.formats.reading import DecodeError
from shardgate.icechunk.sessions.document import decode_session
from shardgate.settings import DatasetSettings, LimitSettings, Settings
from tests.support.files import write_files
from tests.support.formats.icechunk.building import (
    MANIFEST,
    REPO_INFO,
    SNAPSHOT,
    TRANSACTION_LOG,
    Struct,
    Structs,
    header,
    payload,
)
from tests.support.formats.icechunk.building_repo import (
    FIRST,
    U8,
    U64,
    Repo,
    U32s,
    snapshot,
    transaction_log,
)
from tests.support.formats.neuroglancer_precomputed.case import GZIP_DATA, build
from tests.support.serving import client_of

ALLOWED: Final = ByteSize(2**20)
HELD: Final = bytes(16 * 2**20)
MOST_BYTES: Final = 8 * 2**20
CHUNK: Final = "s0/-1-2_5-8_0-1"
soak = pytest.mark.soak


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store a volume with gzip-compressed chunks and an empty folder for a repository."""
    folder = tmp_path_factory.mktemp("bombs")
    (folder / "repo").mkdir()
    write_files(build({CHUNK: b"123456789"}, sharding=GZIP_DATA), folder / "volume")
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Generator[httpx.Client]:
    """Serve the volume and the repository."""
    datasets = {
        name: DatasetSettings(url=(folder / name).as_uri(), writable=True)
        for name in ("volume", "repo")
    }
    limits = LimitSettings(decoded_bytes=ALLOWED, repository_file_bytes=ALLOWED)
    with client_of(Settings(datasets=datasets, limits=limits)) as opened:
        opened.headers["accept-encoding"] = "identity"
        yield opened


@contextmanager
def little(most_nbytes: int) -> Generator[None]:
    """Assert that the block allocates less than *most_nbytes* at its peak."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most_nbytes


@cache
def zipped() -> bytes:
    """Compress 16 MiB of zeros with gzip."""
    return gzip.compress(HELD, 9, mtime=0)


BOMBS: Final[dict[str, tuple[str, Callable[[], bytes]]]] = {
    "gzip": ("gzip", zipped),
    "many members": ("gzip", lambda: zipped() * 64),
    "gzip in gzip": ("gzip", lambda: gzip.compress(zipped(), mtime=0) * 2_000),
    "deflate": ("deflate", lambda: zlib.compress(HELD, 9)),
    "br": ("br", lambda: brotli.compress(HELD, quality=5)),
    "zstd": ("zstd", lambda: zstandard.compress(HELD)),
    "zstd without its size": (
        "zstd",
        lambda: zstandard.ZstdCompressor(write_content_size=False).compress(HELD),
    ),
}
"""Content coding and builder of each bomb."""


@pytest.mark.parametrize(
    ("key", "name"),
    [
        pytest.param(key, name, marks=() if key == CHUNK or name == "gzip" else soak)
        for key in (CHUNK, "info", "other")
        for name in BOMBS
    ],
)
def test_decompression_bomb_in_a_body_is_refused(client: httpx.Client, key: str, name: str) -> None:
    """A PUT whose body decompresses beyond the limit gets 400, 413 or 415 in bounded memory."""
    coding, make = BOMBS[name]
    body = make()
    before = client.get(f"/volume/{key}")
    with little(MOST_BYTES):
        written = client.put(f"/volume/{key}", content=body, headers={"content-encoding": coding})
    after = client.get(f"/volume/{key}")

    assert written.status_code in (400, 413, 415)
    assert (before.status_code, before.content) == (after.status_code, after.content)


@pytest.mark.parametrize("name", ["zstd", "zstd without its size"])
def test_decompression_bomb_in_a_session_file_is_damage(
    client: httpx.Client, folder: Path, name: str
) -> None:
    """A session whose file decompresses beyond the limit fails with a 424 that names the file."""
    client.post("/api/datasets", json={"name": "repo"})
    session_id = client.post("/api/datasets/repo/sessions").json()["session_id"]
    (folder / "repo" / "sessions" / f"{session_id}.session").write_bytes(BOMBS[name][1]())
    with little(MOST_BYTES):
        answer = client.get(f"/repo/@session.{session_id}/zarr.json")

    assert answer.status_code == 424
    assert f"{session_id}.session" in answer.json()["detail"]


LIMIT: Final = 2**20
MANY: Final = 200_000
"""So many offsets to a single table fill a file of LIMIT bytes."""
DECODERS: Final[dict[str, tuple[int, Callable[[bytes], object]]]] = {
    "repo": (REPO_INFO, lambda data: RepoInfoDecoder(LIMIT)(data).reader().root(REPO)),
    "snapshots": (REPO_INFO, lambda data: RepoInfoDecoder(LIMIT)(data).snapshots()),
    "snapshot": (SNAPSHOT, SnapshotDecoder(FIRST, LIMIT)),
    "stored": (SNAPSHOT, StoredSnapshotDecoder(FIRST, LIMIT)),
    "header": (SNAPSHOT, SnapshotHeaderDecoder(FIRST, LIMIT)),
    "manifest": (MANIFEST, ManifestDecoder(FIRST, LIMIT)),
    "log": (TRANSACTION_LOG, TransactionLogDecoder(FIRST, LIMIT)),
    "session": (0, lambda data: decode_session(data, LIMIT)),
}


def frame(window_log: int, blocks: int, declared: int | None = None) -> bytes:
    """Build a zstd frame whose blocks repeat a zero 2^17 times each."""
    sized = 0 if declared is None else 0xC0
    head = struct.pack("<IBB", 0xFD2FB528, sized, (window_log - 10) << 3)
    size = b"" if declared is None else struct.pack("<Q", declared)
    last = [0] * (blocks - 1) + [1]
    return head + size + b"".join((2**20 + 2 + end).to_bytes(3, "little") + b"\0" for end in last)


def snapshot_of(more: dict[int, Any]) -> bytes:
    """Build a snapshot that has nothing but *more*."""
    return payload({0: Struct(FIRST), 2: [], 3: U64(1), 4: "", 5: [], **more})


ITEMS: Final = {0: "name", 1: b"\0\4\1"}
NODE: Final = {0: Struct(bytes(8)), 1: "/", 2: b"{}", 3: U8(2)}
CROWDS: Final[dict[str, Callable[[], bytes]]] = {
    "repo": lambda: Repo(more={6: [ITEMS] * MANY}).payload(),
    "snapshots": lambda: Repo(snapshots=[snapshot(FIRST)] * MANY).payload(),
    "snapshot": lambda: snapshot_of({2: [NODE] * MANY}),
    "stored": lambda: snapshot_of({7: [{0: Struct(FIRST)}] * MANY}),
    "header": lambda: snapshot_of({5: [ITEMS] * MANY}),
    "manifest": lambda: payload(
        {0: Struct(FIRST), 1: [{0: Struct(bytes(8)), 1: [{0: U32s([7]), 4: Struct(FIRST)}] * MANY}]}
    ),
    "log": lambda: transaction_log(
        more={1: Structs([number.to_bytes(8) for number in range(100_000)], 8)}
    ),
    "session": lambda: b"[" + b"[]," * (MANY - 1) + b"[]]",
}
FRAMES: Final[dict[str, tuple[bytes, str]]] = {
    "window": (frame(31, 2**12), "damaged zstd"),
    "largest window": (frame(27, 2**12), "damaged zstd"),
    "lie": (frame(20, 1, declared=2**40), "more than"),
    "smaller lie": (frame(20, 1, declared=LIMIT), "more than"),
    "chain": (frame(20, 1) * 2**12, "more than"),
    "empty chain": (zstandard.compress(b"") * 2**17, "more frames"),
    "skipped": (struct.pack("<II", 0x184D2A50, 0) * 10**5, "more frames"),
    "blocks": (struct.pack("<IBQ", 0xFD2FB528, 0xE0, 0) + bytes(3 * 10**5), "more blocks"),
}
"""Each frame, and the expected error message."""


def stored(name: str, body: bytes) -> bytes:
    """Prepend the header of the file kind that the decoder *name* reads, if it has one."""
    kind = DECODERS[name][0]
    return header(kind) + body if kind else body


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=() if name == "snapshot" or shape == "lie" else soak)
        for name in DECODERS
        for shape in FRAMES
    ],
)
def test_hostile_zstd_frame_is_refused_in_bounded_memory(name: str, shape: str) -> None:
    """A zstd frame with a huge window, wrong size or excess of blocks raises DecodeError."""
    body, reason = FRAMES[shape]
    data = stored(name, body)
    with little(3 * LIMIT), pytest.raises(DecodeError, match=reason):
        DECODERS[name][1](data)


@pytest.mark.parametrize("name", DECODERS)
def test_excess_of_tables_is_refused_in_bounded_memory(name: str) -> None:
    """A file with too many tables raises DecodeError within six times the limit of memory."""
    data = stored(name, zstandard.compress(CROWDS[name]()))
    with little(6 * LIMIT), pytest.raises(DecodeError):
        DECODERS[name][1](data)


def test_node_document_of_many_values_is_damage() -> None:
    """A node whose metadata is a list of 200,000 lists decodes to a DecodeError of this node."""
    nodes = [{0: Struct(bytes(8)), 1: "/a", 2: CROWDS["session"](), 3: U8(2)}]
    data = header(SNAPSHOT) + zstandard.compress(snapshot_of({2: nodes}))
    with little(6 * LIMIT):
        found = SnapshotDecoder(FIRST, LIMIT)(data).nodes["a"]

    assert isinstance(found, DecodeError)
