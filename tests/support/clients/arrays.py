"""Table of sharded arrays: every option that the service must unshard, each option once.

Combinations of options are drawn by the test of random arrays.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

import numpy as np

from tests.support.clients.writing import (
    GZIP,
    VLEN_UTF8,
    ZSTD,
    Case,
    Json,
    Values,
    Writer,
    by_tensorstore,
    by_zarr,
    by_zarr_v2,
    counted,
    default_keys,
    sharding,
    transpose,
    v2_keys,
)
from tests.support.formats.zarr.building import BIG, CRC, LITTLE

VALUES: Final = counted((6, 5, 9))
SHARDS: Final = (4, 6, 8)
"""Two by one by two shards, each of which reaches past the edge of the array."""
INNER: Final = (2, 3, 4)

_LZ4: Final = {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 2, "blocksize": 0}


def _with_codecs(
    folder: str, table: Mapping[str, Sequence[Json]], write: Writer = by_zarr
) -> Iterator[Case]:
    """Yield a case of the usual values for each chain of codecs."""
    for name, codecs in table.items():
        yield Case(f"{folder}/{name}", write, VALUES, SHARDS, codecs)


def _index() -> Iterator[Case]:
    for location, (endian, codec), (writer, write, checks) in product(
        ("start", "end"),
        (("little", LITTLE), ("big", BIG)),
        (("zarr", by_zarr, [CRC]), ("tensorstore", by_tensorstore, [])),
    ):
        codecs = [sharding(INNER, index=[codec, *checks], location=location)]
        name = f"index/{writer}_{location}_{endian}_{'crc' if checks else 'plain'}"
        yield Case(name, write, VALUES, SHARDS, codecs)
    chains: dict[str, list[Json]] = {
        "transposed": [transpose(1, 2, 3, 0), BIG, CRC],
        "three_crcs": [LITTLE, CRC, CRC, CRC],
    }
    for name, index in chains.items():
        codecs = [sharding(INNER, index=index)]
        yield Case(f"index/zarr_{name}", by_zarr, VALUES, SHARDS, codecs)


def _by_tensorstore_alone() -> Iterator[Case]:
    """Yield cases that zarr-python can neither write nor read."""
    inner = sharding((2, 1, 2), [transpose(1, 0, 2), BIG], location="start")
    chains = {
        "outer_021": [transpose(0, 2, 1), sharding((2, 4, 3))],
        "outer_120": [transpose(1, 2, 0), sharding((3, 4, 2))],
        "outer_twice": [transpose(2, 0, 1), transpose(1, 0, 2), sharding((2, 4, 3))],
        "both": [transpose(2, 0, 1), sharding((4, 2, 3), [transpose(1, 2, 0), LITTLE, ZSTD])],
        "everywhere": [
            transpose(1, 2, 0),
            sharding((3, 4, 2), [transpose(2, 0, 1), inner], index=[BIG]),
        ],
    }
    yield from _with_codecs("transpose", chains, by_tensorstore)


def _nested() -> Iterator[Case]:
    two = [sharding(INNER, [sharding((1, 3, 2))])]
    yield from _with_codecs("nested", {"two": two}, by_tensorstore)
    inmost = sharding((1, 3, 2), [LITTLE, GZIP])
    chains = {
        "three": [sharding((4, 3, 8), [sharding(INNER, [inmost])])],
        "transpose_between": [sharding(INNER, [transpose(2, 0, 1), sharding((2, 1, 3))])],
    }
    yield from _with_codecs("nested", chains)


def _rectilinear() -> Iterator[Case]:
    values = counted((16, 6, 36))
    values[4:8, :, :12] = 0
    values[8:12, 3:, 20:] = 0
    rows, columns = (4, 4, 8), (12, 24)
    within = (4, 3, 6)
    table: dict[str, list[Json]] = {
        "end": [sharding(within)],
        "nested": [sharding((4, 3, 12), [sharding(within)])],
        "transpose": [transpose(2, 0, 1), sharding((4, 2, 6))],
        "inside": [sharding(within, [transpose(2, 0, 1), BIG, ZSTD], location="start"), CRC],
    }
    for name, codecs in table.items():
        lists = rows, (6,), columns
        yield Case(f"rectilinear/{name}", by_zarr, values, (8, 6, 24), codecs, edges=lists)
    part, edges = values[:, :5], (rows, 6, columns)
    yield Case("rectilinear/part", by_zarr, part, (8, 6, 24), [sharding(within)], edges=edges)


_AFTER_SHARDING: Final = {
    "crc": [sharding(INNER), CRC],
    "crc_index_at_start": [sharding(INNER, location="start"), CRC],
    "two_crcs": [sharding(INNER), CRC, CRC],
    "crc_after_both": [sharding(INNER, [sharding((1, 3, 2)), CRC]), CRC],
    "gzip": [sharding(INNER), GZIP],
    "crc_then_zstd": [sharding(INNER), CRC, ZSTD],
    "gzip_after_nested": [sharding(INNER, [sharding((1, 3, 2)), GZIP])],
}
_INSIDE: Final = {
    "transpose": [sharding(INNER, [transpose(2, 0, 1), LITTLE])],
    "zstd_crc": [sharding(INNER, [LITTLE, ZSTD, CRC])],
    "gzip": [sharding(INNER, [LITTLE, GZIP])],
    "blosc": [sharding(INNER, [LITTLE, {"name": "blosc", "configuration": _LZ4}])],
    "big_endian": [sharding(INNER, [BIG])],
}


def _keys() -> Iterator[Case]:
    encodings = {
        "default_dot": default_keys("."),
        "v2_dot": v2_keys("."),
        "v2_slash": v2_keys("/"),
        "v2_unsaid": {"name": "v2"},
        "default_unsaid": {"name": "default"},
    }
    for name, encoding in encodings.items():
        writer = by_tensorstore if "unsaid" in name else by_zarr
        codecs = [sharding(INNER)]
        yield Case(f"keys/{name}", writer, VALUES, SHARDS, codecs, key_encoding=encoding)


def _shapes() -> Iterator[Case]:
    table: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
        "1d": ((11,), (8,), (2,)),
        "4d": ((3, 4, 5, 2), (2, 4, 4, 2), (1, 2, 4, 1)),
        "one_element_of_a_large_shard": ((1, 1, 1), (4, 4, 4), (2, 2, 2)),
        "one_inner_chunk_a_shard": ((5, 7), (2, 3), (2, 3)),
        "no_edge": ((8, 8), (4, 8), (2, 2)),
        "zero_length": ((0, 5), (4, 4), (2, 2)),
    }
    for name, (shape, shards, inner) in table.items():
        yield Case(f"shape/{name}", by_zarr, counted(shape), shards, [sharding(inner)])
    for keys in (default_keys("/"), v2_keys(".")):
        name, codecs = f"shape/0d_{keys['name']}", [sharding(())]
        yield Case(name, by_zarr, counted(()), (), codecs, key_encoding=keys)


def _fill_values() -> Iterator[Case]:
    table: dict[str, tuple[str, Any]] = {
        "zero": ("u2", 0),
        "nonzero": ("u2", 4711),
        "nan": ("f8", np.nan),
        "minus_infinity": ("f4", -np.inf),
        "complex": ("c16", 1.5 - 2j),
        "false": ("?", False),
        "negative": ("i8", -5),
        "beyond_2_53": ("u8", 2**64 - 2),
    }
    for name, (dtype, fill) in table.items():
        codecs = [sharding((2, 2))]
        values = _with_holes(dtype, fill)
        yield Case(f"fill/{name}", by_zarr, values, (4, 4), codecs, fill_value=fill)


def _with_holes(dtype: str, fill: Any) -> Values:
    """Return values with one empty shard of 4x4, and another with a single chunk of 2x2."""
    values = np.full((8, 8), fill, dtype)
    values[:4, :4] = counted((4, 4), "u1").astype(dtype)
    values[4:6, 6:] = values[0, 0]
    return values


def _data_types() -> Iterator[Case]:
    for dtype in ("u1", "f2"):
        values = counted((5, 6), dtype)
        name = values.dtype.name
        yield Case(f"dtype/{name}", by_zarr, values, (4, 4), [sharding((2, 2))])
    words = ["a", "bcd", "", "Größe", "日本", "e" * 40, "g"]
    text = np.array(words, dtype=np.dtypes.StringDType())
    vlen = [sharding((2,), [VLEN_UTF8, ZSTD])]
    yield Case("dtype/string", by_zarr, text, (4,), vlen, data_type=str, fill_value="")
    fixed = np.array(words, "U4")
    yield Case("dtype/fixed_text", by_zarr, fixed, (4,), [sharding((2,))], fill_value="")
    octets = np.array([b"a", b"bcd", b"", b"efgh"], "S4")
    yield Case("dtype/fixed_bytes", by_zarr, octets, (4,), [sharding((2,))], fill_value=b"")
    days = np.array(["1970-01-01", "2026-11-21", "NaT"], "M8[ns]")
    yield Case("dtype/time", by_zarr, days, (2,), [sharding((1,))], fill_value="NaT")


def _old_spelling(document: Json) -> Json:
    """Call the codec `bytes` `endian`, as ZEP 2 did."""
    old: Json = json.loads(json.dumps(document).replace('"bytes"', '"endian"'))
    return old


def _stranger(document: Json) -> Json:
    return document | {"x_lab": {"must_understand": False, "note": ["kept"]}}


def _silent(document: Json) -> Json:
    """Remove members that have defaults."""
    del document["codecs"][0]["configuration"]["index_location"]
    document.pop("attributes")
    document.pop("storage_transformers")
    return document


def _documents() -> Iterator[Case]:
    edits = {"endian": _old_spelling, "unknown_member": _stranger, "defaults_left_out": _silent}
    for name, edit in edits.items():
        yield Case(f"document/{name}", by_zarr, VALUES, SHARDS, [sharding(INNER)], edit=edit)
    yield Case(
        "document/names_and_attributes",
        by_zarr,
        VALUES,
        SHARDS,
        [sharding(INNER)],
        dimension_names=["z", None, "x"],
        attributes={"units": "µm", "nested": {"list": [1, None, 2.5]}, "codecs": ["mine"]},
    )


def _not_sharded() -> Iterator[Case]:
    yield Case("plain/v3", by_zarr, VALUES, INNER, [LITTLE, ZSTD], attributes={"a": 1})
    yield Case("plain/transposed", by_tensorstore, VALUES, INNER, [transpose(2, 0, 1), LITTLE])
    yield Case("plain/v2", by_zarr_v2, VALUES, INNER, [], attributes={"a": 1})


CASES: Final[tuple[Case, ...]] = (
    *_index(),
    *_by_tensorstore_alone(),
    *_nested(),
    *_rectilinear(),
    *_with_codecs("after", _AFTER_SHARDING),
    *_with_codecs("inside", _INSIDE),
    *_keys(),
    *_shapes(),
    *_fill_values(),
    *_data_types(),
    *_documents(),
    *_not_sharded(),
)

BY_NAME: Final = {case.name: case for case in CASES}

IN_GROUPS: Final = (
    "index/zarr_start_big_crc", "index/tensorstore_end_little_plain", "transpose/both",
    "nested/two", "rectilinear/part", "after/crc_after_both", "after/gzip", "keys/v2_dot",
    "shape/0d_default", "fill/nan", "dtype/string", "document/unknown_member", "plain/v3",
)  # fmt: skip
"""Cases that are members of groups too."""


def member(name: str) -> str:
    """Return the name of a case as a member of a group."""
    return name.replace("/", "-")
