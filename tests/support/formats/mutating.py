"""JSON documents with wrong values at some positions."""

import copy
from typing import Any

from hypothesis import strategies as st

from tests.support.attacks.mutating import walk

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


@st.composite
def mutations(draw: st.DrawFn, *documents: Any) -> Any:
    """Draw one of *documents* with wrong values at some positions, and others missing."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 3))):
        places = list(walk(document))
        number = draw(st.integers(-1, len(places) - 1))
        if number < 0:
            return draw(_hostile)
        holder, key = places[number]
        if draw(st.booleans()):
            holder[key] = draw(_hostile)
        else:
            del holder[key]
    return document
