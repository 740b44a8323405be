"""Configuration of a repository: virtual chunk containers, and settings for writing.

Version 2 of the format keeps it in ``repo``, version 1 in ``config.yaml``. Of the latter only the
containers are read, as repositories of version 1 are not written. Of a container the location is
used; endpoints, credentials and settings of its store are not.

The library defines ``manifest.splitting``, not the specification: the division of the references of
an array among manifests. For each dimension the first rule counts that matches the array and has a
size for the dimension: the number of chunks that a manifest spans.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import re2
import yaml
from yaml import MappingNode, Node, ScalarNode

from shardgate.errors import ConflictError
from shardgate.formats.documents import Json
from shardgate.formats.icechunk.flexbuffers import decode_flexbuffer
from shardgate.formats.reading import DecodeError
from shardgate.model import check_integer

_CONTAINERS: Final = "virtual_chunk_containers"
_MAX_DEPTH: Final = 32
_MAX_LEVEL: Final = 22
MAX_NBYTES: Final = 64 * 1024
"""Largest configuration in YAML, of which a megabyte would take ten seconds; the default one of the
library has less than 2,000 bytes.
"""
_MAX_FLEXBUFFER_NBYTES: Final = 1024**2
"""Largest configuration in ``repo``; 2,000 virtual chunk containers take a third."""
_MAX_CONDITION_DEPTH: Final = 16
_MOST: Final = 2**64 - 1  # of a FlexBuffer
WHOLE: Final = 2**32 - 1
"""More chunks than an array has along any dimension."""

type _Matches[T] = Callable[[T], bool]


class VirtualContainer(NamedTuple):
    """Virtual chunk container: a prefix of the locations of virtual references."""

    name: str | None
    url_prefix: str


@dataclass(frozen=True, slots=True)
class Config:
    """Settings that are used."""

    containers: tuple[VirtualContainer, ...] = ()
    inline_chunk_threshold_bytes: int = 512
    compression_level: int = 3
    num_updates_per_repo_info_file: int = 1000
    splitting: Json = None
    repo_compression_level: int = 1
    """Level for ``repo``, which every change rewrites: level 3 takes four times as long for random
    ids, and saves at most a tenth of the size.
    """

    @property
    def nbytes(self) -> int:
        containers = sum(512 + len(container.url_prefix) for container in self.containers)
        return containers + (0 if self.splitting is None else 10 * len(str(self.splitting)))


def read_yaml_config(data: bytes) -> Config:
    """Decode a ``config.yaml`` of at most `MAX_NBYTES`. Raises: `DecodeError`."""
    if len(data) > MAX_NBYTES:
        raise DecodeError(f"a configuration of more than {MAX_NBYTES} bytes")
    try:
        return decode_config(_plain(yaml.compose(data, _Loader)))
    except DecodeError:
        raise
    except yaml.MarkedYAMLError as error:  # whose text repeats lines of the file
        line = 1 + error.problem_mark.line if error.problem_mark else 0
        raise DecodeError(f"invalid YAML: {error.problem} in line {line}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise DecodeError(f"invalid YAML: {error}") from None


@lru_cache(maxsize=8)
def read_config(data: bytes) -> Config:
    """Decode the FlexBuffer in ``repo``, which takes 1.5 µs a byte, and which most changes of
    ``repo`` leave as it is. Raises: `DecodeError`.
    """
    if len(data) > _MAX_FLEXBUFFER_NBYTES:
        raise DecodeError(f"a configuration of more than {_MAX_FLEXBUFFER_NBYTES} bytes")
    document = decode_flexbuffer(data)
    members = _members(document, "the configuration")
    compression = _members(members.get("compression"), "compression")
    manifest = _members(members.get("manifest"), "manifest")
    return replace(
        decode_config(document),
        inline_chunk_threshold_bytes=_number(members, "inline_chunk_threshold_bytes", 512),
        compression_level=min(_number(compression, "level", 3), _MAX_LEVEL),
        repo_compression_level=min(_number(compression, "level", 1), _MAX_LEVEL),
        num_updates_per_repo_info_file=_number(members, "num_updates_per_repo_info_file", 1000),
        splitting=manifest.get("splitting"),
    )


def _number(members: Mapping[str, Json], name: str, default: int) -> int:
    value = members.get(name)
    if value is None:
        return default
    return check_integer(value, name, _MOST, DecodeError)


def decode_config(config: Json) -> Config:
    """Read the containers of *config*, a decoded document; `None` has none."""
    containers = _members(_members(config, "the configuration").get(_CONTAINERS), _CONTAINERS)
    return Config(tuple(map(_container, containers.values())))


def _container(document: Json) -> VirtualContainer:
    members = _members(document, "a container")
    name = members.get("name")
    url_prefix = members.get("url_prefix")
    if not isinstance(name, str | None) or not isinstance(url_prefix, str):
        raise DecodeError("the name or the url_prefix of a container is not a string")
    return VirtualContainer(name, url_prefix)


def _members(document: Json, name: str) -> dict[str, Json]:
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise DecodeError(f"{name} is not an object")
    return document


class _Loader(yaml.SafeLoader):
    """Refuses aliases and deep nesting, and constructs no objects."""

    def __init__(self, stream: bytes) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            raise DecodeError("unsupported YAML: an alias")
        if self._depth == _MAX_DEPTH:
            raise DecodeError(f"unsupported YAML: more than {_MAX_DEPTH} levels")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _plain(node: Node | None) -> Json:
    """Convert mappings to objects, and scalars to strings, whatever their tags."""
    match node:
        case MappingNode():
            if not all(isinstance(key, ScalarNode) for key, _ in node.value):
                raise DecodeError("unsupported YAML: a key is not a string")
            return {key.value: _plain(item) for key, item in node.value}
        case ScalarNode() if node.tag != "tag:yaml.org,2002:null":
            # Raises for a lone surrogate, which is no text: UnicodeEncodeError is a ValueError.
            node.value.encode()
            return node.value
    return None


class _ArrayAxis(NamedTuple):
    number: int
    name: str | None


class _Rule(NamedTuple):
    """Sizes for the arrays that a condition matches."""

    matches: _Matches[str]
    sizes: tuple[tuple[_Matches[_ArrayAxis], int], ...]


@dataclass(frozen=True, slots=True)
class Splitting:
    """Rules of a configuration."""

    rules: tuple[_Rule, ...] = ()

    def splits(self, path: str, names: Sequence[str | None] | None, ndim: int) -> tuple[int, ...]:
        """Return how many chunks of the array at *path* a manifest spans, by dimension. Raises:
        `ConflictError` for a bad pattern.
        """
        sizes = [each for rule in self.rules if rule.matches(path) for each in rule.sizes]
        axes = map(_ArrayAxis, range(ndim), names or (None,) * ndim)
        return tuple(next((n for fits, n in sizes if fits(axis)), WHOLE) for axis in axes)


def parse_splitting(document: Json) -> Splitting:
    """Parse the member ``manifest.splitting`` of a configuration; `None` has no rules."""
    if document is None:
        return Splitting()
    if not isinstance(document, dict):
        raise DecodeError("manifest.splitting is not an object")
    rules = document.get("split_sizes")
    return Splitting(tuple(map(_parse_rule, _items(rules if rules is not None else []))))


def _parse_rule(document: Json) -> _Rule:
    match document:
        case [condition, sizes]:
            return _Rule(_parse_condition(condition, 0), tuple(map(_parse_size, _items(sizes))))
    raise DecodeError("a rule of split_sizes is not a pair")


def _parse_condition(document: Json, depth: int) -> _Matches[str]:
    if depth > _MAX_CONDITION_DEPTH:
        raise DecodeError(f"a condition of split_sizes has more than {_MAX_CONDITION_DEPTH} levels")
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
        case {"condition": condition, "num_chunks": size}:
            size = check_integer(size, "num_chunks in split_sizes", WHOLE, DecodeError, least=1)
            return _parse_axis(condition), size
    raise DecodeError("a size in split_sizes has no condition or no num_chunks")


def _parse_axis(document: Json) -> _Matches[_ArrayAxis]:
    match document:
        case "Any":
            return lambda _: True
        case {"Axis": axis_number}:
            number = check_integer(axis_number, "Axis in split_sizes", _MOST, DecodeError)
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
    # RE2 would write the pattern of a stranger to the standard error.
    options.log_errors = False
    options.never_capture = True
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise ConflictError(
            "manifest.splitting of the repository's configuration has the regular expression "
            f"{pattern!r}, which RE2 does not accept: {error.args[0].decode()}"
        ) from error


def check_patterns(document: Json) -> None:
    """Compile all patterns of *document*, for `parse_splitting`. Raises: `ConflictError`."""
    match document:
        case {"regex": str(pattern)} | {"DimensionName": str(pattern)}:
            _compile(pattern)
        case dict():
            for each in document.values():
                check_patterns(each)
        case list():
            for each in document:
                check_patterns(each)


def _items(document: Json) -> list[Json]:
    if not isinstance(document, list):
        raise DecodeError("split_sizes is not a list of lists")
    return document
