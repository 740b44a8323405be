"""What every store that can be written owes its callers, asked of each."""

import asyncio
import hashlib
import re

import pytest

from app.errors import BadKeyError, RangeNotSatisfiedError
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
        await writable.store.verify_conditional_writes(writable.root)

    root = ObjectRef(writable.root.bucket, "")
    names = [each.ref.key async for each in writable.store.list(root)]
    assert not any(TEMPORARY in name for name in names)


@pytest.mark.parametrize("name", ["a/b/c", "a b+c%20", "ä/ü#?", "日本"])
async def test_what_is_written_is_read(writable: Backend, name: str) -> None:
    """A write returns the version that readers see; one like an MD5 is that of the body."""
    empty = await writable.store.put(writable.ref("empty"), [], expected=ABSENT)
    etag = await put(writable, name, DATA, ABSENT)

    assert await read(writable, name) == DATA
    assert await writable.store.stat(writable.ref(name)) == Stat(len(DATA), etag)
    assert await writable.store.stat(writable.ref("empty")) == Stat(0, ETag(str(empty)))
    is_like_one = re.fullmatch('"[0-9a-f]{32}"', etag) is not None
    assert not is_like_one or etag == f'"{hashlib.md5(DATA).hexdigest()}"'  # noqa: S324


@pytest.mark.parametrize("data", [b"", b"longer " + DATA, DATA])
@pytest.mark.parametrize("is_any", [False, True])
async def test_an_object_is_replaced(writable: Backend, data: bytes, *, is_any: bool) -> None:
    """The version that was seen is replaced, or any."""
    first = await put(writable, "key", DATA)

    second = await put(writable, "key", data, None if is_any else first)

    found = await writable.store.get(writable.ref("key"))
    assert isinstance(found, Found)
    assert (found.data, found.etag) == (data, second)


@pytest.mark.parametrize("pieces", [[b"new"], [b"new", ByteRange(0, 9)]], ids=["new", "range"])
@pytest.mark.parametrize("now", [DATA[::-1], None], ids=["replaced", "gone"])
async def test_a_conflict_changes_nothing(
    writable: Backend, pieces: list[Piece], now: bytes | None
) -> None:
    """To lose is an answer; nothing is made of two versions."""
    first = await put(writable, "key", DATA)
    ref, wrong = writable.ref("key"), [first, WRONG]
    if now is None:
        assert await writable.store.delete(ref, expected=None) is True
    else:
        await put(writable, "key", now)
        if pieces == [b"new"]:
            assert await writable.store.put(ref, pieces, expected=ABSENT) is CONFLICT

    for expected in wrong:
        assert await writable.store.put(ref, pieces, expected=expected) is CONFLICT
    assert await read(writable, "key") == now


async def test_ranges_are_copied_exactly(writable: Backend) -> None:
    """Old and new pieces stand in any order; what is not there cannot be kept."""
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

    with pytest.raises(RangeNotSatisfiedError):
        await writable.store.put(
            writable.ref("key"), [ByteRange(1000, 9999)], expected=ETag(str(written))
        )
    assert not isinstance(written, Conflict)
    assert await read(writable, "key") == DATA[1000:] + b"new" + DATA[:10] + DATA[5:700] + b"end"


async def test_only_the_version_seen_is_removed(writable: Backend) -> None:
    """Another is a conflict, unless the store can remove no version for certain; absent is gone."""
    etag, ref = await put(writable, "key", DATA), writable.ref("key")
    await writable.store.verify_conditional_writes(writable.root)

    removed = await writable.store.delete(ref, expected=WRONG)
    assert removed is CONFLICT or removed is False
    assert await read(writable, "key") == DATA
    is_removed = await writable.store.delete(ref, expected=etag)
    assert await read(writable, "key") == (None if is_removed else DATA)
    assert await writable.store.delete(writable.ref("absent/key"), expected=None) is True
    await writable.store.delete(writable.ref("absent/key"), expected=WRONG)
    assert await read(writable, "absent/key") is None


async def test_one_of_many_wins_each_round(writable: Backend) -> None:
    """Of writers that expect the same version, or none, one wins, and its bytes are there."""
    expected: Expected = ABSENT
    for _ in range(3):
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
