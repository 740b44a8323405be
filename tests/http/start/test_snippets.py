"""`app.http.start.snippets`: what is offered for what was seen."""

import ast
from dataclasses import replace
from typing import Any

import pytest

from app.errors import DamagedError
from app.formats.surveying import Description
from app.http.start.snippets import document_key, write_snippets
from app.model import ObjectRef
from app.resolve.inspect import CollectionSummary, GroupSummary

LEVEL = Description("s0", "zarr", "array", (4, 6), "uint8", ("y", "x"), (2, 3))
GROUP = GroupSummary("", is_consolidated=True)
S0 = CollectionSummary("s0", "s0", "s0", GROUP, LEVEL)
URL = "http://host/em"
DAMAGED = DamagedError(ObjectRef("memory://b", "k"), "it is torn")


def titles(*seen: CollectionSummary) -> list[str]:
    """Name the snippets for *seen*."""
    return [snippet.title for snippet in write_snippets(URL, seen)]


def level(name: str, **more: Any) -> CollectionSummary:
    """Make an array in the group of `S0`."""
    return CollectionSummary(name, name, name, GROUP, replace(LEVEL, **more))


def xarray(*seen: CollectionSummary) -> str:
    """Give the snippet for xarray."""
    return dict(write_snippets(URL, seen))["xarray"]


def test_levels_of_other_sizes_are_left_out() -> None:
    """Only what goes together is opened."""
    code = xarray(S0, level("s1", shape=(2, 3)), level("mask"))

    assert 'xarray.open_zarr("http://host/em", consolidated=True, drop_variables=["s1"])' in code


@pytest.mark.parametrize(
    "seen",
    [
        level("s0", dimension_names=None),
        level("s0", dimension_names=("y", None)),
        level("s0", dimension_names=("x", "x")),
        CollectionSummary("", "", "", None, LEVEL),
    ],
)
def test_xarray_needs_names_and_a_group(seen: CollectionSummary) -> None:
    """It opens no array without names for the dimensions, and none that is in no group."""
    assert titles(seen) == ["curl", "zarr-python", "TensorStore"]


def test_one_array_without_names_spoils_its_group() -> None:
    """All arrays of a group are looked at, those that are left out too."""
    assert "xarray" not in titles(S0, level("other", dimension_names=None))
    unnamed = replace(LEVEL, dimension_names=None)
    elsewhere = CollectionSummary("g/a", "g/a", "g/a", GroupSummary("g"), unnamed)
    assert "xarray" in titles(S0, elsewhere)


def test_what_is_damaged_is_not_offered() -> None:
    """The first that is sound is."""
    damaged = CollectionSummary("a", "a", None, None, DAMAGED)

    assert titles(damaged) == []
    assert write_snippets(URL, [damaged, S0])[0].code == f"curl -sS {URL}/s0/zarr.json"


def test_a_name_cannot_leave_its_quotes() -> None:
    """Whatever an array is called, the code is what it seems to be, in one line of ASCII."""
    name = "\"'); import os;\n\u202e`$(id)`"
    hostile = replace(S0, path=name, container=name, node=name)
    curl, *python = write_snippets(URL, [hostile, level(f"{name}2", shape=(9, 9)), S0])

    assert len(curl.code.splitlines()) == 1
    assert curl.code.isascii()
    for title, code in python:
        assert code.isascii()
        assert len(ast.parse(code).body) == (4 if title == "TensorStore" else 3)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (S0, "s0/zarr.json"),
        (replace(S0, path="", container="", node=""), "zarr.json"),
        (replace(S0, node="@branch.main/s0"), "@branch.main/s0/zarr.json"),
        (CollectionSummary("v/8", "v", None, None, replace(LEVEL, format="precomputed")), "v/info"),
        (CollectionSummary("draft/a", "draft", None, None, LEVEL), "draft/zarr.json"),
        (CollectionSummary("a", "a", None, None, DAMAGED), "a/zarr.json"),
    ],
)
def test_document(seen: CollectionSummary, expected: str) -> None:
    """Each has a document that describes it, or its container."""
    assert document_key(seen) == expected
