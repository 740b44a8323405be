"""Small files that describe endless work are refused by counted steps, not by a clock."""

import json
import struct
from collections.abc import Callable
from typing import Final

import pytest
import zstandard

from shardgate.formats.documents import Json, write_json
from shardgate.formats.icechunk.flatbuffers import TEXT, FlatBufferReader, TableType
from shardgate.formats.icechunk.flexbuffers import decode_flexbuffer, encode_flexbuffer
from shardgate.formats.icechunk.metadata_items import decode_messagepack
from shardgate.formats.icechunk.snapshot import SnapshotDecoder
from shardgate.formats.kerchunk.json_set import decode_json_set
from shardgate.formats.kerchunk.parquet_set import decode_table
from shardgate.formats.reading import StepBudget, StepsError
from tests.support.formats.icechunk import building
from tests.support.formats.kerchunk import thrift
from tests.support.processor import processor_time_below

MOST: Final = 2**27
ID: Final = b"a snapshot i"
KIND: Final = TableType(TEXT)


def shared_tables(count: int) -> bytes:
    """Return a vector of *count* offsets to one table without fields, which is behind it."""
    table = 4 + 4 * count + 4
    offsets = (table - slot for slot in range(4, 4 + 4 * count, 4))
    return struct.pack(f"<I{count}I2Hi", count, *offsets, 4, 4, 4)


def test_vector_of_offsets_to_one_table_is_read() -> None:
    """A short vector whose offsets lead to one table is read."""
    reader = FlatBufferReader(shared_tables(1000))

    assert reader.tables(KIND, 0) == [[None]] * 1000


def test_endless_tables_of_a_compressed_file_are_refused() -> None:
    """A million tables of a FlatBuffer that is compressed to 1,000 bytes take too many steps; the
    same tables may lie in a file of megabytes.
    """
    data = shared_tables(10**6) + bytes(2**23)
    with pytest.raises(StepsError, match="more steps"):
        FlatBufferReader(data, stored_nbytes=1000).tables(KIND, 0)

    assert len(FlatBufferReader(data).targets(0)) == 10**6


def snapshot_of(documents: list[bytes]) -> bytes:
    """Return the payload of a snapshot of groups with *documents*."""
    nodes = [
        building.Node(node_id=bytes(8), path=f"/{at}", user_data=document)
        for at, document in enumerate(documents)
    ]
    return building.snapshot(ID, nodes)


def test_nodes_that_share_a_document_are_refused() -> None:
    """A snapshot whose nodes share a document, so that they have more bytes than the file, takes
    too many steps; nodes with equal documents of their own are read.
    """
    document = json.dumps({"zarr_format": 3, "node_type": "group", "a": "x" * 1000}).encode()
    others = [b"other %d" % number for number in range(4)]
    shared = bytearray(snapshot_of([document, *others]))
    vectors = [shared.index(each) - 4 for each in others]
    target = shared.index(document) - 4
    for at, offset in enumerate(struct.unpack_from(f"<{len(shared) // 4}I", shared)):
        if 4 * at + offset in vectors and target > 4 * at:
            struct.pack_into("<I", shared, 4 * at, target - 4 * at)
    decode = SnapshotDecoder(ID, MOST)
    own = building.envelope(snapshot_of([document] * 5), building.SNAPSHOT)

    assert len(decode(own).nodes) == 5
    with pytest.raises(StepsError, match="more steps"):
        decode(building.envelope(bytes(shared), building.SNAPSHOT))


@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (decode_flexbuffer, encode_flexbuffer([0] * 1000)),
        (decode_flexbuffer, encode_flexbuffer({str(number): None for number in range(500)})),
        (decode_messagepack, b"\xdc\x03\xe8" + bytes(1000)),
        (decode_messagepack, b"\xde\x01\xf4" + b"".join(b"\xa3%03d\0" % n for n in range(500))),
    ],
)
def test_values_of_metadata_share_one_budget(
    decode: Callable[[bytes, StepBudget], Json], data: bytes
) -> None:
    """Values of metadata that are decoded together take their steps from one budget."""
    steps = StepBudget(10_000)
    with pytest.raises(StepsError, match="more steps"):
        [decode(each, steps) for each in [data] * 100]


def test_pages_without_rows_are_refused() -> None:
    """A table of references with 60,000 pages that have no rows takes too many steps."""
    header = thrift.encode(12, thrift.page(0, b""))
    pages, footer = thrift.table()
    (group,) = footer[3][2][1]
    meta = group[0][2][1][3][0][2]
    meta[3][2] = meta[4][2] = len(header) * 60_000
    meta[5][2] = len(pages)

    with pytest.raises(StepsError, match="more steps"):
        decode_table(thrift.assemble(pages + header * 60_000, footer), 2, MOST)


def test_texts_of_a_compressed_dictionary_are_refused() -> None:
    """A dictionary of 1.5 million texts in some hundred bytes takes too many steps."""
    count = 1_500_000
    body = zstandard.compress(bytes(4 * count))
    sizes = [[1, 5, 2], [2, 5, 4 * count], [3, 5, len(body)]]
    header = thrift.encode(12, [*sizes, [7, 12, [[1, 5, count], [2, 5, 0]]]])
    pages, footer = thrift.table()
    (group,) = footer[3][2][1]
    meta = group[0][2][1][3][0][2]
    meta[1][2], meta[3][2], meta[4][2] = 6, 5 * count, len(header + body)
    meta[5][2] = len(pages)

    with pytest.raises(StepsError, match="more steps"):
        decode_table(thrift.assemble(pages + header + body, footer), 2, MOST)


def test_references_of_a_compressed_set_are_refused() -> None:
    """A set of 300,000 references in some hundred bytes takes too many steps; uncompressed it is
    read.
    """
    text = b'{"version":1,"refs":{' + b",".join([b'"a":"x"'] * 300_000) + b"}}"
    with pytest.raises(StepsError, match="more steps"):
        decode_json_set(zstandard.compress(text), MOST)

    assert decode_json_set(text, MOST).table.inline.startswith(b"x")


def test_deep_and_long_lists_are_written_in_linear_time() -> None:
    """Lists of thousands of numbers, each within 900 others, are written within 1 s."""
    lists = b"[" * 900 + b"[" + b"0, " * 20_000 + b"0]" + b"]" * 900
    text = b"[" + b", ".join([lists] * 20) + b"]"
    document = json.loads(text)
    with processor_time_below(1):
        written = write_json(document)

    assert written == text
