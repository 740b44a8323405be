"""``zarr.json``: read, served, and translated back to the stored form."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.core.metadata.v3 import ArrayV3Metadata

from app.errors import BadBodyError, ConflictError
from app.formats.documents import MarkerDecoder
from app.formats.reading import DecodeError
from app.formats.zarr.layout import Zarr3
from app.formats.zarr.metadata import Node, NodeTranslator, parse_node
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.formats.mutating import members, mutations
from tests.formats.zarr.building import BIG, CRC, LITTLE, array_metadata, sharding
from tests.formats.zarr.nesting import Nesting, nestings
from tests.resolving import ROOT

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


GZIP = {"name": "gzip", "configuration": {"level": 5}}
SHARDED = array_metadata(
    [8, 6], [4, 6], [sharding([2, 3], [LITTLE, GZIP])], data_type="uint16", x_lab={"note": 1}
)
PLAIN = array_metadata([8, 6], [2, 3], [LITTLE, GZIP], data_type="uint16")
GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}

type Json = dict[str, Any]


def served(stored: Json) -> Json:
    """Give what clients see of *stored*."""
    data = json.dumps(stored).encode()
    document: Json = json.loads(parse_node(stored, data).served)
    return document


async def translated(given: Json, stored: Json | None, **nodes: Json) -> Json:
    """Translate *given*, which is to replace *stored*, below which there are *nodes*."""
    store = MemoryStore()
    for path, node in nodes.items():
        store.place(ROOT.join(f"{path}/zarr.json"), json.dumps(node).encode())
    old = None if stored is None else json.dumps(stored).encode()
    data = json.dumps(given, indent=1).encode()
    made = await NodeTranslator(ROOT, 2**20).translate(data, old, DirectFetch(store))
    document: Json = json.loads(made)
    return document


async def test_an_array_keeps_its_shards() -> None:
    """All else may change, but for what would change how chunks are read."""
    changes = {
        "shape": [80, 3],
        "attributes": {"units": "nm"},
        "dimension_names": ["y", None],
        "x_other": {"must_understand": False},
    }

    made = await translated({**served(SHARDED), **changes}, SHARDED)

    assert made == {**SHARDED, **changes}


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [2, 2]}}),
        ("chunk_grid", {"name": "rectilinear", "configuration": {"chunk_shape": [2, 3]}}),
        ("chunk_grid", None),
        ("codecs", [LITTLE]),
        ("codecs", [BIG, GZIP]),
        ("codecs", [LITTLE, {"name": "gzip", "configuration": {"level": 6}}]),
        ("codecs", [LITTLE, GZIP, CRC]),
        ("codecs", [7, 8]),
        ("codecs", "gzip"),
        ("data_type", "int16"),
        ("data_type", {"name": "uint16", "configuration": {"x": 1}}),
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
async def test_what_would_let_shards_be_misread_is_refused(member: str, value: object) -> None:
    """The reason says what cannot change, and what to do."""
    given = {**served(SHARDED), member: value}
    named = "the number of dimensions" if member == "shape" else member

    with pytest.raises(ConflictError, match=f"^{named} cannot change: .* delete it with"):
        await translated(given, SHARDED)


async def test_another_array_or_a_group_does_not_take_the_place_of_shards() -> None:
    """Whoever overwrites an array deletes it first."""
    with pytest.raises(ConflictError, match="delete it with"):
        await translated(array_metadata([3], [3], [LITTLE]), SHARDED)
    with pytest.raises(ConflictError, match=r"a sharded array is stored here: .* delete it with"):
        await translated(GROUP, SHARDED)


@pytest.mark.parametrize("stored", [None, PLAIN, GROUP])
@pytest.mark.parametrize("given", [PLAIN, GROUP, {**PLAIN, "codecs": ["odd"]}])
async def test_what_has_no_shards_is_stored_as_it_is(given: Json, stored: Json | None) -> None:
    """Byte for byte, whatever it says."""
    data = json.dumps(given, indent=1).encode()
    old = None if stored is None else json.dumps(stored).encode()
    translator = NodeTranslator(ROOT, 2**20)

    assert await translator.translate(data, old, DirectFetch(MemoryStore())) == data


@pytest.mark.parametrize("stored", [None, PLAIN, GROUP])
async def test_no_array_becomes_sharded_here(stored: Json | None) -> None:
    """Its writer would take the keys of inner chunks for those of shards."""
    with pytest.raises(ConflictError, match="arrays are served without shards here"):
        await translated(SHARDED, stored)


async def test_the_shards_of_an_array_do_not_change_here() -> None:
    """Nor do those that its document says already."""
    other = {**SHARDED, "codecs": [sharding([2, 2], [LITTLE, GZIP])]}
    index_first = {**SHARDED, "codecs": [sharding([2, 3], [LITTLE, GZIP], index_location="start")]}

    for sent in (other, index_first):
        with pytest.raises(ConflictError, match="arrays are served without shards here"):
            await translated(sent, SHARDED)


async def test_a_copy_of_the_stored_document_is_stored() -> None:
    """As it is spelled in the store, or with defaults left out."""
    unsaid = sharding([2, 3], [LITTLE, "gzip"])
    del unsaid["configuration"]["index_location"]

    assert await translated(SHARDED | {"attributes": {"a": 1}}, SHARDED) == {
        **SHARDED,
        "attributes": {"a": 1},
    }
    assert await translated({**SHARDED, "codecs": [unsaid]}, SHARDED) == SHARDED
    with pytest.raises(ConflictError, match=r"^data_type cannot change"):
        await translated({**SHARDED, "data_type": "int16"}, SHARDED)


async def test_a_sharded_array_that_is_served_as_it_is_stays_so() -> None:
    """Its shards are its chunks to clients; another array may take its place."""
    stored = {**SHARDED, "codecs": [*SHARDED["codecs"], GZIP]}

    assert await translated(stored | {"attributes": {"a": 1}}, stored) == {
        **stored,
        "attributes": {"a": 1},
    }
    assert await translated(PLAIN, stored) == PLAIN
    with pytest.raises(ConflictError, match="arrays are served without shards here"):
        await translated(SHARDED, stored)


@pytest.mark.parametrize(
    ("member", "stored", "given"),
    [
        ("chunk_key_encoding", {"name": "default"}, "default"),
        ("chunk_key_encoding", {"name": "v2"}, {"name": "v2", "configuration": {"separator": "."}}),
        ("data_type", "float32", {"name": "float32"}),
        ("data_type", "float32", {"name": "float32", "configuration": {}}),
        ("fill_value", "NaN", "0x7fc00000"),
        ("fill_value", 0, 0.0),
        ("fill_value", 0.1, 0.10000000149011612),
        ("fill_value", "Infinity", "0x7f800000"),
    ],
)
async def test_defaults_may_be_spelled_out(member: str, stored: object, given: object) -> None:
    """And left out: what they mean is what counts."""
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
async def test_codecs_may_be_spelled_otherwise(
    data_type: str, inner: list[Any], given: list[Any]
) -> None:
    """Those that are stored stay as they are spelled."""
    stored = {**SHARDED, "codecs": [sharding([2, 3], inner)], "data_type": data_type}

    assert await translated({**served(stored), "codecs": given}, stored) == stored


async def test_complex_fill_values_are_pairs() -> None:
    """Of two real numbers, each spelled in its way."""
    stored = {**SHARDED, "data_type": "complex64", "fill_value": ["NaN", 1]}
    given = {**served(stored), "fill_value": ["0x7fc00000", 1.0]}

    assert (await translated(given, stored))["codecs"] == SHARDED["codecs"]
    with pytest.raises(ConflictError, match="fill_value"):
        await translated({**given, "fill_value": ["NaN", 2]}, stored)


def _consolidated_nodes(**nodes: Json) -> Json:
    inline = {"kind": "inline", "must_understand": False, "metadata": nodes}
    return {**GROUP, "consolidated_metadata": inline}


async def test_consolidated_metadata_keep_shards() -> None:
    """Of each array that is stored in shards, in groups below too; others stay as they are."""
    inner = _consolidated_nodes(b=served(SHARDED), c=PLAIN)
    given = _consolidated_nodes(
        **{"a": served(SHARDED), "g": inner, "g/b": served(SHARDED), "p": PLAIN}
    )

    made = await translated(given, None, **{"a": SHARDED, "g/b": SHARDED, "p": PLAIN, "g": GROUP})

    assert made == _consolidated_nodes(
        **{"a": SHARDED, "g": _consolidated_nodes(b=SHARDED, c=PLAIN), "g/b": SHARDED, "p": PLAIN}
    )


async def test_consolidated_metadata_agree_with_what_is_stored() -> None:
    """What is wrong is named by the path of the array."""
    given = _consolidated_nodes(**{"g/a": {**served(SHARDED), "codecs": [LITTLE]}})

    with pytest.raises(ConflictError, match=r"^g/a: codecs cannot change"):
        await translated(given, None, **{"g/a": SHARDED})
    with pytest.raises(ConflictError, match=r"^a: arrays are served without shards here"):
        await translated(_consolidated_nodes(a=SHARDED), None)


async def test_consolidated_metadata_without_shards_are_stored_as_they_are() -> None:
    """And so are those in which there is nothing."""
    for sent in (
        _consolidated_nodes(a=PLAIN, b=GROUP),
        {**GROUP, "consolidated_metadata": None},
        {**GROUP, "consolidated_metadata": {"metadata": []}},
        _consolidated_nodes(odd=7),  # type: ignore[arg-type]  # what JSON can hold
    ):
        assert await translated(sent, None, a=PLAIN) == sent


@pytest.mark.parametrize("path", ["", "..", "a//b", "../a", "a/.", "/a"])
async def test_consolidated_metadata_name_nodes_below(path: str) -> None:
    """No other objects are looked at."""
    with pytest.raises(BadBodyError, match="name no node"):
        await translated(_consolidated_nodes(**{path: PLAIN}), None)


@pytest.mark.parametrize(
    "given",
    [b"", b"{", b"[]", b"7", b"\xff{}", b"{}", b'{"zarr_format": 2, "node_type": "array"}',
     b'{"zarr_format": 3}', b'{"zarr_format": 3, "node_type": "table"}',
     b'{"zarr_format": 3, "node_type": ["array"]}', b"[" * 100_000,
     b'{"zarr_format":3,"node_type":"group","a":' + b"[" * 100_000],
    ids=lambda given: given[:40],
)  # fmt: skip
async def test_what_is_no_node_is_refused(given: bytes) -> None:
    """Before it takes the place of one."""
    with pytest.raises(BadBodyError):
        await NodeTranslator(ROOT, 2**20).translate(given, None, DirectFetch(MemoryStore()))


@pytest.mark.parametrize("stored", [b"", b"{", b"[]", b'{"codecs": 7}', b'"text"', b"\xff"])
async def test_what_is_damaged_may_be_replaced(stored: bytes) -> None:
    """By whatever has no shards."""
    data = json.dumps(PLAIN).encode()
    translator = NodeTranslator(ROOT, 2**20)

    assert await translator.translate(data, stored, DirectFetch(MemoryStore())) == data


@pytest.mark.parametrize("change", [{"shape": None}, {"shape": [1]}, {"chunk_grid": None}])
async def test_an_array_that_contradicts_itself_may_be_replaced(change: Json) -> None:
    """It is not served otherwise than it is stored."""
    assert await translated(PLAIN, {**SHARDED, **change}) == PLAIN


async def test_an_entry_point_of_the_draft_is_stored_as_it_is() -> None:
    """It has the name of a node, and is none."""
    given = {"zarr_format": "https://purl.org/zarr/spec/protocol/core/3.0"}

    assert await translated(given, None) == given


async def test_chunks_that_are_shards_to_clients_stay_so() -> None:
    """Shards inside that cannot be taken apart are seen, so that their codec is, too."""
    inner = [sharding([1, 3], [LITTLE]), GZIP]
    stored = {**SHARDED, "codecs": [sharding([2, 3], inner)]}

    assert served(stored)["codecs"] == inner
    assert await translated(served(stored), stored) == stored
    with pytest.raises(ConflictError, match=r"^codecs cannot change"):
        await translated({**served(stored), "codecs": inner[:1]}, stored)
