"""How an array's references are divided among manifests, by the repository's configuration.

The library calls it splitting; the specification is silent. The first rule that matches an array
and one of whose dimensions matches an axis decides how many chunks a manifest spans along that.
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
"""More chunks than there are along any axis."""

type _Matches[T] = Callable[[T], bool]


class _Axis(NamedTuple):
    """One dimension of an array."""

    number: int
    name: str | None


@dataclass(frozen=True, slots=True)
class Splits:
    """How many chunks the manifests of an array span along each dimension, counted from 0."""

    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, ndim: int) -> "Splits":
        """Keep all references of an array in one manifest."""
        return cls((WHOLE,) * ndim)


class _Rule(NamedTuple):
    """What holds of some arrays."""

    matches: _Matches[str]
    """Whether of that at an absolute path."""
    sizes: tuple[tuple[_Matches[_Axis], int], ...]

    def size(self, axis: _Axis) -> int | None:
        """Tell how many chunks a manifest spans along *axis*, if the rule says so."""
        return next((size for matches, size in self.sizes if matches(axis)), None)


@dataclass(frozen=True, slots=True)
class Splitting:
    """The member ``manifest.splitting`` of a configuration."""

    rules: tuple[_Rule, ...] = ()

    def splits(self, path: str, names: Sequence[str | None] | None, ndim: int) -> Splits:
        """Divide the array at *path*, absolute, whose dimensions have *names*.

        Raises: `ConflictError` for a regular expression that RE2 does not accept.
        """
        rules = [rule for rule in self.rules if rule.matches(path)]
        axes = map(_Axis, range(ndim), names or (None,) * ndim)
        return Splits(tuple(_size(rules, axis) for axis in axes))


def parse_splitting(document: Json) -> Splitting:
    """Read what a configuration says under ``manifest.splitting``; nothing where it is silent.

    Raises: `DecodeError`.
    """
    if document is None:
        return Splitting()
    if not isinstance(document, dict):
        raise DecodeError("manifest.splitting is no object")
    rules = document.get("split_sizes")
    return Splitting(tuple(map(_parse_rule, _items(rules if rules is not None else []))))


def _size(rules: Sequence[_Rule], axis: _Axis) -> int:
    found = (rule.size(axis) for rule in rules)
    return next((size for size in found if size is not None), WHOLE)


def _parse_rule(document: Json) -> _Rule:
    match document:
        case [condition, sizes]:
            return _Rule(_parse_condition(condition, 0), tuple(map(_parse_size, _items(sizes))))
    raise DecodeError("a rule of split_sizes is no pair")


def _parse_condition(document: Json, depth: int) -> _Matches[str]:
    if depth > _MAX_DEPTH:
        raise DecodeError(f"a condition of split_sizes nests deeper than {_MAX_DEPTH}")
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
    raise DecodeError("a condition of split_sizes is of no known kind")


def _parse_size(document: Json) -> tuple[_Matches[_Axis], int]:
    match document:
        case {"condition": condition, "num_chunks": int(size)} if 0 < size <= WHOLE:
            return _parse_axis(condition), size
    raise DecodeError("split_sizes has no num_chunks for a dimension, or one that is out of range")


def _parse_axis(document: Json) -> _Matches[_Axis]:
    match document:
        case "Any":
            return lambda _: True
        case {"Axis": int(number)}:
            return lambda axis: axis.number == number
        case {"DimensionName": str(pattern)}:
            search = _search(pattern)
            return lambda axis: axis.name is not None and search(axis.name)
    raise DecodeError("a dimension of split_sizes is of no known kind")


def _search(pattern: str) -> _Matches[str]:
    """Search for *pattern*, compiled on first use: a repository with a bad one can be read."""
    return lambda text: _compile(pattern).search(text) is not None


@lru_cache(maxsize=64)
def _compile(pattern: str) -> Any:
    """Compile *pattern* with RE2, whose searches take time linear in the text.

    Raises: `ConflictError`.
    """
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
        raise DecodeError("split_sizes or what is in it is no list")
    return document
