"""Reads of objects of stores, and stores with a way to change their objects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pytest

from shardgate.errors import StorageDeniedError
from shardgate.model import ByteRange, ByteRequest, Condition, ObjectRef
from shardgate.settings import StoreSettings
from shardgate.storage.contract import Found, NotModified, ObjectReader, ObjectStore, Stat
from tests.support.clouds import Azurite
from tests.support.records import replaced
from tests.support.storage.faulty import FaultyServer


@dataclass
class Backend:
    """A store to read, a prefix of its own there, and a way to change its objects."""

    store: ObjectStore
    root: ObjectRef
    put_key: Callable[[str, bytes], object]
    delete_key: Callable[[str], object]
    missing_bucket: ObjectRef | None

    def ref(self, name: str) -> ObjectRef:
        """Return the name of an object below the prefix."""
        return self.root.join(name)

    def put(self, name: str, data: bytes) -> ObjectRef:
        """Store *data* below the prefix."""
        self.put_key(self.ref(name).key, data)
        return self.ref(name)

    def delete(self, name: str) -> None:
        """Remove an object below the prefix."""
        self.delete_key(self.ref(name).key)


def az_settings(server: Azurite) -> StoreSettings:
    """Return the settings of a store of *server*."""
    keys = {"access_key_id": server.account, "secret_access_key": server.key}
    return StoreSettings.model_validate({"endpoint_url": server.url, **keys})


async def found(
    store: ObjectReader, ref: ObjectRef, request: ByteRequest | None = None, **pinned: Condition
) -> Found:
    """Read an object, and assert that it exists."""
    answer = await store.get(ref, request, **pinned)  # type: ignore[arg-type]  # a condition each
    assert isinstance(answer, Found)
    return answer


async def stat_of(store: ObjectReader, ref: ObjectRef) -> Stat:
    """Measure an object, and assert that it exists."""
    stat = await store.stat(ref)
    assert stat is not None
    return stat


async def denied(store: ObjectReader, ref: ObjectRef) -> str:
    """Assert that every read of *ref* is denied, and return the reason."""
    with pytest.raises(StorageDeniedError):
        await store.stat(ref)
    with pytest.raises(StorageDeniedError):
        async with store.stream(ref, ByteRange(0, 1), if_match=None):
            pytest.fail("entered")
    with pytest.raises(StorageDeniedError) as raised:
        await store.get(ref)
    return raised.value.reason


DATA: Final = bytes(range(256)) * 8192
"""More than is read along with a head."""
SECRET: Final = "wJalrXUtnFEMI"


class Remote(NamedTuple):
    """An object of a server with faults, and the store that reads it."""

    server: FaultyServer
    store: ObjectReader
    ref: ObjectRef

    @property
    def absent(self) -> ObjectRef:
        """Name of an object that does not exist."""
        return replaced(self.ref, key=f"{self.ref.key}-absent")

    async def get(
        self, request: ByteRequest | None = None, **pinned: Any
    ) -> Found | NotModified | None:
        """Read the object."""
        return await self.store.get(self.ref, request, **pinned)

    async def found(self, request: ByteRequest | None = None, **pinned: Condition) -> Found:
        """Read the object, and assert that it exists."""
        return await found(self.store, self.ref, request, **pinned)
