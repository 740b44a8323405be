"""``info``: parsed, served and described."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.neuroglancer_precomputed.keys import CellNames, MortonGrid, Names, VoxelBounds
from app.formats.neuroglancer_precomputed.metadata import (
    Info,
    MemberDescription,
    describe,
    parse_info,
)
from app.formats.reading import DecodeError
from app.formats.surveying import Description
from tests.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    MURMUR,
    annotation_info,
    mesh_info,
    skeleton_info,
    volume_info,
)
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING, Sharding

_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)
)
_extra = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.just("sharding"), inner, max_size=3)
    ),
    max_leaves=6,
)
_KNOWN = {
    *("@type", "sharding", "scales", "by_id", "relationships", "spatial", "key"),
    *("size", "voxel_offset", "chunk_sizes", "grid_shape"),
}
_extras = st.dictionaries(st.text(max_size=8).filter(lambda name: name not in _KNOWN), _extra)
_KEPT = [{"@type": "from_the_future"}, {}, "murmur", 3, [RAW_SHARDING]]
_GONE = [None, RAW_SHARDING, MURMUR]


@st.composite
def _members(draw: st.DrawFn, member: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a member of a document as it is stored, and as it is served."""
    extras = list(draw(_extras).items())
    named = [*member.items(), *extras]
    match draw(st.sampled_from(["gone", "kept", "none"])):
        case "gone":
            sharding = draw(st.sampled_from(_GONE))
            at = draw(st.integers(0, len(named)))
            return dict([*named[:at], ("sharding", sharding), *named[at:]]), dict(named)
        case "kept":
            named.append(("sharding", draw(st.sampled_from(_KEPT))))
    return dict(named), dict(named)


@st.composite
def _documents(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw an ``info`` as it is stored, and as it is served."""
    kind = draw(st.sampled_from(["volume", "mesh", "skeletons", "annotations"]))
    if kind in {"mesh", "skeletons"}:
        return draw(_members(mesh_info(None) if kind == "mesh" else _skeletons()))
    stored, served = dict[str, Any](), dict[str, Any]()
    for name, value in (volume_info(None) if kind == "volume" else _annotations()).items():
        if name == "by_id":
            stored[name], served[name] = draw(_members(value))
        elif name in {"scales", "relationships", "spatial"}:
            both = [draw(_members(value[0])) for _ in range(draw(st.integers(0, 3)))]
            stored[name], served[name] = [each[0] for each in both], [each[1] for each in both]
        else:
            stored[name] = served[name] = value
    extras = draw(_extras)
    return {**stored, **extras}, {**served, **extras}


def _skeletons() -> dict[str, Any]:
    return {name: value for name, value in skeleton_info({}).items() if name != "sharding"}


def _annotations() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(annotation_info({})))
    for member in (document["by_id"], *document["relationships"], *document["spatial"]):
        del member["sharding"]
    return document


def _parse(document: Any) -> Info:
    info = parse_info(document, json.dumps(document).encode())
    assert info is not None
    return info


@given(_documents())
def test_sharding_leaves_and_nothing_else(documents: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """What is known of sharding, or is null, is left out; all else stays in its order."""
    stored, served = documents
    before = json.dumps(stored)
    info = _parse(stored)

    assert info.served.decode() == json.dumps(served)
    assert info.is_rewritten == (stored != served)
    assert json.dumps(info.document) == before


@given(_documents())
def test_what_is_served_is_not_rewritten_again(
    documents: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """To a gateway behind this one the containers are not sharded."""
    again = _parse(json.loads(_parse(documents[0]).served))

    assert (again.is_rewritten, again.parts) == (False, ())


@pytest.mark.parametrize(
    "document",
    [
        volume_info(None),
        volume_info({"@type": "from_the_future"}),
        mesh_info(None),
        {"@type": "neuroglancer_legacy_mesh"},
        {"@type": "neuroglancer_segment_properties", "inline": {"ids": ["1"]}},
        {"@type": "neuroglancer_from_the_future", "sharding": RAW_SHARDING, "scales": 3},
    ],
)
def test_what_is_not_sharded_is_served_byte_by_byte(document: dict[str, Any]) -> None:
    """Other documents keep even their spaces, and nothing below them is looked up."""
    data = json.dumps(document, indent=7).encode()
    info = parse_info(document, data)

    assert info is not None
    assert (info.served, info.is_rewritten, info.parts) == (data, False, ())


@pytest.mark.parametrize(
    "document",
    [
        {}, [], None, 3, "neuroglancer_skeletons", [volume_info(RAW_SHARDING)],
        {"@type": "other_program"}, {"@type": 3, "scales": []}, {"@type": None, "scales": []},
        {"type": "image"}, {"name": "a package", "version": "1.0"}, {"sharding": RAW_SHARDING},
    ],
)  # fmt: skip
def test_what_other_programs_call_info_is_none(document: Any) -> None:
    """Without ``@type`` of Neuroglancer, and without scales, it is no container."""
    assert parse_info(document, b"") is None


def _names(document: Any) -> list[tuple[str, Names]]:
    return [(part.path, part.names) for part in _parse(document).parts]


def test_every_chunk_size_of_a_scale_has_names_of_its_own() -> None:
    """Chunks of either size are in the scale's shards; the offset is zero unless told."""
    document = volume_info(RAW_SHARDING, chunk_sizes=[[3, 3, 1], [2, 2, 1]])
    del document["scales"][0]["voxel_offset"]

    assert _names(document) == [
        ("s0", VoxelBounds((0, 0, 0), (7, 5, 1), (3, 3, 1))),
        ("s0", VoxelBounds((0, 0, 0), (7, 5, 1), (2, 2, 1))),
    ]


@pytest.mark.parametrize(
    ("key", "path"),
    [("s0", "s0"), ("./s0", "s0"), ("s0/", "s0"), ("a/b", "a/b"), ("a//b", "a/b"),
     ("a/./b", "a/b"), ("a/../s0", "s0"), ("", ""), (".", "")],
)  # fmt: skip
def test_a_key_is_a_path_below_the_document(key: str, path: str) -> None:
    """Spelled in one way whatever the writer did."""
    assert [part.path for part in _parse(volume_info(RAW_SHARDING, key=key)).parts] == [path]


@pytest.mark.parametrize("key", ["../s0", "..", "a/../../s0", "/s0", "//s0", "s3://b/s0"])
def test_what_lies_elsewhere_stays_sharded(key: str) -> None:
    """Its chunks would be asked for where there is no such document: that stays as it is."""
    document = volume_info(RAW_SHARDING, key=key)
    info = _parse(document)

    assert (info.is_rewritten, info.parts) == (False, ())


def test_the_parameters_are_read() -> None:
    """Every one of them; what is not told of the encodings is raw."""
    odd: Sharding = {
        **MURMUR,
        "preshift_bits": 3,
        "minishard_bits": 0,
        "shard_bits": 64,
        "minishard_index_encoding": "gzip",
        "from the future": 1,
    }
    del odd["data_encoding"]
    (part,) = _parse(skeleton_info(odd)).parts
    found = part.sharding

    assert (found.preshift_bits, found.minishard_bits, found.shard_bits) == (3, 0, 64)
    assert (found.is_hashed, found.is_minishard_index_gzip, found.is_data_gzip) == (
        True,
        True,
        False,
    )


def test_integers_may_be_spelled_as_floats() -> None:
    """As JSON of programs that have no others, which changes nothing."""
    exact = volume_info(RAW_SHARDING)
    spelled = volume_info({**RAW_SHARDING, "shard_bits": 1.0}, size=[7.0, 5, 1])

    assert [part.sharding for part in _parse(spelled).parts] == [
        part.sharding for part in _parse(exact).parts
    ]
    assert _names(spelled) == _names(exact)


@pytest.mark.parametrize("name", ["preshift_bits", "minishard_bits", "shard_bits"])
@pytest.mark.parametrize("value", [-1, 65, 2**70, 1.5, 65.0, "1", None, True, [], {}, "missing"])
def test_absurd_bits_are_refused(name: str, value: Any) -> None:
    """Numbers of bits are integers from 0 to 64."""
    sharding = {**RAW_SHARDING, name: value}
    if value == "missing":
        del sharding[name]
    with pytest.raises(DecodeError, match=f"{name} is no number of bits"):
        _parse(skeleton_info(sharding))


def test_more_bits_than_an_id_has_are_refused() -> None:
    """Minishard and shard share the 64 bits of the hash."""
    with pytest.raises(DecodeError, match="minishard_bits and shard_bits are 65 in all"):
        _parse(skeleton_info({**RAW_SHARDING, "minishard_bits": 33, "shard_bits": 32}))


@pytest.mark.parametrize("name", ["hash", "minishard_index_encoding", "data_encoding"])
@pytest.mark.parametrize("value", ["md5", "", "GZIP", 3, None, ["gzip"], {}])
def test_other_hashes_and_encodings_are_refused(name: str, value: Any) -> None:
    """What nobody can decode is named."""
    with pytest.raises(DecodeError, match=f"{name} is neither"):
        _parse(skeleton_info({**RAW_SHARDING, name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", None), ("size", [7, 5]), ("size", [7, 5, -1]), ("size", [7, 5, 1.5]),
     ("size", [7, 5, 1e300]), ("size", [7, 5, True]), ("size", [2**63, 1, 1]), ("size", "7,5,1"),
     ("voxel_offset", [0, 0]), ("voxel_offset", [0, 0, 0.5]), ("voxel_offset", [-(2**64), 0, 0]),
     ("voxel_offset", None), ("chunk_sizes", None), ("chunk_sizes", []),
     ("chunk_sizes", [3, 3, 1]), ("chunk_sizes", [[3, 3]]), ("chunk_sizes", [[3, 3, 0]]),
     ("chunk_sizes", [[3, 3, 1], None]), ("key", 3), ("key", None)],
)  # fmt: skip
def test_what_describes_no_grid_is_refused(name: str, value: Any) -> None:
    """A sharded scale has a size, an offset, sizes of chunks and a key."""
    with pytest.raises(DecodeError, match="a key is" if name == "key" else name):
        _parse(volume_info(RAW_SHARDING, **{name: value}))


@pytest.mark.parametrize("shape", [None, [], [0, 1], [1, -1], [1.5], "1", [True], [1] * 65])
def test_a_spatial_level_without_a_grid_is_refused(shape: Any) -> None:
    """Cells have no codes without one; a point is one cell."""
    document = annotation_info(RAW_SHARDING)
    document["spatial"][0]["grid_shape"] = shape
    if shape == []:
        assert _names(document)[2] == ("spatial0", CellNames(MortonGrid(())))
        return
    with pytest.raises(DecodeError, match="grid_shape"):
        _parse(document)
    del document["spatial"][0]["grid_shape"]
    with pytest.raises(DecodeError, match="grid_shape"):
        _parse(document)


@pytest.mark.parametrize(("bits", "is_read"), [((21, 21, 22), True), ((21, 22, 22), False)])
def test_codes_must_fit_into_64_bits(bits: tuple[int, ...], *, is_read: bool) -> None:
    """A grid of more cells than there are ids cannot be sharded."""
    document = volume_info(RAW_SHARDING, size=[2**n for n in bits], chunk_sizes=[[1, 1, 1]])
    if is_read:
        assert len(_parse(document).parts) == 1
    else:
        with pytest.raises(DecodeError, match="ids of 65 bits, more than 64"):
            _parse(document)


@pytest.mark.parametrize("value", [None, 3, {}, [3], [[]], "scales", [volume_info(None), None]])
@pytest.mark.parametrize("name", ["scales", "relationships", "spatial"])
def test_what_is_no_list_of_objects_is_refused(name: str, value: Any) -> None:
    """The list is named."""
    document = volume_info(None) if name == "scales" else annotation_info(RAW_SHARDING)
    with pytest.raises(DecodeError, match=f"{name} is no list of objects"):
        _parse({**document, name: value})


def test_a_long_document_loses_all_its_sharding() -> None:
    """A hundred thousand scales would be work of minutes if each were held against all."""
    document = {"scales": [{"sharding": None}] * 100_000}
    document = json.loads(json.dumps(document))

    assert json.loads(_parse(document).served) == {"scales": [{}] * 100_000}


@pytest.mark.parametrize(("count", "is_read"), [(64, True), (65, False), (500_000, False)])
def test_names_in_one_directory_are_of_few_kinds(count: int, *, is_read: bool) -> None:
    """A million chunk sizes would take gigabytes, and seconds for each name."""
    document = volume_info(RAW_SHARDING, chunk_sizes=[[1, 1, 1]] * count)
    if is_read:
        assert len(_parse(document).parts) == count
    else:
        with pytest.raises(DecodeError, match="more than 64 kinds are in one directory"):
            _parse(document)


def test_parts_weigh_something() -> None:
    """More than the text that tells of them."""
    scales = volume_info(RAW_SHARDING, key="a")["scales"] + volume_info(RAW_SHARDING)["scales"]
    one, two = (_parse({"scales": scales[:count]}) for count in (1, 2))

    assert two.nbytes - one.nbytes > 2000 + 3 * (len(two.served) - len(one.served))


_RAW = "identity, preshift 1, minishard 1, shard 1 bits, index raw, data raw"


def _described(document: dict[str, Any]) -> Iterator[Description]:
    for each in describe(_parse(document)):
        assert isinstance(each, MemberDescription)
        yield each.description


def test_a_scale_is_an_array_by_the_order_of_its_axes() -> None:
    """Shapes are in voxels, x first, and the sharding is spelled out."""
    assert list(_described(volume_info(RAW_SHARDING))) == [
        Description(
            path="s0",
            format="precomputed",
            kind="array",
            shape=(7, 5, 1),
            data_type="uint8",
            dimension_names=("x", "y", "z"),
            inner_chunk_shape=(3, 3, 1),
            codecs=("raw",),
            sharding=_RAW,
        )
    ]


def test_channels_are_a_dimension() -> None:
    """All of them are in each chunk; a single one is no dimension."""
    (array,) = _described(volume_info(None) | {"num_channels": 3})

    assert array.shape == (7, 5, 1, 3)
    assert array.inner_chunk_shape == (3, 3, 1, 3)
    assert array.dimension_names == ("x", "y", "z", "channel")


def test_each_chunk_size_is_an_array_of_its_own() -> None:
    """Paths are unlike each other, whatever else is called so."""
    document = volume_info(None, chunk_sizes=[[3, 3, 1], [7, 5, 1]])
    document["scales"] += [{**document["scales"][0], "key": key} for key in ("s0#2", "s0")]

    assert [(array.path, array.inner_chunk_shape) for array in _described(document)] == [
        ("s0", (3, 3, 1)),
        ("s0#2", (7, 5, 1)),
        ("s0#2#2", (3, 3, 1)),
        ("s0#2#3", (7, 5, 1)),
        ("s0#3", (3, 3, 1)),
        ("s0#4", (7, 5, 1)),
    ]


@pytest.mark.parametrize(
    ("document", "kind", "sharding"),
    [
        (mesh_info(RAW_SHARDING), "meshes", _RAW),
        (mesh_info(None), "meshes", None),
        (
            skeleton_info({**MURMUR, "minishard_index_encoding": "gzip"}),
            "skeletons",
            "murmurhash3_x86_128, preshift 0, minishard 1, shard 1 bits, index gzip, data raw",
        ),
    ],
)
def test_meshes_and_skeletons_are_one_collection(
    document: dict[str, Any], kind: str, sharding: str | None
) -> None:
    """They lie in the directory itself; manifests and fragments share their shards."""
    assert list(_described(document)) == [Description("", "precomputed", kind, sharding=sharding)]


def test_annotations_are_a_collection_by_each_index() -> None:
    """By id, by each relationship, by each spatial level."""
    found = list(_described(annotation_info(GZIP_DATA)))

    assert [each.path for each in found] == ["by_id", "by_segment", "spatial0", "spatial1"]
    assert {each.kind for each in found} == {"annotations"}


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"sharding": {"@type": "by_moon"}}, "the sharding is by_moon"),
        ({"sharding": "dense"}, "the sharding is dense"),
        ({"sharding": RAW_SHARDING, "key": "../s0"}, "its key leads out of the directory"),
        ({"sharding": None}, ""),
        ({}, ""),
    ],
)
def test_what_is_served_as_it_is_tells_why(members: dict[str, Any], why: str) -> None:
    """Only where it says that it is sharded."""
    document = volume_info(None)
    document["scales"][0] |= members

    (found,) = describe(_parse(document))

    assert isinstance(found, MemberDescription)
    assert found.parts == ()
    assert found.description.sharding is None
    assert found.description.why_sharded.startswith(why)
    assert bool(found.description.why_sharded) == bool(why)


@pytest.mark.parametrize("members", [{"size": [7, 5]}, {"chunk_sizes": None}, {"size": "x"}])
def test_damage_of_one_scale_hides_no_other(members: dict[str, Any]) -> None:
    """What is only passed on may be anything."""
    document = volume_info(None, **members)
    document["scales"] += volume_info(RAW_SHARDING, key="s1")["scales"]

    damaged, sound = describe(_parse(document))

    assert isinstance(damaged, DecodeError)
    assert isinstance(sound, MemberDescription)
    assert sound.description.path == "s1"


def test_what_nothing_depends_on_may_be_missing() -> None:
    """Shards are found without type and encoding."""
    document = volume_info(RAW_SHARDING, encoding=7) | {"data_type": None, "num_channels": "x"}

    (array,) = _described(document)

    assert (array.data_type, array.codecs, array.shape) == (None, (), (7, 5, 1))


def test_a_volume_names_the_containers_below() -> None:
    """Directories that may have an ``info`` of their own."""
    document = volume_info(None) | {"mesh": "m/", "skeletons": "./s", "segment_properties": 7}

    assert _parse(document).below == ("m", "s")
