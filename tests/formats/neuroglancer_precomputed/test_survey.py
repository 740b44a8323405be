"""`shardgate.formats.neuroglancer_precomputed.survey`: shards and the chunks in their indexes."""

import json
import struct
import sys
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import DamagedError, VersionChangedError
from shardgate.formats.neuroglancer_precomputed.metadata import (
    MemberDescription,
    describe,
    parse_info,
)
from shardgate.formats.neuroglancer_precomputed.survey import PrecomputedShards, coalesce
from shardgate.formats.surveying import IndexEntry, Ranges, Survey
from shardgate.model import ByteRange
from shardgate.read.metadata_cache import ReadCache, uncached_reads
from shardgate.storage.memory import MemoryStore
from tests.support.formats.case import filled
from tests.support.formats.neuroglancer_precomputed.case import (
    GZIP_DATA,
    build,
    encode_manifest,
    mesh_info,
    skeleton_info,
    volume_info,
)
from tests.support.formats.neuroglancer_precomputed.shards import (
    RAW_SHARDING,
    SINGLE,
    Sharding,
    build_shards,
    container,
    encode_minishard,
    encode_shard,
    shardings,
    single_shard,
)
from tests.support.resolving import ROOT
from tests.support.zipped import zipped

_MOST_NBYTES = 4096


def _of(info: dict[str, Any]) -> PrecomputedShards:
    parsed = parse_info(info, json.dumps(info).encode())
    assert parsed is not None
    described = next(describe(parsed))
    assert isinstance(described, MemberDescription)
    assert described.part is not None
    return PrecomputedShards(ROOT, described.part, _MOST_NBYTES)


def _skeletons(**members: Any) -> PrecomputedShards:
    return _of(skeleton_info({**RAW_SHARDING, **members}))


def _fetch(objects: dict[str, bytes]) -> ReadCache:
    return uncached_reads(filled(objects))


async def _survey(
    shards: PrecomputedShards, objects: dict[str, bytes], name: str = "0.shard"
) -> Survey:
    shard = shards.named(name)
    assert shard is not None
    survey = await shard.survey(_fetch(objects))
    assert survey is not None
    return survey


@pytest.mark.parametrize(
    ("shard_bits", "name", "number"),
    [(0, "0", 0), (1, "1", 1), (4, "f", 15), (5, "1f", 31), (9, "0a0", 160), (60, "0" * 15, 0)],
)
def test_hexadecimal_name_of_the_right_width_is_a_shard(
    shard_bits: int, name: str, number: int
) -> None:
    """A name with as many hexadecimal digits as the shard bits take names a shard."""
    shards = _skeletons(shard_bits=shard_bits)

    shard = shards.named(f"{name}.shard")

    assert shard is not None
    assert (shard.number, shard.key) == (number, f"{name}.shard")
    assert shards.named(f"{name}.data") == shard


@pytest.mark.parametrize(
    ("shard_bits", "name"),
    [(0, "1.shard"), (4, "00.shard"), (5, "f.shard"), (5, "20.shard"), (4, "F.shard"),
     (4, "0.index"), (4, "0"), (4, ".shard"), (4, "0.shard.gz"), (4, "x/0.shard"),
     (4, "\u0660.shard"), (63, "0" * 17 + ".shard")],
)  # fmt: skip
def test_other_name_is_no_shard(shard_bits: int, name: str) -> None:
    """A name of another width, case, suffix or number names no shard, nor does ``.index``."""
    assert _skeletons(shard_bits=shard_bits).named(name) is None


def test_shards_are_named_below_the_path_of_their_part() -> None:
    """Names directly below the path of a part name its shards, and no others."""
    shards = _of(volume_info(RAW_SHARDING))

    assert shards.prefix == "s0/"
    assert shards.named("s0/0.shard") is not None
    assert [shards.named(name) for name in ("0.shard", "s1/0.shard", "s0/s0/0.shard")] == [None] * 3


def test_large_number_of_shards_is_not_listed() -> None:
    """All shards are listed for 3 shard bits, and None is returned for 13."""
    few = _skeletons(shard_bits=3).every()

    assert few is not None
    assert [shard.key for shard in few] == [f"{number}.shard" for number in range(8)]
    assert _skeletons(shard_bits=13).every() is None


async def test_survey_of_an_absent_shard_is_none() -> None:
    """The survey of an absent shard is None, whatever the size of its index."""
    for bits in (1, 50):
        shard = _skeletons(minishard_bits=bits).named("0.shard")
        assert shard is not None
        assert await shard.survey(_fetch({})) is None


async def test_survey_lists_entries_by_place() -> None:
    """A survey lists the entries of all minishards by their places in the shard."""
    objects = build({"s0/-1-2_5-8_0-1": b"first", "s0/2-5_8-10_0-1": b"second"})

    survey = await _survey(_of(volume_info(RAW_SHARDING)), objects, "s0/0.shard")
    table = survey.table()

    assert list(table) == [IndexEntry(0, ByteRange(35, 40)), IndexEntry(3, ByteRange(67, 73))]
    assert [survey.key(entry.number) for entry in table] == ["s0/-1-2_5-8_0-1", "s0/2-5_8-10_0-1"]
    assert np.transpose(survey.indexes).tolist() == [[0, 32], [40, 64], [73, 97]]
    assert (survey.index_location, survey.checksummed, survey.inner) == ("start", (), None)
    assert (table.empty, list(table.faults)) == (0, [])


async def test_survey_of_a_shard_in_two_objects_covers_its_data() -> None:
    """The survey of a shard in two objects has places in the data object."""
    objects = build({"s0/-1-2_5-8_0-1": b"first"}, old=True)

    survey = await _survey(_of(volume_info(RAW_SHARDING)), objects, "s0/0.data")

    assert survey.whole.ref == ROOT.join("s0/0.data")
    assert np.transpose(survey.indexes).tolist() == [[0, 0], [8, 32]]
    assert list(survey.table()) == [IndexEntry(0, ByteRange(3, 8))]


class _Replacing(MemoryStore):
    """Store that replaces the data after each read of it."""

    async def get(self, ref: Any, request: Any = None, **options: Any) -> Any:
        """Read, and replace the data if it was read."""
        found = await super().get(ref, request, **options)
        if ref.key.endswith(".data"):
            self.place(ROOT.join("s0/0.data"), b"other")
        return found


async def test_data_replaced_during_a_survey_has_changed() -> None:
    """Data replaced during a survey, even without minishards, raises VersionChangedError."""
    store = _Replacing()
    store.place(ROOT.join("s0/0.index"), bytes(32))
    store.place(ROOT.join("s0/0.data"), b"first")
    shard = _of(volume_info(RAW_SHARDING)).named("s0/0.data")

    assert shard is not None
    with pytest.raises(VersionChangedError):
        await shard.survey(uncached_reads(store))


@given(st.dictionaries(st.integers(0, 2**64 - 1), st.binary(max_size=9)), st.data())
async def test_survey_names_all_written_ids(chunks: dict[int, bytes], data: st.DataObject) -> None:
    """Surveys of all shards name exactly the written ids, for any ids and sharding."""
    shard_bits = data.draw(st.integers(0, 58))
    sharding = data.draw(shardings()) | {"shard_bits": shard_bits, "data_encoding": "raw"}
    shards = _of(skeleton_info(sharding))

    named: dict[int, bytes] = {}
    for name, shard in build_shards(chunks, sharding).items():
        table = (await _survey(shards, {name: shard}, name)).table()
        assert list(table.faults) == []
        named |= {entry.number: shard[slice(*entry.place)] for entry in table}

    assert named == chunks


_ENTRIES = struct.Struct("<4Q")


def _inflating(nbytes: int, count: int) -> bytes:
    """Encode a shard of eight minishards, *count* of whose indexes inflate to *nbytes*."""
    index = zipped(bytes(nbytes))
    places = [(len(index) * n, len(index) * (n + 1)) for n in range(count)]
    places += [(0, 0)] * (8 - count)
    return b"".join(struct.pack("<2Q", *place) for place in places) + index * count


_ELSEWHERE = b"".join(encode_shard([{0: b"right", 1: b"wrong"}, {3: b"elsewhere"}]))
_GZIP_INDEX = {**SINGLE, "minishard_bits": 3, "minishard_index_encoding": "gzip"}


@pytest.mark.parametrize(
    ("sharding", "shard", "key", "reason"),
    [
        (SINGLE, single_shard((5, 0, 1), (7, 1, 1), (9, 2, 90)), "9",
         "chunk 9 ends past 78 bytes"),
        (SINGLE, single_shard((5, 0, 1), (7, 1, 1), (7, 3, 1)), "7",
         "chunk 7 is twice in the minishard indexes"),
        ({**RAW_SHARDING, "preshift_bits": 0}, _ELSEWHERE, "1",
         "chunk 1 is not in the minishard where readers look for it"),
        ({**RAW_SHARDING, "preshift_bits": 0}, _ELSEWHERE, "3",
         "chunk 3 is not in the minishard where readers look for it"),
        (RAW_SHARDING, _ENTRIES.pack(0, 7, 0, 0) + b"x" * 9, "0.shard",
         "minishard index 0: a minishard index of 7 bytes"),
        (_GZIP_INDEX, _inflating(4104, 1), "0.shard",
         "minishard index 0: more than 4096 bytes once inflated"),
        (_GZIP_INDEX, _inflating(4080, 8), "0.shard",
         "its minishard indexes hold over 16384 bytes in all"),
    ],
)  # fmt: skip
async def test_damaged_entry_or_index_is_a_fault(
    sharding: Sharding, shard: bytes, key: str, reason: str
) -> None:
    """A damaged entry is a fault of its chunk, a damaged minishard index of its shard.

    Other chunks are listed.
    """
    survey = await _survey(_of(skeleton_info(sharding)), {"0.shard": shard})
    table = survey.table()

    assert next(fault for fault in table.faults if fault.key == key).reason.startswith(reason)
    assert len(table.faults) == 1 or shard is _ELSEWHERE or sharding is _GZIP_INDEX
    if sharding is SINGLE:
        assert [entry.number for entry in table] == [n for n in (5, 7) if str(n) != key]


async def test_faults_after_the_first_hundred_are_counted() -> None:
    """The first 100 faults of one kind name their chunks; the others are counted in one fault."""
    rows = [(number, 10**6, 2) for number in range(150)]

    shards = _of(skeleton_info(SINGLE))
    survey = await _survey(shards, {"0.shard": single_shard(*rows)})
    faults = survey.table().faults

    assert [fault.key for fault in faults] == [*map(str, range(100)), "0.shard"]
    assert faults[-1].reason == "50 more chunks: each ends past 3606 bytes"


_LARGE_IN_ALL = struct.pack("<16Q", *(4080 * at for n in range(8) for at in (n, n + 1)))


@pytest.mark.parametrize(
    ("bits", "data", "reason"),
    [
        (3, _LARGE_IN_ALL + bytes(4080 * 8), "minishard indexes of 32640 bytes, over 16384"),
        (12, bytes(2**16), "a shard index of 65536 bytes, over 4096"),
        (1, _ENTRIES.pack(5, 2, 0, 0) + b"x" * 9, "minishard index 0 ends at 2, before 5"),
        (1, _ENTRIES.pack(0, 0, 2, 99) + b"x" * 9,
         r"minishard index 1 at \[2, 99\) ends past 9 bytes"),
        (1, _ENTRIES.pack(0, 5000, 0, 0) + b"x" * 5000,
         r"minishard index 0 at \[0, 5000\) has over 4096 bytes"),
        (1, _ENTRIES.pack(0, 24, 23, 47) + bytes(47),
         r"minishard index 1 at \[23, 47\) overlaps another"),
    ],
)  # fmt: skip
async def test_damaged_or_too_large_shard_index_is_damage(
    bits: int, data: bytes, reason: str
) -> None:
    """A damaged or too large shard index raises DamagedError."""
    with pytest.raises(DamagedError, match=reason):
        await _survey(_skeletons(minishard_bits=bits), {"0.shard": data})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (zipped(b"abc"), None),
        (b"abc", "no gzip"),
        (zipped(bytes(_MOST_NBYTES + 1)), "more than 4096 bytes once inflated"),
    ],
)
async def test_gzip_chunks_are_checked_by_inflating(data: bytes, reason: str | None) -> None:
    """A gzip chunk that does not inflate within the limit is a fault; a raw chunk never."""
    for sharding, expected in (({**GZIP_DATA}, reason), ({**RAW_SHARDING}, None)):
        objects = build_shards({0: b"any"}, sharding)
        survey = await _survey(_of(skeleton_info(sharding)), objects)
        found = survey.check(IndexEntry(0, ByteRange(32, 32 + len(data))), data)
        assert (found or "").startswith(expected or "")
        assert (found is None) is (expected is None)


@pytest.mark.parametrize("encoding", ["raw", "gzip"])
@pytest.mark.parametrize(
    ("fragments_nbytes", "reason"),
    [
        (0, None),
        (20, None),
        (21, "its fragments overlap a minishard index"),
        (67, "its fragments overlap a minishard index"),
        (68, "its fragments have 68 bytes, and there are 67 before it"),
    ],
)
async def test_fragments_of_a_manifest_must_fit_before_it(
    fragments_nbytes: int, reason: str | None, encoding: str
) -> None:
    """Fragments that overlap an index, or exceed the bytes before their manifest, are a fault."""
    manifest = encode_manifest(
        [[fragments_nbytes // 2], [fragments_nbytes - fragments_nbytes // 2]]
    )
    shards = _of(mesh_info({**RAW_SHARDING, "data_encoding": encoding}))
    first = encode_minishard([(0, 0, 23)])
    body = bytes(23) + first + bytes(20) + manifest
    second = encode_minishard([(2, 67, len(manifest))])
    places = (23, 47, len(body), len(body) + len(second))
    survey = await _survey(shards, {"0.shard": struct.pack("<4Q", *places) + body + second})
    _, entry = survey.table()

    stored = zipped(manifest) if encoding == "gzip" else manifest
    assert survey.key(entry.number) == "2.index"
    assert survey.check(entry, stored) == reason
    if encoding == "raw":
        early = "the mesh manifest ends after 40 bytes, early"
        assert survey.check(entry, b"x" * 40) == early


_GAP = 64 * 1024
_SPAN = 8 * 1024**2

_steps = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, _GAP, _GAP + 1]), st.sampled_from([1, 9, _SPAN // 3])),
    max_size=12,
)


def places(steps: list[tuple[int, int]]) -> list[ByteRange]:
    """Return consecutive ranges, each after a gap and of a length."""
    edges = [0, *accumulate(each for step in steps for each in step)]
    return [ByteRange(*edges[at : at + 2]) for at in range(1, len(edges), 2)]


@given(_steps)
def test_near_ranges_are_coalesced(steps: list[tuple[int, int]]) -> None:
    """Ranges with gaps up to 64 KiB are read together within spans of 8 MiB, others apart."""
    found = places(steps)

    runs = [found[run] for run in coalesce(Ranges.of(*found))]

    assert [each for run in runs for each in run] == found
    assert all(b.start - a.stop <= _GAP for run in runs for a, b in pairwise(run))
    assert all(run[-1].start // _SPAN == run[0].start // _SPAN for run in runs)
    for run, after in pairwise(runs):
        is_far = after[0].start - run[-1].stop > _GAP
        assert is_far or after[0].start // _SPAN > run[-1].start // _SPAN


@pytest.mark.parametrize("bits", [3, 12])
async def test_opening_a_shard_takes_no_call_per_minishard(bits: int) -> None:
    """Opening a shard of 4,096 minishards takes less than 2,000 calls, as on the event loop."""
    sharding = {**RAW_SHARDING, "preshift_bits": 0, "minishard_bits": bits, "shard_bits": 0}
    objects = build_shards(dict.fromkeys(range(2**bits), b"data"), sharding)
    case = container(skeleton_info(sharding), **objects)
    target, entry = await case.slot("5")
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    opened = await target.open([entry], case.fetch)
    sys.setprofile(None)

    assert opened is not None
    start = 16 * 2**bits + 5 * (3 + 4 + 24) + 3
    assert opened.lookup(entry) == ByteRange(start, start + 4)
    assert calls < 2000
