"""FlexBuffers as we write them are those of the library, byte for byte."""

from math import inf, nan
from pathlib import Path
from typing import Any

import icechunk
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.flexbuffer import decode_flexbuffer
from app.formats.icechunk.flexbuffer_writing import encode_flexbuffer
from app.formats.icechunk.metadata_items import encode_metadata, read_metadata
from app.formats.icechunk.repo_info import RepoInfoDecoder

TEXT = st.text(st.characters(codec="utf-8"), max_size=300)
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-300, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(width=32, allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUES = st.recursive(
    SCALARS | st.lists(st.integers(-9, 9), max_size=7) | st.lists(st.floats(0, 1), max_size=7),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(KEYS, inner, max_size=7),
    max_leaves=40,
)


@given(VALUES)
def test_what_is_written_can_be_read(value: Any) -> None:
    """Every value of JSON comes back."""
    assert decode_flexbuffer(encode_flexbuffer(value)) == value


def test_the_library_writes_the_same(tmp_path: Path) -> None:
    """And so it reads it as it was meant."""
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path)))
    values: list[Any] = []

    @given(st.lists(VALUES, min_size=5, max_size=5))
    def collect(some: list[Any]) -> None:
        values.extend(some)

    collect()
    metadata = {f"{number:04d}": value for number, value in enumerate(values)}
    repo.set_metadata(metadata)

    info = RepoInfoDecoder(2**26)((tmp_path / "repo").read_bytes())
    stored = dict(read_metadata(info.reader().buffer.root, 6, 2).items)
    ours = dict(encode_metadata(metadata).items)
    assert ours.keys() == stored.keys()
    for name, value in metadata.items():
        assert ours[name] == stored[name], value


@pytest.mark.parametrize(
    "value",
    [2**64, -(2**63) - 1, inf, [nan], {"a\0": 1}, "\ud800", [[[]] * 2, {"\ud800": 1}]],
)
def test_what_cannot_be_spelled_is_refused(value: Any) -> None:
    """It is a `ValueError`, never something else that is read."""
    with pytest.raises(ValueError, match=r".+"):
        encode_flexbuffer(value)


def test_what_nests_too_deep_to_be_read_is_not_written() -> None:
    """A bound is the same on both sides."""
    value: Any = 1
    for _ in range(128):
        value = [value]
    assert decode_flexbuffer(encode_flexbuffer(value)) == value
    with pytest.raises(ValueError, match="deeper than 128"):
        encode_flexbuffer([value])
