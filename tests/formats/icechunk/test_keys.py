"""Virtual keys: the ref that they name and the path in it; ids as file names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.icechunk.ids import NODE_ID_NBYTES, OBJECT_ID_NBYTES, decode_id, encode_id
from shardgate.formats.icechunk.keys import MAIN, Branch, Ref, SnapshotId, Tag, spell_ref, split_ref
from shardgate.http.paths import split_target
from shardgate.model import VirtualKey, escape_ref

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
def test_a_key_is_a_ref_and_a_path(key: str, ref: Ref | None, path: str) -> None:
    """Without a ref, of which each has one spelling, it is a path in ``main``."""
    assert split_ref(VirtualKey(key)) == (ref, path)


@given(REFS, st.sampled_from(["", "zarr.json", "g/a/c/0"]))
def test_every_ref_can_be_spelled(ref: Ref, path: str) -> None:
    """Any text is a name, which stays in its segment, however much of it a URL encodes."""
    name = ref.text if isinstance(ref, SnapshotId) else ref.name
    head = {Branch: "@branch.", Tag: "@tag.", SnapshotId: "@"}[type(ref)]
    everything = "".join(f"%{byte:02x}" for byte in (head + name).encode())
    key = VirtualKey(f"{spell_ref(ref)}/{path}")

    assert split_ref(key) == (ref, path)
    assert "/" not in spell_ref(ref)
    assert not any(letter < " " or letter == "\x7f" for letter in spell_ref(ref))
    assert split_target(f"/em/{everything}/{path}".encode()) == ("em", key)


def test_only_what_no_segment_can_hold_is_escaped() -> None:
    """Names of people's alphabets stay readable."""
    assert escape_ref("é b/c%\n?#") == "é b%2Fc%25%0A?#"


@given(st.binary(max_size=40))
def test_an_id_is_read_as_it_is_spelled(data: bytes) -> None:
    """Of any length: five bits a letter, the last ones padded."""
    assert decode_id(encode_id(data), len(data)) == data


def test_the_first_snapshot_has_its_name() -> None:
    """The alphabet is that of the specification."""
    digits = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    bits = "".join(f"{digits.index(letter):05b}" for letter in FIRST)
    data = int(bits[:96], 2).to_bytes(12)

    assert decode_id(FIRST) == data
    assert encode_id(data) == FIRST


@given(st.text("0123456789ABCDEFGHJKMNPQRSTVWXYZabcoilOIL-\u0663 ", max_size=21))
def test_an_id_has_one_spelling(text: str) -> None:
    """Neither small letters nor letters alike nor set bits at the end are read."""
    for nbytes in (NODE_ID_NBYTES, OBJECT_ID_NBYTES):
        data = decode_id(text, nbytes)
        assert data is None or encode_id(data) == text
