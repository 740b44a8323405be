"""`shardgate.formats.members`: names of members, sorted and looked up."""

import random

from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.members import SortedNames

_names = st.text("ab é/", min_size=1, max_size=4)
_texts = st.text("ab é/\0\n", max_size=5)


def test_many_names_are_sorted_by_their_bytes() -> None:
    """Names in any order are sorted by their UTF-8 bytes, and each tells its old position."""
    names = [f"{'é/'[n % 2]}{n * 7919 % 50_021}".encode() for n in range(50_000)]
    random.Random(0).shuffle(names)

    found, order = SortedNames.of(names)

    assert [name.encode() for name, _ in found.below("", "", "")] == sorted(names)
    assert [names[at] for at in order.tolist()] == sorted(names)
    assert found.position(names[3].decode()) == sorted(names).index(names[3])


@given(st.sets(_names, max_size=70), st.sets(_texts, max_size=20))
def test_names_have_positions_and_other_texts_none(names: set[str], others: set[str]) -> None:
    """Each name has its position in the order of their bytes; other texts have none."""
    ordered = sorted(names, key=str.encode)
    found, _ = SortedNames.of([name.encode() for name in names])

    assert [found.position(name) for name in ordered] == list(range(len(ordered)))
    assert {found.position(text) for text in others.difference(names)} <= {None}


@given(st.sets(_names, max_size=70), _texts, _texts, st.sampled_from(["", "/"]))
def test_names_below_a_prefix_follow_any_text(
    names: set[str], start: str, last: str, delimiter: str
) -> None:
    """The names that begin with a prefix and sort after a text come in order, with positions.

    They are cut behind the delimiter, and each folder comes once, without a position.
    """
    found, _ = SortedNames.of([name.encode() for name in names])
    expected = dict[str, int | None]()
    for at, name in enumerate(sorted(names, key=str.encode)):
        head, cut, _ = name[len(start) :].partition(delimiter or "in no name")
        if name.startswith(start):
            expected.setdefault(f"{start}{head}{cut}", None if cut else at)

    assert list(found.below(start, last, delimiter)) == [
        (name, at) for name, at in expected.items() if name > last
    ]


def test_name_takes_few_bytes_beside_its_own() -> None:
    """Many names weigh four bytes each beside their own."""
    names = [b"%06d" % number for number in range(10_000)]

    found, _ = SortedNames.of(names)

    assert found.nbytes <= (6 + 4) * len(names)
