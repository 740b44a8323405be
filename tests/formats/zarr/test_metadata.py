"""`shardgate.formats.zarr.metadata`: ``zarr.json`` read, served, and translated back."""

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.core.metadata.v3 import ArrayV3Metadata

from shardgate.concurrency import run_in_thread
from shardgate.errors import BadBodyError, ConflictError
from shardgate.formats.documents import MarkerDecoder
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.layout import Zarr3
from shardgate.formats.zarr.metadata import Node, NodeTranslator, parse_node
from shardgate.read.metadata_cache import uncached_reads
from shardgate.storage.memory import MemoryStore
from tests.support.formats.mutating import members, mutations
from tests.support.formats.zarr.building import (
    BIG,
    CRC,
    LITTLE,
    array_metadata,
    consolidated,
    rectilinear,
    sharding,
)
from tests.support.formats.zarr.draft import ENTRY_POINT
from tests.support.formats.zarr.nesting import Nesting, nestings
from tests.support.resolving import ROOT

_LIMIT = 2**20
GZIP = {"name": "gzip", "configuration": {"level": 5}}
SHARDED = array_metadata(
    [8, 6], [4, 6], [sharding([2, 3], [LITTLE, GZIP])], data_type="uint16", x_lab={"note": 1}
)
PLAIN = array_metadata([8, 6], [2, 3], [LITTLE, GZIP], data_type="uint16")
_SERVED = {**SHARDED, "chunk_grid": PLAIN["chunk_grid"], "codecs": PLAIN["codecs"]}
GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_REWRITTEN = ("chunk_grid", "codecs")

_extra = st.dictionaries(st.text(max_size=8), members, max_size=4).map(
    lambda extra: {k: v for k, v in extra.items() if k not in {*SHARDED, "storage_transformers"}}
)


def _decode(document: Any) -> Node:
    return _read(json.dumps(document).encode())


def _read(data: bytes) -> Node:
    node = MarkerDecoder((Zarr3(0, _LIMIT, 0),), _LIMIT)(data).spec
    assert isinstance(node, Node)
    return node


@given(nestings(), _extra, members)
def test_other_members_are_served_as_stored(
    nesting: Nesting, extra: dict[str, Any], attributes: Any
) -> None:
    """Attributes and unknown members are served as stored, in order, without shards.

    zarr-python accepts the served metadata.
    """
    document = {**nesting.document, "attributes": attributes, **extra}
    data = _decode(document).served
    served, again = json.loads(data), _read(data)
    accepted = ArrayV3Metadata.from_dict(json.loads(_decode(nesting.document).served))

    assert list(served) == list(document)
    for name in document.keys() - set(_REWRITTEN):
        assert json.dumps(served[name]) == json.dumps(document[name])
    assert (again.served, again.is_rewritten, again.array) == (data, False, None)
    assert (accepted.shape, accepted.shards) == (nesting.shape, None)
    shape = {"chunk_shape": nesting.inner_chunk_shape}
    assert accepted.chunk_grid.to_dict()["configuration"] == shape


_NOT_UNDERSTOOD: list[tuple[dict[str, Any], str]] = [
    ({"shape": "8"}, "shape is no list"),
    ({"shape": [8]}, "chunk_shape has 2 dimensions instead of 1"),
    ({"chunk_grid": None}, "without a name"),
    ({"chunk_grid": {"name": "regular"}}, "chunk_shape is no list"),
    ({"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/../"}}},
     "the separator is neither"),
    ({"codecs": [sharding([3, 3])]}, "do not divide"),
    ({"chunk_grid": {"name": "rectilinear"}}, "chunk_shapes does not have 2 dimensions"),
    ({"chunk_grid": rectilinear(4, [3, 5])}, r"\[2, 3\] do not divide shards of \[4, 5\]"),
    ({"chunk_grid": rectilinear(4, [9, 4])}, "3 elements do not divide a shard of 4"),
    ({"chunk_grid": rectilinear(4, [3])}, "chunk_shapes covers 3 elements of 6"),
]  # fmt: skip
_ODD: list[Any] = [None, [], 3, "x", {}, {"metadata": None}]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (PLAIN, ""),
        (GROUP, ""),
        (consolidated({"a": PLAIN, "b": GROUP}), ""),
        *(({**GROUP, "consolidated_metadata": other}, "") for other in _ODD),
        ({**SHARDED, "codecs": [sharding([2, 3]), GZIP]}, "gzip after sharding_indexed"),
        ({**SHARDED, "codecs": [sharding([2, 3]), {"name": "x" * 10_000}]}, "xxx"),
        ({**SHARDED, "chunk_grid": {"name": "hexagonal"}}, "the chunk grid is hexagonal"),
        ({**SHARDED, "chunk_key_encoding": {"name": "fanout"}}, "chunk key encoding is fanout"),
        ({**SHARDED, "storage_transformers": [{"name": "mirror"}]}, "storage transformers"),
        ({**SHARDED, "x_warp": {"name": "warp", "must_understand": True}}, "extension x_warp must"),
        *(({**SHARDED, **changed}, "") for changed in ({"codecs": 7}, {"codecs": [7, 8]})),
        *(({**SHARDED, **changed}, reason) for changed, reason in _NOT_UNDERSTOOD),
    ],
)  # fmt: skip
def test_other_nodes_are_served_byte_by_byte(document: dict[str, Any], reason: str) -> None:
    """A node without removable shards is served byte for byte, with a short reason."""
    data = json.dumps(document, indent=7).encode()
    node = _read(data)

    assert (node.served, node.is_rewritten, node.array) == (data, False, None)
    assert re.search(reason, node.why_sharded)
    assert bool(reason) is bool(node.why_sharded)
    assert len(node.why_sharded) < 200


@pytest.mark.parametrize(
    "other",
    [PLAIN, GROUP, {**SHARDED, "shape": "wrong"}, {**SHARDED, "codecs": [sharding([3])]}, None,
     3, [], "x"],
)  # fmt: skip
def test_consolidated_arrays_are_rewritten(other: Any) -> None:
    """Each array in consolidated metadata is served without shards, beside damaged ones."""

    def nodes(array: Any) -> dict[str, Any]:
        return consolidated({"a": array, "b": other, "g": GROUP, "g/c": array})

    assert json.loads(_decode(nodes(SHARDED)).served) == nodes(_SERVED)


def test_sizes_are_served_as_integers() -> None:
    """Sizes that are stored as 8.0 are served as 8."""
    data = json.dumps(array_metadata([8, 6], [4, 6], [sharding([2, 3])]))
    served = json.loads(_read(re.sub(r"\[(\d), (\d)\]", r"[\1.0, \2.0]", data).encode()).served)

    assert json.dumps(served["shape"]) == "[8, 6]"
    assert json.dumps(served["chunk_grid"]["configuration"]) == '{"chunk_shape": [2, 3]}'


@pytest.mark.parametrize(
    ("encoding", "key"),
    [
        ({"name": "default"}, "c/3/1"),
        ("default", "c/3/1"),
        ({"name": "default", "configuration": {"separator": "."}}, "c.3.1"),
        ({"name": "v2"}, "3.1"),
        ("v2", "3.1"),
        ({"name": "v2", "configuration": {"separator": "/"}}, "3/1"),
    ],
)
def test_chunk_keys_have_the_encoding_of_the_array(encoding: Any, key: str) -> None:
    """Keys of inner chunks and of shards have the chunk key encoding of the array."""
    document = array_metadata([8, 8], [4, 4], [sharding([2, 2])], chunk_key_encoding=encoding)
    array = _decode({**document, "storage_transformers": []}).array

    assert array is not None
    assert array.keys.parse(key) == (3, 1)
    assert array.keys.format(array.shard((12, 4)).coords) == key


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "no JSON"),
        (b"[]", "no JSON object"),
        (b'{"zarr_format": 2}', "zarr_format is not 3"),
        (b'{"zarr_format": 3}', "node_type is neither array nor group: None"),
        (b'{"zarr_format": 3, "node_type": ["array"]}', "neither array nor group"),
    ],
)
def test_invalid_node_is_refused(data: bytes, reason: str) -> None:
    """A document that is no Zarr v3 node raises DecodeError with the reason."""
    with pytest.raises(DecodeError, match=reason):
        _read(data)


def test_deep_attributes_are_served_in_about_their_size() -> None:
    """Deeply nested attributes are served in less than twice their stored size."""
    attributes = b"[" * 300 + b",".join([b"0"] * 10_000) + b"]" * 300
    data = json.dumps({**SHARDED, "attributes": "@"}).encode().replace(b'"@"', attributes)

    assert len(_read(data).served) < 2 * len(data)


def test_size_of_a_node_includes_its_document() -> None:
    """The counted size of a node exceeds that of its served document."""
    node = _decode({**SHARDED, "attributes": {"x": "x" * 10_000}})

    assert node.nbytes > len(node.served) > 10_000


_TRANSPOSE = {"name": "transpose", "configuration": {"order": [1, 0]}}
_NESTED = array_metadata(
    [8, 8],
    [4, 4],
    [_TRANSPOSE, sharding([4, 2], [sharding([2, 2], [_TRANSPOSE, LITTLE])]), CRC],
    dimension_names=["y", "x"],
)


_RECTILINEAR = {**_NESTED, "chunk_grid": rectilinear([4, [8, 2]], 4)}


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(mutations(_NESTED, _RECTILINEAR, consolidated({"a": _NESTED})))
def test_wrong_metadata_is_refused_or_understood(document: Any) -> None:
    """Metadata with random wrong values decode to a node or raise DecodeError."""
    try:
        node = _decode(document)
    except DecodeError as error:
        assert len(str(error)) < 20_000  # noqa: PT017 - what it says is the fact
        return
    json.loads(node.served)
    if node.array is not None:
        array = node.array
        for coords in ((0,) * len(array.shape), (10**18,) * len(array.shape)):
            origin = array.origin(coords)
            if origin is None:
                continue
            shard = array.shard(origin)
            assert array.keys.owns(array.keys.format(shard.coords))
            for level, entry in zip(shard.levels, shard.entry, strict=True):
                assert 0 <= entry < level.index.entry_count


type Json = dict[str, Any]


def served(stored: Json) -> Json:
    """Return the served form of *stored*."""
    data = json.dumps(stored).encode()
    document: Json = json.loads(parse_node(stored, data).served)
    return document


async def translated(given: Json, stored: Json | None, **nodes: Json) -> Json:
    """Translate *given*, which replaces *stored*, above the stored *nodes*."""
    store = MemoryStore()
    for path, node in nodes.items():
        store.place(ROOT.join(f"{path}/zarr.json"), json.dumps(node).encode())
    old = None if stored is None else json.dumps(stored).encode()
    data = json.dumps(given, indent=1).encode()
    made = await NodeTranslator(ROOT, 2**20).translate(
        data, old, uncached_reads(store), run_in_thread
    )
    document: Json = json.loads(made)
    return document


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [2, 2]}}),
        ("chunk_grid", rectilinear(2, 3)),
        ("chunk_grid", None),
        ("codecs", [LITTLE]),
        ("codecs", [BIG, GZIP]),
        ("codecs", [LITTLE, {"name": "gzip", "configuration": {"level": 6}}]),
        ("codecs", [LITTLE, GZIP, CRC]),
        ("codecs", ["bytes", GZIP]),
        ("codecs", [{"name": "bytes"}, GZIP]),
        ("codecs", [7, 8]),
        ("codecs", "gzip"),
        ("data_type", "int16"),
        ("data_type", {"name": SHARDED["data_type"], "configuration": {"unit": "s"}}),
        ("data_type", None),
        ("fill_value", 1),
        ("fill_value", None),
        ("chunk_key_encoding", {"name": "v2"}),
        ("chunk_key_encoding", {"name": "default", "configuration": {"separator": "."}}),
        ("chunk_key_encoding", "unknown"),
        ("shape", [8, 6, 1]),
        ("shape", "large"),
        ("storage_transformers", [{"name": "x"}]),
    ],
)
async def test_change_that_would_misread_shards_is_refused(member: str, value: object) -> None:
    """A change by which shards would be misread raises ConflictError that names the member."""
    named = {
        "shape": r"(chunk_shape has 2 dimensions instead of 3|shape is no list of sizes: large)",
        "storage_transformers": "storage transformers change",
        "chunk_key_encoding": "(chunk_key_encoding cannot|the chunk key encoding is unknown)",
    }.get(member, f"{member} cannot change")

    with pytest.raises(ConflictError, match=f"^{named}.*: .* delete it with"):
        await translated({**served(SHARDED), member: value}, SHARDED)


_BOTH_WAYS_SHARDED = {**SHARDED, "codecs": [*SHARDED["codecs"], GZIP]}
"""Metadata that are served as stored."""
_WITHOUT_SHARDS = [
    None,
    *(json.dumps(node).encode() for node in (PLAIN, GROUP)),
    b"", b"{", b"[]", b'{"codecs": 7}', b'"text"', b"\xff",
]  # fmt: skip
_WITH_SHARDS_UNSERVED = [
    json.dumps(node).encode()
    for node in (
        _BOTH_WAYS_SHARDED,
        {**SHARDED, "shape": None},
        {**SHARDED, "shape": [1]},
        {**SHARDED, "chunk_grid": None},
    )
]
_OTHER_ARRAYS: list[Json] = [
    PLAIN,
    {**PLAIN, "codecs": ["odd"]},
]


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        *itertools.product([*_OTHER_ARRAYS, GROUP, ENTRY_POINT], _WITHOUT_SHARDS),
        *itertools.product(_OTHER_ARRAYS, _WITH_SHARDS_UNSERVED),
    ],
)
async def test_metadata_without_shards_is_stored_verbatim(
    given: Json, stored: bytes | None
) -> None:
    """Metadata without shards is stored verbatim in place of anything but a sharded array."""
    data = json.dumps(given, indent=1).encode()
    translator = NodeTranslator(ROOT, 2**20)

    assert (
        await translator.translate(data, stored, uncached_reads(MemoryStore()), run_in_thread)
        == data
    )


_ATTRIBUTES: Json = {"attributes": {"units": "nm"}}
_CHANGES: Json = {
    **_ATTRIBUTES, "shape": [80, 3], "dimension_names": ["y", None],
    "x_other": {"must_understand": False},
}  # fmt: skip
_UNSAID = sharding([2, 3], [LITTLE, "gzip"])
del _UNSAID["configuration"]["index_location"]
_INSIDE = [sharding([1, 3], [LITTLE]), GZIP]
_SHARDED_INSIDE = {**SHARDED, "codecs": [sharding([2, 3], _INSIDE)]}
_INDEX_FIRST_INSIDE = {
    **SHARDED,
    "codecs": [sharding([2, 3], [sharding([1, 3], [LITTLE], index_location="start"), GZIP])],
}
_INDEX_UNSAID = sharding([1, 3], [LITTLE])
del _INDEX_UNSAID["configuration"]["index_location"]
_LINED = {**SHARDED, "chunk_grid": rectilinear([4, [2, 3]], [6])}
_COMPLEX = {**SHARDED, "data_type": "complex64", "fill_value": ["NaN", 1]}
_OF_COMPLEX = {**served(_COMPLEX), "fill_value": ["NaN", 1.0]}


@pytest.mark.parametrize(
    ("given", "stored", "expected"),
    [
        ({**served(SHARDED), **_CHANGES}, SHARDED, {**SHARDED, **_CHANGES}),
        ({**SHARDED, **_ATTRIBUTES}, SHARDED, {**SHARDED, **_ATTRIBUTES}),
        ({**SHARDED, "codecs": [_UNSAID]}, SHARDED, SHARDED),
        ({**_BOTH_WAYS_SHARDED, **_ATTRIBUTES}, _BOTH_WAYS_SHARDED,
         {**_BOTH_WAYS_SHARDED, **_ATTRIBUTES}),
        (served(_SHARDED_INSIDE), _SHARDED_INSIDE, _SHARDED_INSIDE),
        (_OF_COMPLEX, _COMPLEX, {**_OF_COMPLEX, **{k: SHARDED[k] for k in _REWRITTEN}}),
        ({**served(_LINED), **_ATTRIBUTES, "shape": [10, 3]}, _LINED,
         {**_LINED, **_ATTRIBUTES, "shape": [10, 3]}),
        ({**_LINED, **_ATTRIBUTES}, _LINED, {**_LINED, **_ATTRIBUTES}),
    ],
    ids=["served and changed", "stored and changed", "stored, defaults left out",
         "served as it is", "chunks that are shards to clients", "pairs of real numbers",
         "shards of several sizes", "shards of several sizes, stored and changed"],
)  # fmt: skip
async def test_array_keeps_its_shards(given: Json, stored: Json, expected: Json) -> None:
    """An array keeps its shards when a client writes its served metadata, changed or not."""
    assert await translated(given, stored) == expected


_NO_SHARDS = "arrays are served without shards here"


@pytest.mark.parametrize(
    ("given", "stored", "nodes", "reason"),
    [
        (array_metadata([3], [3], [LITTLE]), SHARDED, {}, "delete it with"),
        (GROUP, SHARDED, {}, "a sharded array is stored here: .* delete it with"),
        (ENTRY_POINT, SHARDED, {}, "a sharded array is stored here: .* delete it with"),
        *((SHARDED, stored, {}, _NO_SHARDS) for stored in (None, PLAIN, GROUP)),
        ({**SHARDED, "codecs": [sharding([2, 2], [LITTLE, GZIP])]}, SHARDED, {}, _NO_SHARDS),
        ({**SHARDED, "codecs": [sharding([2, 3], [LITTLE, GZIP], index_location="start")]},
         SHARDED, {}, _NO_SHARDS),
        ({**SHARDED, "data_type": "int16"}, SHARDED, {}, "^data_type cannot change"),
        (SHARDED, _BOTH_WAYS_SHARDED, {}, _NO_SHARDS),
        ({**served(_LINED), "shape": [11, 6]}, _LINED, {},
         "^chunk_shapes covers 10 elements of 11: .* delete it with"),
        ({**SHARDED, "chunk_grid": rectilinear([4, [2, 4]], [6])}, _LINED, {}, _NO_SHARDS),
        ({**served(_SHARDED_INSIDE), "codecs": _INSIDE[:1]}, _SHARDED_INSIDE, {},
         "^codecs cannot change"),
        ({**served(_INDEX_FIRST_INSIDE), "codecs": [_INDEX_UNSAID, GZIP]}, _INDEX_FIRST_INSIDE, {},
         "^codecs cannot change"),
        ({**_OF_COMPLEX, "fill_value": ["NaN", 2]}, _COMPLEX, {}, "fill_value"),
        (consolidated({"g/a": {**served(SHARDED), "codecs": [LITTLE]}}), None, {"g/a": SHARDED},
         "^g/a: codecs cannot change"),
        (consolidated({"a": SHARDED}), None, {}, f"^a: {_NO_SHARDS}"),
    ],
)  # fmt: skip
async def test_change_of_sharding_is_refused(
    given: Json, stored: Json | None, nodes: dict[str, Json], reason: str
) -> None:
    """Metadata that would add, change or remove shards raises ConflictError."""
    with pytest.raises(ConflictError, match=reason):
        await translated(given, stored, **nodes)


@pytest.mark.parametrize(
    ("member", "stored", "given"),
    [
        ("chunk_key_encoding", {"name": "default"}, "default"),
        ("chunk_key_encoding", {"name": "v2"}, {"name": "v2", "configuration": {"separator": "."}}),
        ("data_type", "float32", {"name": "float32"}),
        ("data_type", "float32", {"name": "float32", "configuration": {}}),
        ("fill_value", "NaN", "NaN"),
        ("fill_value", "0x7fc00001", "0x7fc00001"),
        ("fill_value", 0, 0.0),
        ("fill_value", 0.1, 0.10000000149011612),
        ("fill_value", "-Infinity", "-Infinity"),
    ],
)
async def test_equivalent_spellings_of_values_are_accepted(
    member: str, stored: object, given: object
) -> None:
    """Equivalent spellings of encodings, data types and fill values are accepted and stored."""
    sharded = {**SHARDED, "data_type": "float32", member: stored}

    for one, other in ((stored, given), (given, stored)):
        before = {**sharded, member: one}
        made = await translated({**served(before), member: other}, before)

        assert made == {**before, member: other}


@pytest.mark.parametrize(
    ("data_type", "inner", "given"),
    [
        ("uint8", [LITTLE], [{"name": "bytes"}]),
        ("uint8", ["bytes"], [LITTLE]),
        ("uint8", [BIG], ["bytes"]),
        ("uint16", [{"name": "endian", "configuration": {"endian": "little"}}], [LITTLE]),
        ("uint16", [LITTLE, "crc32c"], [LITTLE, {"name": "crc32c", "configuration": {}}]),
        ("uint16", [LITTLE, "gzip"], [LITTLE, GZIP]),
        ("uint16", [LITTLE, GZIP], [LITTLE, "gzip"]),
        (
            "uint16",
            [{"name": "transpose", "configuration": {"order": "F"}}, LITTLE],
            [{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE],
        ),
    ],
)
async def test_equivalent_codecs_are_accepted(
    data_type: str, inner: list[Any], given: list[Any]
) -> None:
    """Equivalent spellings of codecs are accepted, and the stored ones are kept."""
    stored = {**SHARDED, "codecs": [sharding([2, 3], inner)], "data_type": data_type}

    assert await translated({**served(stored), "codecs": given}, stored) == stored


async def test_consolidated_metadata_keeps_shards() -> None:
    """Consolidated metadata is stored with the shards of each stored array."""
    others = {"g": GROUP, "p": PLAIN}
    given = consolidated({"a": served(SHARDED), "g/b": served(SHARDED), **others})

    made = await translated(given, None, **{"a": SHARDED, "g/b": SHARDED, **others})

    assert made == consolidated({"a": SHARDED, "g/b": SHARDED, **others})


async def test_consolidated_metadata_without_shards_is_stored_verbatim() -> None:
    """Consolidated metadata without stored shards, or malformed, is stored verbatim."""
    for sent in (
        consolidated({"a": PLAIN, "b": GROUP}),
        {**GROUP, "consolidated_metadata": None},
        {**GROUP, "consolidated_metadata": {"metadata": []}},
        consolidated({"odd": 7}),
    ):
        assert await translated(sent, None, a=PLAIN) == sent


@pytest.mark.parametrize("path", ["", "..", "a//b", "../a", "a/.", "/a", "a/", "\ud800"])
async def test_consolidated_metadata_with_an_invalid_path_is_refused(path: str) -> None:
    """Consolidated metadata with a path outside of the group raises BadBodyError."""
    with pytest.raises(BadBodyError, match="name no node"):
        await translated(consolidated({path: PLAIN}), None)


@pytest.mark.parametrize(
    "given",
    [b"", b"{", b"[]", b"7", b"\xff{}", b"{}", b'{"zarr_format": 2, "node_type": "array"}',
     b'{"zarr_format": 3}', b'{"zarr_format": 3, "node_type": "table"}',
     b'{"zarr_format": 3, "node_type": ["array"]}', b"[" * 100_000,
     b'{"zarr_format":3,"node_type":"group","a":' + b"[" * 100_000],
    ids=lambda given: given[:40],
)  # fmt: skip
async def test_body_without_a_node_is_refused(given: bytes) -> None:
    """A written document that is no node raises BadBodyError."""
    with pytest.raises(BadBodyError):
        await NodeTranslator(ROOT, 2**20).translate(
            given, None, uncached_reads(MemoryStore()), run_in_thread
        )
