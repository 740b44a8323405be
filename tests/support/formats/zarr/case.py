"""Containers of Zarr v3 and of the draft of 2022 for the conformance suite."""

from functools import partial
from typing import Any

from tests.support.formats.case import Case
from tests.support.formats.zarr import draft
from tests.support.formats.zarr.building import build, build_nested, build_rectilinear, chunk_bytes


def _case(
    name: str, *, checksummed: bool = True, is_spelling: bool = False, **options: Any
) -> Case:
    keys = ["c/0/0", "c/0/1", "c/1/0", "c/2/3", "c/0/3"]
    return Case(
        name,
        partial(build, **options),
        {key: chunk_bytes(number) for number, key in enumerate(keys)},
        absent=("c/1/1", "c/2/0", "c/3/0", "c/0/4", "c/0/0/0", "c/00/0", "c/0", "c", "x/c/0/0"),
        checksummed=checksummed,
        is_spelling=is_spelling,
    )


_spelling = partial(_case, is_spelling=True)


CASES = (
    _case("end"),
    _case("start", location="start"),
    _spelling("big-endian", endian=">"),
    _spelling("no-checksum", crc=False, checksummed=False),
    _spelling("start-no-checksum-big", location="start", crc=False, endian=">", checksummed=False),
    _case("undeclared", is_declared=False, checksummed=False),
    _spelling("undeclared-no-checksum", crc=False, is_declared=False, checksummed=False),
    _case("undeclared-start", location="start", is_declared=False, checksummed=False),
    _spelling(
        "undeclared-start-no-checksum",
        location="start",
        crc=False,
        is_declared=False,
        checksummed=False,
    ),
    _case("checksum-after", trailer=True),
    _case("checksum-after-start", trailer=True, location="start"),
    Case(
        "rectilinear",
        build_rectilinear,
        {
            key: chunk_bytes(number)
            for number, key in enumerate(["c/0/0", "c/1/3", "c/3/0", "c/3/2", "c/4/3"])
        },
        absent=("c/0/1", "c/1/0", "c/2/3", "c/4/0", "c/5/0", "c/4/4", "c/00/0", "c/0", "c"),
        checksummed=True,
    ),
    Case(
        "nested",
        build_nested,
        {f"c/{number}": chunk_bytes(number) for number in (0, 1, 2, 5)},
        absent=("c/3", "c/4", "c/6", "c/7", "c/8", "c/0/0", "c/05"),
        checksummed=False,
    ),
    *draft.CASES,
)
