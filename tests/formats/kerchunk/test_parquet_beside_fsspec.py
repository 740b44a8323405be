"""Reference sets in Parquet of many kinds, key by key beside the file system of fsspec."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd
import pytest
from fsspec.implementations.reference import LazyReferenceMapper

from tests.support.formats.kerchunk.beside import (
    DATA,
    NOTHING,
    PART,
    REFUSED,
    SOURCE,
    Instead,
    Outcome,
    assert_found,
    located,
    part_of,
    write_sources,
)
from tests.support.formats.kerchunk.sets import write_parquet


def _lazy(refs: Mapping[str, Any], record_size: int = 4) -> Callable[[Path], None]:
    """Return the writer of a set by fsspec, in Parquet."""

    def write(path: Path) -> None:
        mapper = LazyReferenceMapper.create(str(path), record_size=record_size)
        for key, value in located(refs, path.parent).items():
            mapper[key] = value
        mapper.flush()

    return write


def _by_kerchunk(refs: Mapping[str, Any], record_size: int = 4) -> Callable[[Path], None]:
    """Return the writer of a set by kerchunk, in Parquet."""
    return lambda path: write_parquet(
        path, located({"version": 1, "refs": refs}, path.parent), record_size
    )


def _table(columns: Mapping[str, Any], **options: Any) -> Callable[[Path], None]:
    """Return the writer of a set with one table of *columns* by pandas, for 4 chunks."""

    def write(path: Path) -> None:
        (path / "t").mkdir(parents=True)
        catalog = {"metadata": {"t/.zarray": json.loads(_array([4], [1]))}, "record_size": 4}
        (path / ".zmetadata").write_text(json.dumps(catalog))
        options.setdefault("compression", "ZSTD")
        pd.DataFrame(located(columns, path.parent)).to_parquet(
            path / "t/refs.0.parq", engine="fastparquet", **options
        )

    return write


def _changed(
    write: Callable[[Path], None], change: Callable[[Path], Any]
) -> Callable[[Path], None]:
    """Return the writer of a set whose second table of the array *t* is changed."""

    def write_changed(path: Path) -> None:
        write(path)
        change(path / "t/refs.1.parq")

    return write_changed


def _array(shape: list[int], chunks: list[int], **members: Any) -> str:
    document = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": "|u1", "order": "C"}
    return json.dumps(document | {"fill_value": 0, "compressor": None, "filters": None} | members)


GROUP: Final = '{"zarr_format": 2}'
GRID: Final[dict[str, Any]] = {
    ".zgroup": GROUP,
    "t/.zarray": _array([4, 6], [2, 2]),
    "t/.zattrs": '{"b": "\\u00e9"}',
    "t/0.0": [SOURCE],
    "t/0.1": part_of(),
    "t/0.2": b"text",
    "t/1.0": "base64:AAE=",
    "t/1.2": part_of("s3://bucket/x"),
}
OF_GRID: Final[dict[str, Outcome]] = {
    ".zgroup": GROUP.encode(),
    "t/.zarray": GRID["t/.zarray"].encode(),
    "t/.zattrs": b'{"b": "\\u00e9"}',
    "t/0.0": DATA,
    "t/0.1": PART,
    "t/0.2": b"text",
    "t/1.0": b"\0\1",
    "t/1.1": None,
    "t/1.2": PART,
    "t/2.0": None,
    "t/9.9": None,
    "x/0": None,
}
ROW: Final = {".zgroup": GROUP, "t/.zarray": _array([40], [1])}
FULL: Final = ROW | {f"t/{n}": part_of(offset=n, length=1) for n in range(40)}
OF_FULL: Final[dict[str, Outcome]] = {f"t/{n}": DATA[n : n + 1] for n in (0, 1, 19, 20, 39)}
FOUR: Final[dict[str, Any]] = {"path": [SOURCE] * 4, "offset": [0, 1, 2, 3], "size": [1] * 4}
OF_FOUR: Final[dict[str, Outcome]] = {f"t/{n}": DATA[n : n + 1] for n in range(4)}
WITH_DOTS: Final = "fsspec spells all keys with dots, whatever the array says"
OTHER_CHUNK: Final = "fsspec gives the bytes of another chunk"


class Case(NamedTuple):
    """A set, and what is found by its keys; see `assert_found`."""

    write: Callable[[Path], None]
    by_fsspec: Mapping[str, Outcome]
    instead: Instead = NOTHING


CASES: Final[dict[str, Case]] = {
    "an empty set": Case(_lazy({}), {".zgroup": None, "t/0": None}),
    "tables of few references": Case(_lazy(GRID), OF_GRID),
    "one table": Case(_lazy(GRID, 1000), OF_GRID),
    "tables by kerchunk": Case(_by_kerchunk(GRID), OF_GRID),
    "full tables, with categories": Case(_lazy(FULL, 20), OF_FULL | {"t/40": None}),
    "full tables, with categories, by kerchunk": Case(_by_kerchunk(FULL, 20), OF_FULL),
    "tables with gaps": Case(
        _lazy({key: value for key, value in FULL.items() if not key.endswith(("1", "9"))}, 7),
        {"t/0": DATA[:1], "t/1": None, "t/38": DATA[38:39], "t/39": None},
    ),
    "keys off the grid": Case(
        _lazy(GRID),
        {"t/0.3": b"\0\1", "t/00.0": DATA, "t/x": REFUSED},
        {
            "t/0.3": (None, OTHER_CHUNK),
            "t/00.0": (None, OTHER_CHUNK),
            "t/x": (None, "the set has no such key"),
        },
    ),
    "the catalog": Case(
        _lazy({".zgroup": GROUP}, 9),
        {".zmetadata": b'{"metadata": {".zgroup": {"zarr_format": 2}}, "record_size": 9}'},
        {
            ".zmetadata": (
                b'{"zarr_consolidated_format": 1, "metadata": {".zgroup": {"zarr_format": 2}}}',
                "it is served as the consolidated metadata that readers of Zarr expect",
            )
        },
    ),
    "arrays without dimensions or chunks": Case(
        _lazy(
            {
                "s/.zarray": _array([], []),
                "s/0": part_of(),
                "e/.zarray": _array([0], [1]),
            }
        ),
        {"s/0": PART, "s/1": None, "s": None, "e/0": None, "e/.zarray": _array([0], [1]).encode()},
    ),
    "deep arrays with names of any letters": Case(
        _lazy(
            {
                "a/b/c/.zarray": _array([4], [2]),
                "a/b/c/1": b"x",
                "é/.zarray": _array([4], [2]),
                "é/0": part_of(),
            }
        ),
        {"a/b/c/1": b"x", "a/b/c/0": None, "é/0": PART, "é/1": None},
    ),
    "chunks in folders": Case(
        _lazy({"t/.zarray": _array([4, 6], [2, 2], dimension_separator="/"), "t/0.1": part_of()}),
        {"t/0.1": PART, "t/0/1": None},
        {"t/0.1": (None, WITH_DOTS), "t/0/1": (PART, WITH_DOTS)},
    ),
    "whole and empty objects": Case(
        _lazy(
            ROW | {"t/0": [SOURCE], "t/1": part_of(offset=0, length=0), "t/2": part_of(length=0)}
        ),
        {"t/0": DATA, "t/1": DATA, "t/2": b""},
    ),
    "bytes of many kinds": Case(
        _lazy(ROW | {"t/0": b"\0\xff", "t/1": b"", "t/2": b"base64:AAE=", "t/3": b"{}"}),
        {"t/0": b"\0\xff", "t/1": b"", "t/2": b"\0\1", "t/3": b"{}"},
    ),
    "references that cannot be followed": Case(
        _lazy(
            ROW
            | {
                "t/0": part_of("ROOT/no"),
                "t/1": part_of("a.bin"),
                "t/2": part_of(length=-2),
                "t/3": b"base64:YmFzZTY0OkE=",
                "t/4": part_of(offset=-3, length=2),
                "t/5": part_of(),
            },
            8,
        ),
        dict.fromkeys(("t/0", "t/1", "t/2", "t/3"), REFUSED) | {"t/4": DATA[253:255], "t/5": PART},
        {"t/4": (REFUSED, "fsspec counts from the end of the object, the specification does not")},
    ),
    "an absent table": Case(
        _changed(_lazy(FULL, 20), Path.unlink), {"t/19": DATA[19:20], "t/20": None}
    ),
    "an empty table": Case(
        _changed(_lazy(FULL, 20), lambda path: path.write_bytes(b"")),
        {"t/19": DATA[19:20], "t/20": REFUSED},
    ),
    "a table cut off": Case(
        _changed(_lazy(FULL, 20), lambda path: path.write_bytes(path.read_bytes()[:99])),
        {"t/19": DATA[19:20], "t/20": None},
        {"t/20": (REFUSED, "damage is no absence")},
    ),
    "no column of bytes": Case(_table(FOUR), OF_FOUR),
    "no column of paths": Case(
        _table({"raw": [b"a", None, b"", b"base64:AAE="]}),
        {"t/0": b"a", "t/1": None, "t/2": b"", "t/3": b"\0\1"},
    ),
    "bytes as texts": Case(
        _table(FOUR | {"raw": [None, None, "text", "base64:AAE="]}),
        OF_FOUR | {"t/2": b"text", "t/3": b"\0\1"},
    ),
    "other columns": Case(_table(FOUR | {"etag": ["x"] * 4, "mtime": [1.5] * 4}), OF_FOUR),
    "a column of the index": Case(_table(FOUR, index=True), OF_FOUR),
    "integers of 32 bits": Case(
        _table(
            FOUR | {"offset": pd.array([0, 1, 2, 3], "int32"), "size": pd.array([1] * 4, "uint32")}
        ),
        OF_FOUR,
    ),
    "several groups of rows": Case(_table(FOUR, row_group_offsets=[0, 3]), OF_FOUR),
    "tables by gzip": Case(_table(FOUR, compression="GZIP"), OF_FOUR),
    "tables without compression": Case(_table(FOUR, compression=None), OF_FOUR),
    "tables by snappy": Case(
        _table(FOUR, compression="SNAPPY"),
        OF_FOUR,
        dict.fromkeys(OF_FOUR, (REFUSED, "no writer of sets uses this compression")),
    ),
    "a table with too few rows": Case(
        _table({name: column[:2] for name, column in FOUR.items()}),
        OF_FOUR | {"t/2": REFUSED, "t/3": REFUSED},
    ),
    "a table with too many rows": Case(
        _table({name: column * 2 for name, column in FOUR.items()}),
        OF_FOUR,
        dict.fromkeys(OF_FOUR, (REFUSED, "the catalog bounds the rows, and so the memory")),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write sources, and return the folder of sets that refer to them."""
    return write_sources(tmp_path_factory.mktemp("beside"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")  # pandas would rather use another library
async def test_set_in_parquet_is_read_as_by_fsspec(folder: Path, name: str) -> None:
    """Each key of a set in Parquet has the bytes that fsspec reads, but for the listed
    differences.
    """
    case = CASES[name]
    path = folder / "refs.parq"
    shutil.rmtree(path, ignore_errors=True)
    case.write(path)

    await assert_found(path, case.by_fsspec, case.instead)
