"""The entry point, metadata of arrays, and what is served in their place."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.formats.documents import DocumentDecoder, MarkerDecoder
from app.formats.reading import DecodeError
from app.formats.zarr_sharding_indexed.layout import Zarr3
from app.formats.zarr_sharding_indexed.metadata import Node
from app.formats.zarr_storage_transformer.layout import Zarr2022
from app.formats.zarr_storage_transformer.metadata import (
    ArraySpec,
    Document,
    Hierarchy,
    parse_array_document,
    parse_consolidated,
)
from tests.formats.zarr_sharding_indexed.case import array_metadata as array_metadata_v3
from tests.formats.zarr_storage_transformer.case import (
    BY_ZARR_PYTHON,
    CORE,
    ENTRY_POINT,
    SHARDING,
    array_metadata,
    encode,
    sharding,
)

_LIMIT = 2**20
_SHARDED = array_metadata([5, 7], [2, 2], [sharding([2, 2])], dimension_separator="/")
_SERVED = array_metadata([5, 7], [2, 2], dimension_separator="/")
_OTHER = {"extension": "https://example.org/mirror/1.0", "type": "mirror", "configuration": {}}
_MUST = {"extension": "https://example.org/warp/1.0", "must_understand": True}
_MAY = {"extension": "https://example.org/hint/1.0", "must_understand": False}

_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)
)
_members = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def _open(document: Any) -> Any:
    """Understand a ``zarr.json`` as the service does, draft or not."""
    dialects = (Zarr2022(0, _LIMIT), Zarr3(0, _LIMIT))
    return MarkerDecoder(dialects, _LIMIT)(encode(document)).spec


def _read(data: bytes) -> Document:
    return DocumentDecoder(parse_array_document, _LIMIT)(data)


def _decode(document: Any) -> Document:
    return _read(encode(document))


def _array(**members: Any) -> ArraySpec:
    array = _decode({**_SHARDED, **members}).array
    assert array is not None
    return array


def _configured(chunks_per_shard: Any, shape: list[int] | None = None) -> dict[str, Any]:
    shape = [5, 7] if shape is None else shape
    return array_metadata(shape, [2] * len(shape), [sharding(chunks_per_shard)])


@pytest.mark.parametrize(
    "uri",
    [
        "https://purl.org/zarr/spec/protocol/core/3.0",
        "http://purl.org/zarr/spec/protocol/core/3.0",
        "https://purl.org/zarr/spec/protocol/core/3.1",
        "https://purl.org/zarr/spec/core/3.0",
        "https://purl.org/zarr/spec/core/3.0/",
    ],
)
def test_an_entry_point_is_known_by_its_format(uri: str) -> None:
    """The URI of the protocol changed in 2022; minor versions can be read by who knows none."""
    assert _open({**ENTRY_POINT, "zarr_format": uri}) == Hierarchy(".json")


@pytest.mark.parametrize(
    "uri",
    [
        "https://purl.org/zarr/spec/protocol/core/2.0",
        "https://purl.org/zarr/spec/protocol/core/4.0",
        "https://purl.org/zarr/spec/protocol/core/33.0",
        "https://example.org/zarr/spec/protocol/core/3.0",
        "3",
        None,
    ],
)
def test_other_formats_are_not_of_the_draft(uri: Any) -> None:
    """What else stands there is left to the final specification, which refuses it."""
    with pytest.raises(DecodeError, match="zarr_format is not 3"):
        _open({**ENTRY_POINT, "zarr_format": uri})


def test_metadata_of_the_final_specification_stay_with_it() -> None:
    """A number is no URI."""
    assert isinstance(_open(array_metadata_v3([4], [2], [])), Node)


def test_the_suffix_has_a_default() -> None:
    """Without a ``metadata_key_suffix`` it is ``.json``."""
    assert _open({"zarr_format": CORE, "metadata_encoding": CORE}) == Hierarchy(".json")


@pytest.mark.parametrize("options", [{}, {"metadata_key_suffix": ".json"}])
def test_the_encoding_may_be_an_object(options: dict[str, str]) -> None:
    """As the draft of November 2022 has it."""
    encoding = {"type": "json", **options}

    assert _open({"zarr_format": CORE, "metadata_encoding": encoding}) == Hierarchy(".json")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"metadata_encoding": "https://example.org/cbor"}, "not encoded as JSON"),
        ({"metadata_encoding": {"type": "cbor"}}, "not encoded as JSON"),
        ({"metadata_encoding": None}, "not encoded as JSON"),
        ({"extensions": [_MAY, _MUST]}, "example.org/warp/1.0 must be understood"),
    ],
)
def test_a_hierarchy_that_is_not_understood_says_why(changed: Any, reason: str) -> None:
    """Its arrays cannot be told, so they are served as they are."""
    assert reason in _open({**ENTRY_POINT, **changed}).why_sharded


def test_an_extension_may_be_ignored_that_says_so() -> None:
    """Only ``must_understand`` keeps arrays sharded."""
    assert _open({**ENTRY_POINT, "extensions": [_MAY]}) == Hierarchy(".json")
    assert _array(extensions=[_MAY])


def test_a_suffix_that_is_none_is_refused() -> None:
    """It could not stand in a key."""
    with pytest.raises(DecodeError, match="metadata_key_suffix is no string: 3"):
        _open({**ENTRY_POINT, "metadata_key_suffix": 3})


def test_a_transformed_array_is_served_without_the_transformer() -> None:
    """The member is gone, and nothing else has changed."""
    document = _decode(_SHARDED)

    assert json.loads(document.served) == _SERVED
    assert document.is_rewritten


def test_what_zarr_python_wrote_is_understood() -> None:
    """Its spelling, member for member."""
    document = _decode(BY_ZARR_PYTHON)
    expected = {k: v for k, v in BY_ZARR_PYTHON.items() if k != "storage_transformers"}

    assert json.loads(document.served) == expected
    assert document.array is not None
    assert document.array.grid.chunks_per_shard == (2, 3)
    assert document.array.identifiers.parse("c2.3") == (2, 3)


@given(st.dictionaries(st.text(max_size=8), _members, max_size=4), _members)
def test_every_other_member_is_untouched(extra: dict[str, Any], attributes: Any) -> None:
    """Attributes and members that nobody knows are served as they are stored, in their order."""
    document = {**extra, **_SHARDED, "attributes": attributes}
    served = _decode(document).served
    del document["storage_transformers"]

    assert served == encode(document)


@pytest.mark.parametrize(
    "document",
    [
        _SERVED,
        {**_SERVED, "storage_transformers": []},
        {**_SERVED, "storage_transformers": None},
        {"anything": "else"},
        {},
    ],
)
def test_what_has_no_transformer_is_served_byte_by_byte(document: dict[str, Any]) -> None:
    """Other documents keep even their spaces, and need not be understood."""
    data = json.dumps(document, indent=7).encode()

    assert _read(data) == Document(data, is_rewritten=False)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"storage_transformers": [_OTHER]}, "transformer is https://example.org/mirror/1.0"),
        ({"storage_transformers": [sharding([2, 2]), _OTHER]}, "are stacked"),
        ({"storage_transformers": [_OTHER, sharding([2, 2])]}, "are stacked"),
        ({"storage_transformers": [sharding([2, 2])] * 2}, "are stacked"),
        ({"storage_transformers": [{"name": "sharding"}]}, "transformer is None"),
        ({"storage_transformers": [{**sharding([2, 2]), "type": "sorted"}]}, "format is sorted"),
        ({"storage_transformers": [{"extension": SHARDING}]}, "format is None"),
        ({"chunk_grid": {"type": "rectilinear"}}, "the chunk grid is rectilinear"),
        ({"extensions": [_MUST]}, "example.org/warp/1.0 must be understood"),
    ],
)
def test_what_is_not_understood_is_served_as_it_is(changed: dict[str, Any], reason: str) -> None:
    """The array is passed on with its transformers, and the reason is told."""
    data = json.dumps({**_SHARDED, **changed}, indent=3).encode()
    document = _read(data)

    assert (document.served, document.is_rewritten, document.array) == (data, False, None)
    assert reason in document.why_sharded


def test_a_reason_is_short_however_long_a_name() -> None:
    """Names come from outside and are cut where they are told."""
    document = _decode({**_SHARDED, "storage_transformers": [{"extension": "x" * 10_000}]})

    assert 0 < len(document.why_sharded) < 200


@pytest.mark.parametrize(
    "uri",
    [
        SHARDING,
        SHARDING.replace("https", "http"),
        SHARDING.replace("_", "-"),
        SHARDING.replace("1.0", "1.1"),
    ],
)
def test_the_transformer_is_known_by_its_uri(uri: str) -> None:
    """The draft's example has an underscore, its heading a hyphen and no ``s``."""
    assert _array(storage_transformers=[{**sharding([2, 2]), "extension": uri}])


@pytest.mark.parametrize(("separator", "identifier"), [({}, "c1/3"), ({"separator": "."}, "c1.3")])
def test_the_separator_is_that_of_the_chunk_grid(separator: Any, identifier: str) -> None:
    """It is a slash unless told; another member is none of the draft's."""
    grid = {"type": "regular", "chunk_shape": [2, 2], **separator}
    array = _array(chunk_grid=grid, dimension_separator="?")

    assert array.identifiers.parse(identifier) == (1, 3)


def test_the_grid_counts_chunks_at_the_edge() -> None:
    """Five and seven elements are three and four chunks of two."""
    assert _array().grid.chunk_grid_shape == (3, 4)


def test_an_array_without_elements_has_no_chunk() -> None:
    """Along a dimension of no length nothing begins."""
    assert not _array(shape=[0, 7]).grid.holds((0, 0))


@pytest.mark.parametrize(
    ("chunks_per_shard", "padded"), [([2], (2, 1, 1)), ([2, 3], (2, 3, 1)), ([2, 3, 4], (2, 3, 4))]
)
def test_last_dimensions_that_are_left_out_are_not_sharded(
    chunks_per_shard: list[int], padded: tuple[int, ...]
) -> None:
    """zarr-python wrote ``chunks_per_shard=2``, and sub-array types, with too few numbers."""
    array = _decode(_configured(chunks_per_shard, [5, 7, 9])).array

    assert array is not None
    assert array.grid.chunks_per_shard == padded


@pytest.mark.parametrize(
    ("chunks_per_shard", "key", "entry_count"), [([], "c", 1), ([1], "c0", 1), ([3], "c0", 3)]
)
def test_the_chunk_of_an_array_without_dimensions(
    chunks_per_shard: list[int], key: str, entry_count: int
) -> None:
    """It is ``c``, but ``c0`` where zarr-python wrote it, which then counts one dimension."""
    array = _decode(_configured(chunks_per_shard, [])).array

    assert array is not None
    coords = array.identifiers.parse(key)
    assert coords is not None
    assert array.grid.holds(coords)
    assert array.identifiers.format(array.grid.shard(coords)) == key
    assert array.grid.index.entry_count == entry_count


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "no object"),
        (None, "no object"),
        ({**_SHARDED, "storage_transformers": "sharding"}, "no list of objects"),
        ({**_SHARDED, "storage_transformers": {"a": 1}}, "no list of objects"),
        ({**_SHARDED, "storage_transformers": ["sharding"]}, "no list of objects"),
        ({**_SHARDED, "storage_transformers": [{**sharding(0), "configuration": 3}]}, "no config"),
        ({**_SHARDED, "shape": None}, "shape is no list of sizes"),
        ({**_SHARDED, "shape": [5, -7]}, "shape is no list of sizes"),
        ({**_SHARDED, "chunk_grid": "regular"}, "the chunk grid is no object"),
        ({**_SHARDED, "chunk_grid": {"type": "regular"}}, "chunk_shape is no list"),
        (array_metadata([5, 7], [2], [sharding([2, 2])]), "chunk_shape has 1 dimensions"),
        (array_metadata([5, 7], [2, 0], [sharding([2, 2])]), "chunk_shape is no list of sizes"),
        (array_metadata([5, 7], [2, 2], [sharding([2, 2])], separator="-"), "the separator is"),
        (_configured([2, 0]), "chunks_per_shard is no list of sizes"),
        (_configured([2, -1]), "chunks_per_shard is no list of sizes"),
        (_configured([2, True]), "chunks_per_shard is no list of sizes"),
        (_configured([2, 2.0]), "chunks_per_shard is no list of sizes"),
        (_configured(["2", 2]), "chunks_per_shard is no list of sizes"),
        (_configured(2), "chunks_per_shard is no list of sizes"),
        (_configured(None), "chunks_per_shard is no list of sizes"),
        (_configured([2, 2**63]), r"chunks_per_shard has a size above 2\^63-1"),
        (_configured([2, 2, 2]), "chunks_per_shard has 3 dimensions instead of 2"),
        (_configured([]), "chunks_per_shard has 0 dimensions instead of 2"),
        (_configured([2, 2], []), "chunks_per_shard has 2 dimensions instead of 0"),
    ],
)
def test_damaged_metadata_are_refused(document: Any, reason: str) -> None:
    """What contradicts itself or the draft is an error that says what is wrong."""
    with pytest.raises(DecodeError, match=reason):
        _decode(document)


@pytest.mark.parametrize("data", [b"", b"{", b"\x80", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    """So is anything that no JSON parser takes."""
    with pytest.raises(DecodeError, match="no JSON"):
        _read(data)


def test_a_document_weighs_at_least_its_bytes() -> None:
    """The memory of a document is counted."""
    document = _decode({**_SHARDED, "attributes": {"x": "x" * 10_000}})

    assert document.nbytes > len(document.served) > 10_000


def _consolidated(nodes: Any) -> dict[str, Any]:
    return {"zarr_consolidated_format": 1, "metadata": nodes}


def test_consolidated_arrays_are_rewritten() -> None:
    """In consolidated metadata each array is as it is served by itself."""
    nodes = {
        "zarr.json": ENTRY_POINT,
        "meta/root/a.array.json": _SHARDED,
        "meta/root/b.array.json": _SERVED,
        "meta/root/g.group.json": {"attributes": {}},
    }
    document = parse_consolidated(_consolidated(nodes), b"")

    assert document.is_rewritten
    assert json.loads(document.served) == _consolidated(
        {**nodes, "meta/root/a.array.json": _SERVED}
    )


@pytest.mark.parametrize(
    "other",
    [_configured([0, 0]), {**_SHARDED, "storage_transformers": [_OTHER]}, None, 3, [], "x"],
)
def test_a_consolidated_node_that_is_not_understood_stays(other: Any) -> None:
    """What is wrong with one array does not keep the others from readers."""
    document = parse_consolidated(_consolidated({"a": _SHARDED, "b": other}), b"")

    assert json.loads(document.served) == _consolidated({"a": _SERVED, "b": other})


@pytest.mark.parametrize(
    "document", [None, [], 3, {}, _consolidated(None), _consolidated({"a": _SERVED})]
)
def test_other_consolidated_metadata_stay(document: Any) -> None:
    """Where nothing changes the bytes are those that are stored."""
    assert parse_consolidated(document, b"stored") == Document(b"stored", is_rewritten=False)


_hostile = st.one_of(
    _members,
    st.floats(),
    st.sampled_from([0, 1, 2, 2**63, 2**64 - 1, 10**4000, -1, True]),
    st.sampled_from(["regular", "indexed", "/", ".", "json", CORE, SHARDING, "\ud800"]),
)


def _positions(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(document, dict | list):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield from _positions(document[key], (*path, key))


@st.composite
def _mutations(draw: st.DrawFn, document: Any) -> Any:
    """Draw *document* with wrong values at some positions, and others missing."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_positions(document))))
        if not path:
            return draw(_hostile)
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        if draw(st.booleans()):
            parent[path[-1]] = draw(_hostile)
        else:
            del parent[path[-1]]
    return document


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(_mutations({**BY_ZARR_PYTHON, "extensions": [_MAY]}))
def test_wrong_metadata_are_refused_or_understood(document: Any) -> None:
    """Whatever stands at any position, decoding gives a document or `DecodeError`."""
    try:
        decoded = _decode(document)
    except DecodeError as error:
        assert len(str(error)) < 20_000  # noqa: PT017 - what it says is the fact
        return
    json.loads(decoded.served)
    if (array := decoded.array) is not None:
        coords = (0,) * array.identifiers.ndim
        assert array.grid.entry(coords) == 0
        assert array.identifiers.parse(array.identifiers.format(coords)) == coords


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(_mutations({**ENTRY_POINT, "extensions": [_MAY]}))
def test_a_wrong_entry_point_is_refused_or_understood(document: Any) -> None:
    """Whatever stands at any position, decoding gives a hierarchy or `DecodeError`."""
    try:
        assert isinstance(_open(document), Hierarchy)
    except DecodeError as error:
        assert len(str(error)) < 20_000  # noqa: PT017 - what it says is the fact
