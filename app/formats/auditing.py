"""What a container owes ``inspect`` and ``verify`` that keeps its states under refs.

Its layout is a `Stateful` one too. The bytes of its chunks are told by references, so that it is
not looked through shard after shard: its `audit` follows what leads to what, says what is wrong,
and hands over what only the store can tell.
"""

from collections.abc import AsyncIterator, Iterable
from typing import Final, NamedTuple, Protocol, runtime_checkable

from app.errors import DamagedError, StorageError
from app.formats.contract import Listing
from app.formats.reading import Fetch, Read, Weighable
from app.formats.surveying import Shard
from app.model import ObjectRef, Part, Stored, VirtualKey

ARRAYS: Final = "arrays"


class State(NamedTuple):
    """A state of a container, by a name that keys can begin with."""

    ref: str
    """As keys spell it: ``@tag.v1``."""
    snapshot_id: str


class Trace(NamedTuple):
    """What leads to the bytes of a chunk."""

    reference: str
    """Its kind: ``native``, ``inline``, ``virtual``."""
    manifest: ObjectRef
    """The object that holds the reference."""
    location: str
    """What the reference names, as it says so itself; empty where it holds the bytes."""


class Flaw(NamedTuple):
    """What is wrong with the object *ref*, seen by *key*, which is relative to the container."""

    ref: ObjectRef
    key: str
    reason: str


class Unchecked(NamedTuple):
    """What cannot be checked, and why."""

    key: str
    reason: str


class Counted(NamedTuple):
    """More that was looked at, or was found, of a kind of things."""

    things: str
    number: int


class Expected(NamedTuple):
    """An object that has to be there, in the version that is told, and as long as told."""

    key: str
    place: Stored | Part


class Enclosed(NamedTuple):
    """A shard that something refers to, wherever it is."""

    path: str
    """What keys of the shard are relative to, below the container."""
    shard: Shard
    data: bytes | None = None
    """All bytes of the shard, where its object is only what holds them."""


type Finding = Flaw | Unchecked | Counted | Expected | Enclosed


class Auditor(Protocol):
    """Reads for an audit; nothing is remembered."""

    @property
    def fetch(self) -> Fetch:
        """Performs one read."""
        ...

    def read_each[T: Weighable](
        self, reads: Iterable[Read[T]]
    ) -> AsyncIterator[tuple[Read[T], T | DamagedError | StorageError | None]]:
        """Perform *reads*, a few at a time, and give what came of each in their order."""
        ...

    def sizes(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """Give the keys of the objects below *prefix*, as a `Listing` does, and their bytes."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """The layout of a container that keeps its states under refs."""

    async def states(self, fetch: Fetch, listing: Listing) -> list[State]:
        """Name the states that a ref is at.

        Raises: `DamagedError`, `OfflineError`.
        """
        ...

    async def trace(self, key: VirtualKey, fetch: Fetch) -> Trace | None:
        """Tell what leads to the chunk *key*; `None` where nothing does, or it is no chunk."""
        ...

    def audit(self, auditor: Auditor, *, chunks: bool) -> AsyncIterator[Finding]:
        """Look through all states; *chunks* hands over also what only has a checksum of its own.

        Raises: `OfflineError`, and any `StorageError` where the states cannot be found out.
        """
        ...
