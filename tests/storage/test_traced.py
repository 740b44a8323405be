"""A store that tells of what it is asked."""

from typing import Any

import pytest

from app.errors import VersionChangedError
from app.model import ByteRange, ETag, ObjectRef
from app.storage.contract import ABSENT, CONFLICT
from app.storage.memory import MemoryStore
from app.storage.traced import Call, TracedStore

REF = ObjectRef("memory://bucket", "key")


class Heard(list[tuple[Any, ...]]):
    """Keeps what was told, all but the seconds."""

    def __call__(self, told: Call) -> None:
        """Keep it."""
        assert 0 <= told.seconds < 60
        self.append((told.method, told.ref, told.request, told.nbytes))
        self.errors.append(told.error)

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException | None] = []


async def test_each_call_is_told() -> None:
    """Method, object, request and bytes of each call are told at its end."""
    inner, heard = MemoryStore(), Heard()
    etag = inner.place(REF, b"data")
    store = TracedStore(inner, heard)

    await store.get(REF, ByteRange(1, 3))
    await store.stat(REF)
    await store.reach(REF)
    async with store.stream(REF, ByteRange(0, 4), if_match=etag) as pieces:
        assert [piece async for piece in pieces] == [b"data"]
    assert [each async for each in store.list(ObjectRef(REF.bucket, ""))]

    assert heard == [
        ("get", REF, ByteRange(1, 3), 2),
        ("stat", REF, None, 0),
        ("reach", REF, None, 0),
        ("stream", REF, ByteRange(0, 4), 4),
        ("list", ObjectRef(REF.bucket, ""), None, 0),
    ]


async def test_each_write_is_told() -> None:
    """Of a put the new bytes are counted, also of one that was lost."""
    store, heard = MemoryStore(), Heard()
    traced = TracedStore(store, heard)

    await traced.demand_safety(REF)
    etag = await traced.put(REF, [b"data", b"more"], expected=ABSENT)
    assert isinstance(etag, str)
    assert await traced.put(REF, [b"late"], expected=ABSENT) is CONFLICT
    await traced.put(REF, [b"new", ByteRange(0, 4)], expected=etag)
    await traced.delete(REF, expected=None)

    assert traced.keeps_headers(REF)
    assert heard == [
        ("safety", REF, None, 0),
        ("put", REF, None, 8),
        ("put", REF, None, 4),
        ("put", REF, None, 3),
        ("delete", REF, None, 0),
    ]


async def test_a_failed_call_is_told() -> None:
    """Nor does its error go untold."""
    heard = Heard()

    with pytest.raises(VersionChangedError):
        await TracedStore(MemoryStore(), heard).get(REF, if_match=ETag('"1"'))

    assert heard == [("get", REF, None, 0)]
    assert [type(error) for error in heard.errors] == [VersionChangedError]
