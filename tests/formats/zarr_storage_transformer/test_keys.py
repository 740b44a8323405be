"""Storage keys and chunk identifiers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.zarr_storage_transformer.keys import (
    ChunkIdentifiers,
    DataKey,
    MetadataKeys,
    split_data_key,
)

_identifiers = st.builds(ChunkIdentifiers, st.sampled_from(["/", "."]), st.integers(0, 4))
_numbers = st.integers(0, 10**19 - 1)
_pieces = st.sampled_from(["c", "/", ".", "0", "1", "10", "07", "-1", "+1", "1_0", " ", "\n", "c1"])
_texts = st.one_of(
    st.text(),
    st.text("c/.0123456789"),
    st.lists(_pieces | st.characters(categories=["Nd"])).map("".join),
)
_names = st.text("abc01.-_", min_size=1).filter(lambda name: name.strip("."))
_paths = st.lists(_names, max_size=4).map("/".join)


def _coords(data: st.DataObject, identifiers: ChunkIdentifiers) -> tuple[int, ...]:
    return data.draw(st.tuples(*[_numbers] * identifiers.ndim))


@given(_identifiers, st.data())
def test_what_is_formatted_parses(identifiers: ChunkIdentifiers, data: st.DataObject) -> None:
    """The coordinates of an identifier are those it was made of."""
    coords = _coords(data, identifiers)

    assert identifiers.parse(identifiers.format(coords)) == coords


@given(_identifiers, _texts)
def test_what_parses_is_canonical(identifiers: ChunkIdentifiers, text: str) -> None:
    """There is one spelling of each identifier: whatever else is written is none."""
    for spelled in (text, f"c{text}"):
        coords = identifiers.parse(spelled)

        assert coords is None or identifiers.format(coords) == spelled


@pytest.mark.parametrize(
    ("separator", "coords", "identifier"),
    [
        ("/", (1, 23, 45), "c1/23/45"),
        (".", (1, 23, 45), "c1.23.45"),
        ("/", (0,), "c0"),
        ("/", (), "c"),
        (".", (), "c"),
    ],
)
def test_identifiers_of_the_draft(separator: str, coords: tuple[int, ...], identifier: str) -> None:
    """A ``c``, the indices joined with the separator, and nothing between."""
    assert ChunkIdentifiers(separator, len(coords)).format(coords) == identifier
    assert ChunkIdentifiers(separator, len(coords)).parse(identifier) == coords


@given(_paths, _identifiers, st.data())
def test_array_and_chunk_are_told_apart(
    path: str, identifiers: ChunkIdentifiers, data: st.DataObject
) -> None:
    """Whatever nodes are called, like a chunk or a number too, one array can own a data key."""
    key = DataKey(path, identifiers.format(_coords(data, identifiers)))

    assert split_data_key(key.format()) == key


@given(_texts)
def test_what_is_told_apart_is_put_together_again(text: str) -> None:
    """No key is taken for another."""
    for key in (text, f"data/root/{text}", f"data/root/c{text}", f"data/root/{text}/c0"):
        split = split_data_key(key)

        assert split is None or split.format() == key


@pytest.mark.parametrize(
    ("key", "split"),
    [
        ("data/root/foo/baz/c96/18", DataKey("foo/baz", "c96/18")),
        ("data/root/c0/0", DataKey("", "c0/0")),
        ("data/root/c0.0", DataKey("", "c0.0")),
        ("data/root/c", DataKey("", "c")),
        ("data/root/foo/c", DataKey("foo", "c")),
        ("data/root/c0/c1/2", DataKey("c0", "c1/2")),
        ("data/root/c0/5/c1", DataKey("c0/5", "c1")),
    ],
)
def test_data_keys(key: str, split: DataKey) -> None:
    """The identifier begins at the last ``c``; the array at the root has no path."""
    assert split_data_key(key) == split


@pytest.mark.parametrize(
    "key",
    [
        "",
        "zarr.json",
        "data/root",
        "data/root/foo",
        "data/root/foo/checksums",
        "data/root/foo/c0x",
        "data/root/foo/c0/",
        "data/root/foo/c0//1",
        "data/root/foo/c/0",
        "data/root/foo/C0",
        "data/root//c0",
        "data/root/foo//c0",
        "data/root//foo/c0",
        "data/rooted/c0/0",
        "data/c0/0",
        "c0/0",
        "meta/root/c0/0",
        "x/data/root/c0/0",
    ],
)
def test_other_keys_name_no_chunk(key: str) -> None:
    """What is not below ``data/root``, or ends otherwise, belongs to no array."""
    assert split_data_key(key) is None


@pytest.mark.parametrize(
    ("path", "suffix", "key"),
    [
        ("", ".json", "meta/root.array.json"),
        ("foo", ".json", "meta/root/foo.array.json"),
        ("foo/bar", ".json", "meta/root/foo/bar.array.json"),
        ("foo/bar", "", "meta/root/foo/bar.array"),
        ("a.array.json", ".json", "meta/root/a.array.json.array.json"),
    ],
)
def test_metadata_keys(path: str, suffix: str, key: str) -> None:
    """The path, ``.array`` and the suffix of the entry point."""
    keys = MetadataKeys(suffix)

    assert keys.format(path) == key
    assert keys.owns(key)


@given(_paths, st.sampled_from([".json", "", ".yaml"]))
def test_every_array_has_its_metadata_key(path: str, suffix: str) -> None:
    """What is formatted is owned."""
    assert MetadataKeys(suffix).owns(MetadataKeys(suffix).format(path))


@pytest.mark.parametrize(
    "key",
    [
        "",
        "zarr.json",
        "meta/root.group.json",
        "meta/root/foo.group.json",
        "meta/root/foo.array.yaml",
        "meta/root/foo.array",
        "meta/root/.array.json",
        "meta/root/foo/.array.json",
        "meta/rootfoo.array.json",
        "foo.array.json",
        ".array.json",
        "data/root/foo.array.json",
        "x/meta/root/foo.array.json",
    ],
)
def test_other_keys_are_no_metadata_of_arrays(key: str) -> None:
    """Groups, other suffixes, and what is spelled otherwise."""
    assert not MetadataKeys(".json").owns(key)
