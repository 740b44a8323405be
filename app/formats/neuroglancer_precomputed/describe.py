"""What an ``info`` tells to people."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from app.formats.neuroglancer_precomputed.index import Sharding
from app.formats.neuroglancer_precomputed.metadata import (
    MESHES,
    SHARDED,
    SKELETONS,
    Info,
    Part,
    integer,
    path_of,
    voxel_bounds,
)
from app.formats.reading import DecodeError
from app.formats.surveying import Description

type Json = Any

_KINDS: Final = {MESHES: "meshes", SKELETONS: "skeletons"}
"""What else there is, are annotations."""
_AXES: Final = ("x", "y", "z")


class _Paths:
    """Makes paths unlike each other."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def unlike(self, path: str) -> str:
        """Give *path*, with a number behind it unless it is the first that is called so."""
        name, number = path, self._last.get(path, 0) + 1
        while name in self._last:
            number += 1
            name = f"{path}#{number}"
        self._last[name] = 0
        self._last[path] = number - 1
        return name


class Described(NamedTuple):
    """Something in an ``info``, and its parts that are in shards of their own."""

    description: Description
    parts: tuple[Part, ...]


def describe(info: Info) -> Iterator[Described | DecodeError]:
    """Describe each scale by each of its chunk sizes, and all else; or tell what is wrong there.

    Where two would have the same path, ``#2`` and so on tell them apart.
    """
    parts: dict[int, list[Part]] = {}
    for part in info.parts:
        parts.setdefault(id(part.member), []).append(part)
    paths = _Paths()
    for name, member in info.members:
        try:
            for described in _describe(info, name, member, tuple(parts.get(id(member), ()))):
                path = paths.unlike(described.description.path)
                yield described._replace(description=replace(described.description, path=path))
        except DecodeError as error:
            yield error


def _describe(info: Info, name: str, member: Json, parts: tuple[Part, ...]) -> Iterator[Described]:
    path = path_of(member)
    description = Description(
        path=member["key"] if path is None else path,
        format="precomputed",
        kind=_KINDS.get(name, "annotations"),
        sharding=_spell(parts[0].sharding) if parts else None,
        why_sharded="" if parts else _why_sharded(member),
    )
    if name == "scales":
        yield from _describe_arrays(info, member, parts, replace(description, kind="array"))
    else:
        yield Described(description, parts)


def _describe_arrays(
    info: Info, scale: Json, parts: tuple[Part, ...], description: Description
) -> Iterator[Described]:
    """Fill the *description* in; with more than one channel, they are a dimension as well."""
    count = integer(info.document.get("num_channels"))
    channels = (count,) if count is not None and count > 1 else ()
    for number, bounds in enumerate(voxel_bounds(scale)):
        array = replace(
            description,
            shape=bounds.size + channels,
            data_type=_text(info.document.get("data_type")),
            dimension_names=_AXES + ("channel",) * len(channels),
            inner_chunk_shape=bounds.chunk_size + channels,
            codecs=tuple(filter(None, (_text(scale.get("encoding")),))),
        )
        yield Described(array, parts[number : number + 1])


def _spell(sharding: Sharding) -> str:
    return (
        f"{'murmurhash3_x86_128' if sharding.is_hashed else 'identity'}, "
        f"preshift {sharding.preshift_bits}, minishard {sharding.minishard_bits}, "
        f"shard {sharding.shard_bits} bits, "
        f"index {_encoding(is_gzip=sharding.is_minishard_index_gzip)}, "
        f"data {_encoding(is_gzip=sharding.is_data_gzip)}"
    )


def _encoding(*, is_gzip: bool) -> str:
    return "gzip" if is_gzip else "raw"


def _why_sharded(member: Json) -> str:
    """Tell why what may be sharded is served as it is."""
    if (sharding := member.get("sharding")) is None:
        return ""
    kind = sharding.get("@type") if isinstance(sharding, dict) else sharding
    if kind != SHARDED:
        return f"the sharding is {str(kind)[:80]}"
    return "its key leads out of the directory of the info"


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None
