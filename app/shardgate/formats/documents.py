"""Containers that a JSON document marks, in one of several dialects."""

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import batched, repeat
from typing import Any, Final, Protocol

import numpy as np

from shardgate.errors import DamagedError, MetadataMissingError
from shardgate.formats.contract import Layout, StoredObjects, Translator
from shardgate.formats.reading import (
    BoundDecoder,
    DecodedMetadata,
    DecodeError,
    Fetch,
    Read,
    Versioned,
    Weighable,
)
from shardgate.model import ByteRange, Coded, ETag, Inline, ObjectRef, Stored, VirtualKey

type Json = Any

SETTING: Final = "limits.metadata_bytes"
_NO_MARKS: Final = bytes(set(range(256)) - set(b'[]{}"'))
_BEFORE_JSON: Final = b"\xef\xbb\xbf \t\r\n"  # a byte order mark, and white space
_PARSED_AT_ONCE_NBYTES: Final = 256 * 1024
_FEW_VALUES: Final = 16  # in an object or list that is written without a look at them
MOST_LEVELS: Final = 1024
"""Objects and lists of a JSON text inside one another; orjson reads as many, Python 1,500."""
_STEPPED_LEVELS: Final = 256  # `_SteppingDecoder` stays within half of Python's limit on calls


def begins_like_json(data: bytes) -> bool:
    """Return whether *data* begins like a JSON object, or is empty like a truncated one."""
    text = data.lstrip(_BEFORE_JSON)
    return not text or text.startswith(b"{")


def begins_like_page(data: bytes) -> bool:
    """Return whether *data* begins like HTML or XML: an error page of a server or a proxy."""
    return data.lstrip(_BEFORE_JSON).startswith(b"<")


def may_contain(data: bytes, text: re.Pattern[bytes]) -> bool:
    """Return whether the JSON *data* has *text*, or letters in any other spelling."""
    step = 1024**2  # between searches other threads can run
    overlap = 64  # longer than a match
    pieces = (data[start : start + step + overlap] for start in range(0, len(data), step))
    # Escaped letters begin so; other encodings than UTF-8 have zero bytes.
    spellings = (rb"\u004", rb"\u005", rb"\u006", rb"\u007", b"\0")
    return any(
        text.search(piece) is not None or any(each in piece for each in spellings)
        for piece in pieces
    )


def check_not_blank(data: bytes) -> None:
    """Raise `DecodeError` for a marker that is empty or zeroed, as a crash leaves a file."""
    if not data.strip(b"\0"):
        raise DecodeError("it has only zero bytes" if data else "it is empty")


class _SteppingDecoder(json.JSONDecoder):
    """Decoder that calls a function of Python for each value."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def parse_json(data: bytes) -> Json:
    """Parse JSON of at most `MOST_LEVELS`. Raises: `ValueError`.

    Other threads can run only between the calls of Python functions. Parsing a long document
    therefore makes one for each object and number, or for each value where these are rare.
    """
    levels = check_levels(data)
    if len(data) <= _PARSED_AT_ONCE_NBYTES:
        return json.loads(data)
    if levels <= _STEPPED_LEVELS and _longest_step(data) > _PARSED_AT_ONCE_NBYTES:
        return json.loads(data, cls=_SteppingDecoder)
    return json.loads(
        data,
        object_hook=lambda members: members,
        parse_int=lambda digits: int(digits),  # noqa: PLW0108  `int` is no Python function
        parse_float=lambda digits: float(digits),  # noqa: PLW0108
    )


def check_levels(data: bytes) -> int:
    """Return how many objects and lists of the JSON text *data* are inside one another, or a number
    above it. Raises: `ValueError` for more than `MOST_LEVELS`.
    """
    if (most := data.count(b"[") + data.count(b"{")) <= _STEPPED_LEVELS:
        return most
    if not (encoding := json.detect_encoding(data)).startswith("utf-8"):
        data = data.decode(encoding).encode()
    # Without escaped quotes all quotes begin or end strings.
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = np.frombuffer(unescaped.translate(None, delete=_NO_MARKS), np.uint8)
    is_string = np.bitwise_xor.accumulate(marks == ord('"'))  # behind an odd number of quotes
    begins = (marks == ord("[")) | (marks == ord("{"))
    steps = np.where(is_string | (marks == ord('"')), 0, np.where(begins, 1, -1))
    levels = int(np.cumsum(steps, dtype=np.int64).max(initial=0))
    if levels > MOST_LEVELS:
        raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels")
    return levels


def is_strict_json(data: bytes) -> bool:
    """Return whether JSON that Python reads has no NaN or Infinity, which strict readers refuse."""
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    return b"NaN" not in outside_strings and b"Infinity" not in outside_strings


def _longest_step(data: bytes) -> int:
    """Return the number of bytes between two digits or ends of objects outside of strings."""
    if not json.detect_encoding(data).startswith("utf-8"):
        return len(data)
    # Escapes are replaced by as many bytes, so that distances stay.
    unescaped = data.replace(rb"\\", b"__").replace(rb"\"", b"__")
    text = np.frombuffer(unescaped, np.uint8)
    is_string = np.bitwise_xor.accumulate(text == ord('"'))
    is_end = ((text >= ord("0")) & (text <= ord("9")) | (text == ord("}"))) & ~is_string
    ends = np.flatnonzero(is_end)
    return int(np.diff(ends, prepend=0, append=len(text)).max())


def write_json(document: Json) -> bytes:
    """Write JSON on one line, in many short calls: other threads can run in between. Indenting
    deeply nested JSON could take a thousand times its bytes. Raises: `ValueError` for what
    `parse_json` would refuse.
    """
    texts: list[str] = []
    counts = _count_values(document)
    open_values = [iter([document])]  # a stack in place of recursion, which Python limits
    while open_values:
        for part in open_values[-1]:
            if type(part) is not _Text and not _is_short([part], counts):
                open_values.append(_parts(part, counts))
                break
            texts.append(part if type(part) is _Text else json.dumps(part))
        else:
            open_values.pop()
    written = "".join(texts).encode()
    check_levels(written)
    return written


class _Text(str):
    """JSON text among values that are to be written."""

    __slots__ = ()


def _parts(value: Json, counts: Mapping[int, int]) -> Iterator[_Text | Json]:
    """Yield the text of an object or a list, and in between the values that are long."""
    is_object = isinstance(value, dict)
    separator = "{" if is_object else "["
    for some in batched(value.items() if is_object else value, 1000):
        batch = dict(some) if is_object else list(some)
        if _is_short(_inner(batch), counts):
            yield _Text(separator + json.dumps(batch)[1:-1])  # without its own brackets
            separator = ", "
            continue
        for each in some:
            yield _Text(separator + (f"{json.dumps(each[0])}: " if is_object else ""))
            yield each[1] if is_object else each
            separator = ", "
    yield _Text("}" if is_object else "]")


def _inner(value: Json) -> Collection[Json]:
    """Return the values in an object or a list."""
    return value.values() if isinstance(value, dict) else value


def _is_short(values: Collection[Json], counts: Mapping[int, int]) -> bool:
    """Return whether *values* have few members and items at all depths."""
    return sum(counts.get(id(value), 1) for value in values) <= 16 * 1000  # written in 1 ms


def _count_values(document: Json) -> Mapping[int, int]:
    """Return how many values are in an object or list at all depths, by its id; few are left out.
    Each value is counted once, however deep it lies.
    """
    found = [document] if isinstance(document, dict | list) else []
    parents = array("q", [0])
    for at, each in enumerate(found):  # grows while it is walked
        inner = [value for value in _inner(each) if isinstance(value, dict | list)]
        found += inner
        parents.extend(repeat(at, len(inner)))
    counts = array("q", map(len, found))
    for at in range(len(found) - 1, 0, -1):  # the innermost first: they stand behind the outer ones
        counts[parents[at]] += counts[at]
    return {id(each): n for each, n in zip(found, counts, strict=True) if n > _FEW_VALUES}


def as_integer(value: Json) -> Json:
    """Return an integer for ``4.0``, as JSON may spell it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Dialect[S: Weighable](Protocol):
    """One way to understand a marker."""

    def parse(self, document: Json, data: bytes) -> S | None:
        """Understand *document*, parsed from *data*; `None` if it is of another dialect."""

    def may_rewrite(self, data: bytes) -> bool:
        """Return whether the document *data*, too long to be parsed, may have another form."""

    def layout(self, directory: ObjectRef, spec: Versioned[S]) -> Layout:
        """Open the container at *directory* that *spec* describes."""

    def translator(self, directory: ObjectRef) -> Translator | None:
        """Return the translator of a marker in *directory*; `None` leaves it to other dialects."""


@dataclass(frozen=True, slots=True)
class Marked[S: Weighable](DecodedMetadata):
    """A decoded marker; empty for a file that no format, or no dialect of it, knows."""

    spec: S | None = None
    dialect: Dialect[Any] | None = None
    is_page: bool = False
    is_long: bool = False
    """True for a document above the limit, which is not parsed."""

    @property
    def is_metadata(self) -> bool:
        return self.spec is not None or self.is_long

    @property
    def nbytes(self) -> int:
        return 0 if self.spec is None else self.spec.nbytes

    def refusal(self, ref: ObjectRef, reason: str) -> DamagedError | MetadataMissingError:
        """Return the error for the marker *ref* where the settings name the format."""
        if not self.is_page:
            return DamagedError(ref, reason)
        page = "an error page in place of metadata; they may come back"
        return MetadataMissingError(ref, page)

    @property
    def why_sharded(self) -> str:
        return self.spec.why_sharded if isinstance(self.spec, DecodedMetadata) else ""


def json_memory_nbytes(text: bytes) -> int:
    """Estimate the memory that the values of the JSON *text* take at most."""
    commas, colons, lists, objects = map(text.count, (b",", b":", b"[", b"{"))
    return 2 * len(text) + 48 * commas + 64 * colons + 96 * lists + 256 * objects


@dataclass(frozen=True, slots=True)
class DocumentDecoder[S: Weighable]:
    """Decodes a JSON document of at most *limit_bytes* with *parse*."""

    parse: Callable[[Json, bytes], S]
    limit_bytes: int

    def __call__(self, data: bytes) -> S:
        if len(data) > self.limit_bytes:
            raise DecodeError(f"metadata of more than {self.limit_bytes} bytes: {SETTING}")
        try:
            return self.parse(parse_json(data), data)
        except DecodeError:
            raise
        except ValueError as error:
            raise DecodeError(f"no JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class MarkerDecoder:
    """Decodes a document of at most *limit_bytes* by the first of *dialects* that claims it; they
    get `None` for a file that does not begin like a JSON object.
    """

    dialects: tuple[Dialect[Any], ...]
    limit_bytes: int

    def __call__(self, data: bytes) -> Marked[Any]:
        check_not_blank(data)
        if not begins_like_json(data):
            marked = self._claim(None, data)
            return marked if marked.is_metadata else Marked(is_page=begins_like_page(data))
        if len(data) > self.limit_bytes:
            return Marked(is_long=True)
        return DocumentDecoder(self._claim, self.limit_bytes)(data)

    def _claim(self, document: Json, data: bytes) -> Marked[Any]:
        for dialect in self.dialects:
            if (spec := dialect.parse(document, data)) is not None:
                return Marked(spec, dialect)
        return Marked()


@dataclass(frozen=True, slots=True)
class Searched:
    """A document that is not parsed."""

    may_be_rewritten: bool
    nbytes: int = 0


def _search(data: bytes, dialects: tuple[Dialect[Any], ...], most_nbytes: int) -> Searched:
    """Search a document for what any of *dialects* would rewrite; a longer one may have that."""
    is_whole = len(data) <= most_nbytes
    return Searched(not is_whole or any(each.may_rewrite(data) for each in dialects))


@dataclass(frozen=True, slots=True)
class DocumentFormat:
    """Format whose containers are directories with a *marker* in one of the *dialects*."""

    name: str
    marker: VirtualKey
    dialects: tuple[Dialect[Any], ...]
    limit_bytes: int
    is_named: bool = False
    """True if the settings name the format: then no file has the name of the marker by chance."""

    def claim(self, _: VirtualKey) -> int | None:
        return None

    def translator(self, directory: ObjectRef, name: str) -> Translator | None:
        """Return the translator of the first dialect that has one, if *name* is the marker."""
        if name != self.marker:
            return None
        found = (dialect.translator(directory) for dialect in self.dialects)
        return next(filter(None, found), None)

    def markers(self, directory: ObjectRef) -> tuple[Read[Marked[Any]]]:
        request = ByteRange(0, self.limit_bytes + 1)
        decode = MarkerDecoder(self.dialects, self.limit_bytes)
        ref = directory.join(self.marker)
        return (Read("metadata", ref, request, decode, is_marker=True),)

    async def open(self, directory: ObjectRef, fetch: Fetch) -> Layout | None:
        (read,) = self.markers(directory)
        found = await fetch(read)
        if found is None:
            return None
        if found.value.is_long:
            return await self._open_long(directory, read, fetch)
        if found.value.dialect is None:
            if self.is_named:
                raise found.value.refusal(read.ref, f"no metadata of the format {self.name}")
            return None
        spec = Versioned(found.value.spec, found.etag, found.size, coding=found.coding)
        return found.value.dialect.layout(directory, spec)

    async def _open_long(
        self, directory: ObjectRef, read: Read[Marked[Any]], fetch: Fetch
    ) -> Layout | None:
        """Open *directory*, whose marker is longer than the limit. Raises: `DamagedError` where it
        has to be rewritten, else everything is served as it is stored.
        """
        most_nbytes = 16 * self.limit_bytes
        search = BoundDecoder(_search, (self.dialects, most_nbytes))
        request = ByteRange(0, most_nbytes + 1)
        found = await fetch(
            Read("metadata", read.ref, request, search, None, _text_nbytes, is_marker=True)
        )
        if found is None:
            return None
        if found.value.may_be_rewritten:
            reason = f"metadata of more than {self.limit_bytes} bytes, perhaps to be rewritten"
            raise DamagedError(read.ref, f"{reason}: {SETTING}")
        return StoredObjects(directory)


def _text_nbytes(data: bytes | None, most_nbytes: int) -> int:
    """Return the memory of a document that is searched and not parsed."""
    return most_nbytes if data is None else len(data)


class Shown(Protocol):
    """A decoded document that is served, perhaps in another form."""

    @property
    def served(self) -> bytes:
        """The document that clients see."""

    @property
    def is_rewritten(self) -> bool:
        """True if `served` differs from the stored document."""


def show[S: Shown](ref: ObjectRef, document: Versioned[S]) -> Inline | Coded:
    """Return *document*, stored as *ref*, as it is served; a rewritten one has another ETag."""
    value = document.value
    etag = document.etag
    if value.is_rewritten:
        return Inline(value.served, etag_of_rewritten(etag))
    if document.coding:
        return Coded(Stored(ref, ByteRange(0, document.size), etag), document.coding, etag)
    return Inline(value.served, etag)


def etag_of_rewritten(etag: ETag) -> ETag:
    """Return the ETag of a document that is stored as *etag* and served in another form."""
    # ``u1`` changes whenever the same stored metadata are served in another form.
    return ETag(f'{etag[:-1]}-u1"')
