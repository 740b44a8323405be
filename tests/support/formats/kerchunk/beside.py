"""Keys of reference sets beside the file system of fsspec: the sources, and what is found."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from shardgate.errors import ShardgateError
from tests.support.formats.kerchunk.sets import fsspec_of, opening

DATA: Final = bytes(range(256))
REFUSED: Final = "refused"
type Outcome = bytes | str | None
"""Bytes, `REFUSED`, or `None` for a missing key."""
type Instead = Mapping[str, tuple[Outcome, str]]
"""Outcomes that only the service has, by key, and the reasons."""
NOTHING: Final[Instead] = {}

SOURCE: Final = "ROOT/sources/a.bin"
"""`ROOT` is the folder of the set."""
SOURCES: Final = ("sources/a.bin", "sources/007.bin", "sources/part-007.bin", "sources/é b%20.bin")
PART: Final = DATA[2:5]
NEGATIVE: Final = "fsspec passes negative numbers on to the file, which takes them as it likes"


def part_of(url: Any = SOURCE, offset: Any = 2, length: Any = 3) -> list[Any]:
    """Return a reference that is spelled so, by default to `PART`."""
    return [url, offset, length]


def located(value: Any, root: Path) -> Any:
    """Replace `ROOT` in the texts of *value*."""
    match value:
        case str():
            return value.replace("ROOT", str(root))
        case dict():
            return {key: located(each, root) for key, each in value.items()}
        case list():
            return [located(each, root) for each in value]
    return value


def write_sources(root: Path) -> Path:
    """Write sources beside the sets, outside of their folder, and in the folder of a bucket.
    Return the folder of the sets.
    """
    for name in (*(f"sets/{name}" for name in SOURCES), "outside.bin", "bucket/x", "bucket/é y%20"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(DATA[7:] if "007" in name else DATA)
    return root / "sets"


def _outcomes_of_fsspec(path: Path, keys: Iterable[str], *, jinja: bool) -> dict[str, Outcome]:
    """Read *keys* with fsspec, which finds objects of the bucket in memory."""
    bucket = MemoryFileSystem()
    for key in ("x", "é y%20"):
        bucket.pipe_file(f"s3://bucket/{key}", DATA)
    local = fsspec.filesystem("file")
    stores = {"s3": bucket, "file": local, "local": local, None: local}
    found: dict[str, Outcome] = dict.fromkeys(keys, REFUSED)
    try:
        peer = fsspec_of(path, simple_templates=not jinja, fs=stores)
    except Exception:  # noqa: BLE001  of many types, as below
        return found
    for key in found:
        try:
            found[key] = peer.cat_file(key)
        except FileNotFoundError:
            found[key] = None
        except Exception:  # noqa: BLE001, S112
            continue
    return found


async def _outcomes(path: Path, keys: Iterable[str]) -> dict[str, Outcome]:
    """Read *keys* as the service does."""
    found: dict[str, Outcome] = dict.fromkeys(keys, REFUSED)
    try:
        async with opening(path, buckets={"s3://bucket": path.parent.parent / "bucket"}) as opened:
            for key in found:
                try:
                    found[key] = await opened.read(key)
                except (ShardgateError, AssertionError):  # the latter of a source that is absent
                    continue
    except ShardgateError:  # of the set
        pass
    return found


def _spaced_alike(found: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Write documents anew: two libraries space and escape them in their own ways."""
    return {
        key: json.dumps(json.loads(data)).encode() if data and data[:2] in (b'{"', b"{}") else data
        for key, data in found.items()
    }


async def assert_found(
    path: Path, expected: Mapping[str, Outcome], instead: Instead, *, jinja: bool = False
) -> None:
    """Assert that fsspec finds what is *expected* by its keys, and the service too, but for what it
    finds *instead*. fsspec evaluates templates by *jinja*, or replaces their names only.
    """
    by_fsspec = _outcomes_of_fsspec(path, expected, jinja=jinja)
    by_service = await _outcomes(path, expected)

    assert _spaced_alike(by_fsspec) == expected
    others = {key: outcome for key, (outcome, _) in instead.items()}
    assert _spaced_alike(by_service) == {**expected, **others}
