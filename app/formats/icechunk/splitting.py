"""Division of the references of an array among manifests, by ``manifest.splitting``.

The library defines it, not the specification. For each dimension of an array the first rule counts
that matches the array and has a size for the dimension: the number of chunks that a manifest spans.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import re2

from app.errors import ConflictError
from app.formats.documents import Json
from app.formats.reading import DecodeError

_MAX_DEPTH: Final = 16
WHOLE: Final = 2**32 - 1
"""More chunks than an array has along any dimension."""

type _Matches[T] = Callable[[T], bool]


class _ArrayAxis(NamedTuple):
    number: int
    name: str | None


@dataclass(frozen=True, slots=True)
class Splits:
    """Numbers of chunks that a manifest spans, by dimension."""

    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, ndim: int) -> "Splits":
        """Return sizes that keep all references of an array in one manifest."""
        return cls((WHOLE,) * ndim)


class _Rule(NamedTuple):
    """Sizes for the arrays that a condition matches."""

    matches: _Matches[str]
    sizes: tuple[tuple[_Matches[_ArrayAxis], int], ...]

    def size(self, axis: _ArrayAxis) -> int | None:
        return next((size for matches, size in self.sizes if matches(axis)), None)


@dataclass(frozen=True, slots=True)
class Splitting:
    """Rules of a configuration."""

    rules: tuple[_Rule, ...] = ()

    def splits(self, path: str, names: Sequence[str | None] | None, ndim: int) -> Splits:
        """Return the sizes for the array at *path*. Raises: `ConflictError` for a bad pattern."""
        rules = [rule for rule in self.rules if rule.matches(path)]
        axes = map(_ArrayAxis, range(ndim), names or (None,) * ndim)
        return Splits(tuple(_size(rules, axis) for axis in axes))


def parse_splitting(document: Json) -> Splitting:
    """Parse the member ``manifest.splitting`` of a configuration; `None` has no rules."""
    if document is None:
        return Splitting()
    if not isinstance(document, dict):
        raise DecodeError("manifest.splitting is not an object")
    rules = document.get("split_sizes")
    return Splitting(tuple(map(_parse_rule, _items(rules if rules is not None else []))))


def _size(rules: Sequence[_Rule], axis: _ArrayAxis) -> int:
    found = (rule.size(axis) for rule in rules)
    return next((size for size in found if size is not None), WHOLE)


def _parse_rule(document: Json) -> _Rule:
    match document:
        case [condition, sizes]:
            return _Rule(_parse_condition(condition, 0), tuple(map(_parse_size, _items(sizes))))
    raise DecodeError("a rule of split_sizes is not a pair")


def _parse_condition(document: Json, depth: int) -> _Matches[str]:
    if depth > _MAX_DEPTH:
        raise DecodeError(f"a condition of split_sizes has more than {_MAX_DEPTH} levels")
    match document:
        case "any_array":
            return lambda _: True
        case {"path_matches": {"regex": str(pattern)}}:
            return _search(pattern)
        case {"name_matches": {"regex": str(pattern)}}:
            search = _search(pattern)
            return lambda path: path != "/" and search(path.rpartition("/")[2])
        case {"or": [*documents]}:
            some = [_parse_condition(each, depth + 1) for each in documents]
            return lambda path: any(matches(path) for matches in some)
        case {"and": [*documents]}:
            every = [_parse_condition(each, depth + 1) for each in documents]
            return lambda path: all(matches(path) for matches in every)
    raise DecodeError("unknown condition in split_sizes")


def _parse_size(document: Json) -> tuple[_Matches[_ArrayAxis], int]:
    match document:
        case {"condition": condition, "num_chunks": int(size)} if 0 < size <= WHOLE:
            return _parse_axis(condition), size
    raise DecodeError("num_chunks in split_sizes is absent or out of range")


def _parse_axis(document: Json) -> _Matches[_ArrayAxis]:
    match document:
        case "Any":
            return lambda _: True
        case {"Axis": int(number)}:
            return lambda axis: axis.number == number
        case {"DimensionName": str(pattern)}:
            search = _search(pattern)
            return lambda axis: axis.name is not None and search(axis.name)
    raise DecodeError("unknown dimension in split_sizes")


def _search(pattern: str) -> _Matches[str]:
    """Return a search for *pattern*, compiled on first use: only writing needs it."""
    return lambda text: _compile(pattern).search(text) is not None


@lru_cache(maxsize=64)
def _compile(pattern: str) -> Any:
    """Compile *pattern* with RE2, whose searches take time linear in the text."""
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise ConflictError(
            "manifest.splitting of the repository's configuration has the regular expression "
            f"{pattern!r}, which RE2 does not accept: {error.args[0].decode()}"
        ) from error


def _items(document: Json) -> list[Json]:
    if not isinstance(document, list):
        raise DecodeError("split_sizes is not a list of lists")
    return document
