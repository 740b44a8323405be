"""Keys, entry point and metadata of the draft of 2022."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardgate.formats.documents import DocumentDecoder, MarkerDecoder
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.array_spec import ArraySpec
from shardgate.formats.zarr.draft_2022 import (
    ArrayParser,
    Hierarchy,
    Zarr2022,
    array_of,
    describe,
    parse_consolidated,
)
from shardgate.formats.zarr.keys import ChunkKeys
from shardgate.formats.zarr.layout import Zarr3
from shardgate.formats.zarr.metadata import Node
from tests.support.formats.mutating import members, mutations
from tests.support.formats.zarr.draft import (
    BY_ZARR_PYTHON,
    CORE,
    ENTRY_POINT,
    SHARDING,
    array_metadata,
    encode,
    sharding,
)

type Json = dict[str, Any]

_LIMIT = 2**20
_SHARDED = array_metadata([5, 7], [2, 2], [sharding([2, 2])], dimension_separator="/")
_SERVED = array_metadata([5, 7], [2, 2], dimension_separator="/")
_OTHER = {"extension": "https://example.org/mirror/1.0", "type": "mirror", "configuration": {}}
_MUST = {"extension": "https://example.org/warp/1.0", "must_understand": True}
_MAY = {"extension": "https://example.org/hint/1.0", "must_understand": False}

_names = st.text("abc01.-_", min_size=1).filter(lambda name: name.strip("."))
_paths = st.lists(_names.map("{}/".format), max_size=4).map("".join)


@given(_paths, st.sampled_from("/."), st.lists(st.integers(0, 10**19 - 1), max_size=4).map(tuple))
def test_data_and_metadata_keys_lead_to_their_array(
    path: str, separator: str, coords: tuple[int, ...]
) -> None:
    """A data key and a metadata key lead back to the path of their array."""
    hierarchy = Hierarchy(".json")

    assert array_of(ChunkKeys(f"data/root/{path}c", separator, len(coords)).format(coords)) == path
    assert hierarchy.array_path(hierarchy.metadata_key(path)) == path


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("data/root/foo/baz/c96/18", "foo/baz/"),
        ("data/root/c0.0", ""),
        ("data/root/c", ""),
        ("data/root/foo/c", "foo/"),
        ("data/root/c0/c1/2", "c0/"),
        ("data/root/c0/5/c1", "c0/5/"),
        *dict.fromkeys(
            ["", "zarr.json", "data/root", "data/root/foo", "data/root/foo/checksums",
             "data/root/foo/c0x", "data/root/foo/c0/", "data/root/foo/c0//1", "data/root/foo/c/0",
             "data/root/foo/C0", "data/root//c0", "data/root/foo//c0", "data/root//foo/c0",
             "data/rooted/c0/0", "data/c0/0", "c0/0", "meta/root/c0/0", "x/data/root/c0/0"]
        ).items(),
    ],
)  # fmt: skip
def test_array_of_a_data_key_ends_at_the_last_chunk_identifier(key: str, path: str | None) -> None:
    """The array of a data key is the path before the last ``c``; other keys have none."""
    assert array_of(key) == path


@pytest.mark.parametrize(
    ("suffix", "key", "path"),
    [
        (".json", "meta/root.array.json", ""),
        (".json", "meta/root/foo/bar.array.json", "foo/bar/"),
        ("", "meta/root/foo/bar.array", "foo/bar/"),
        (".json", "meta/root/a.array.json.array.json", "a.array.json/"),
        *((".json", key, None) for key in (
            "", "zarr.json", "meta/root.group.json", "meta/root/foo.group.json", ".array.json",
            "meta/root/foo.array.yaml", "meta/root/foo.array", "meta/root/.array.json",
            "foo.array.json", "meta/root/foo/.array.json", "meta/rootfoo.array.json",
            "data/root/foo.array.json", "x/meta/root/foo.array.json",
        )),
    ],
)  # fmt: skip
def test_array_of_a_metadata_key_has_the_suffix_of_the_entry_point(
    suffix: str, key: str, path: str | None
) -> None:
    """A metadata key is the path, ``.array`` and the entry point's suffix; others have none."""
    assert Hierarchy(suffix).array_path(key) == path


def _open(document: Any) -> Any:
    """Decode a ``zarr.json`` by both dialects, as the service does."""
    dialects = (Zarr2022(0, _LIMIT, 0), Zarr3(0, _LIMIT, 0))
    return MarkerDecoder(dialects, _LIMIT)(encode(document)).spec


def _read(data: bytes) -> Node:
    return DocumentDecoder(ArrayParser("a/"), _LIMIT)(data)


def _decode(document: Any) -> Node:
    return _read(encode(document))


def _array(**changed: Any) -> ArraySpec:
    array = _decode({**_SHARDED, **changed}).array
    assert array is not None
    return array


def _configured(chunks_per_shard: Any, shape: list[int] | None = None) -> Json:
    shape = [5, 7] if shape is None else shape
    return array_metadata(shape, [2] * len(shape), [sharding(chunks_per_shard)])


_URI = "https://purl.org/zarr/spec/"


@pytest.mark.parametrize(
    "document",
    [
        *({**ENTRY_POINT, "zarr_format": uri}
          for uri in (f"{_URI}protocol/core/3.0", "http://purl.org/zarr/spec/protocol/core/3.0",
                      f"{_URI}protocol/core/3.1", f"{_URI}core/3.0", f"{_URI}core/3.0/")),
        *({"zarr_format": CORE, "metadata_encoding": CORE, **members}
          for members in ({}, {"metadata_encoding": {"type": "json"}},
                          {"metadata_encoding": {"type": "json", "metadata_key_suffix": ".json"}},
                          {"extensions": [_MAY]})),
    ],
)  # fmt: skip
def test_entry_point_is_recognized_by_its_uri(document: Json) -> None:
    """An entry point is recognized by each form of its URI, with ``.json`` as default suffix."""
    assert _open(document) == Hierarchy(".json")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        *(({"zarr_format": uri}, "zarr_format is not 3")
          for uri in (f"{_URI}protocol/core/2.0", f"{_URI}protocol/core/4.0",
                      f"{_URI}protocol/core/33.0",
                      "https://example.org/zarr/spec/protocol/core/3.0", "3", None)),
        *(({"metadata_key_suffix": suffix}, "metadata_key_suffix is no short end of a key: ")
          for suffix in (3, "." * 257, "/../../secret.json", "\ud800", "\0")),
    ],
)  # fmt: skip
def test_invalid_entry_point_is_refused(changed: Json, reason: str) -> None:
    """An entry point with another URI or an invalid suffix raises DecodeError."""
    with pytest.raises(DecodeError, match=reason):
        _open({**ENTRY_POINT, **changed})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"metadata_encoding": "https://example.org/cbor"}, "not encoded as JSON"),
        ({"metadata_encoding": {"type": "cbor"}}, "not encoded as JSON"),
        ({"metadata_encoding": None}, "not encoded as JSON"),
        ({"extensions": [_MAY, _MUST]}, "example.org/warp/1.0 must be understood"),
    ],
)
def test_hierarchy_of_an_unknown_encoding_has_a_reason(changed: Any, reason: str) -> None:
    """A hierarchy with an unknown encoding or a required extension has a reason for it."""
    assert reason in _open({**ENTRY_POINT, **changed}).why_sharded


def test_metadata_written_by_zarr_python_is_understood() -> None:
    """Metadata that zarr-python 2.18 wrote is served without its transformer and understood."""
    document = _decode(BY_ZARR_PYTHON)
    expected = {k: v for k, v in BY_ZARR_PYTHON.items() if k != "storage_transformers"}

    assert json.loads(document.served) == expected
    assert document.array is not None
    assert document.array.shard_shape == (2, 3)
    assert document.array.keys.parse("data/root/a/c2.3") == (2, 3)


@given(st.dictionaries(st.text(max_size=8), members, max_size=4), members)
def test_only_the_transformer_is_removed(extra: Json, attributes: Any) -> None:
    """All members but the transformer are served as stored, in order."""
    document = {**extra, **_SHARDED, "attributes": attributes}
    decoded = _decode(document)
    del document["storage_transformers"]

    assert (decoded.served, decoded.is_rewritten) == (encode(document), True)


_KEPT: list[tuple[Json, str]] = [
    ({"storage_transformers": [_OTHER]}, "transformer is https://example.org/mirror/1.0"),
    ({"storage_transformers": [sharding([2, 2]), _OTHER]}, "are stacked"),
    ({"storage_transformers": [sharding([2, 2])] * 2}, "are stacked"),
    ({"storage_transformers": [{"name": "sharding"}]}, "transformer is None"),
    ({"storage_transformers": [{"extension": "x" * 10_000}]}, "transformer is xxx"),
    ({"storage_transformers": [{**sharding([2, 2]), "type": "sorted"}]},
     "format is sorted"),
    ({"storage_transformers": [{"extension": SHARDING}]}, "format is None"),
    ({"chunk_grid": {"type": "rectilinear"}}, "the chunk grid is rectilinear"),
    ({"extensions": [_MUST]}, "example.org/warp/1.0 must be understood"),
    ({"storage_transformers": "sharding"}, "no list of objects"),
    ({"storage_transformers": {"a": 1}}, "no list of objects"),
    ({"storage_transformers": ["sharding"]}, "no list of objects"),
    ({"storage_transformers": [{**sharding(0), "configuration": 3}]}, "no config"),
    ({"shape": [5, -7]}, "shape is no list of sizes"),
    ({"chunk_grid": "regular"}, "the chunk grid is no object"),
    ({"chunk_grid": {"type": "regular"}}, "chunk_shape is no list"),
    (array_metadata([5, 7], [2], [sharding([2, 2])]), "chunk_shape has 1 dimensions"),
    (array_metadata([5, 7], [2, 0], [sharding([2, 2])]), "chunk_shape is no list of sizes"),
    (array_metadata([5, 7], [2, 2], [sharding([2, 2])], separator="-"), "the separator is"),
    (_configured([2, 0]), "chunks_per_shard is no list of sizes"),
    (_configured(None), "chunks_per_shard is no list of sizes"),
    (_configured([2, 2**63]), "chunks_per_shard has a size above 2^63-1"),
    (_configured([2, 2, 2]), "chunks_per_shard has 3 dimensions instead of 2"),
    (_configured([]), "chunks_per_shard has 0 dimensions instead of 2"),
    (_configured([2, 2], []), "chunks_per_shard has 2 dimensions instead of 0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        *((document, "") for document in (
            _SERVED, {**_SERVED, "storage_transformers": []},
            {**_SERVED, "storage_transformers": None}, {"anything": "else"}, {})),
        *(({**_SHARDED, **changed}, reason) for changed, reason in _KEPT),
    ],
)  # fmt: skip
def test_other_documents_are_served_byte_by_byte(document: Json, reason: str) -> None:
    """A document without a removable transformer is served byte for byte, with a short reason."""
    data = json.dumps(document, indent=7).encode()
    found = _read(data)

    assert (found.served, found.is_rewritten, found.array) == (data, False, None)
    assert reason in found.why_sharded
    assert bool(reason) is bool(found.why_sharded)
    assert len(found.why_sharded) < 200


def test_transformer_is_recognized_by_its_uri() -> None:
    """The transformer is recognized by each form of its URI.

    The separator of keys is that of the chunk grid, by default a slash.
    """
    for uri in (
        SHARDING, SHARDING.replace("https", "http"), SHARDING.replace("_", "-"),
        SHARDING.replace("1.0", "1.1"),
    ):  # fmt: skip
        assert _array(
            storage_transformers=[{**sharding([2, 2]), "extension": uri}], extensions=[_MAY]
        )
    for separator, identifier in (({}, "c1/3"), ({"separator": "."}, "c1.3")):
        grid = {"type": "regular", "chunk_shape": [2, 2], **separator}
        array = _array(chunk_grid=grid, dimension_separator="?")
        assert array.keys.parse(f"data/root/a/{identifier}") == (1, 3)


@pytest.mark.parametrize(
    ("chunks_per_shard", "padded"), [([2], (2, 1, 1)), ([2, 3], (2, 3, 1)), ([2, 3, 4], (2, 3, 4))]
)
def test_omitted_last_dimensions_are_not_sharded(
    chunks_per_shard: list[int], padded: tuple[int, ...]
) -> None:
    """Dimensions that ``chunks_per_shard`` omits have one chunk per shard.

    zarr-python wrote such lists, and the draft's own example has the given keys.
    """
    array = _decode(_configured(chunks_per_shard, [5, 7, 9])).array
    example = _decode(_configured([32, 2], [400, 400])).array

    assert array is not None
    assert array.shard_shape == padded
    assert example is not None
    for coords in ((96, 18), (96, 19), (97, 18), (127, 19)):
        assert example.keys.format(example.shard(coords).coords) == "data/root/a/c3/9"
    assert example.indexes[0].nbytes == 1024


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(mutations({**BY_ZARR_PYTHON, "extensions": [_MAY]}))
def test_wrong_metadata_is_refused_or_understood(document: Any) -> None:
    """Metadata with random wrong values decodes to a document or raises DecodeError."""
    try:
        decoded = _decode(document)
    except DecodeError as error:
        assert len(str(error)) < 20_000  # noqa: PT017 - what it says is the fact
        return
    json.loads(decoded.served)
    if (array := decoded.array) is not None:
        coords = (0,) * len(array.shape)
        assert array.shard(coords).entry == (0,)
        assert array.keys.parse(array.keys.format(coords)) == coords


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(mutations({**ENTRY_POINT, "extensions": [_MAY]}))
def test_wrong_entry_point_is_refused_or_understood(document: Any) -> None:
    """An entry point with random wrong values decodes to a hierarchy or raises DecodeError."""
    try:
        assert isinstance(_open(document), Hierarchy)
    except DecodeError as error:
        assert len(str(error)) < 20_000  # noqa: PT017 - what it says is the fact


def _consolidated(nodes: Any) -> Json:
    return {"zarr_consolidated_format": 1, "metadata": nodes}


@pytest.mark.parametrize(
    "other",
    [_SERVED, ENTRY_POINT, {"attributes": {}}, _configured([0, 0]), None, 3, [], "x",
     {**_SHARDED, "storage_transformers": [_OTHER]}],
)  # fmt: skip
def test_consolidated_arrays_are_rewritten(other: Any) -> None:
    """Each array in consolidated metadata is served without transformer, beside damaged ones."""
    document = parse_consolidated(_consolidated({"a": _SHARDED, "b": other}), b"")

    assert document.is_rewritten
    assert json.loads(document.served) == _consolidated({"a": _SERVED, "b": other})


@pytest.mark.parametrize(
    "document", [None, [], 3, {}, _consolidated(None), _consolidated({"a": _SERVED})]
)
def test_consolidated_metadata_without_shards_is_served_as_stored(document: Any) -> None:
    """Consolidated metadata without sharded arrays is served as stored."""
    found = parse_consolidated(document, b"stored")

    assert (found.served, found.is_rewritten) == (b"stored", False)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (_SHARDED, ("u1", (2, 2), (), (4, 4), (2, 2), ("end",))),
        (BY_ZARR_PYTHON, ("<i4", (2, 2), ("blosc/1.0",), (4, 6), (2, 3), ("end",))),
        (_SERVED, ("u1", (2, 2), (), None, None, ())),
        ({**_SERVED, "data_type": {"extension": "x", "type": "<M8[s]"}, "compressor": None},
         ("<M8[s]", (2, 2), (), None, None, ())),
        ({**_SERVED, "data_type": 7, "chunk_grid": {"type": "rectilinear"}},
         (None, (), (), None, None, ())),
        ({**_SERVED, "compressor": {"codec": "lz4"}}, ("u1", (2, 2), ("lz4",), None, None, ())),
        ({**_SERVED, "compressor": {"codec": f"{_URI}codecs/gzip"}},
         ("u1", (2, 2), ("gzip",), None, None, ())),
    ],
)  # fmt: skip
def test_description_has_chunks_and_shards(document: Json, expected: Any) -> None:
    """A description has shapes in elements, codecs by name, and shards if there are any."""
    found = describe("foo/", _decode(document))

    assert (found.path, found.format, found.kind, found.shape) == ("foo", "zarr", "array", (5, 7))
    assert expected == (
        found.data_type,
        found.inner_chunk_shape,
        found.codecs,
        found.shard_shape,
        found.chunks_per_shard,
        found.index_location,
    )
