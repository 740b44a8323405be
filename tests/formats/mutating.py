"""JSON documents with wrong values at some positions."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)
)
members = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.just("sharding"), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Any JSON value."""
_words = st.sampled_from(
    ["sharding_indexed", "crc32c", "transpose", "bytes", "endian", "regular", "default", "v2", "C",
     "F", "start", "end", "little", "/", ".", "\ud800", "indexed", "json",
     "https://purl.org/zarr/spec/protocol/core/3.0"]
)  # fmt: skip
_numbers = st.sampled_from([0, 1, 2, 3, 4, 2**63, 2**64 - 1, 10**4000, -1, True])
_hostile = st.recursive(
    st.one_of(_leaves, st.floats(), st.integers(-(10**200), 10**200), _numbers, _words),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["name", "configuration", "chunk_shape", "codecs", "order", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


def _positions(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(document, dict | list):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield from _positions(document[key], (*path, key))


@st.composite
def mutations(draw: st.DrawFn, *documents: Any) -> Any:
    """Draw one of *documents* with wrong values at some positions, and others missing."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_positions(document))))
        if not path:
            return draw(_hostile)
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        if draw(st.booleans()):
            parent[path[-1]] = draw(_hostile)
        else:
            del parent[path[-1]]
    return document
