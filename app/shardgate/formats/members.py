"""Members: objects that lie in other ones, as the entries of an archive or of a reference set.

The members of one version of an archive, or of a set, have a bucket of their own, so that formats
and callers take them for objects of a store. `read.member_store` reads them where they lie.
"""

import re
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import merge
from itertools import batched
from sys import getsizeof
from typing import Final, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from shardgate.errors import DamagedError
from shardgate.formats.listing import LAST
from shardgate.formats.reading import Fetch, RunInThread
from shardgate.formats.surveying import LEFT_OUT, ChunkCollection, Description, Listing
from shardgate.model import (
    Bucket,
    Coded,
    ETag,
    Inline,
    Missing,
    ObjectRef,
    Part,
    Referenced,
    Stored,
)

NO_KEY: Final = re.compile(rb"(?:^|/)\.{0,2}(?:/|\Z)|[\\\x00-\x1f\x7f]")
"""In names that are no keys: empty, ``.`` and ``..`` segments, backslashes, control characters."""

ARCHIVE_SUFFIXES: Final = (".zip", ".ozx")
"""Ends of the names of archives, in small letters, as all below."""
SET_SUFFIXES: Final = (".json", ".json.gz", ".json.zst")
"""Ends of the names of reference sets in JSON."""
SET_FOLDER_SUFFIXES: Final = (".parq", ".parquet")
"""Usual ends of the names of folders of reference sets in Parquet."""

_NAMES_PER_BLOCK: Final = 16
_END: Final = b"\0"


class LeftOut(NamedTuple):
    """Members whose names are no keys."""

    number: int = 0
    example: str = ""

    def add(self, name: str) -> Self:
        return self._replace(number=self.number + 1, example=self.example or name)

    def describe(self, container_format: str) -> Sequence[ChunkCollection]:
        """Return a description of them, for people; none without any."""
        names = "name is no key" if self.number == 1 else "names are no keys"
        reason = f"{self.number:,} {names}, such as {self.example[:200]!r}"
        found = Description("", container_format, LEFT_OUT, why_sharded=reason)
        return [ChunkCollection(found, None)] if self.number else []


type Place = Stored | Coded | Part | Inline | Missing
"""Location of a member: a range of one version, or of the current version, of an object, perhaps
with a content coding, or bytes in memory.
"""


class SortedNames:
    """Names in the order of their UTF-8 bytes, without zero bytes: 4 bytes a name and its own."""

    __slots__ = ("_blocks", "nbytes")

    def __init__(self, blocks: Sequence[bytes]) -> None:
        """Hold the names in *blocks*, `_NAMES_PER_BLOCK` in each, with `_END` between them."""
        self._blocks = blocks
        self.nbytes = sum(map(getsizeof, blocks)) + 8 * len(blocks)

    @classmethod
    def of(cls, names: Sequence[bytes]) -> tuple[Self, NDArray[np.intp]]:
        """Sort *names*, which are distinct UTF-8; return their old positions in the new order."""

        def key(at: int) -> bytes:
            return names[at]

        count = len(names)
        step = 2**14  # during a call that sorts no other thread runs: a million names take 2 s
        starts = range(0, count, step)
        runs = [sorted(range(at, min(at + step, count)), key=key) for at in starts]
        merged: Iterator[int] = merge(*runs, key=key)
        order = np.fromiter(merged, np.intp, count)
        blocks = batched((names[at] for at in order.tolist()), _NAMES_PER_BLOCK)
        return cls([_END.join(block) for block in blocks]), order

    def _since(self, wanted: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the names that are not before *wanted*, with their positions."""
        # A block that begins with *wanted* and `_END` sorts before *wanted* and the byte behind it.
        first = max(0, bisect_left(self._blocks, wanted + b"\1") - 1)
        for number in range(first, len(self._blocks)):
            names = self._blocks[number].split(_END)
            for at in range(bisect_left(names, wanted), len(names)):
                yield number * _NAMES_PER_BLOCK + at, names[at]

    def at(self, position: int) -> str:
        """Return the name at a *position*."""
        block, number = divmod(position, _NAMES_PER_BLOCK)
        return self._blocks[block].split(_END)[number].decode()

    def position(self, name: str) -> int | None:
        """Return the position of *name*; `None` if it is not among the names."""
        wanted = name.encode(errors="replace")
        at, found = next(self._since(wanted), (0, None))
        return at if found == wanted else None

    def below(self, prefix: str, after: str, delimiter: str) -> Iterator[tuple[str, int | None]]:
        """Yield names with their positions as `Members.below` does; folded ones have none."""
        start = prefix.encode()
        names = self._since(max(start, after.encode()))
        while (found := next(names, None)) is not None and found[1].startswith(start):
            at, name = found
            key = name.decode()
            slash = key.find(delimiter, len(prefix)) if delimiter else -1
            if slash < 0:
                if key > after:
                    yield key, at
                continue
            folder = key[: slash + 1]
            if folder > after:
                yield folder, None
            names = self._since((folder + LAST).encode())  # behind all that is in the folder


class MemberFormat(Protocol):
    """A format whose containers have members."""

    @property
    def patterns(self) -> Sequence[str]:
        """Patterns of the names of containers, or of objects in them, for people."""

    def is_container(self, name: str) -> bool:
        """Return whether an object of this name may be a container."""

    async def open(self, ref: ObjectRef, fetch: Fetch) -> "Members | None":
        """Open *ref*; `None` if it is no container. Raises: `DamagedError`."""


def refer(place: Part) -> Referenced:
    """Return *place* with an id of its object, since ETags of several objects can be equal."""
    reference_id = blake2b("/".join(place.ref).encode(), digest_size=8).hexdigest()
    return Referenced(place, reference_id, is_immutable=False)


@dataclass(frozen=True, slots=True)
class Members:
    """The members of one version of an archive, or of a reference set, which are never written.
    Their names have no slash at either end.
    """

    ref: ObjectRef
    """The archive, the set, or the folder of a set."""
    etag: ETag
    decoded_nbytes: int
    """Most bytes of a member that is decoded into memory: a shard or metadata."""
    modified_s: int | None
    """Time of the last modification of the object that has all members, if that is known."""

    @property
    def root(self) -> ObjectRef:
        """Prefix of all members."""
        return ObjectRef(MemberBucket(self), "")

    @property
    def references(self) -> ObjectRef | None:
        """Object whose references lead to the members; by default they lie in one."""
        return None

    @abstractmethod
    async def find(self, name: str, fetch: Fetch) -> Place:
        """Find the member *name*. Raises: `DamagedError`, `NotAllowedError`."""

    @abstractmethod
    def below(
        self, prefix: str, after: str, delimiter: str, fetch: Fetch
    ) -> AsyncIterator[tuple[str, int | None]]:
        """Yield the names that begin with *prefix* and sort after *after*, in the order of their
        UTF-8 bytes, each with its size in bytes, or without if only the object at its place tells.

        With the *delimiter* ``/``, names that have it behind the prefix are cut there, and come
        once, with the slash and without a size.
        """

    @abstractmethod
    async def collections(
        self, fetch: Fetch, listing: Listing, run_in_thread: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        """Describe the members that are left out, and name damaged parts."""


class MemberBucket(Bucket):
    """Bucket of *members*; its name has their version."""

    __slots__ = ("members",)
    members: Members

    def __new__(cls, members: Members) -> Self:
        url = str(members.ref)
        bucket = super().__new__(cls, f"{members.etag} of {url}", url.rstrip("/"))
        bucket.members = members
        return bucket


def members_of(ref: ObjectRef) -> Members | None:
    """Return the members of which *ref* is one, or the root; `None` for an object of a store."""
    bucket = ref.bucket
    return bucket.members if isinstance(bucket, MemberBucket) else None
