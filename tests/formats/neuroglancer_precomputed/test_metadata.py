"""`shardgate.formats.neuroglancer_precomputed.metadata`: ``info`` parsed, served and written."""

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.concurrency import run_in_thread
from shardgate.errors import BadBodyError, ConflictError
from shardgate.formats.neuroglancer_precomputed.keys import (
    CellNames,
    MortonGrid,
    Names,
    VoxelBounds,
)
from shardgate.formats.neuroglancer_precomputed.layout import Precomputed
from shardgate.formats.neuroglancer_precomputed.metadata import (
    Info,
    MemberDescription,
    describe,
    parse_info,
)
from shardgate.formats.reading import DecodeError
from shardgate.formats.surveying import Description
from shardgate.read.perform import DirectFetch
from shardgate.storage.memory import MemoryStore
from tests.formats.mutating import members
from tests.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    MURMUR,
    annotation_info,
    mesh_info,
    skeleton_info,
    volume_info,
)
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING, Sharding
from tests.support.resolving import ROOT

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


def _parse(document: Any) -> Info:
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
    info = _parse(stored)
    again = _parse(json.loads(info.served))

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
    return [(part.path, part.names) for part in _parse(document).parts]


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
     *((key, []) for key in ("../s0", "..", "a/../../s0", "/s0", "//s0", "s3://b/s0"))],
)  # fmt: skip
def test_key_of_a_scale_is_normalized(key: str, paths: list[str]) -> None:
    """The key of a scale is normalized; a scale outside of the directory keeps its sharding."""
    info = _parse(volume_info(RAW_SHARDING, key=key))

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
    (part,) = _parse(skeleton_info(odd)).parts
    found = part.sharding

    assert (found.preshift_bits, found.minishard_bits, found.shard_bits) == (3, 0, 64)
    assert found.hash == "murmurhash3_x86_128"
    assert (found.minishard_index_encoding, found.data_encoding) == ("gzip", "raw")


def test_integral_floats_are_accepted() -> None:
    """Integers spelled as floats, such as 1.0, are accepted."""
    exact = volume_info(RAW_SHARDING)
    spelled = volume_info({**RAW_SHARDING, "shard_bits": 1.0}, size=[7.0, 5, 1])

    assert [part.sharding for part in _parse(spelled).parts] == [
        part.sharding for part in _parse(exact).parts
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
    info = _parse(document)
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
        _parse({**document, name: value})


def test_malformed_scale_keeps_its_stored_form() -> None:
    """Scales lose their sharding in the served ``info``, except for malformed ones."""
    document = volume_info(RAW_SHARDING, size=[7])
    document["scales"] += [None, *volume_info(RAW_SHARDING, key="s1")["scales"]]
    info = _parse(document)
    served = json.loads(info.served)

    assert served["scales"][:2] == document["scales"][:2]
    assert served["scales"][2] == volume_info(None, key="s1")["scales"][0]
    assert [part.path for part in info.parts] == ["s1"]
    assert set(info.faults_at) == {"s0"}


def test_info_at_the_limits_is_accepted() -> None:
    """Ids of 64 bits, 64 chunk sizes and a spatial level without dimensions are accepted."""
    assert [len(_parse(document).parts) for document in (_cube(21, 21, 22), _kinds(64))] == [1, 64]
    assert _names(_level_with(grid_shape=[]))[2] == ("spatial0", CellNames(MortonGrid(())))


def test_size_of_an_info_includes_its_parts() -> None:
    """The counted size of an ``info`` grows with each part by more than its text."""
    scales = volume_info(RAW_SHARDING, key="a")["scales"] + volume_info(RAW_SHARDING)["scales"]
    one, two = (_parse({"scales": scales[:count]}) for count in (1, 2))

    assert two.nbytes - one.nbytes > 2000 + 3 * (len(two.served) - len(one.served))


_RAW = "identity, preshift 1, minishard 1, shard 1 bits, index raw, data raw"


def _described(document: dict[str, Any]) -> Iterator[Description]:
    for each in describe(_parse(document)):
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


_TWICE = volume_info(None, chunk_sizes=[[3, 3, 1], [7, 5, 1]])
_TWICE["scales"] += [{**_TWICE["scales"][0], "key": key} for key in ("s0#2", "s0")]
_PATHS = ("s0", "s0#2", "s0#2#2", "s0#2#3", "s0#3", "s0#4")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (volume_info(None) | {"num_channels": 3},
         [{"shape": (7, 5, 1, 3), "inner_chunk_shape": (3, 3, 1, 3),
           "dimension_names": ("x", "y", "z", "channel")}]),
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
    ids=["channels are a dimension", "what nothing depends on may be missing",
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
        ({"sharding": RAW_SHARDING, "key": "../s0"}, "its key leads out of the directory"),
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

    (found,) = describe(_parse(document))

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

    damaged, sound = describe(_parse(document))

    assert isinstance(damaged, DecodeError)
    assert isinstance(sound, MemberDescription)
    assert sound.description.path == "s1"


def test_volume_names_its_mesh_and_skeleton_directories() -> None:
    """A volume names the directories of its meshes and skeletons as containers below."""
    document = volume_info(None) | {"mesh": "m/", "skeletons": "./s", "segment_properties": 7}

    assert _parse(document).below == ("m", "s")


type Document = Any

_SCALE: Document = {
    **volume_info(None)["scales"][0],
    "key": "s1",
    "encoding": "compressed_segmentation",
    "compressed_segmentation_block_size": [8, 8, 8],
}
VOLUME = volume_info(RAW_SHARDING)
VOLUME["scales"].append(_SCALE | {"sharding": MURMUR})
VOLUME["scales"].append(_SCALE | {"key": "s2"})
MESHES = mesh_info(GZIP_DATA)
SKELETONS = skeleton_info(MURMUR) | {
    "vertex_attributes": [{"id": "radius", "data_type": "float32", "num_components": 1}]
}
ANNOTATIONS = annotation_info(MURMUR) | {
    "properties": [{"id": "size", "type": "float32", "description": "how large"}],
    "lower_bound": [0, 0, 0],
}
EVERY = pytest.mark.parametrize(
    "stored", [VOLUME, MESHES, SKELETONS, ANNOTATIONS], ids=lambda info: info["@type"]
)


async def _translate(given: bytes, stored: bytes | None) -> bytes:
    translator = Precomputed(2**20, 2**20).translator(ROOT)
    return await translator.translate(given, stored, DirectFetch(MemoryStore()), run_in_thread)


async def _stored(given: Document, stored: Document) -> Document:
    found = await _translate(json.dumps(given).encode(), json.dumps(stored).encode())
    return json.loads(found)


def _served(stored: Document) -> Document:
    return json.loads(_parse(stored).served)


@EVERY
async def test_served_info_is_written_back_with_its_sharding(stored: Document) -> None:
    """A served ``info`` that is written back is stored with its sharding, as is the stored one."""
    other = json.loads(json.dumps(stored).replace('"minishard_bits": 1', '"minishard_bits": 1.0'))

    assert "sharding" not in json.dumps(_served(stored))
    for given_info in (_served(stored), stored, other):
        assert await _stored(given_info, stored) == stored


@EVERY
async def test_info_is_stored_verbatim_without_a_sharded_one(stored: Document) -> None:
    """An ``info`` is stored verbatim, sharded or not, if no sharded one is stored."""
    for info in (stored, _served(stored)):
        given = json.dumps(info, indent=3).encode()
        assert await _translate(given, None) == given
        assert await _translate(given, b"no info") == given
        assert await _translate(given, json.dumps(_served(stored)).encode()) == given


def _scale(at: int = 0, **members: Any) -> Callable[[Document], None]:
    return lambda info: info["scales"][at].update(members)


def _top(**members: Any) -> Callable[[Document], None]:
    return lambda info: info.update(members)


def _level(**members: Any) -> Callable[[Document], None]:
    return lambda info: info["spatial"][1].update(members)


def _elsewhere(info: Document) -> None:
    """Move a relationship to another folder, without sharding."""
    info["relationships"][0]["key"] = "elsewhere"
    info["relationships"][0].pop("sharding", None)


ALLOWED: list[tuple[Document, Callable[[Document], None]]] = [
    (VOLUME, _scale(resolution=[4, 4, 40])),
    (VOLUME, _scale(hidden=True)),
    (VOLUME, _scale(2, size=[1, 1, 1], encoding="raw")),
    (VOLUME, _top(type="segmentation", mesh="mesh")),
    (VOLUME, lambda info: info["scales"].append({**_SCALE, "key": "new", "sharding": MURMUR})),
    (VOLUME, lambda info: info["scales"].insert(0, {**_SCALE, "key": "new"})),
    (VOLUME, lambda info: info["scales"].reverse()),
    (VOLUME, lambda info: info["scales"].pop(0)),
    (MESHES, _top(transform=[2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2, 0], lod_scale_multiplier=2)),
    (MESHES, _top(segment_properties="properties")),
    (MESHES, _top(spatial_index={"path": "at"}, chunk_size=[448, 448, 448])),
    (SKELETONS, _top(transform=[2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2, 0])),
    (SKELETONS, _top(spatial_index={"path": "at"}, chunk_size=[448, 448, 448])),
    (ANNOTATIONS, _top(upper_bound=[9, 9, 9])),
    (ANNOTATIONS, lambda info: info["properties"][0].update(description="its size")),
    (ANNOTATIONS, _level(limit=10)),
    (ANNOTATIONS, _elsewhere),
    (ANNOTATIONS, lambda info: info["spatial"].pop()),
    (ANNOTATIONS, lambda info: info["spatial"].append({"key": "s2", "grid_shape": [1, 1, 1]})),
]


@pytest.mark.parametrize(("stored", "change"), ALLOWED)
async def test_compatible_change_of_an_info_is_stored(
    stored: Document, change: Callable[[Document], None]
) -> None:
    """A change that does not affect stored shards is stored with the sharding of the rest."""
    expected, given = deepcopy(stored), _served(stored)
    change(expected)
    change(given)

    assert await _stored(given, stored) == expected


REFUSED: list[tuple[Document, Callable[[Document], None], str]] = [
    (VOLUME, _scale(size=[8, 5, 1]), "scales s0 is stored in shards, and size cannot change"),
    (VOLUME, _scale(voxel_offset=[0, 0, 0]), "voxel_offset"),
    (VOLUME, lambda info: info["scales"][0].pop("voxel_offset"), "voxel_offset"),
    (VOLUME, _scale(chunk_sizes=[[3, 3, 2]]), "chunk_sizes"),
    (VOLUME, _scale(chunk_sizes=[[3, 3, 1], [4, 4, 4]]), "chunk_sizes"),
    (VOLUME, _scale(encoding="png"), "encoding"),
    (VOLUME, _scale(1, compressed_segmentation_block_size=[4, 4, 4]), "block_size"),
    (VOLUME, _top(data_type="uint16"), "data_type"),
    (VOLUME, _top(num_channels=3), "num_channels"),
    (VOLUME, _scale(sharding=MURMUR), "scales s0 .* its sharding cannot change"),
    (VOLUME, _scale(sharding={"@type": "other"}), "its sharding cannot change"),
    (VOLUME, _scale(sharding={}), "its sharding cannot change"),
    (VOLUME, _scale(sharding=[]), "its sharding cannot change"),
    (MESHES, _top(vertex_quantization_bits=10), "vertex_quantization_bits"),
    (MESHES, _top(**{"@type": "neuroglancer_legacy_mesh"}), "no other @type"),
    (MESHES, _top(**{"@type": "something"}), "no other @type"),
    (MESHES, _top(sharding=MURMUR), "its sharding cannot change"),
    (SKELETONS, _top(vertex_attributes=[]), "vertex_attributes"),
    (ANNOTATIONS, _top(annotation_type="line"), "annotation_type"),
    (ANNOTATIONS, _top(dimensions={"x": [1, "m"], "y": [1, "m"]}), "dimensions"),
    (ANNOTATIONS, _top(dimensions={n: [1, "m"] for n in "zyx"}), "dimensions"),
    (ANNOTATIONS, _top(properties=[]), "properties"),
    (ANNOTATIONS, _top(properties=[{"id": "size", "type": "uint8"}]), "properties"),
    (ANNOTATIONS, _top(properties=["size"]), "properties"),
    (ANNOTATIONS, _top(relationships=[]), "by_id .* relationships cannot change"),
    (ANNOTATIONS, _level(grid_shape=[2, 1, 4]), "spatial spatial1 .* grid_shape"),
    (ANNOTATIONS, _level(chunk_size=[1, 1, 1]), "chunk_size"),
    (ANNOTATIONS, _top(lower_bound=[1, 0, 0]), "lower_bound"),
]


@pytest.mark.parametrize(("stored", "change", "reason"), REFUSED)
async def test_change_that_would_misread_shards_is_refused(
    stored: Document, change: Callable[[Document], None], reason: str
) -> None:
    """A change by which stored shards would be misread raises ConflictError."""
    given = _served(stored)
    change(given)

    with pytest.raises(ConflictError, match=reason):
        await _stored(given, stored)


@pytest.mark.parametrize("given", [b"", b"{", b"{'a': 1}", b'{"a": ' * 100_000, b"{} {}"])
async def test_malformed_json_is_refused(given: bytes) -> None:
    """A written ``info`` of malformed JSON raises BadBodyError."""
    for stored in (None, json.dumps(VOLUME).encode()):
        with pytest.raises(BadBodyError, match="no JSON"):
            await _translate(given, stored)


async def test_info_that_is_too_deep_to_be_written_is_refused() -> None:
    """An ``info`` of shards that is both long and deeply nested raises BadBodyError."""
    deep: Document = list(range(10_000))
    for _ in range(600):
        deep = {"a": deep}

    with pytest.raises(BadBodyError, match="the info cannot be written"):
        await _stored(_served(VOLUME) | {"deep": deep}, VOLUME)


@pytest.mark.parametrize(
    "change", [_scale(chunk_sizes=[]), _scale(size=[1, 2]), _top(scales=3), _scale(key=5)]
)
async def test_invalid_info_is_refused(change: Callable[[Document], None]) -> None:
    """A written ``info`` with an invalid scale raises BadBodyError."""
    given = deepcopy(VOLUME)
    change(given)

    with pytest.raises(BadBodyError):
        await _translate(json.dumps(given).encode(), None)


async def test_unchanged_malformed_scale_may_be_written_back() -> None:
    """A malformed scale is accepted if it is the stored one, and refused if it was changed."""
    stored = deepcopy(VOLUME)
    stored["scales"].append({**stored["scales"][0], "key": "s9", "size": "large"})
    given = _served(stored)

    assert await _stored({**given, "type": "segmentation"}, stored) == {
        **stored,
        "type": "segmentation",
    }
    given["scales"][-1]["size"] = "larger"
    with pytest.raises(BadBodyError, match="scales s9: size"):
        await _stored(given, stored)


@pytest.mark.parametrize("given", [b"{}", b'{"some": "settings"}', b"a note", b"\xff\xd8"])
async def test_other_files_named_info_are_stored_verbatim(given: bytes) -> None:
    """A file of another program is stored verbatim, but text not in place of an ``info``."""
    for stored in (None, b"", b"an older note", b"{", b'{"other": 1}'):
        assert await _translate(given, stored) == given
    if not given.startswith(b"{"):
        with pytest.raises(BadBodyError):
            await _translate(given, json.dumps(VOLUME).encode())
