"""The contract of stores: of all that are read, and of those that can be written."""

import asyncio
import hashlib
import re
import time
from contextlib import suppress

import pytest

from shardgate.errors import (
    BadKeyError,
    RangeNotSatisfiedError,
    StorageDeniedError,
    StorageUnavailableError,
    StorageUnusableError,
    VersionChangedError,
)
from shardgate.model import (
    ByteRange,
    ByteRequest,
    Condition,
    ETag,
    ObjectRef,
    Piece,
    SuffixRange,
    UnmodifiedSince,
)
from shardgate.storage.contract import (
    ABSENT,
    CONFLICT,
    NOT_MODIFIED,
    TEMPORARY,
    UPLOADS,
    Conflict,
    Expected,
    Found,
    ObjectHeaders,
    Stat,
)
from tests.support.records import replaced
from tests.support.storage.ranges import REQUESTS
from tests.support.storage.reading import Backend, found, stat_of

DATA = bytes(range(256)) * 4
ORDER = ("0/0/0", "0.1", "b-1", "b.1", "b/10", "b/2", "b/c/1", "b0", "c d/e/f", "ü")
BETWEEN = ("a", "b/", "b/1", "b/c/", "b/\U0010ffff", "z")
PREFIXES = ["", "b", "b/", "b-", "b/1", "b0/", "x", "a/../", "c ", "c d/e"]
NAMES = ["a b", "a+b", "a%20b", "a#b", "a?b=c", "ä/ü", "日本", "a&b;c=d", "it's", "x(1)!*", "c/0~"]
UNKNOWN = ETag('"no such version"')
LONG_AGO = UnmodifiedSince(1_000_000_000)


def tomorrow() -> UnmodifiedSince:
    """Return a condition that every object meets."""
    return UnmodifiedSince(int(time.time()) + 86_400)


ASKED: dict[ByteRequest | None, tuple[int, int]] = {
    None: (0, 1024),
    ByteRange(0, 1): (0, 1),
    ByteRange(100, 300): (100, 300),
    ByteRange(1000, 1024): (1000, 1024),
    ByteRange(1000, 9999): (1000, 1024),
    ByteRange(0, 1024): (0, 1024),
    ByteRange(7, 7): (7, 7),
    ByteRange(1024, 1024): (1024, 1024),
    SuffixRange(1): (1023, 1024),
    SuffixRange(100): (924, 1024),
    SuffixRange(1024): (0, 1024),
    SuffixRange(9999): (0, 1024),
}


async def test_range_is_read_exactly(backend: Backend) -> None:
    """A range is clamped to the object, and a condition that holds changes nothing.

    `if_none_match` with the current version returns NOT_MODIFIED. A stat has the same size and
    ETag.
    """
    ref = backend.put("object", DATA)
    stat = await backend.store.stat(ref)
    for request, (start, stop) in ASKED.items():
        answer = await found(backend.store, ref, request)

        assert stat == Stat(1024, answer.etag)
        assert answer.etag[0] == answer.etag[-1] == '"'
        assert answer.data == DATA[start:stop]
        assert (answer.byte_range, answer.size) == (ByteRange(start, stop), 1024)
        for condition in (tomorrow(), answer.etag):
            assert await backend.store.get(ref, request, if_match=condition) == answer
        assert await backend.store.get(ref, request, if_none_match=answer.etag) is NOT_MODIFIED
        assert await found(backend.store, ref, request, if_none_match=UNKNOWN) == answer


@pytest.mark.parametrize(
    ("data", "outside"),
    [
        (DATA, [ByteRange(1024, 1025), ByteRange(2000, 3000)]),
        (b"", [ByteRange(0, 1), SuffixRange(1)]),
    ],
    ids=["object", "empty"],
)
async def test_a_range_outside_is_not_satisfied(
    backend: Backend, data: bytes, outside: list[ByteRequest]
) -> None:
    """A range outside of the object raises RangeNotSatisfiedError with its size.

    With a condition it raises VersionChangedError.
    """
    ref = backend.put("object", data)
    whole = await found(backend.store, ref)
    assert (whole.data, whole.byte_range) == (data, ByteRange(0, len(data)))

    for request in outside:
        with pytest.raises(RangeNotSatisfiedError) as raised:
            await backend.store.get(ref, request)
        with pytest.raises(VersionChangedError):
            await backend.store.get(ref, request, if_match=whole.etag)
        assert raised.value.size == len(data)


async def test_absence_is_none(backend: Backend) -> None:
    """A read or stat of a missing object returns `None`."""
    backend.put("object", DATA)
    for name in ("absent", "absent/below", "object/below", "n" * 250):
        for request in (ByteRange(0, 1), ByteRange(0, 0), SuffixRange(1), None):
            assert await backend.store.get(backend.ref(name), request) is None
        assert await backend.store.stat(backend.ref(name)) is None


async def test_missing_bucket_is_an_error(backend: Backend) -> None:
    """A missing bucket or folder raises a storage error, and an existing one is reachable."""
    backend.put("object", DATA)
    await backend.store.check_reachable(backend.root)
    if backend.missing_bucket is None:
        pytest.skip("has no buckets")
    for ask in (backend.store.get, backend.store.stat, backend.store.check_reachable):
        with pytest.raises((StorageUnavailableError, StorageUnusableError)):
            await ask(backend.missing_bucket)
    with pytest.raises((StorageUnavailableError, StorageUnusableError)):
        await anext(backend.store.list(ObjectRef(backend.missing_bucket.bucket, "")), None)


@pytest.mark.parametrize("data", [b"other", DATA[::-1], None], ids=["shorter", "same-size", "none"])
async def test_replaced_object_is_detected(backend: Backend, data: bytes | None) -> None:
    """A read with a condition of a replaced or removed object raises VersionChangedError."""
    ref = backend.put("object", DATA)
    first = await found(backend.store, ref)
    if data is None:
        backend.delete("object")
    else:
        backend.put("object", data)

    for request in (*REQUESTS, ByteRange(500, 600)):
        for condition in (first.etag, tomorrow() if data is None else LONG_AGO):
            with pytest.raises(VersionChangedError):
                await backend.store.get(ref, request, if_match=condition)


async def test_stream_has_exactly_its_range(backend: Backend) -> None:
    """The pieces of a stream make up its range, with and without a condition."""
    data = DATA * 2500
    ref = backend.put("large", data)
    first = await stat_of(backend.store, ref)

    for start, stop in ((0, 2_560_000), (1_000_000, 2_300_000), (3, 4), (9, 9)):
        for condition in (first.etag, tomorrow(), None):
            opened = backend.store.stream(ref, ByteRange(start, stop), if_match=condition)
            async with opened as pieces:
                got = b"".join([piece async for piece in pieces])
            assert got == data[start:stop]


async def test_stream_can_be_left_early(backend: Backend) -> None:
    """A stream can be left after its first piece, and the store continues to work."""
    ref = backend.put("large", DATA * 8000)
    first = await stat_of(backend.store, ref)

    for _ in range(3):
        async with backend.store.stream(ref, ByteRange(0, 8_192_000), if_match=first.etag) as some:
            assert DATA.startswith((await anext(some))[:1024])

    assert (await found(backend.store, ref, ByteRange(0, 9))).data == DATA[:9]


NOT_ENTERED: list[tuple[str, ByteRange, Condition | None, type[Exception]]] = [
    ("short", ByteRange(0, 4), UNKNOWN, VersionChangedError),
    ("short", ByteRange(1000, 1001), UNKNOWN, VersionChangedError),
    ("short", ByteRange(0, 0), UNKNOWN, VersionChangedError),
    ("object", ByteRange(1, 4), LONG_AGO, VersionChangedError),
    ("object", ByteRange(9, 9), LONG_AGO, VersionChangedError),
    ("absent", ByteRange(1, 4), None, VersionChangedError),
    ("absent", ByteRange(9, 9), None, VersionChangedError),
    ("object", ByteRange(1000, 1025), None, VersionChangedError),
    ("object", ByteRange(0, 5_000_000), None, VersionChangedError),
    ("long", ByteRange(0, 5_000_000), None, VersionChangedError),
    ("object", ByteRange(1024, 1025), None, RangeNotSatisfiedError),
]


async def test_a_stream_that_cannot_be_whole_is_not_entered(backend: Backend) -> None:
    """A stream of another version, or beyond the object, raises before its first piece."""
    backend.put("object", DATA)
    backend.put("short", b"other")
    backend.put("long", bytes(2_000_000))

    for name, byte_range, condition, error in NOT_ENTERED:
        with pytest.raises(error):
            async with backend.store.stream(backend.ref(name), byte_range, if_match=condition):
                pytest.fail(f"entered {byte_range} of {name}")


async def test_irregular_key_is_absent_or_refused(backend: Backend) -> None:
    """A key with empty or dot segments is absent or refused."""
    backend.put("object", DATA)
    backend.put("a/b", DATA)
    for name in ("", "/", "a/", "/etc/passwd", "../object", "a/../object"):
        ref = ObjectRef(backend.root.bucket, f"{backend.root.key}/{name}")
        with suppress(StorageDeniedError, StorageUnavailableError, StorageUnusableError):
            answer = await backend.store.stat(ref)
            assert answer is None or answer.size == 0


async def listed(backend: Backend, prefix: str, **options: str) -> list[tuple[str, int | None]]:
    """List names and sizes, or skip a store that cannot list."""
    if backend.root.bucket.startswith("http"):
        pytest.skip("HTTP cannot be listed")
    listing = backend.store.list(
        ObjectRef(backend.root.bucket, f"{backend.root.key}/{prefix}"), **options
    )
    return [(each.ref.key[len(backend.root.key) + 1 :], each.size) async for each in listing]


async def test_keys_and_prefixes_may_have_any_name(backend: Backend) -> None:
    """Keys and prefixes with special characters are read and listed."""
    for name in NAMES:
        backend.put(f"{name}/c/0", name.encode())
        backend.put(f"{name}.", name.encode())
    for name in NAMES:
        for key in (f"{name}/c/0", f"{name}."):
            assert (await found(backend.store, backend.ref(key))).data == name.encode()
            assert await backend.store.stat(backend.ref(key)) is not None

    for name in NAMES:
        whole = await listed(backend, f"{name}/")
        assert whole == [(f"{name}/c/0", len(name.encode()))]
        assert await listed(backend, f"{name}/", delimiter="/") == [(f"{name}/c/", None)]


@pytest.mark.parametrize("delimiter", ["", "/"])
@pytest.mark.parametrize(
    ("prefixes", "behind"),
    [
        (["", "b"], ["", *ORDER, *BETWEEN]),
        (PREFIXES, ["", "b/1"]),
        pytest.param(PREFIXES, [*ORDER, *BETWEEN], marks=pytest.mark.soak),
    ],
    ids=["after", "prefix", "both"],
)
async def test_a_listing_is_in_the_order_of_keys(
    backend: Backend, delimiter: str, prefixes: list[str], behind: list[str]
) -> None:
    """A listing is in byte order, with folders as common prefixes.

    Names up to *after*, which need not exist, are left out.
    """
    for name in ORDER:
        backend.put(name, b"1")
    for prefix in prefixes:
        keys = [name for name in sorted(ORDER, key=str.encode) if name.startswith(prefix)]
        if delimiter:
            cuts = [name.find("/", len(prefix)) for name in keys]
            rolled = zip(keys, cuts, strict=True)
            keys = [name if cut < 0 else name[: cut + 1] for name, cut in rolled]
        every = list(dict.fromkeys(keys))
        for after in behind:
            answer = await listed(
                backend, prefix, delimiter=delimiter, after=f"{backend.root.key}/{after}"
            )
            assert [name for name, _ in answer] == [name for name in every if name > after]


async def test_listed_etag_is_that_of_a_read_or_none(backend: Backend) -> None:
    """A listed object has the ETag of a stat, or none for clouds, and its modification time."""
    ref = backend.put("object", DATA)
    if backend.root.bucket.startswith("http"):
        pytest.skip("HTTP cannot be listed")
    (seen,) = [each async for each in backend.store.list(ref)]
    stat = await backend.store.stat(ref)

    assert stat is not None
    assert seen.etag in (None, stat.etag)
    assert (seen.etag is None) is backend.root.bucket.startswith(("gs", "az"))
    assert seen.modified_s is not None
    assert abs(seen.modified_s - time.time()) < 3600


WRONG = ETag('"0123456789abcdef0123456789abcdef"')
WRITERS = 4


async def put(writable: Backend, name: str, data: bytes, expected: Expected = None) -> ETag:
    """Write an object without concurrent writers."""
    etag = await writable.store.put(writable.ref(name), [data], expected=expected)
    assert not isinstance(etag, Conflict)
    return etag


async def read(writable: Backend, name: str) -> bytes | None:
    """Read an object, or return `None`."""
    answer = await writable.store.get(writable.ref(name))
    return answer.data if isinstance(answer, Found) else None


async def test_conditional_writes_are_verified(writable: Backend) -> None:
    """`verify_conditional_writes` passes, repeatedly, and leaves no objects."""
    for _ in range(2):
        await writable.store.verify_conditional_writes(writable.root)

    root = ObjectRef(writable.root.bucket, writable.root.key.partition("/")[0])
    names = [each.ref.key async for each in writable.store.list(root)]
    assert not any(TEMPORARY in name for name in names)


async def test_written_object_is_read(writable: Backend) -> None:
    """A write returns the ETag that reads return; one like an MD5 is that of the body."""
    empty = await writable.store.put(writable.ref("empty"), [], expected=ABSENT)
    assert await writable.store.stat(writable.ref("empty")) == Stat(0, ETag(str(empty)))
    for name in ("a/b/c", "a b+c%20", "ä/ü#?", "日本"):
        etag = await put(writable, name, DATA, ABSENT)

        assert await read(writable, name) == DATA
        assert await writable.store.stat(writable.ref(name)) == Stat(len(DATA), etag)
        is_like_one = re.fullmatch('"[0-9a-f]{32}"', etag) is not None
        assert not is_like_one or etag == f'"{hashlib.md5(DATA).hexdigest()}"'  # noqa: S324


async def test_an_object_is_replaced(writable: Backend) -> None:
    """An object is replaced by its expected version, or unconditionally."""
    etag = await put(writable, "key", DATA)
    for data in (b"", b"longer " + DATA, DATA):
        for expected in (etag, None):
            etag = await put(writable, "key", data, expected)

            answer = await found(writable.store, writable.ref("key"))
            assert (answer.data, answer.etag) == (data, etag)


@pytest.mark.parametrize("pieces", [[b"new"], [b"new", ByteRange(0, 9)]], ids=["new", "range"])
@pytest.mark.parametrize("now", [DATA[::-1], None], ids=["replaced", "gone"])
async def test_a_conflict_changes_nothing(
    writable: Backend, pieces: list[Piece], now: bytes | None
) -> None:
    """A write with another expected version returns CONFLICT and changes nothing."""
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
    """Ranges of the old object and new bytes are written in any order.

    A range outside of the object raises RangeNotSatisfiedError.
    """
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


async def test_delete_needs_the_expected_version(writable: Backend) -> None:
    """Deleting another version than the current is CONFLICT or False.

    Deleting a missing object returns True.
    """
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


async def test_one_of_concurrent_writers_wins(writable: Backend) -> None:
    """One of four writers that expect the same version, or absence, wins."""
    expected: Expected = ABSENT
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


@pytest.mark.parametrize("coding", ["", "gzip", "br", "gzip, compress"])
async def test_headers_are_kept_or_refused(writable: Backend, coding: str) -> None:
    """A store that keeps headers returns those written; another one raises ValueError."""
    ref, body = writable.ref("key"), b"not compressed, but who knows"
    headers = ObjectHeaders(coding, "text/plain", (("a-b", "c d"), ("e", "f")))
    if not writable.store.keeps_headers(ref):
        with pytest.raises(ValueError, match="headers"):
            await writable.store.put(ref, [body], expected=None, headers=headers)
        return
    await writable.store.put(ref, [body], expected=None, headers=headers)

    stat = await stat_of(writable.store, ref)
    assert (await found(writable.store, ref)).coding == stat.coding == coding
    kept = stat.headers
    assert replaced(kept, metadata=tuple(sorted(kept.metadata))) == headers


async def test_reserved_names_are_refused(writable: Backend) -> None:
    """Writing or deleting a name that no listing shows raises BadKeyError."""
    for name in ("a/", f"a{TEMPORARY}b", f"{TEMPORARY}/b", f"a{UPLOADS}b", UPLOADS):
        ref = writable.root.join(name)
        with pytest.raises(BadKeyError):
            await writable.store.put(ref, [b"1"], expected=None)
        with pytest.raises(BadKeyError):
            await writable.store.delete(ref, expected=None)


@pytest.mark.parametrize("expected", [ABSENT, None])
async def test_ranges_of_no_version_are_refused(writable: Backend, expected: Expected) -> None:
    """A write of ranges without the version that they are taken from raises ValueError."""
    ref = writable.put("object", DATA)

    with pytest.raises(ValueError, match="byte ranges need the version"):
        await writable.store.put(ref, [ByteRange(0, 9)], expected=expected)
    assert (await found(writable.store, ref)).data == DATA


async def test_temporary_objects_are_not_listed(writable: Backend) -> None:
    """Names with the mark of temporary objects are not listed."""
    for name in ("a", f"a{TEMPORARY}1", f"c/{TEMPORARY}2", "c/d"):
        writable.put(name, b"1")

    for delimiter, names in (("", ["a", "c/d"]), ("/", ["a", "c/"])):
        listing = writable.store.list(writable.root.prefix, delimiter=delimiter)
        below = [each.ref.key[len(writable.root.prefix.key) :] async for each in listing]
        assert below == names


async def test_uploads_are_listed_by_their_prefix_only(writable: Backend) -> None:
    """Objects of uploads are written and removed like others, and listed by their prefix only."""
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
