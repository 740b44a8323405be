"""`app.formats.icechunk.used_chunks`: which chunk files manifests refer to."""

import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.used_chunks import ChunkIdsDecoder, UsedChunks
from app.formats.reading import DecodeError
from tests.formats.icechunk.building import MANIFEST, Ref, envelope, manifest

LIMIT_NBYTES = 1 << 20
OBJECT_ID = b"manifest  id"
IDS = st.binary(min_size=12, max_size=12) | st.sampled_from([bytes(12), b"\1" + bytes(11)])
REFS = st.one_of(
    st.builds(
        lambda index, chunk_id, offset: Ref(
            index=index, offset=offset, length=1, chunk_id=chunk_id
        ),
        st.lists(st.integers(0, 9), max_size=3),
        IDS,
        st.none() | st.integers(1, 9),
    ),
    st.builds(
        lambda at, data: Ref(index=(at,), inline=data), st.integers(0, 9), st.binary(max_size=9)
    ),
    st.builds(lambda at: Ref(index=(at,), location="s3://x/y", length=5), st.integers(0, 9)),
)


def _decode(data: bytes) -> list[bytes]:
    found = ChunkIdsDecoder(OBJECT_ID, LIMIT_NBYTES)(envelope(data, MANIFEST))
    raw = found.ids.tobytes()
    return [raw[at : at + 12] for at in range(0, len(raw), 12)]


@given(st.lists(st.lists(REFS, max_size=8), max_size=4))
def test_all_native_references_are_found(arrays: list[list[Ref]]) -> None:
    """Also those that stand twice, out of order, or have coordinates that no array has."""
    data = manifest(OBJECT_ID, [(bytes([at] * 8), refs) for at, refs in enumerate(arrays)])
    wanted = {ref.chunk_id for refs in arrays for ref in refs if ref.chunk_id is not None}

    assert _decode(data) == sorted(wanted)


@given(st.data())
def test_a_flipped_bit_never_breaks_more_than_the_manifest(data: st.DataObject) -> None:
    """What is damaged is told, or not seen; no other error is raised."""
    whole = manifest(
        OBJECT_ID, [(b"12345678", [Ref(index=(1,), chunk_id=b"a" * 12, length=1)] * 3)]
    )
    at = data.draw(st.integers(0, len(whole) * 8 - 1))
    flipped = bytearray(whole)
    flipped[at // 8] ^= 1 << at % 8
    with suppress(DecodeError):
        _decode(bytes(flipped))


def test_another_manifest_is_refused() -> None:
    """Its name says which it is."""
    with pytest.raises(DecodeError):
        _decode(manifest(b"another one!", []))


@given(st.lists(st.lists(IDS, max_size=20), max_size=5), st.lists(IDS, max_size=20))
def test_a_set_of_ids_holds_what_was_added(added: list[list[bytes]], others: list[bytes]) -> None:
    """Whatever the bytes are, zeros at the end too."""
    used = UsedChunks()
    for ids in added:
        refs = [Ref(index=(at,), chunk_id=each, length=1) for at, each in enumerate(ids)]
        data = envelope(manifest(OBJECT_ID, [(b"12345678", refs)]), MANIFEST)
        used.add(ChunkIdsDecoder(OBJECT_ID, LIMIT_NBYTES)(data).ids)
    held = {each for ids in added for each in ids}
    asked = [*held, *others, os.urandom(12)]

    assert used.hold(asked).tolist() == [each in held for each in asked]
