"""`shardgate.formats.neuroglancer_precomputed.metadata`: ``info`` parsed and served."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.neuroglancer_precomputed.keys import (
    CellNames,
    MortonGrid,
    Names,
    VoxelBounds,
)
from shardgate.formats.neuroglancer_precomputed.metadata import (
    Info,
    MemberDescription,
    describe,
    parse_info,
)
from shardgate.formats.reading import DecodeError
from shardgate.formats.surveying import Description
from tests.support.formats.mutating import members
from tests.support.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    MURMUR,
    annotation_info,
    mesh_info,
    skeleton_info,
    volume_info,
)
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING, Sharding

_KNOWN = {
    *("@type", "sharding", "scales", "by_id", "relationships", "spatial", "key"),
    *("size", "voxel_offset", "chunk_sizes", "grid_shape"),
}
_extras = st.dictionaries(st.text(max_size=8).filter(lambda name: name not in _KNOWN), members)
_KEPT = [{"@type": "from_the_future"}, {}, "murmur", 3, [RAW_SHARDING]]
_GONE = [None, RAW_SHARDING, MURMUR]


@st.composite
def _members(draw: st.DrawFn, member: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a member of a document in its stored and its served form."""
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
    """Draw an ``info`` in its stored and its served form."""
    kind = draw(st.sampled_from(["volume", "mesh", "skeletons", "annotations"]))
    if kind in {"mesh", "skeletons"}:
        bare = mesh_info(None) if kind == "mesh" else _without_sharding(skeleton_info({}))
        return draw(_members(bare))
    stored, served = dict[str, Any](), dict[str, Any]()
    bare = volume_info(None) if kind == "volume" else _without_sharding(annotation_info({}))
    for name, value in bare.items():
        if name == "by_id":
            stored[name], served[name] = draw(_members(value))
        elif name in {"scales", "relationships", "spatial"}:
            both = [draw(_members(value[0])) for _ in range(draw(st.integers(0, 3)))]
            stored[name], served[name] = [each[0] for each in both], [each[1] for each in both]
        else:
            stored[name] = served[name] = value
    extras = draw(_extras)
    return {**stored, **extras}, {**served, **extras}


def _without_sharding(document: dict[str, Any]) -> Any:
    return json.loads(json.dumps(document).replace(', "sharding": {}', ""))


def parse(document: Any) -> Info:
    """Parse a document as an ``info``."""
    info = parse_info(document, json.dumps(document).encode())
    assert info is not None
    return info


@given(_documents())
def test_only_known_sharding_is_removed(documents: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """An ``info`` is served without known or null sharding, and otherwise unchanged.

    Parsed again, the served document has no sharded parts.
    """
    stored, served = documents
    before = json.dumps(stored)
    info = parse(stored)
    again = parse(json.loads(info.served))

    assert info.served.decode() == json.dumps(served)
    assert info.is_rewritten == (stored != served)
    assert json.dumps(info.document) == before
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
def test_info_without_sharding_is_served_byte_by_byte(document: dict[str, Any]) -> None:
    """An ``info`` without known sharding is served byte for byte and has no sharded parts."""
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
def test_info_of_other_programs_is_no_container(document: Any) -> None:
    """An ``info`` without scales or a type of Neuroglancer is no container."""
    assert parse_info(document, b"") is None


def _names(document: Any) -> list[tuple[str, Names]]:
    return [(part.path, part.names) for part in parse(document).parts]


def test_each_chunk_size_of_a_scale_is_a_part() -> None:
    """Each chunk size of a scale is a part of its own; the voxel offset is zero by default."""
    document = volume_info(RAW_SHARDING, chunk_sizes=[[3, 3, 1], [2, 2, 1]])
    del document["scales"][0]["voxel_offset"]

    assert _names(document) == [
        ("s0", VoxelBounds((0, 0, 0), (7, 5, 1), (3, 3, 1))),
        ("s0", VoxelBounds((0, 0, 0), (7, 5, 1), (2, 2, 1))),
    ]


@pytest.mark.parametrize(
    ("key", "paths"),
    [("s0", ["s0"]), ("./s0", ["s0"]), ("s0/", ["s0"]), ("a/b", ["a/b"]), ("a//b", ["a/b"]),
     ("a/./b", ["a/b"]), ("a/../s0", ["s0"]), ("", [""]), (".", [""]),
     *((key, []) for key in ("../s0", "..", "a/../../s0", "/s0", "//s0", "s3://b/s0", "\ud800",
                             "s\0"))],
)  # fmt: skip
def test_key_of_a_scale_is_normalized(key: str, paths: list[str]) -> None:
    """The key of a scale is normalized; a scale outside of the directory keeps its sharding."""
    info = parse(volume_info(RAW_SHARDING, key=key))

    assert [part.path for part in info.parts] == paths
    assert info.is_rewritten is bool(paths)


def test_parameters_of_a_sharding_are_parsed() -> None:
    """All parameters of a sharding are parsed; encodings are raw by default."""
    odd: Sharding = {
        **MURMUR,
        "preshift_bits": 3,
        "minishard_bits": 0,
        "shard_bits": 64,
        "minishard_index_encoding": "gzip",
        "from the future": 1,
    }
    del odd["data_encoding"]
    (part,) = parse(skeleton_info(odd)).parts
    found = part.sharding

    assert (found.preshift_bits, found.minishard_bits, found.shard_bits) == (3, 0, 64)
    assert found.hash == "murmurhash3_x86_128"
    assert (found.minishard_index_encoding, found.data_encoding) == ("gzip", "raw")


def test_integral_floats_are_accepted() -> None:
    """Integers spelled as floats, such as 1.0, are accepted."""
    exact = volume_info(RAW_SHARDING)
    spelled = volume_info({**RAW_SHARDING, "shard_bits": 1.0}, size=[7.0, 5, 1])

    assert [part.sharding for part in parse(spelled).parts] == [
        part.sharding for part in parse(exact).parts
    ]
    assert _names(spelled) == _names(exact)


def _level_with(**members: Any) -> dict[str, Any]:
    document = annotation_info(RAW_SHARDING)
    del document["spatial"][0]["grid_shape"]
    document["spatial"][0] |= members
    return document


def _cube(*bits: int) -> dict[str, Any]:
    return volume_info(RAW_SHARDING, size=[2**n for n in bits], chunk_sizes=[[1, 1, 1]])


def _kinds(count: int) -> dict[str, Any]:
    return volume_info(RAW_SHARDING, chunk_sizes=[[1, 1, 1]] * count)


_BITS: list[Any] = [-1, 65, 2**70, 1.5, 65.0, "1", None, True, [], {}]
_NO_LISTS: list[Any] = [None, 3, {}, "scales"]
_NO_OBJECTS: list[Any] = [[3], [[]], [volume_info(None), None]]
_NO_GRIDS: dict[str, list[Any]] = {
    "size": [None, [7, 5], [7, 5, -1], [7, 5, 1.5], [7, 5, 1e300], [7, 5, True], [2**63, 1, 1],
             "7,5,1"],
    "voxel_offset": [[0, 0], [0, 0, 0.5], [-(2**64), 0, 0], None],
    "chunk_sizes": [None, [], [3, 3, 1], [[3, 3]], [[3, 3, 0]], [[3, 3, 1], None]],
    "key": [3, None],
}  # fmt: skip
_NO_SHAPES: list[Any] = [None, [0, 1], [1, -1], [1.5], "1", [True], [1] * 65]
_OTHERS: list[Any] = ["md5", "", "GZIP", 3, None, ["gzip"], {}]


def _bad_shardings() -> Iterator[tuple[Sharding, str]]:
    for name in ("preshift_bits", "minishard_bits", "shard_bits"):
        yield {k: v for k, v in RAW_SHARDING.items() if k != name}, f"{name}: Field required"
        yield from (({**RAW_SHARDING, name: value}, f"{name}: Input should") for value in _BITS)
    too_many = {**RAW_SHARDING, "minishard_bits": 33, "shard_bits": 32}
    yield too_many, "minishard_bits and shard_bits are 65 in all"
    for name in ("hash", "minishard_index_encoding", "data_encoding"):
        yield from (({**RAW_SHARDING, name: value}, f"{name}: Input should") for value in _OTHERS)


def _bad_grids() -> Iterator[tuple[dict[str, Any], str]]:
    for name, values in _NO_GRIDS.items():
        reason = "a key is" if name == "key" else rf"^scales s0: {name}[.0-9]*: "
        yield from ((volume_info(RAW_SHARDING, **{name: value}), reason) for value in values)
    yield _level_with(), "grid_shape: Field required"
    yield from (
        (_level_with(grid_shape=value), r"^spatial spatial0: grid_shape[.0-9]*: ")
        for value in _NO_SHAPES
    )
    yield _level_with(grid_shape=[0] * 65), "at most 64"  # looked at before what they are
    for name in ("scales", "relationships", "spatial"):
        document = volume_info(None) if name == "scales" else annotation_info(RAW_SHARDING)
        reason = f"^{name} .*: is no object"
        yield from (({**document, name: value}, reason) for value in _NO_OBJECTS)
    yield _cube(21, 22, 22), "ids of 65 bits, more than 64"
    yield from ((_kinds(n), "chunk_sizes: List should have at most 64") for n in (65, 500_000))
    two = volume_info(RAW_SHARDING)
    two["scales"] *= 65
    yield two, "more than 64 kinds are in one directory"


@pytest.mark.parametrize(
    ("document", "reason"),
    [*((skeleton_info(sharding), reason) for sharding, reason in _bad_shardings()), *_bad_grids()],
)
def test_invalid_member_is_named_in_its_fault(document: Any, reason: str) -> None:
    """Sharding or a grid that is invalid or too large makes a fault that names its member."""
    info = parse(document)
    (*_, fault) = (member.fault for member in info.members if member.fault)

    assert re.search(reason, fault)
    assert len(fault) < 300
    assert info.why_sharded


@pytest.mark.parametrize("name", ["scales", "relationships", "spatial"])
@pytest.mark.parametrize("value", _NO_LISTS)
def test_members_that_are_no_list_are_refused(name: str, value: Any) -> None:
    """A document whose members are no list of objects is refused as a whole."""
    document = volume_info(None) if name == "scales" else annotation_info(RAW_SHARDING)

    with pytest.raises(DecodeError, match=f"{name} is no list of objects"):
        parse({**document, name: value})


def test_malformed_scale_keeps_its_stored_form() -> None:
    """Scales lose their sharding in the served ``info``, except for malformed ones."""
    document = volume_info(RAW_SHARDING, size=[7])
    document["scales"] += [None, *volume_info(RAW_SHARDING, key="s1")["scales"]]
    info = parse(document)
    served = json.loads(info.served)

    assert served["scales"][:2] == document["scales"][:2]
    assert served["scales"][2] == volume_info(None, key="s1")["scales"][0]
    assert [part.path for part in info.parts] == ["s1"]
    assert set(info.faults_at) == {"s0"}


def test_info_at_the_limits_is_accepted() -> None:
    """Ids of 64 bits, 64 chunk sizes and a spatial level without dimensions are accepted."""
    assert [len(parse(document).parts) for document in (_cube(21, 21, 22), _kinds(64))] == [1, 64]
    assert _names(_level_with(grid_shape=[]))[2] == ("spatial0", CellNames(MortonGrid(())))


def test_size_of_an_info_includes_its_parts() -> None:
    """The counted size of an ``info`` grows with each part by more than its text."""
    scales = volume_info(RAW_SHARDING, key="a")["scales"] + volume_info(RAW_SHARDING)["scales"]
    one, two = (parse({"scales": scales[:count]}) for count in (1, 2))

    assert two.nbytes - one.nbytes > 2000 + 3 * (len(two.served) - len(one.served))


_RAW = "identity, preshift 1, minishard 1, shard 1 bits, index raw, data raw"


def _described(document: dict[str, Any]) -> Iterator[Description]:
    for each in describe(parse(document)):
        assert isinstance(each, MemberDescription)
        yield each.description


def test_scale_is_described_as_an_array() -> None:
    """A scale is described as an array in voxels, x first, with its sharding."""
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


_INVALID_COUNTS = {"negative": -3, "boolean": True, "2^63": 2**63, "very many": 10**400}
_TWICE = volume_info(None, chunk_sizes=[[3, 3, 1], [7, 5, 1]])
_TWICE["scales"] += [{**_TWICE["scales"][0], "key": key} for key in ("s0#2", "s0")]
_PATHS = ("s0", "s0#2", "s0#2#2", "s0#2#3", "s0#3", "s0#4")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (volume_info(None) | {"num_channels": 3},
         [{"shape": (7, 5, 1, 3), "inner_chunk_shape": (3, 3, 1, 3),
           "dimension_names": ("x", "y", "z", "channel")}]),
        *((volume_info(None) | {"num_channels": count}, [{"shape": (7, 5, 1)}])
          for count in _INVALID_COUNTS.values()),
        (volume_info(RAW_SHARDING, encoding=7) | {"data_type": None, "num_channels": "x"},
         [{"data_type": None, "codecs": (), "shape": (7, 5, 1)}]),
        (_TWICE,
         [{"path": path, "inner_chunk_shape": (7, 5, 1) if at % 2 else (3, 3, 1)}
          for at, path in enumerate(_PATHS)]),
        (annotation_info(GZIP_DATA),
         [{"path": path, "kind": "annotations"}
          for path in ("by_id", "by_segment", "spatial0", "spatial1")]),
        (mesh_info(RAW_SHARDING), [{"path": "", "kind": "meshes", "sharding": _RAW}]),
        (mesh_info(None), [{"path": "", "kind": "meshes", "sharding": None}]),
        (skeleton_info({**MURMUR, "minishard_index_encoding": "gzip"}),
         [{"path": "", "kind": "skeletons", "sharding": "murmurhash3_x86_128, preshift 0, "
           "minishard 1, shard 1 bits, index gzip, data raw"}]),
    ],
    ids=["channels are a dimension", *(f"{name} channels are one" for name in _INVALID_COUNTS),
         "what nothing depends on may be missing",
         "each chunk size has a path of its own", "annotations are a collection by each index",
         "manifests and fragments share their shards", "what is not sharded", "skeletons"],
)  # fmt: skip
def test_each_array_and_collection_is_described(
    document: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    """Each scale, chunk size and collection of an ``info`` has a description of its own."""
    found = _described(document)

    assert [
        {name: getattr(each, name) for name in wanted}
        for each, wanted in zip(found, expected, strict=True)
    ] == expected


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"sharding": {"@type": "by_moon"}}, "the sharding is by_moon"),
        ({"sharding": "dense"}, "the sharding is dense"),
        ({"sharding": RAW_SHARDING, "key": "../s0"}, "its key is no path below the directory"),
        ({"sharding": None}, ""),
        ({}, ""),
    ],
)
def test_sharded_member_that_is_served_as_stored_has_a_reason(
    members: dict[str, Any], why: str
) -> None:
    """A member that stays sharded is described with the reason; one without sharding has none."""
    document = volume_info(None)
    document["scales"][0] |= members

    (found,) = describe(parse(document))

    assert isinstance(found, MemberDescription)
    assert found.part is None
    assert found.description.sharding is None
    assert found.description.why_sharded.startswith(why)
    assert bool(found.description.why_sharded) == bool(why)


@pytest.mark.parametrize("members", [{"size": [7, 5]}, {"chunk_sizes": None}, {"size": "x"}])
def test_damaged_scale_does_not_hide_others(members: dict[str, Any]) -> None:
    """A damaged scale is described by a DecodeError, beside the descriptions of others."""
    document = volume_info(None, **members)
    document["scales"] += volume_info(RAW_SHARDING, key="s1")["scales"]

    damaged, sound = describe(parse(document))

    assert isinstance(damaged, DecodeError)
    assert isinstance(sound, MemberDescription)
    assert sound.description.path == "s1"


def test_volume_names_its_mesh_and_skeleton_directories() -> None:
    """A volume names the directories of its meshes and skeletons as containers below."""
    document = volume_info(None) | {"mesh": "m/", "skeletons": "./s", "segment_properties": 7}

    assert parse(document).below == ("m", "s")
