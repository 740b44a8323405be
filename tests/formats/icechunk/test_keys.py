"""Virtual keys: the ref that they name and the path in it; ids as file names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.ids import NODE_ID_NBYTES, OBJECT_ID_NBYTES, decode_id, encode_id
from app.formats.icechunk.keys import MAIN, Branch, Ref, SnapshotId, Tag, spell_ref, split_ref
from app.http.paths import split_target
from app.model import VirtualKey, escape_ref

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
     ("@session.x/c", None, "c"), ("g/@branch.dev/c", MAIN, "g/@branch.dev/c")],
)  # fmt: skip
def test_a_key_is_a_ref_and_a_path(key: str, ref: Ref | None, path: str) -> None:
    """Without a ref it is a path in ``main``; there are no sessions to read."""
    assert split_ref(VirtualKey(key)) == (ref, path)


@pytest.mark.parametrize(
    "key",
    [f"@{FIRST.lower()}/a", f"@{FIRST[:-1]}1/a", f"@{FIRST[:-1]}/a", f"@{FIRST}0/a",
     "@1CECHNKREPOF1RSTCMT0/a", "@/a", "@a/b", "@Branch.dev/a", "@branch/a", f"{FIRST}/a"],
)  # fmt: skip
def test_what_is_no_ref_is_a_path(key: str) -> None:
    """Ids have one spelling, in capitals and with no bit to spare."""
    assert split_ref(VirtualKey(key)) == (MAIN, key)


@given(REFS, st.sampled_from(["", "zarr.json", "g/a/c/0"]))
def test_every_ref_can_be_spelled(ref: Ref, path: str) -> None:
    """Any text is a name: it stays in its segment, and comes back."""
    assert split_ref(VirtualKey(f"{spell_ref(ref)}/{path}")) == (ref, path)
    assert "/" not in spell_ref(ref)
    assert not any(letter < " " or letter == "\x7f" for letter in spell_ref(ref))


@given(REFS)
def test_a_spelled_ref_is_what_a_path_is_decoded_to(ref: Ref) -> None:
    """However much of it a client encodes in the path of a URL."""
    name = ref.text if isinstance(ref, SnapshotId) else ref.name
    head = {Branch: "@branch.", Tag: "@tag.", SnapshotId: "@"}[type(ref)]
    everything = "".join(f"%{byte:02x}" for byte in (head + name).encode())

    assert split_target(f"/em/{everything}/zarr.json".encode()) == (
        "em",
        VirtualKey(f"{spell_ref(ref)}/zarr.json"),
    )


def test_only_what_no_segment_can_hold_is_escaped() -> None:
    """Names of people's alphabets stay readable."""
    assert escape_ref("é b/c%\n?#") == "é b%2Fc%25%0A?#"


_FIRST_SNAPSHOT = "1CECHNKREP0F1RSTCMT0"
"""Of every repository."""


@given(st.binary(max_size=40))
def test_an_id_is_read_as_it_is_spelled(data: bytes) -> None:
    """Of any length: five bits a letter, the last ones padded."""
    assert decode_id(encode_id(data), len(data)) == data


def test_the_first_snapshot_has_its_name() -> None:
    """The alphabet is that of the specification."""
    digits = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    bits = "".join(f"{digits.index(letter):05b}" for letter in _FIRST_SNAPSHOT)
    data = int(bits[:96], 2).to_bytes(12)

    assert decode_id(_FIRST_SNAPSHOT) == data
    assert encode_id(data) == _FIRST_SNAPSHOT


@given(st.text("0123456789ABCDEFGHJKMNPQRSTVWXYZabcoilOIL-\u0663 ", max_size=21))
def test_an_id_has_one_spelling(text: str) -> None:
    """Neither small letters nor letters alike nor set bits at the end are read."""
    for nbytes in (NODE_ID_NBYTES, OBJECT_ID_NBYTES):
        data = decode_id(text, nbytes)
        assert data is None or encode_id(data) == text


@pytest.mark.parametrize(
    "text",
    ["", _FIRST_SNAPSHOT.lower(), _FIRST_SNAPSHOT[:-1], _FIRST_SNAPSHOT + "0",
     _FIRST_SNAPSHOT[:-1] + "1", _FIRST_SNAPSHOT.replace("0", "O"),
     _FIRST_SNAPSHOT.replace("1", "\u0661")],
)  # fmt: skip
def test_what_is_no_id_is_none(text: str) -> None:
    """A wrong length, case, letter, digit, or padding."""
    assert decode_id(text) is None
