"""Stores of a service that hang until the test opens their gate."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from shardgate.model import ObjectRef
from shardgate.storage.contract import Listed, ObjectStore
from shardgate.storage.wrappers import StoreWrapper


class Gate:
    """Holds all reads of buckets whose names end in *ending*, and of keys with *part*, until it is
    opened.

    Each read of any bucket takes *read_s* before that.
    """

    def __init__(self, ending: str = "", *, part: str = "", read_s: float = 0) -> None:
        self._ending = ending
        self._part = part
        self._read_s = read_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened = asyncio.Event()

    def open(self) -> None:
        """Let all reads pass; any thread may call it."""
        assert self._loop is not None, "no read has come to the gate"
        self._loop.call_soon_threadsafe(self._opened.set)

    def wrap(self, store: ObjectStore) -> ObjectStore:
        """Return *store* behind the gate."""
        return _GatedStore(store, self)

    async def enter(self, ref: ObjectRef) -> None:
        """Wait until *ref* may be read."""
        await asyncio.sleep(self._read_s)
        if ref.bucket.endswith(self._ending) and self._part in ref.key:
            self._loop = asyncio.get_running_loop()
            await self._opened.wait()


class _GatedStore(StoreWrapper):
    def __init__(self, inner: ObjectStore, gate: Gate) -> None:
        super().__init__(inner)
        self._gate = gate

    async def get(self, ref: ObjectRef, *args: Any, **options: Any) -> Any:
        await self._gate.enter(ref)
        return await super().get(ref, *args, **options)

    async def stat(self, ref: ObjectRef) -> Any:
        await self._gate.enter(ref)
        return await super().stat(ref)

    async def list(self, prefix: ObjectRef, **options: Any) -> AsyncGenerator[Listed]:
        await self._gate.enter(prefix)
        async for each in super().list(prefix, **options):
            yield each
