"""The cache that is bounded by weight."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from app.resolve.weighed import WeighedCache

_MAX = 10


def _cache() -> WeighedCache[str, int]:
    """Make a cache of integers that weigh what they are."""
    return WeighedCache(_MAX, lambda _, value: value)


_steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "discard"]),
        st.sampled_from("abcdef"),
        st.integers(0, 4) | st.integers(0, _MAX + 3),
    ),
    max_size=60,
)


@given(_steps)
def test_it_is_a_dictionary_that_drops_the_least_recent(steps: list[tuple[str, str, int]]) -> None:
    """Whatever is done, it holds what a naive model holds, and weighs what that weighs."""
    cache, model = _cache(), OrderedDict[str, int]()
    for verb, key, weight in steps:
        if verb == "get":
            assert cache.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        else:
            model.pop(key, None)
            if verb == "discard":
                cache.discard(key)
            else:
                cache.put(key, weight)
                if weight <= _MAX:
                    model[key] = weight
            while sum(model.values()) > _MAX:
                model.popitem(last=False)
        assert (cache.nbytes, len(cache)) == (sum(model.values()), len(model))
        assert cache.nbytes <= _MAX


def test_what_is_heavier_than_everything_is_not_kept() -> None:
    """An entry above the bound cannot be found."""
    cache = _cache()
    cache.put("a", _MAX + 1)

    assert cache.get("a") is None


def test_what_is_heavier_than_everything_evicts_no_other() -> None:
    """The other entries stay."""
    cache = _cache()
    cache.put("a", 4)
    cache.put("b", _MAX + 1)

    assert cache.get("a") == 4


def test_what_is_heavier_than_everything_replaces_its_own_key() -> None:
    """The old value is not given for the new one."""
    cache = _cache()
    cache.put("a", 4)
    cache.put("a", _MAX + 1)

    assert (cache.get("a"), cache.nbytes) == (None, 0)


def test_what_was_used_last_stays_longest() -> None:
    """To look an entry up keeps it from being the next to go."""
    cache = _cache()
    for key in "abc":
        cache.put(key, 3)
    cache.get("a")
    cache.put("d", 3)

    assert [cache.get(key) for key in "abcd"] == [3, None, 3, 3]


def test_an_entry_as_heavy_as_everything_is_kept() -> None:
    """The bound itself is allowed."""
    cache = _cache()
    cache.put("a", _MAX)

    assert cache.get("a") == _MAX


def test_the_key_is_weighed_too() -> None:
    """A long key takes room."""
    cache = WeighedCache[str, int](_MAX, lambda key, value: len(key) + value)
    cache.put("a" * _MAX, 1)
    cache.put("b", 1)

    assert (cache.get("a" * _MAX), cache.nbytes) == (None, 2)
