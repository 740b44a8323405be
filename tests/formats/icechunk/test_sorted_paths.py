"""`app.formats.icechunk.sorted_paths`: what is below a group, among many paths."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from app.formats.icechunk.editing import edit
from app.formats.icechunk.metadata_items import Metadata
from app.formats.icechunk.requested import DeleteNode, Edit, PutNode
from app.formats.icechunk.sorted_paths import SortedPaths
from app.formats.icechunk.stored_nodes import StoredNode, StoredSnapshot

PATHS = st.lists(st.sampled_from(["a", "a-", "a0", "é", "b"]), max_size=3).map(
    lambda segments: "/" + "/".join(segments)
)


@given(st.lists(PATHS, max_size=12, unique=True), st.lists(PATHS, max_size=8))
def test_what_is_taken_is_a_path_and_all_below(first: Sequence[str], steps: Sequence[str]) -> None:
    """Paths that are there are taken, others are added, in any order."""
    paths, left = SortedPaths(first), set(first)
    for path in steps:
        if path in left:
            expected = {each for each in left if f"{each}/".startswith(f"{path}/")}
            if path == "/":
                expected = set(left)
            taken = paths.take(path)
            assert (taken[0], set(taken), len(taken)) == (path, expected, len(expected))
            left -= expected
        else:
            paths.add(path)
            left.add(path)


def test_thousands_of_nodes_are_deleted_one_by_one() -> None:
    """Not each looks at all others: that would take minutes."""
    root = StoredNode(b"the root", "/", b"{}")
    parent = StoredSnapshot(bytes(12), {"/": root}, {}, 0, "", Metadata(2, ()))
    paths = [f"/{number}" for number in range(100_000)]
    edits: list[Edit] = [PutNode(path, b"{}", is_array=False) for path in paths]
    edits += [DeleteNode(path) for path in paths]
    numbers = iter(range(len(paths)))

    changes = edit(parent, edits, lambda: next(numbers).to_bytes(8))

    assert changes.is_empty
