"""`app.formats.icechunk.audit_snapshot`: extents that overlap."""

from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.audit_snapshot import find_misfits
from app.formats.icechunk.metadata import Chunks, ManifestRef, Node
from app.formats.zarr_sharding_indexed.keys import ChunkKeys
from app.formats.zarr_sharding_indexed.metadata import Node as Document

RANGES = st.tuples(st.integers(0, 5), st.integers(0, 5))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, int], ...]]]:
    """Draw boxes of one number of dimensions."""
    ndim = draw(st.integers(0, 3))
    return ndim, draw(st.lists(st.tuples(*[RANGES] * ndim), max_size=5))


def _share(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    return all(set(range(*a)) & set(range(*b)) for a, b in zip(one, other, strict=True))


@given(boxes())
def test_extents_that_share_a_chunk_are_found(
    drawn: tuple[int, list[tuple[tuple[int, int], ...]]],
) -> None:
    """Two manifests may cover a chunk exactly if that is told; empty extents cover nothing."""
    ndim, extents = drawn
    manifests = [ManifestRef(bytes([at] * 12), box) for at, box in enumerate(extents)]
    listed = frozenset(manifest.object_id for manifest in manifests)
    chunks = Chunks(ChunkKeys("c", "/", ndim), (5,) * ndim, tuple(manifests))
    node = Node(b"nodename", Document("array", b"", is_rewritten=False), chunks)

    found = list(find_misfits(node, listed))

    pairs = [(a, b) for at, a in enumerate(extents) for b in extents[at + 1 :]]
    assert bool(found) == any(_share(a, b) for a, b in pairs)
    assert all("overlap" in reason for reason in found)
