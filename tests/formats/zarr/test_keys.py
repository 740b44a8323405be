"""`shardgate.formats.zarr.keys`: chunk keys and coordinates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.zarr.keys import ChunkKeys

_encodings = st.builds(
    ChunkKeys,
    st.sampled_from(["c/", "c.", "", "data/root/a/c"]),
    st.sampled_from(["/", "."]),
    st.integers(0, 4),
)
_numbers = st.integers(0, 10**19 - 1)
_pieces = st.sampled_from(["c", "/", ".", "0", "1", "7", "10", "07", "-1", "+1", "1_0", " ", "\n"])
_texts = st.one_of(
    st.text(),
    st.text("c/.0123456789"),
    st.lists(_pieces | st.characters(categories=["Nd"])).map("".join),
)


@given(_encodings, st.data())
def test_formatted_key_parses_to_its_coordinates(keys: ChunkKeys, data: st.DataObject) -> None:
    """A formatted key parses to its coordinates."""
    coords = data.draw(st.tuples(*[_numbers] * keys.ndim))

    assert keys.parse(keys.format(coords)) == coords


@pytest.mark.parametrize(
    ("keys", "counts", "described"),
    [
        (ChunkKeys("c/", "/", 3), [8, 8, 8], "8×8×8 chunks, c/0/0/0 to c/7/7/7"),
        (ChunkKeys("", ".", 2), [1, 3], "1×3 chunks, 0.0 to 0.2"),
        (ChunkKeys("c/", "/", 0), [], "1 chunk, c"),
        (ChunkKeys("c/", "/", 2), [0, 3], "0×3 chunks"),
    ],
)
def test_grid_is_described_with_its_first_and_last_key(
    keys: ChunkKeys, counts: list[int], described: str
) -> None:
    """The description of a grid has its size and, unless it is empty, its first and last key."""
    assert keys.describe(counts) == described


@given(_encodings, _texts)
def test_only_canonical_keys_parse(keys: ChunkKeys, text: str) -> None:
    """A text that parses is the canonical key of its coordinates."""
    coords = keys.parse(text)

    assert coords is None or keys.format(coords) == text


@pytest.mark.parametrize(
    ("prefix", "separator", "coords", "key"),
    [("c/", "/", (7, 3, 1), "c/7/3/1"), ("c.", ".", (7, 3, 1), "c.7.3.1"),
     ("", "/", (7, 3, 1), "7/3/1"), ("", ".", (7, 3, 1), "7.3.1"), ("c/", "/", (), "c"),
     ("c.", ".", (), "c"), ("", "/", (), "0"), ("", ".", (), "0"), ("c/", "/", (0,), "c/0"),
     ("", ".", (0,), "0"), ("data/c", "/", (1, 2), "data/c1/2"), ("data/c", ".", (), "data/c")],
)  # fmt: skip
def test_keys_are_spelled_by_the_specification(
    prefix: str, separator: str, coords: tuple[int, ...], key: str
) -> None:
    """Each encoding formats and parses the keys of the specification."""
    keys = ChunkKeys(prefix, separator, len(coords))

    assert (keys.format(coords), keys.parse(key)) == (key, coords)


@pytest.mark.parametrize(
    "key",
    [
        "", "c", "c/", "c/1", "c/1/", "c/1/2/", "c/1/2/3", "/c/1/2", "c//1/2", "C/1/2", "c.1.2",
        "1/2", "c/01/2", "c/1/00", "c/-1/2", "c/+1/2", "c/1.0/2", "c/1e1/2", "c/0x1/2", "c/1_0/2",
        "c/ 1/2", "c/1/2\n", "c/1/2\0", "c/\u0663/1", "c/\uff11/2", "c/\u00b2/1", "c/1/..",
        "c/" + "1" * 20 + "/2", "c/1/" + "9" * 5000,
    ],
)  # fmt: skip
def test_noncanonical_key_does_not_parse(key: str) -> None:
    """Keys with signs, zeros, other digits or separators, or wrong counts do not parse."""
    assert ChunkKeys("c/", "/", 2).parse(key) is None


@pytest.mark.parametrize(
    ("prefix", "separator", "key", "is_owned"),
    [("c/", "/", "c", True), ("c/", "/", "c/", True), ("c/", "/", "c/0/", True),
     ("c/", "/", "c/x", True), ("c/", "/", "cat.jpg", False), ("c/", "/", "zarr.json", False),
     ("c.", ".", "c.0.0", True), ("c.", ".", "zarr.json", False), ("", "/", "0/", True),
     ("", "/", "0/1", True), ("", "/", "zarr.json", False), ("", ".", "0.1", True),
     ("", ".", "notes/", False)],
)  # fmt: skip
def test_array_owns_keys_that_begin_like_its_chunks(
    prefix: str, separator: str, key: str, *, is_owned: bool
) -> None:
    """An array owns the keys that begin like its chunk keys, and no others."""
    assert ChunkKeys(prefix, separator, 2).owns(key) is is_owned
