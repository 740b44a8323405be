"""Columns of Parquet files as pandas and fastparquet write them, and of hostile files."""

import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastparquet
import numpy as np
import pandas as pd
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.formats.kerchunk.parquet import NULL, ParquetFile
from shardgate.formats.reading import DecodeError, StepsError
from tests.support.formats.kerchunk.thrift import Field, assemble, encode, varint

PATHS = ["s3://b/a.nc", None, "s3://b/b.nc", "s3://b/a.nc", "é", ""]
RAWS = [None, b"", b"\x00\xff", None, None, b"x" * 300]
OFFSETS = [0, -5, 2**40, 3, 4, 5]


def _write(
    path: Path,
    paths: Sequence[str | None] = PATHS,
    raws: Sequence[bytes | None] = RAWS,
    offsets: Sequence[int] = OFFSETS,
    *,
    is_categorical: bool = False,
    **options: Any,
) -> bytes:
    """Write a table by fastparquet, and return the file."""
    frame = pd.DataFrame({"path": np.array(paths, "O"), "raw": np.array(raws, "O")})
    frame["offset"] = np.array(offsets, "i8")
    if is_categorical:
        frame["path"] = frame["path"].astype("category")
    encoding = {"path": "utf8", "raw": "bytes"}
    options = {"compression": "ZSTD", "has_nulls": ["path", "raw"], "stats": False} | options
    fastparquet.write(str(path), frame, object_encoding=encoding, **options)
    return path.read_bytes()


def _texts(file: ParquetFile, name: str) -> list[bytes | None]:
    codes, values = file.texts(name)
    return [None if code == NULL else values[code] for code in codes.tolist()]


def _encoded(paths: Sequence[str | None]) -> list[bytes | None]:
    return [None if path is None else path.encode() for path in paths]


def _check(data: bytes, paths: Sequence[str | None] = PATHS) -> None:
    file = ParquetFile(data, len(paths))
    assert _texts(file, "path") == _encoded(paths)
    assert _texts(file, "raw") == RAWS
    assert file.integers("offset").tolist() == OFFSETS


@pytest.mark.parametrize(
    ("compression", "groups"),
    [("ZSTD", [0]), ("GZIP", [0, 2, 5]), ("BROTLI", [0]), ("UNCOMPRESSED", [0, 2, 5])],
)
@pytest.mark.parametrize("is_categorical", [False, True])
@pytest.mark.parametrize("page_version", [1, 2])
def test_columns_are_those_that_were_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compression: str,
    groups: list[int],
    page_version: int,
    *,
    is_categorical: bool,
) -> None:
    """Plain and dictionary pages of both versions, in each compression, have all values."""
    monkeypatch.setattr("fastparquet.writer.DATAPAGE_VERSION", page_version)
    options: dict[str, Any] = {"compression": compression, "row_group_offsets": groups}

    _check(_write(tmp_path / "a.parq", is_categorical=is_categorical, **options))


@settings(max_examples=25)
@given(rows=st.lists(st.sampled_from(["a", "b", "c", None, "d" * 9]), max_size=70), size=st.data())
def test_any_dictionary_is_decoded(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str | None], size: st.DataObject
) -> None:
    """Runs and packed groups of codes, and levels, of any length give the written values."""
    rows = rows * size.draw(st.sampled_from([1, 7, 40])) or [None]
    path = tmp_path_factory.mktemp("parquet") / "a.parq"
    raws, offsets = [None] * len(rows), range(len(rows))
    data = _write(path, rows, raws, list(offsets), is_categorical=True)

    assert _texts(ParquetFile(data, len(rows)), "path") == _encoded(rows)


def test_absent_column_is_empty_or_refused(tmp_path: Path) -> None:
    """A column of texts that does not exist is empty; one of integers, or of another type than
    expected, is refused.
    """
    file = ParquetFile(_write(tmp_path / "a.parq"), 6)

    assert set(_texts(file, "other")) == {None}
    with pytest.raises(DecodeError, match="no column size"):
        file.integers("size")
    with pytest.raises(DecodeError, match="has no 5 integers"):
        file.integers("path")
    with pytest.raises(DecodeError, match="no texts or bytes"):
        file.texts("offset")


def test_page_that_inflates_further_is_refused(tmp_path: Path) -> None:
    """A page that inflates to more bytes than its header says is refused, and not inflated."""
    noise = random.Random(0).randbytes(50_000)
    data = _write(tmp_path / "a.parq", raws=[noise, *RAWS[1:]])
    start = data.rindex(zstandard.FRAME_HEADER, 0, data.index(noise[:100]))
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10**8))
    padding = len(noise) - len(bomb)
    skipped = (0x184D2A50).to_bytes(4, "little") + padding.to_bytes(4, "little") + bytes(padding)
    changed = data[:start] + bomb + skipped + data[start + len(bomb + skipped) :]

    with pytest.raises(DecodeError, match="zstd"):
        ParquetFile(changed, 6).texts("raw")


@pytest.mark.parametrize("is_categorical", [False, True])
def test_damaged_file_is_decoded_or_refused(tmp_path: Path, *, is_categorical: bool) -> None:
    """Any change of bytes, and any truncation, gives values or a `DecodeError`."""
    data = _write(tmp_path / "a.parq", is_categorical=is_categorical)
    chance, refused = random.Random(0), 0
    for _ in range(1000):
        changed = bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 5])):
            changed[chance.randrange(len(data))] = chance.choice([0, 255, chance.randrange(256)])
        if chance.random() < 0.1:
            del changed[chance.randrange(len(data)) :]
        try:
            file = ParquetFile(bytes(changed), 6)
            assert file.rows <= 6
            assert len(_texts(file, "path")) == len(_texts(file, "raw")) == file.rows
            file.integers("offset")
        except DecodeError:
            refused += 1

    assert 250 < refused < 1000


def _table(rows: int, levels: bytes, values: bytes = b"") -> bytes:
    """Return a table of one optional column of texts, in one page that zstd compresses."""
    body = struct.pack("<I", len(levels)) + levels + values
    stored = zstandard.compress(body)
    kinds = [[1, 5, rows], [2, 5, 0], [3, 5, 3], [4, 5, 3]]
    head = encode(12, [[1, 5, 0], [2, 5, len(body)], [3, 5, len(stored)], [5, 12, kinds]])
    sizes = [[6, 6, len(head) + len(body)], [7, 6, len(head) + len(stored)], [9, 6, 4]]
    column = [[3, 12, [[1, 5, 6], [4, 5, 6], [5, 6, rows], *sizes]]]
    schema = [[[4, 8, b"root"], [5, 5, 1]], [[1, 5, 6], [3, 5, 1], [4, 8, b"path"]]]
    group = [[1, 9, (12, [column])], [2, 6, 0], [3, 6, rows]]
    footer: list[Field] = [[1, 5, 1], [2, 9, (12, schema)], [3, 6, rows], [4, 9, (12, [group])]]
    return assemble(b"PAR1" + head + stored, footer)


def test_runs_are_counted_steps() -> None:
    """Half a million runs in few bytes are refused by steps; as many rows in one run are read."""
    rows = 2**19
    file = ParquetFile(_table(rows, b"\2\0" * rows), rows)

    with pytest.raises(StepsError):
        file.texts("path")
    codes, _ = ParquetFile(_table(rows, varint(2 * rows) + b"\0"), rows).texts("path")
    assert (codes == NULL).all()


def test_texts_are_counted_steps() -> None:
    """Few bytes that inflate to more texts than a table may have steps are refused unread."""
    rows = 2**22 + 2**16
    file = ParquetFile(_table(rows, varint(2 * rows) + b"\1", bytes(4 * rows)), rows)

    with pytest.raises(StepsError):
        file.texts("path")
