"""Configuration of a repository: virtual chunk containers, and settings for writing.

Version 2 of the format keeps it in ``repo``, version 1 in ``config.yaml``. Of the latter only the
containers are read, as repositories of version 1 are not written. Of a container the location is
used; endpoints, credentials and settings of its store are not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import yaml
from yaml import MappingNode, Node, ScalarNode

from app.formats.documents import Json
from app.formats.icechunk.flexbuffers import decode_flexbuffer
from app.formats.reading import DecodeError

_CONTAINERS: Final = "virtual_chunk_containers"
_NULL: Final = "tag:yaml.org,2002:null"
_MAX_DEPTH: Final = 32
_MAX_LEVEL: Final = 22
MAX_NBYTES: Final = 64 * 1024
"""Largest configuration; the default one of the library has less than 2,000 bytes."""


@dataclass(frozen=True, slots=True)
class VirtualContainer:
    """Virtual chunk container: a prefix of the locations of virtual references."""

    name: str | None
    url_prefix: str
    store: str


@dataclass(frozen=True, slots=True)
class Config:
    """Settings that are used."""

    containers: tuple[VirtualContainer, ...] = ()
    inline_chunk_threshold_bytes: int = 512
    compression_level: int = 3
    num_updates_per_repo_info_file: int = 1000
    splitting: Json = None

    @property
    def nbytes(self) -> int:
        containers = sum(512 + len(container.url_prefix) for container in self.containers)
        return containers + (0 if self.splitting is None else 10 * len(str(self.splitting)))


@dataclass(frozen=True, slots=True)
class YamlConfigDecoder:
    """Decodes a ``config.yaml`` of at most *limit_nbytes*; a megabyte takes ten seconds."""

    limit_nbytes: int

    def __call__(self, data: bytes) -> Config:
        if len(data) > self.limit_nbytes:
            raise DecodeError(f"a configuration of more than {self.limit_nbytes} bytes")
        try:
            return decode_config(_plain(yaml.compose(data, _Loader)))
        except DecodeError:
            raise
        except yaml.MarkedYAMLError as error:  # whose text repeats lines of the file
            line = 1 + error.problem_mark.line if error.problem_mark else 0
            raise DecodeError(f"invalid YAML: {error.problem} in line {line}") from None
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise DecodeError(f"invalid YAML: {error}") from None


def read_config(data: bytes) -> Config:
    """Decode the FlexBuffer in ``repo``. Raises: `DecodeError`."""
    if len(data) > MAX_NBYTES:
        raise DecodeError(f"a configuration of more than {MAX_NBYTES} bytes")
    document = decode_flexbuffer(data)
    members = _members(document, "the configuration")
    compression = _members(members.get("compression"), "compression")
    manifest = _members(members.get("manifest"), "manifest")
    return replace(
        decode_config(document),
        inline_chunk_threshold_bytes=_number(members, "inline_chunk_threshold_bytes", 512),
        compression_level=min(_number(compression, "level", 3), _MAX_LEVEL),
        num_updates_per_repo_info_file=_number(members, "num_updates_per_repo_info_file", 1000),
        splitting=manifest.get("splitting"),
    )


def _number(members: Mapping[str, Json], name: str, default: int) -> int:
    value = members.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise DecodeError(f"{name} is not a non-negative integer")
    return value


def decode_config(config: Json) -> Config:
    """Read the containers of *config*, a decoded document; `None` has none."""
    containers = _members(_members(config, "the configuration").get(_CONTAINERS), _CONTAINERS)
    return Config(tuple(map(_container, containers.values())))


def _container(document: Json) -> VirtualContainer:
    members = _members(document, "a container")
    name, url_prefix, store = (members.get(key) for key in ("name", "url_prefix", "store"))
    if isinstance(store, dict) and len(store) == 1:
        (store,) = store
    if not isinstance(name, str | None):
        raise DecodeError("the name of a container is not a string")
    if not isinstance(url_prefix, str):
        raise DecodeError("the url_prefix of a container is not a string")
    if not isinstance(store, str):
        raise DecodeError("the store of a container has no kind")
    return VirtualContainer(name, url_prefix, store)


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
    """Convert mappings to objects, scalars to strings, local tags to objects of one member."""
    value: Json = None
    match node:
        case MappingNode():
            value = dict(_plain_members(node))
        case ScalarNode() if node.tag != _NULL:
            value = node.value
            value.encode()
    if node is not None and node.tag.startswith("!"):
        return {node.tag[1:]: value}
    return value


def _plain_members(node: MappingNode) -> Iterator[tuple[str, Json]]:
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise DecodeError("unsupported YAML: a key is not a string")
        yield key.value, _plain(value)
