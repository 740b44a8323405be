"""What every store that can be written owes its callers, asked of each."""

import asyncio
import hashlib
import re

import pytest

from app.errors import BadKeyError, RangeNotSatisfiedError, VersionChangedError
from app.model import ByteRange, ETag, ObjectRef, Piece
from app.storage.contract import (
    ABSENT,
    CONFLICT,
    TEMPORARY,
    UPLOADS,
    Conflict,
    Expected,
    Found,
    ObjectHeaders,
    Stat,
)
from tests.storage.conftest import Backend

DATA = bytes(range(256)) * 4
WRONG = ETag('"0123456789abcdef0123456789abcdef"')
WRITERS = 8


async def put(writable: Backend, name: str, data: bytes, expected: Expected = None) -> ETag:
    """Write what nobody else does."""
    etag = await writable.store.put(writable.ref(name), [data], expected=expected)
    assert not isinstance(etag, Conflict)
    return etag


async def read(writable: Backend, name: str) -> bytes | None:
    """Read what is there."""
    found = await writable.store.get(writable.ref(name))
    assert found is None or isinstance(found, Found)
    return None if found is None else found.data


async def test_the_store_is_safe(writable: Backend) -> None:
    """It refuses what it should, is asked so once for all, and keeps nothing of it."""
    for _ in range(2):
        await writable.store.demand_safety(writable.root)

    root = ObjectRef(writable.root.bucket, "")
    names = [each.ref.key async for each in writable.store.list(root)]
    assert not any(TEMPORARY in name for name in names)


async def test_what_is_written_is_read(writable: Backend) -> None:
    """A write gives the version that readers see."""
    etag = await put(writable, "a/b/c", DATA, ABSENT)

    assert await read(writable, "a/b/c") == DATA
    assert await writable.store.stat(writable.ref("a/b/c")) == Stat(len(DATA), etag)


async def test_an_etag_like_an_md5_is_one(writable: Backend) -> None:
    """Clients that copy compare it with the MD5 of the body."""
    etag = await put(writable, "key", DATA, ABSENT)

    is_like_one = re.fullmatch('"[0-9a-f]{32}"', etag) is not None
    assert not is_like_one or etag == f'"{hashlib.md5(DATA).hexdigest()}"'  # noqa: S324


@pytest.mark.parametrize("data", [b"", b"longer " + DATA, DATA])
async def test_an_object_is_replaced(writable: Backend, data: bytes) -> None:
    """The version that was seen is the one that goes."""
    first = await put(writable, "key", DATA)

    second = await put(writable, "key", data, first)

    found = await writable.store.get(writable.ref("key"))
    assert isinstance(found, Found)
    assert (found.data, found.etag) == (data, second)


async def test_anything_is_replaced(writable: Backend) -> None:
    """Who expects nothing always wins."""
    for data in (b"1", b"22", b""):
        await put(writable, "key", data)

        assert await read(writable, "key") == data


async def test_an_empty_object_is_one(writable: Backend) -> None:
    """No pieces make an object."""
    etag = await writable.store.put(writable.ref("empty"), [], expected=ABSENT)

    assert await writable.store.stat(writable.ref("empty")) == Stat(0, ETag(str(etag)))


@pytest.mark.parametrize("expected", [ABSENT, WRONG], ids=["absent", "other"])
async def test_a_conflict_changes_nothing(writable: Backend, expected: Expected) -> None:
    """To lose is an answer, and leaves the object as it is."""
    etag = await put(writable, "key", DATA)

    written = await writable.store.put(writable.ref("key"), [b"other"], expected=expected)

    assert written is CONFLICT
    assert await writable.store.stat(writable.ref("key")) == Stat(len(DATA), etag)


async def test_what_is_gone_is_a_conflict(writable: Backend) -> None:
    """A version of an object that is not there cannot be replaced, also not with its ranges."""
    etag = await put(writable, "key", DATA)
    assert await writable.store.delete(writable.ref("key"), expected=None) is True

    changes: list[list[Piece]] = [[b"new"], [b"new", ByteRange(0, 9)]]
    for pieces in changes:
        assert await writable.store.put(writable.ref("key"), pieces, expected=etag) is CONFLICT
    assert await read(writable, "key") is None


async def test_ranges_are_copied_exactly(writable: Backend) -> None:
    """Pieces of the old object and new ones stand one behind the other, in any order."""
    etag = await put(writable, "key", DATA)
    pieces: list[Piece] = [
        ByteRange(1000, 1024),
        b"new",
        ByteRange(0, 10),
        ByteRange(5, 700),
        b"",
        b"end",
    ]

    written = await writable.store.put(writable.ref("key"), pieces, expected=etag)

    assert not isinstance(written, Conflict)
    assert await read(writable, "key") == DATA[1000:] + b"new" + DATA[:10] + DATA[5:700] + b"end"


async def test_ranges_of_another_version_are_a_conflict(writable: Backend) -> None:
    """Nothing is made of two versions."""
    first = await put(writable, "key", DATA)
    await put(writable, "key", DATA[::-1])

    pieces: list[Piece] = [b"new", ByteRange(0, 10)]
    assert await writable.store.put(writable.ref("key"), pieces, expected=first) is CONFLICT
    assert await read(writable, "key") == DATA[::-1]


async def test_ranges_past_the_end_are_not_satisfied(writable: Backend) -> None:
    """What is not there cannot be kept, and nothing is written."""
    etag = await put(writable, "key", DATA)

    with pytest.raises(RangeNotSatisfiedError):
        await writable.store.put(writable.ref("key"), [ByteRange(1000, 1025)], expected=etag)
    assert await read(writable, "key") == DATA


async def test_readers_of_the_old_version_are_told(writable: Backend) -> None:
    """Whoever knows the version that was replaced reads none of the new bytes."""
    first = await put(writable, "key", DATA)
    for _ in range(2):
        found = await writable.store.get(writable.ref("key"), ByteRange(1, 3), if_match=first)
        assert isinstance(found, Found)
    await put(writable, "key", DATA[::-1], first)

    with pytest.raises(VersionChangedError):
        await writable.store.get(writable.ref("key"), ByteRange(1, 3), if_match=first)


async def test_the_version_seen_is_removed(writable: Backend) -> None:
    """An object is gone, or the store says that it cannot tell versions apart there."""
    etag = await put(writable, "key", DATA)
    await writable.store.demand_safety(writable.root)

    if await writable.store.delete(writable.ref("key"), expected=etag):
        assert await read(writable, "key") is None
    else:
        assert await read(writable, "key") == DATA


async def test_another_version_is_not_removed(writable: Backend) -> None:
    """To lose is an answer here too, unless the store can remove no version for certain."""
    await put(writable, "key", DATA)
    await writable.store.demand_safety(writable.root)

    removed = await writable.store.delete(writable.ref("key"), expected=WRONG)

    assert removed is CONFLICT or removed is False
    assert await read(writable, "key") == DATA


async def test_nothing_is_gone_already(writable: Backend) -> None:
    """What is not there need not be removed; it may as well be said to be in another version."""
    await writable.store.demand_safety(writable.root)

    assert await writable.store.delete(writable.ref("absent/key"), expected=None) is True
    await writable.store.delete(writable.ref("absent/key"), expected=WRONG)

    assert await read(writable, "absent/key") is None


async def test_one_of_many_wins_each_round(writable: Backend) -> None:
    """Writers that expect the same version are told apart, and the winner's bytes are there."""
    expected: Expected = await put(writable, "key", DATA)
    for _ in range(2):
        bodies = [b"writer %d %s" % (writer, str(expected).encode()) for writer in range(WRITERS)]
        written = await asyncio.gather(
            *(writable.store.put(writable.ref("key"), [body], expected=expected) for body in bodies)
        )
        winners = [each for each in enumerate(written) if each[1] is not CONFLICT]

        assert len(winners) == 1
        ((winner, etag),) = winners
        assert await read(writable, "key") == bodies[winner]
        assert not isinstance(etag, Conflict)
        expected = etag


async def test_one_of_three_makes_an_object(writable: Backend) -> None:
    """Where nothing was, one writer is the first."""
    written = await asyncio.gather(
        *(
            writable.store.put(writable.ref("key"), [b"%d" % writer], expected=ABSENT)
            for writer in range(3)
        )
    )

    assert sum(each is not CONFLICT for each in written) == 1


@pytest.mark.parametrize("is_gzip", [True, False])
async def test_headers_are_kept_or_refused(writable: Backend, *, is_gzip: bool) -> None:
    """What is stored with headers is found with them, and with no others."""
    ref, body = writable.ref("key"), b"not gzip, but who knows"
    headers = ObjectHeaders(is_gzip, "text/plain", (("a-b", "c d"), ("e", "f")))
    if not writable.store.keeps_headers(ref):
        with pytest.raises(ValueError, match="headers"):
            await writable.store.put(ref, [body], expected=None, headers=headers)
        return
    await writable.store.put(ref, [body], expected=None, headers=headers)

    found, stat = await writable.store.get(ref), await writable.store.stat(ref)
    assert isinstance(found, Found)
    assert stat is not None
    assert found.is_gzip is stat.is_gzip is is_gzip
    kept = stat.headers
    assert kept._replace(metadata=tuple(sorted(kept.metadata))) == headers


@pytest.mark.parametrize(
    "name", ["a/", f"a{TEMPORARY}b", f"{TEMPORARY}/b", f"a{UPLOADS}b", UPLOADS]
)
async def test_names_of_no_objects_are_refused(writable: Backend, name: str) -> None:
    """What no listing could show cannot be written or removed."""
    ref = writable.root.join(name)

    with pytest.raises(BadKeyError):
        await writable.store.put(ref, [b"1"], expected=None)
    with pytest.raises(BadKeyError):
        await writable.store.delete(ref, expected=None)


async def test_unfinished_objects_are_not_listed(writable: Backend) -> None:
    """Names with our mark are left out, whoever made them, and below them too."""
    for name in ("a", f"a{TEMPORARY}1", f"c/{TEMPORARY}2", "c/d"):
        writable.put(name, b"1")

    for delimiter, names in (("", ["a", "c/d"]), ("/", ["a", "c/"])):
        listing = writable.store.list(writable.root.prefix, delimiter=delimiter)
        below = [each.ref.key[len(writable.root.prefix.key) :] async for each in listing]
        assert below == names


async def test_uploads_are_listed_to_who_names_them(writable: Backend) -> None:
    """They are written and removed as all else, and no other listing shows them."""
    for name in ("a", f"{UPLOADS}7.1", f"{UPLOADS}7.2", f"{UPLOADS}8.1"):
        await put(writable, name, name.encode(), ABSENT)
    await writable.store.delete(writable.ref(f"{UPLOADS}7.2"), expected=None)

    async def below(prefix: str) -> list[str]:
        listing = writable.store.list(ObjectRef(writable.root.bucket, prefix))
        return [each.ref.key.removeprefix(writable.root.prefix.key) async for each in listing]

    assert await below(writable.root.prefix.key) == ["a"]
    for hidden in (UPLOADS[:5], UPLOADS[:-1], UPLOADS[:-4]):
        assert await below(writable.ref(hidden).key) == []
    assert await below(writable.ref(UPLOADS).key) == [f"{UPLOADS}7.1", f"{UPLOADS}8.1"]
    assert await below(writable.ref(f"{UPLOADS}7.").key) == [f"{UPLOADS}7.1"]
    assert await read(writable, f"{UPLOADS}8.1") == f"{UPLOADS}8.1".encode()


async def test_many_names_are_written(writable: Backend) -> None:
    """Names that need quoting are names."""
    for name in ("a b+c%20", "ä/ü#?", "日本"):
        await put(writable, name, name.encode(), ABSENT)

        assert await read(writable, name) == name.encode()
