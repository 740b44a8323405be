"""Keys, entry point and metadata of the draft of 2022, as read, served and written."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import BadBodyError, ConflictError
from app.formats.documents import DocumentDecoder, MarkerDecoder
from app.formats.reading import DecodeError
from app.formats.zarr.draft_2022 import (
    ArrayDocument,
    ArrayParser,
    ArrayTranslator,
    ConsolidatedTranslator,
    DataKey,
    DraftKeys,
    Hierarchy,
    MetadataKeys,
    Zarr2022,
    describe,
    parse_consolidated,
    restore,
)
from app.formats.zarr.layout import Zarr3
from app.formats.zarr.metadata import ArraySpec, Restorer
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.formats.mutating import members, mutations
from tests.formats.zarr.draft import (
    BY_ZARR_PYTHON,
    CORE,
    ENTRY_POINT,
    SHARDING,
    array_metadata,
    encode,
    sharding,
)
from tests.support.resolving import ROOT

type Json = dict[str, Any]

_LIMIT = 2**20
_SHARDED = array_metadata([5, 7], [2, 2], [sharding([2, 2])], dimension_separator="/")
_SERVED = array_metadata([5, 7], [2, 2], dimension_separator="/")
_OTHER = {"extension": "https://example.org/mirror/1.0", "type": "mirror", "configuration": {}}
_MUST = {"extension": "https://example.org/warp/1.0", "must_understand": True}
_MAY = {"extension": "https://example.org/hint/1.0", "must_understand": False}

_numbers = st.integers(0, 10**19 - 1)
_pieces = st.sampled_from(["c", "/", ".", "0", "1", "10", "07", "-1", "+1", "1_0", " ", "\n", "c1"])
_texts = st.one_of(
    st.text(),
    st.text("c/.0123456789"),
    st.lists(_pieces | st.characters(categories=["Nd"])).map("".join),
)
_names = st.text("abc01.-_", min_size=1).filter(lambda name: name.strip("."))
_paths = st.lists(_names, max_size=4).map("/".join)
_keys = st.builds(DraftKeys, _paths, st.sampled_from(["/", "."]), st.integers(0, 4))


@given(_keys, st.data())
def test_keys_that_are_formatted_parse(keys: DraftKeys, data: st.DataObject) -> None:
    """Whatever nodes are called, one array owns a data key, with the coordinates in it."""
    coords = data.draw(st.tuples(*[_numbers] * keys.ndim))
    key = keys.format(coords)

    assert keys.parse(key) == coords
    assert keys.owns(key)
    assert DraftKeys(f"{keys.path}x", keys.separator, keys.ndim).parse(key) is None


@given(_keys, _texts)
def test_keys_that_parse_are_canonical(keys: DraftKeys, text: str) -> None:
    """Each chunk has one key, and each data key one reading."""
    for key in (text, f"data/root/{text}", f"data/root/c{text}", f"data/root/{text}/c0"):
        coords, split = keys.parse(key), DataKey.parse(key)

        assert coords is None or keys.format(coords) == key
        assert split is None or split.format() == key


@pytest.mark.parametrize(
    ("key", "split"),
    [
        ("data/root/foo/baz/c96/18", DataKey("foo/baz", "c96/18")),
        ("data/root/c0.0", DataKey("", "c0.0")),
        ("data/root/c", DataKey("", "c")),
        ("data/root/foo/c", DataKey("foo", "c")),
        ("data/root/c0/c1/2", DataKey("c0", "c1/2")),
        ("data/root/c0/5/c1", DataKey("c0/5", "c1")),
        *dict.fromkeys(
            ["", "zarr.json", "data/root", "data/root/foo", "data/root/foo/checksums",
             "data/root/foo/c0x", "data/root/foo/c0/", "data/root/foo/c0//1", "data/root/foo/c/0",
             "data/root/foo/C0", "data/root//c0", "data/root/foo//c0", "data/root//foo/c0",
             "data/rooted/c0/0", "data/c0/0", "c0/0", "meta/root/c0/0", "x/data/root/c0/0"]
        ).items(),
    ],
)  # fmt: skip
def test_data_keys(key: str, split: DataKey | None) -> None:
    """The identifier begins at the last ``c``; keys that are not below ``data/root`` have none."""
    assert DataKey.parse(key) == split


@pytest.mark.parametrize(
    ("path", "suffix", "key"),
    [
        ("", ".json", "meta/root.array.json"),
        ("foo/bar", ".json", "meta/root/foo/bar.array.json"),
        ("foo/bar", "", "meta/root/foo/bar.array"),
        ("a.array.json", ".json", "meta/root/a.array.json.array.json"),
    ],
)
@given(_paths, st.sampled_from([".json", "", ".yaml"]))
def test_metadata_keys(path: str, suffix: str, key: str, any_path: str, other: str) -> None:
    """The path, ``.array`` and the suffix of the entry point; each key has one path."""
    assert (MetadataKeys(suffix).format(path), MetadataKeys(suffix).parse(key)) == (key, path)
    assert MetadataKeys(other).parse(MetadataKeys(other).format(any_path)) == any_path


def test_other_keys_are_no_metadata_of_arrays() -> None:
    """Groups, other suffixes and other spellings."""
    for key in (
        "", "zarr.json", "meta/root.group.json", "meta/root/foo.group.json", ".array.json",
        "meta/root/foo.array.yaml", "meta/root/foo.array", "meta/root/.array.json",
        "foo.array.json", "meta/root/foo/.array.json", "meta/rootfoo.array.json",
        "data/root/foo.array.json", "x/meta/root/foo.array.json",
    ):  # fmt: skip
        assert MetadataKeys(".json").parse(key) is None, key


def _open(document: Any) -> Any:
    """Understand a ``zarr.json`` as the service does, draft or not."""
    dialects = (Zarr2022(0, _LIMIT), Zarr3(0, _LIMIT))
    return MarkerDecoder(dialects, _LIMIT)(encode(document)).spec


def _read(data: bytes) -> ArrayDocument:
    return DocumentDecoder(ArrayParser("a"), _LIMIT)(data)


def _decode(document: Any) -> ArrayDocument:
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
def test_an_entry_point_is_known_by_its_format(document: Json) -> None:
    """The URI changed in 2022; the suffix has a default, also where the encoding is an object."""
    assert _open(document) == Hierarchy(".json")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        *(({"zarr_format": uri}, "zarr_format is not 3")
          for uri in (f"{_URI}protocol/core/2.0", f"{_URI}protocol/core/4.0",
                      f"{_URI}protocol/core/33.0",
                      "https://example.org/zarr/spec/protocol/core/3.0", "3", None)),
        ({"metadata_key_suffix": 3}, "metadata_key_suffix is no string: 3"),
    ],
)  # fmt: skip
def test_other_entry_points_are_refused(changed: Json, reason: str) -> None:
    """They are left to the final specification; a suffix has to stand in a key."""
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
def test_a_hierarchy_that_is_not_understood_says_why(changed: Any, reason: str) -> None:
    """None of its arrays is unsharded."""
    assert reason in _open({**ENTRY_POINT, **changed}).why_sharded


def test_what_zarr_python_wrote_is_understood() -> None:
    """Its spelling, member for member."""
    document = _decode(BY_ZARR_PYTHON)
    expected = {k: v for k, v in BY_ZARR_PYTHON.items() if k != "storage_transformers"}

    assert json.loads(document.served) == expected
    assert document.array is not None
    assert document.array.shard_shape == (2, 3)
    assert document.array.keys.parse("data/root/a/c2.3") == (2, 3)


@given(st.dictionaries(st.text(max_size=8), members, max_size=4), members)
def test_only_the_transformer_is_left_out(extra: Json, attributes: Any) -> None:
    """All other members are served as they are stored, in their order."""
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
    """Even with their spaces; the reason why an array keeps its transformers is short."""
    data = json.dumps(document, indent=7).encode()
    found = _read(data)

    assert (found.served, found.is_rewritten, found.array) == (data, False, None)
    assert reason in found.why_sharded
    assert bool(reason) is bool(found.why_sharded)
    assert len(found.why_sharded) < 200


def test_the_transformer_is_known_by_its_uri() -> None:
    """The draft's example has an underscore, its heading a hyphen and no ``s``.

    The separator is that of the grid, by default a slash; there is no ``dimension_separator``.
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
def test_last_dimensions_that_are_left_out_are_not_sharded(
    chunks_per_shard: list[int], padded: tuple[int, ...]
) -> None:
    """zarr-python wrote ``chunks_per_shard=2``, and sub-array types, with too few numbers.

    In the draft's own example these chunks share a shard whose index has 1,024 bytes.
    """
    array = _decode(_configured(chunks_per_shard, [5, 7, 9])).array
    example = _decode(_configured([32, 2], [400, 400])).array

    assert array is not None
    assert array.shard_shape == padded
    assert example is not None
    for coords in ((96, 18), (96, 19), (97, 18), (127, 19)):
        assert example.shard_key(coords) == "data/root/a/c3/9"
    assert example.unsharded.indexes[0].nbytes == 1024


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "no object"),
        (None, "no object"),
        ({**_SHARDED, "storage_transformers": "sharding"}, "no list of objects"),
        ({**_SHARDED, "storage_transformers": {"a": 1}}, "no list of objects"),
        ({**_SHARDED, "storage_transformers": ["sharding"]}, "no list of objects"),
        ({**_SHARDED, "storage_transformers": [{**sharding(0), "configuration": 3}]}, "no config"),
        ({**_SHARDED, "shape": [5, -7]}, "shape is no list of sizes"),
        ({**_SHARDED, "chunk_grid": "regular"}, "the chunk grid is no object"),
        ({**_SHARDED, "chunk_grid": {"type": "regular"}}, "chunk_shape is no list"),
        (array_metadata([5, 7], [2], [sharding([2, 2])]), "chunk_shape has 1 dimensions"),
        (array_metadata([5, 7], [2, 0], [sharding([2, 2])]), "chunk_shape is no list of sizes"),
        (array_metadata([5, 7], [2, 2], [sharding([2, 2])], separator="-"), "the separator is"),
        (_configured([2, 0]), "chunks_per_shard is no list of sizes"),
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


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(mutations({**BY_ZARR_PYTHON, "extensions": [_MAY]}))
def test_wrong_metadata_are_refused_or_understood(document: Any) -> None:
    """Whatever stands at any position, decoding gives a document or `DecodeError`."""
    try:
        decoded = _decode(document)
    except DecodeError as error:
        assert len(str(error)) < 20_000  # noqa: PT017 - what it says is the fact
        return
    json.loads(decoded.served)
    if (array := decoded.array) is not None:
        coords = (0,) * len(array.shape)
        assert array.unsharded.entry(coords) == (0,)
        assert array.keys.parse(array.keys.format(coords)) == coords


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(mutations({**ENTRY_POINT, "extensions": [_MAY]}))
def test_a_wrong_entry_point_is_refused_or_understood(document: Any) -> None:
    """Whatever stands at any position, decoding gives a hierarchy or `DecodeError`."""
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
    """Each array is as it is served by itself; damage of one does not hide the others."""
    document = parse_consolidated(_consolidated({"a": _SHARDED, "b": other}), b"")

    assert document.is_rewritten
    assert json.loads(document.served) == _consolidated({"a": _SERVED, "b": other})


@pytest.mark.parametrize(
    "document", [None, [], 3, {}, _consolidated(None), _consolidated({"a": _SERVED})]
)
def test_other_consolidated_metadata_are_unchanged(document: Any) -> None:
    """The bytes are those that are stored."""
    assert parse_consolidated(document, b"stored") == ArrayDocument(b"stored", is_rewritten=False)


def _served(stored: Json) -> Json:
    document: Json = json.loads(_decode(stored).served)
    return document


async def _translated(given: Json, stored: Json | None) -> Json:
    """Translate the metadata of an array."""
    old = None if stored is None else encode(stored)
    made = await ArrayTranslator().translate(encode(given), old, DirectFetch(MemoryStore()))
    document: Json = json.loads(made)
    return document


@pytest.mark.parametrize("stored", [_SHARDED, BY_ZARR_PYTHON])
async def test_an_array_keeps_its_transformer(stored: Json) -> None:
    """Shape and attributes may change, and the separator be left out when it is the default."""
    changes = {"shape": [80, 60], "attributes": {"units": "nm"}}
    grid = {"chunk_grid": {"type": "regular", "chunk_shape": [2, 2]}}

    assert await _translated({**_served(stored), **changes}, stored) == {**stored, **changes}
    assert await _translated({**stored, **changes}, stored) == {**stored, **changes}
    assert await _translated({**_SERVED, **grid}, _SHARDED) == {**_SHARDED, **grid}


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("chunk_grid", {"type": "regular", "chunk_shape": [2, 3], "separator": "/"}),
        ("chunk_grid", {"type": "regular", "chunk_shape": [2, 2], "separator": "."}),
        ("chunk_memory_layout", "F"),
        ("compressor", {"codec": "https://purl.org/zarr/spec/codec/gzip/1.0"}),
        ("data_type", "i1"),
        ("fill_value", 1),
        ("shape", [8]),
        ("shape", 8),
    ],
)
async def test_shards_cannot_be_misread_after_a_change(member: str, value: object) -> None:
    """The reason names the member, and the way out."""
    named = "the number of dimensions" if member == "shape" else member

    with pytest.raises(ConflictError, match=rf"^{named} cannot change: .* delete it with"):
        await _translated({**_SERVED, member: value}, _SHARDED)


async def test_no_array_becomes_sharded() -> None:
    """Nor do the shards of one change."""
    other = {**_SHARDED, "storage_transformers": [sharding([2, 1])]}
    for document, stored in ((_SHARDED, None), (_SHARDED, _SERVED), (other, _SHARDED)):
        with pytest.raises(ConflictError, match="arrays are served without shards here"):
            await _translated(document, stored)


@pytest.mark.parametrize("stored", [None, _SERVED, {**_SHARDED, "storage_transformers": [_OTHER]}])
async def test_an_array_without_a_known_transformer_may_be_replaced(stored: Json | None) -> None:
    """Whatever the new one is."""
    assert await _translated({**_SERVED, "data_type": "i1"}, stored) == {
        **_SERVED,
        "data_type": "i1",
    }


_RESTORER = Restorer(ROOT, _LIMIT, restore)


@pytest.mark.parametrize("given", [b"", b"7", b"{", b"[" * 100_000], ids=lambda data: data[:9])
async def test_what_is_no_object_is_refused(given: bytes) -> None:
    """Before it takes the place of metadata."""
    consolidated = ConsolidatedTranslator(_RESTORER, MetadataKeys(".json"))
    for translator in (ArrayTranslator(), consolidated):
        with pytest.raises(BadBodyError):
            await translator.translate(given, None, DirectFetch(MemoryStore()))


async def _consolidate(nodes: Any, stored: Json) -> Any:
    store = MemoryStore()
    store.place(ROOT.join("meta/root/a.array.json"), encode(stored))
    translator = ConsolidatedTranslator(_RESTORER, MetadataKeys(".json"))
    made = await translator.translate(encode({"metadata": nodes}), None, DirectFetch(store))
    return json.loads(made)["metadata"]


async def test_consolidated_metadata_keep_transformers() -> None:
    """Those of the arrays that are stored with one; errors name the key."""
    key = "meta/root/a.array.json"
    nodes = {
        key: _SERVED,
        "meta/root/b.array.json": _SERVED,
        "meta/root/a.group.json": {"attributes": {}},
        "zarr.json": 7,
    }

    assert await _consolidate(nodes, _SHARDED) == {**nodes, key: _SHARDED}
    assert await _consolidate(nodes, _SERVED) == nodes
    assert await _consolidate([], _SERVED) == []
    with pytest.raises(ConflictError, match=r"^meta/root/a\.array\.json: data_type cannot"):
        await _consolidate({key: {**_SERVED, "data_type": "i1"}}, _SHARDED)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ("u1", (2, 2), (), (4, 4), (2, 2), ("end",))),
        (BY_ZARR_PYTHON, ("<i4", (2, 2), ("blosc/1.0",), (4, 6), (2, 3), ("end",))),
        ({"storage_transformers": [_OTHER]}, ("u1", (2, 2), (), None, None, ())),
        ({"storage_transformers": []}, ("u1", (2, 2), (), None, None, ())),
    ],
)
def test_a_description_names_chunks_and_shards(changed: Json, expected: Any) -> None:
    """Shapes are in elements; an array that stays sharded says why."""
    found = describe("foo", _decode({**_SHARDED, **changed}))

    assert (found.path, found.format, found.kind, found.shape) == ("foo", "zarr", "array", (5, 7))
    assert expected == (
        found.data_type,
        found.inner_chunk_shape,
        found.codecs,
        found.shard_shape,
        found.chunks_per_shard,
        found.index_location,
    )
    assert ("example.org/mirror" in found.why_sharded) is (
        changed.get("storage_transformers") == [_OTHER]
    )


@pytest.mark.parametrize(
    ("changed", "data_type", "chunk_shape", "codecs"),
    [
        ({"data_type": {"extension": "x", "type": "<M8[s]"}}, "<M8[s]", (2,), ()),
        ({"data_type": 7}, None, (2,), ()),
        ({"chunk_grid": {"type": "rectilinear"}}, "u1", (), ()),
        ({"compressor": {"codec": "lz4"}}, "u1", (2,), ("lz4",)),
        ({"compressor": {"codec": f"{_URI}codecs/gzip"}}, "u1", (2,), ("gzip",)),
        ({"compressor": None}, "u1", (2,), ()),
    ],
)
def test_extensions_are_described_by_their_names(
    changed: Json, data_type: str | None, chunk_shape: tuple[int, ...], codecs: tuple[str, ...]
) -> None:
    """An array that is not sharded need not be understood, but for what is described."""
    described = describe("", _decode(array_metadata([5], [2]) | changed))

    assert described.data_type == data_type
    assert (described.inner_chunk_shape, described.codecs) == (chunk_shape, codecs)
    for invalid in ({"shape": 8}, {"chunk_grid": {"type": "regular", "chunk_shape": "x"}}):
        with pytest.raises(DecodeError):
            describe("", _decode(array_metadata([5], [2]) | invalid))
