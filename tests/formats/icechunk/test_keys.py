"""Virtual keys of refs, and ids as file names."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardgate.formats.icechunk.ids import NODE_ID_NBYTES, OBJECT_ID_NBYTES, decode_id, encode_id
from shardgate.formats.icechunk.keys import (
    MAIN,
    Branch,
    Ref,
    SnapshotId,
    Tag,
    sharded_key,
    spell_ref,
    split_ref,
)
from shardgate.model import VirtualKey, escape_ref
from shardgate.server.request import split_target

FIRST = "1CECHNKREP0F1RSTCMT0"
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
REFS = st.builds(Branch, NAMES) | st.builds(Tag, NAMES) | st.just(SnapshotId(FIRST))


@pytest.mark.parametrize(
    ("key", "ref", "path"),
    [("", MAIN, ""), ("zarr.json", MAIN, "zarr.json"), ("g/a/c/0/0", MAIN, "g/a/c/0/0"),
     ("@branch.dev/g/a", Branch("dev"), "g/a"), ("@branch.dev", Branch("dev"), ""),
     ("@branch.dev/", Branch("dev"), ""), ("@branch./a", Branch(""), "a"),
     ("@branch.../a", Branch(".."), "a"), ("@branch.a%2Fb/c", Branch("a/b"), "c"),
     ("@branch.a/b", Branch("a"), "b"), ("@branch.100%25/c", Branch("100%"), "c"),
     ("@branch.%252F/c", Branch("%2F"), "c"), (f"@branch.{FIRST}/c", Branch(FIRST), "c"),
     ("@tag.v1.0/c", Tag("v1.0"), "c"), ("@tag.@tag.x/c", Tag("@tag.x"), "c"),
     (f"@{FIRST}/c/0", SnapshotId(FIRST), "c/0"), (f"@{FIRST}", SnapshotId(FIRST), ""),
     ("@session.x/c", None, "c"), ("g/@branch.dev/c", MAIN, "g/@branch.dev/c"),
     *((key, MAIN, key) for key in (
         f"@{FIRST.lower()}/a", f"@{FIRST[:-1]}1/a", f"@{FIRST[:-1]}/a", f"@{FIRST}0/a",
         "@1CECHNKREPOF1RSTCMT0/a", "@/a", "@a/b", "@Branch.dev/a", "@branch/a", f"{FIRST}/a"))],
)  # fmt: skip
def test_key_is_split_into_ref_and_path(key: str, ref: Ref | None, path: str) -> None:
    """A key is split into the ref that it begins with, or ``main``, and a path."""
    assert split_ref(VirtualKey(key)) == (ref, path)


@settings(max_examples=40)
@given(REFS, st.sampled_from(["", "zarr.json", "g/a/c/0"]))
@example(Branch("shardgate-b"), "zarr.json")
@example(Tag("shardgate-1"), "")
def test_spelled_ref_is_split_back(ref: Ref, path: str) -> None:
    """A ref of any name, spelled in a key and percent-encoded in a URL, is split back."""
    name = ref.text if isinstance(ref, SnapshotId) else ref.name
    head = {Branch: "@branch.", Tag: "@tag.", SnapshotId: "@"}[type(ref)]
    everything = "".join(f"%{byte:02x}" for byte in (head + name).encode())
    key = VirtualKey(f"{spell_ref(ref)}/{path}")

    assert split_ref(key) == (ref, path)
    assert "/" not in spell_ref(ref)
    assert not any(letter < " " or letter == "\x7f" for letter in spell_ref(ref))
    assert split_target(f"/em/{everything}/{path}".encode()) == ("em", key)


_SEGMENTS = st.sampled_from(["g", "c", "0", "@sharded", "@branch.a", "@tag.", f"@{FIRST}", "@x"])


@given(st.lists(_SEGMENTS).map("/".join) | NAMES)
@example("lab/@tag.v1")
def test_sharded_key_has_one_segment_more_behind_its_ref(key: str) -> None:
    """The key as it is stored has `@sharded` first or behind the first ref, once."""
    found = sharded_key(key)
    assert sharded_key(found) == found
    without = {found[: at.start()] + found[at.end() :] for at in re.finditer("@sharded/", found)}
    assert found == key or not without.isdisjoint([key, f"{key}/"])


def test_ref_name_is_escaped_minimally() -> None:
    """Slashes, percent signs and control characters of a ref's name are escaped, others kept."""
    assert escape_ref("é b/c%\n?#") == "é b%2Fc%25%0A?#"


@given(st.binary(min_size=1, max_size=40))
def test_encoded_id_is_decoded(data: bytes) -> None:
    """An id of any length is encoded in letters of five bits and decoded back."""
    assert decode_id(encode_id(data), len(data)) == data


def test_id_of_the_first_snapshot_has_the_specified_spelling() -> None:
    """The id of the first snapshot is spelled in the alphabet of the specification."""
    digits = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    bits = "".join(f"{digits.index(letter):05b}" for letter in FIRST)
    data = int(bits[:96], 2).to_bytes(12)

    assert decode_id(FIRST) == data
    assert encode_id(data) == FIRST


@given(st.text("0123456789ABCDEFGHJKMNPQRSTVWXYZabcoilOIL-\u0663 ", max_size=21))
def test_noncanonical_id_is_not_decoded(text: str) -> None:
    """An id in lower case, with look-alike letters or with padding bits set is not decoded."""
    for nbytes in (NODE_ID_NBYTES, OBJECT_ID_NBYTES):
        data = decode_id(text, nbytes)
        assert data is None or encode_id(data) == text
