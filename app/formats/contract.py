"""What a format owes the resolver, and what it may ask of it.

A format describes its reads and says how it will decode them; the resolver performs, caches,
shares and times them. ``open`` answers whether a directory is a container of the format;
the `Layout` it gives then turns virtual keys into locations. Keys are listed as `naming` tells;
what ``inspect`` and ``verify`` tell they ask of the `Collection`s of `surveying`.
"""

from collections.abc import Sequence
from typing import Protocol

from app.errors import DamagedError
from app.formats.naming import Name, Shelf
from app.formats.reading import Fetch
from app.formats.surveying import Collection, Listing, Shards
from app.formats.writing import Target, Translator
from app.model import Location, ObjectRef, VirtualKey


class Layout(Protocol):
    """An opened container."""

    def encloses(self, key: VirtualKey) -> bool:
        """Tell whether *key*, or a prefix, can lie in no other container further down."""
        ...

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Find the bytes of *key*, which is relative to the container.

        Raises: `DamagedError` where an index contradicts itself or its object.
        """
        ...

    async def shard(self, key: VirtualKey, fetch: Fetch) -> str | None:
        """Name the shard that *key* is in, from metadata alone; `None` for what is in none.

        Raises: `DamagedError`.
        """
        ...

    async def target(self, key: VirtualKey, fetch: Fetch) -> Target:
        """Find where *key*, which may name nothing yet, is written.

        Raises: `BadKeyError` where there can be no such chunk, `ReadOnlyError`, `DamagedError`.
        """
        ...

    async def shelf(self, directory: VirtualKey, fetch: Fetch) -> Shelf:
        """Tell what of *directory*, empty or with a slash behind it, can be asked for.

        Raises: `DamagedError`.
        """
        ...

    async def names(self, prefix: VirtualKey, fetch: Fetch) -> Sequence[Name] | None:
        """Name what is right below *prefix*; `None` where it is what the `Shelf` has."""
        ...

    async def collections(
        self, fetch: Fetch, listing: Listing
    ) -> Sequence[Collection | DamagedError]:
        """Describe what is in the container itself, or tell what of it is damaged."""
        ...

    async def shards_at(self, key: VirtualKey, fetch: Fetch) -> Shards | None:
        """Find the shards among which *key*, of a chunk or a shard, is to be looked for."""
        ...

    def expects(self, path: str) -> bool:
        """Return whether the metadata describe a sharded array at *path* below."""
        ...

    def names_below(self) -> Sequence[str] | None:
        """Name the containers below that the metadata tells of; `None` if it does not tell."""
        ...


class Format(Protocol):
    """A way to lay out containers."""

    @property
    def name(self) -> str:
        """The name in settings and answers: ``zarr``."""
        ...

    def claim(self, key: VirtualKey) -> int | None:
        """Find where *key* goes on as only keys in containers of this format do."""
        ...

    def translator(self, directory: ObjectRef, name: str) -> Translator | None:
        """Say how the document *name* in *directory* is written; `None` is as it is given."""
        ...

    async def open(self, directory: ObjectRef, fetch: Fetch) -> Layout | None:
        """Open *directory*, or `None` if it holds no marker of this format.

        Raises: `DamagedError` where there is a marker that cannot be understood.
        """
        ...
