"""Tables of references whose Thrift metadata lie are refused, within bounded memory and time."""

import random
import struct
from contextlib import suppress

import pytest

from shardgate.formats.kerchunk.parquet_set import decode_table, memory_nbytes
from shardgate.formats.reading import DecodeError
from tests.support.formats.kerchunk import thrift
from tests.support.processor import processor_time_below

MOST = 2**20


def lying(number: int, kind: int, value: object, column: int = 3) -> bytes:
    """Return a table whose metadata of a column have another field *number*."""
    pages, footer = thrift.table()
    (group,) = footer[3][2][1]
    ((_, _, meta),) = group[0][2][1][column]
    for field in meta:
        if field[0] == number:
            field[1:] = [kind, value]
    return thrift.assemble(pages, footer)


@pytest.mark.parametrize("number", [1, 4, 6, 7, 9])
@pytest.mark.parametrize("value", [-1, -(2**63), 2**63, 2**68])
def test_number_out_of_bounds_is_refused(number: int, value: int) -> None:
    """A number of a column that is negative, or above 63 bits, is refused, whatever it counts."""
    with pytest.raises(DecodeError, match=r"expected an integer|compression"):
        decode_table(lying(number, 6, value), 2, MOST)


@pytest.mark.parametrize("column", range(4))
def test_negative_size_does_not_lift_the_bound_of_another_column(column: int) -> None:
    """Sizes of columns cannot cancel: a negative one is refused before they are added."""
    with pytest.raises(DecodeError, match="bytes of an inflated column"):
        memory_nbytes(lying(6, 6, -(2**40), column), MOST)


def test_boolean_in_place_of_a_number_is_refused() -> None:
    """A Thrift boolean where the number of rows stands is refused."""
    pages, footer = thrift.table()
    (group,) = footer[3][2][1]
    group[2][1:] = [1, True]

    with pytest.raises(DecodeError, match=r"rows of a group: expected an integer .* found True"):
        decode_table(thrift.assemble(pages, footer), 2, MOST)


def test_columns_that_share_pages_are_refused() -> None:
    """Columns with more bytes than the file are refused: each would be decoded again."""
    pages, footer = thrift.table()
    (group,) = footer[3][2][1]
    for column in group[0][2][1]:
        column[0][2][4][2], column[0][2][5][2] = len(pages) - 4, 4

    with pytest.raises(DecodeError, match="columns of"):
        decode_table(thrift.assemble(pages, footer), 2, MOST)


@pytest.mark.parametrize("nested", [b"\x19" * 100_000, b"\x1c" * 100_000, b"\x19\x1c" * 50_000])
@pytest.mark.parametrize("is_page", [False, True])
def test_nested_metadata_are_refused(nested: bytes, *, is_page: bool) -> None:
    """Lists and structs nested 100,000 deep, in a footer or a page, are refused as too deep."""
    pages, footer = thrift.table()
    file = pages + nested + struct.pack("<I", len(nested)) + b"PAR1"
    if is_page:
        (group,) = footer[3][2][1]
        for column in group[0][2][1]:
            column[0][2][4][2], column[0][2][5][2] = len(nested) // 4, 4
        file = thrift.assemble(b"PAR1" + nested, footer)

    with pytest.raises(DecodeError, match="nested deeper than 16 levels"):
        decode_table(file, 2, MOST)


@pytest.mark.parametrize("examples", [10_000, pytest.param(3_000_000, marks=pytest.mark.soak)])
def test_changed_table_is_decoded_or_refused(examples: int) -> None:
    """Tables with wrong numbers, types and fields are decoded, or raise DecodeError, a thousand of
    them within 10 s of CPU time.
    """
    chance = random.Random(54)
    for _ in range(examples // 1000):
        with processor_time_below(10):
            for _ in range(1000):
                data = thrift.changed(chance)
                with suppress(DecodeError):
                    decode_table(data, 2, MOST)
