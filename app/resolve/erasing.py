"""Keys taken away by the thousand: all that begin alike."""

from contextlib import suppress
from typing import Final

from app.concurrency import bounded_gather, take
from app.errors import BadKeyError, ShardgateError
from app.formats.listing import Window
from app.model import VirtualKey
from app.resolve.containers import PassThrough
from app.resolve.objects import ObjectWriter
from app.resolve.resolver import Dataset, Resolver
from app.resolve.writing import Given, Writer
from app.storage.contract import Listed

_AT_ONCE: Final = 16
"""Objects that are removed at a time."""
_ERASED_AT_ONCE: Final = 50_000
"""Keys whose shards are rewritten once for all of them."""
_PAGE: Final = 1000


class Eraser:
    """Takes away what is below a prefix; what is told of is gone for good."""

    def __init__(self, resolver: Resolver, objects: ObjectWriter, writer: Writer) -> None:
        self._resolver = resolver
        self._objects = objects
        self._writer = writer

    async def erase(self, dataset: Dataset, prefix: VirtualKey) -> int:
        """Take all keys away that begin with *prefix*, which ends in a slash; tell how many.

        Of whole containers, and where there is none, objects are counted.

        Raises: `ReadOnlyError` where a repository is, or is in the way; the first error that a
        key met.
        """
        await self._demand_place(dataset, f"{prefix}0.0")  # named like a chunk, and no mesh
        root = self._resolver.root(dataset)
        layout, rest = await dataset.containers.find(dataset.root, prefix, root.fetch)
        if not rest or isinstance(layout, PassThrough):
            await self._demand_erasable(dataset, prefix)
            return await self._erase_objects(dataset, prefix)
        return await self._erase_keys(dataset, prefix)

    async def _demand_place(self, dataset: Dataset, key: str) -> None:
        """Raise where nothing can be written beside *key*."""
        with suppress(BadKeyError):  # that is the name of no chunk, but others may be
            await self._writer.demand_place(dataset, VirtualKey(key))

    async def _demand_erasable(self, dataset: Dataset, prefix: VirtualKey) -> None:
        """Look for what is below *prefix* and may not be written, before anything is gone.

        Raises: `ReadOnlyError`, `DamagedError`.
        """
        root, seen = self._resolver.root(dataset), None
        async for each in root.store.list(dataset.root.join(prefix).prefix):
            path = each.ref.key.removeprefix(dataset.root.prefix.key).rpartition("/")[0]
            if path != seen:
                seen = path
                await self._demand_place(dataset, f"{path}/_")

    async def _erase_objects(self, dataset: Dataset, prefix: VirtualKey) -> int:
        listed = self._resolver.root(dataset).store.list(dataset.root.join(prefix).prefix)
        count = 0
        while batch := await take(listed, _PAGE):
            await bounded_gather(self._remove, batch, limit=_AT_ONCE)
            count += len(batch)
        return count

    async def _remove(self, listed: Listed) -> None:
        await self._objects.delete(listed.ref, demand=None)

    async def _erase_keys(self, dataset: Dataset, prefix: VirtualKey) -> int:
        count = 0
        after: str | None = ""
        while after is not None:
            keys, after = await self._list(dataset, prefix, after)
            given = [Given(key, None) for key in keys]
            for outcome in await self._writer.put_each(dataset, given):
                if isinstance(outcome, ShardgateError):
                    raise outcome
            count += len(keys)
        return count

    async def _list(
        self, dataset: Dataset, prefix: VirtualKey, start: str
    ) -> tuple[list[VirtualKey], str | None]:
        """List keys below *prefix* behind *start*, and tell behind which to go on."""
        keys: list[VirtualKey] = []
        after: str | None = start
        while after is not None and len(keys) < _ERASED_AT_ONCE:
            page = await self._resolver.page(dataset, Window(prefix, after), _PAGE)
            keys += [VirtualKey(entry.key) for entry in page.entries]
            after = page.after
        return keys, after
