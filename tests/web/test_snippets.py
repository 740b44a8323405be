"""`shardgate.web.snippets`: code for hostile names and for arrays without dimensions."""

import ast
from dataclasses import replace

import pytest

from shardgate.survey.arrays import ArrayView
from shardgate.web.snippets import array_snippets, curl, group_snippets, volume_snippets

URL = "http://host/em"
LEVEL = ArrayView("", "zarr", "array", (4, 6), "uint8", ("y", "x"), (2, 3), shard_shape=(4, 6))


def test_xarray_snippet_drops_arrays_of_other_sizes() -> None:
    """The xarray snippet of a group drops arrays whose dimensions have other sizes before."""
    arrays = {"s0": LEVEL, "s1": replace(LEVEL, shape=(2, 3)), "mask": LEVEL}
    code = group_snippets(URL, arrays, is_consolidated=True)["xarray"]

    assert 'xarray.open_zarr("http://host/em", consolidated=True, drop_variables=["s1"])' in code


@pytest.mark.parametrize("names", [None, ("y", None), ("x", "x")])
def test_xarray_snippets_need_dimension_names(names: tuple[str | None, ...] | None) -> None:
    """An array, or one of a group, without dimension names of its own has no xarray snippet."""
    unnamed = replace(LEVEL, dimension_names=names)

    assert list(array_snippets(URL, unnamed)) == ["zarr-python", "TensorStore", "dask"]
    both = {"s0": LEVEL, "other": unnamed}
    assert list(group_snippets(URL, both, is_consolidated=False)) == ["zarr-python"]


def test_group_with_unequal_chunks_has_no_xarray_snippet() -> None:
    """A group with an array of unequal chunks, which xarray refuses, has no snippet of xarray."""
    unequal = replace(LEVEL, inner_chunk_shape=None, shard_shape=None)
    arrays = {"s0": LEVEL, "other": unequal}

    assert list(group_snippets(URL, arrays, is_consolidated=False)) == ["zarr-python"]
    assert list(array_snippets(URL, unequal)) == ["zarr-python"]


def test_dask_snippet_has_chunks_of_a_shard() -> None:
    """The dask snippet reads whole shards; of an array without shards, its chunks."""
    assert f'from_zarr("{URL}", chunks=(4, 6))' in array_snippets(URL, LEVEL)["dask"]
    whole = replace(LEVEL, shard_shape=None)
    assert f'from_zarr("{URL}", chunks=(2, 3))' in array_snippets(URL, whole)["dask"]


def test_snippets_quote_hostile_names() -> None:
    """Snippets with quotes, braces and line breaks in names of arrays are valid ASCII code."""
    name = "\"'); import os;\n\u202e`$(id)`{0}"
    hostile = replace(LEVEL, dimension_names=(name, "x"))
    arrays = {name: LEVEL, f"{name}2": replace(LEVEL, shape=(9, 9))}
    python = [
        *array_snippets(URL, hostile).values(),
        *group_snippets(URL, arrays, is_consolidated=False).values(),
        *volume_snippets(URL).values(),
    ]

    for code in python:
        assert code.isascii()
        assert len(ast.parse(code).body) in (3, 4)
    assert curl("http://host/a'b")["curl"] == """curl -sS 'http://host/a'"'"'b'"""
