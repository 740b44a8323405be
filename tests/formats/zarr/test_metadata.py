"""``zarr.json``: what is read in it, and what is served in its place."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.core.metadata.v3 import ArrayV3Metadata

from app.formats.documents import MarkerDecoder
from app.formats.reading import DecodeError
from app.formats.zarr.layout import Zarr3
from app.formats.zarr.metadata import Node
from tests.formats.mutating import members, mutations
from tests.formats.zarr.building import CRC, LITTLE, array_metadata, sharding
from tests.formats.zarr.nesting import Nesting, nestings

_LIMIT = 2**20
_GZIP = {"name": "gzip", "configuration": {"level": 1}}
_PLAIN = array_metadata([8], [2], [LITTLE, _GZIP])
_SHARDED = array_metadata([8], [4], [sharding([2], [LITTLE, _GZIP])])
_SERVED = {
    **_SHARDED,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
    "codecs": [LITTLE, _GZIP],
}
_GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_REWRITTEN = ("chunk_grid", "codecs")

_extra = st.dictionaries(st.text(max_size=8), members, max_size=4).map(
    lambda extra: {k: v for k, v in extra.items() if k not in {*_SHARDED, "storage_transformers"}}
)


def _decode(document: Any) -> Node:
    return _read(json.dumps(document).encode())


def _read(data: bytes, limit_bytes: int = _LIMIT) -> Node:
    node = MarkerDecoder((Zarr3(0, limit_bytes),), limit_bytes)(data).spec
    assert isinstance(node, Node)
    return node


def _consolidated(nodes: dict[str, Any]) -> dict[str, Any]:
    inline = {"kind": "inline", "must_understand": False, "metadata": nodes}
    return {**_GROUP, "consolidated_metadata": inline}


@given(nestings(), _extra, members)
def test_every_other_member_is_untouched(
    nesting: Nesting, extra: dict[str, Any], attributes: Any
) -> None:
    """Attributes and members that nobody knows are served as they are stored, in their order."""
    document = {**nesting.document, "attributes": attributes, **extra}
    served = json.loads(_decode(document).served)

    assert list(served) == list(document)
    for name in document.keys() - set(_REWRITTEN):
        assert json.dumps(served[name]) == json.dumps(document[name])


@given(nestings(letters=False))
def test_zarr_python_accepts_what_is_served(nesting: Nesting) -> None:
    """The document is valid metadata of an unsharded array of the same shape."""
    served = ArrayV3Metadata.from_dict(json.loads(_decode(nesting.document).served))

    assert served.shape == nesting.shape
    assert served.shards is None
    assert served.chunk_grid.to_dict()["configuration"] == {
        "chunk_shape": nesting.inner_chunk_shape
    }


@given(nestings())
def test_what_is_served_is_not_sharded_any_more(nesting: Nesting) -> None:
    """To rewrite what was rewritten changes nothing."""
    served = _decode(nesting.document).served
    again = _read(served)

    assert (again.served, again.is_rewritten, again.array) == (served, False, None)


@pytest.mark.parametrize("document", [_PLAIN, _GROUP, _consolidated({"a": _PLAIN, "b": _GROUP})])
def test_what_is_not_sharded_is_served_byte_by_byte(document: dict[str, Any]) -> None:
    """Other nodes keep even their spaces."""
    data = json.dumps(document, indent=7).encode()
    node = _read(data)

    assert (node.served, node.is_rewritten, node.array) == (data, False, None)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"codecs": [sharding([2]), _GZIP]}, "gzip after sharding_indexed"),
        ({"chunk_grid": {"name": "rectilinear"}}, "the chunk grid is rectilinear"),
        ({"chunk_key_encoding": {"name": "fanout"}}, "the chunk key encoding is fanout"),
        ({"storage_transformers": [{"name": "mirror"}]}, "storage transformers"),
    ],
)
def test_what_cannot_be_unsharded_is_served_as_it_is(changed: dict[str, Any], reason: str) -> None:
    """The array is passed on, and the reason is told."""
    data = json.dumps({**_SHARDED, **changed}).encode()
    node = _read(data)

    assert (node.served, node.is_rewritten, node.array) == (data, False, None)
    assert reason in node.why_sharded


def test_a_reason_is_short_however_long_a_name() -> None:
    """Names come from outside and are cut where they are told."""
    node = _decode({**_SHARDED, "codecs": [sharding([2]), {"name": "x" * 10_000}]})

    assert 0 < len(node.why_sharded) < 200


def test_no_storage_transformers_are_none() -> None:
    """An empty list of storage transformers changes nothing."""
    assert _decode({**_SHARDED, "storage_transformers": []}).array is not None


def test_consolidated_arrays_are_rewritten() -> None:
    """In a group's consolidated metadata each sharded array is served as by itself."""
    nodes = {"a": _SHARDED, "b": _PLAIN, "g": _GROUP, "g/c": _SHARDED}
    served = json.loads(_decode(_consolidated(nodes)).served)

    assert served == _consolidated({"a": _SERVED, "b": _PLAIN, "g": _GROUP, "g/c": _SERVED})


def test_groups_consolidated_inside_of_groups_are_rewritten() -> None:
    """Consolidated metadata may hold groups with consolidated metadata of their own."""
    node = _decode(_consolidated({"g": _consolidated({"a": _SHARDED})}))

    assert json.loads(node.served) == _consolidated({"g": _consolidated({"a": _SERVED})})


@pytest.mark.parametrize(
    "other",
    [{**_SHARDED, "shape": "wrong"}, {**_SHARDED, "codecs": [sharding([3])]}, None, 3, [], "x"],
)
def test_a_damaged_node_among_consolidated_ones_stays(other: Any) -> None:
    """What is wrong with one array does not keep the group or its other arrays from readers."""
    served = json.loads(_decode(_consolidated({"a": _SHARDED, "b": other})).served)

    assert served == _consolidated({"a": _SERVED, "b": other})


@pytest.mark.parametrize("consolidated", [None, [], 3, "x", {}, {"metadata": None}])
def test_other_consolidated_metadata_stays(consolidated: Any) -> None:
    """What is not understood is passed on."""
    document = {**_GROUP, "consolidated_metadata": consolidated}

    assert not _decode(document).is_rewritten


@pytest.mark.parametrize(
    ("encoding", "key"),
    [
        ({"name": "default"}, "c/3"),
        ("default", "c/3"),
        ({"name": "default", "configuration": {"separator": "."}}, "c.3"),
        ({"name": "v2"}, "3"),
        ({"name": "v2", "configuration": {"separator": "/"}}, "3"),
    ],
)
def test_chunks_are_named_by_the_encoding_of_the_array(encoding: Any, key: str) -> None:
    """Inner chunks and shards are spelled in the same way."""
    array = _decode({**_SHARDED, "chunk_key_encoding": encoding}).array

    assert array is not None
    assert array.keys.parse(key) == (3,)
    assert array.shard_key((12,)) == key


def test_v2_keys_have_dots_unless_told() -> None:
    """The separator of the encoding ``v2`` is a dot, that of ``default`` a slash."""
    document = array_metadata([8, 8], [4, 4], [sharding([2, 2])], chunk_key_encoding="v2")
    array = _decode(document).array

    assert array is not None
    assert array.shard_key((4, 0)) == "1.0"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe{", "no JSON"),
        (b"\x80", "no JSON"),
        (b"[]", "no JSON object"),
        (b"null", "no JSON object"),
        (b"3", "no JSON object"),
        (b'{"zarr_format": 2}', "zarr_format is not 3"),
        (b'{"zarr_format": 3}', "node_type is neither array nor group: None"),
        (b'{"zarr_format": 3, "node_type": ["array"]}', "neither array nor group"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a":' * 100_000, "no JSON"),
        (b'{"zarr_format": 1' + b"0" * 100_000 + b"}", "no JSON"),
    ],
)
def test_what_is_no_metadata_is_refused(data: bytes, reason: str) -> None:
    """Anything but a Zarr v3 node is an error that says what is wrong."""
    with pytest.raises(DecodeError, match=reason):
        _read(data)


def test_metadata_over_the_limit_is_refused() -> None:
    """One byte more than the limit is not even parsed."""
    data = json.dumps(_SHARDED).encode()

    assert _read(data, len(data)).kind == "array"
    with pytest.raises(DecodeError, match=f"more than {len(data)} bytes"):
        _read(data + b" ", len(data))


def test_deep_attributes_are_served_in_about_their_size() -> None:
    """Rewriting does not multiply what is deeply nested."""
    attributes = b"[" * 300 + b",".join([b"0"] * 10_000) + b"]" * 300
    data = json.dumps({**_SHARDED, "attributes": "@"}).encode().replace(b'"@"', attributes)

    assert len(_read(data).served) < 2 * len(data)


def test_a_node_weighs_at_least_its_document() -> None:
    """The memory of a node is counted."""
    node = _decode({**_SHARDED, "attributes": {"x": "x" * 10_000}})

    assert node.nbytes > len(node.served) > 10_000


_TRANSPOSE = {"name": "transpose", "configuration": {"order": [1, 0]}}
_NESTED = array_metadata(
    [8, 8],
    [4, 4],
    [_TRANSPOSE, sharding([4, 2], [sharding([2, 2], [_TRANSPOSE, LITTLE])]), CRC],
    dimension_names=["y", "x"],
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(mutations(_NESTED, _consolidated({"a": _NESTED})))
def test_wrong_metadata_is_refused_or_understood(document: Any) -> None:
    """Whatever stands at any position, decoding gives a node or `DecodeError`."""
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
            assert array.keys.owns(array.shard_key(origin))
            for level in array.unsharded.levels:
                assert 0 <= level.entry(origin) < level.index.entry_count
