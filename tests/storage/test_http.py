"""What only plain HTTP servers do."""

from collections.abc import AsyncGenerator

import pytest

from app.errors import StorageDeniedError, StorageUnavailableError
from app.model import ByteRange, ObjectRef
from app.storage.contract import Found
from app.storage.http import HttpStore
from tests.storage.faulty import Fault, FaultyServer


@pytest.fixture
async def store() -> AsyncGenerator[HttpStore]:
    """Open a store with little patience."""
    opened = HttpStore(timeout_s=1)
    yield opened
    await opened.aclose()


async def test_a_redirect_is_followed(faulty: FaultyServer, store: HttpStore) -> None:
    """The object may have moved; range and version are asked for there."""
    faulty.put("bucket", "a b", b"0123456789")
    faulty.fail(Fault.REDIRECT)

    found = await store.get(ObjectRef(faulty.url, "bucket/a b"), ByteRange(2, 4))

    assert isinstance(found, Found)
    assert found.data == b"23"


async def test_a_server_cannot_be_listed(store: HttpStore) -> None:
    """Listing fails with words, not with an empty answer."""
    with pytest.raises(StorageUnavailableError, match="cannot be listed"):
        await anext(store.list(ObjectRef("http://127.0.0.1:1", "")))


@pytest.mark.parametrize("fault", [Fault.DENY, Fault.TEAPOT, Fault.NO_BUCKET])
async def test_any_answer_below_500_reaches(
    faulty: FaultyServer, store: HttpStore, fault: Fault
) -> None:
    """A server that refuses its root works."""
    faulty.fail(fault)

    await store.reach(ObjectRef(faulty.url, ""))


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.RESET])
async def test_a_broken_server_is_not_reached(
    faulty: FaultyServer, store: HttpStore, fault: Fault
) -> None:
    """A server that fails does not."""
    faulty.fail(fault)

    with pytest.raises(StorageUnavailableError):
        await store.reach(ObjectRef(faulty.url, ""))


async def test_a_key_that_climbs_is_refused(faulty: FaultyServer, store: HttpStore) -> None:
    """Servers resolve ``..``, so that such a key never is sent."""
    with pytest.raises(StorageDeniedError):
        await store.get(ObjectRef(faulty.url, "bucket/../other/key"))

    assert not faulty.seen
