"""`shardgate.formats.members`: names of members, sorted and looked up."""

import random

from shardgate.formats.members import SortedNames


def test_many_names_are_sorted_by_their_bytes() -> None:
    """Names in any order are sorted by their UTF-8 bytes, and each tells its old position."""
    names = [f"{'é/'[n % 2]}{n * 7919 % 50_021}".encode() for n in range(50_000)]
    random.Random(0).shuffle(names)

    found, order = SortedNames.of(names)

    assert [name.encode() for name, _ in found.below("", "", "")] == sorted(names)
    assert [names[at] for at in order.tolist()] == sorted(names)
    assert found.position(names[3].decode()) == sorted(names).index(names[3])


def test_no_names_are_sorted() -> None:
    """A container may have no members."""
    found, order = SortedNames.of([])

    assert (len(found), len(order), found.position("a")) == (0, 0, None)
    assert list(found.below("", "", "")) == []
