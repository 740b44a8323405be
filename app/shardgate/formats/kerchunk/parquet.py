"""Columns of integers and of texts or bytes in Parquet files, without nesting.

Every length is checked before it is used, and nothing is inflated beyond a bound: libraries for all
of Parquet end the process, or take any memory, on some damaged files.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardgate.formats.compression import decode_content
from shardgate.formats.reading import DecodeError, StepBudget
from shardgate.model import EVERYTHING, check_integer

NULL: Final = 2**32 - 1
"""Code of an absent value."""
_MAGIC: Final = b"PAR1"
_MOST_HEADER_NBYTES: Final = 1024**2
"""Longest footer or header of a page: fields become Python objects. Few kB are usual."""
_MOST_DEPTH: Final = 16  # of lists and structs in metadata; the format defines 8 at most
_CODINGS: Final = {0: "", 2: "gzip", 4: "br", 6: "zstd"}
_DATA_PAGE: Final = 0
_DICTIONARY_PAGE: Final = 2
_DATA_PAGE_2: Final = 3
_PLAIN: Final = 0
_DICTIONARY: Final = (2, 8)
_HEADERS: Final = {_DATA_PAGE: 5, _DICTIONARY_PAGE: 7, _DATA_PAGE_2: 8}
"""Fields of the headers of pages, by their kinds."""
_INTEGERS: Final[Mapping[int, np.dtype[np.signedinteger]]] = {
    1: np.dtype("<i4"),
    2: np.dtype("<i8"),
}
_BYTES: Final = 6
_OPTIONAL: Final = 1
_LENGTH: Final = struct.Struct("<I")
_TAIL_NBYTES: Final = 8
_MOST_NUMBER: Final = EVERYTHING.stop

type _Struct = dict[int, Any]
"""Fields by their numbers in the Thrift definition of Parquet."""


class _Reader:
    """Reads Thrift's compact protocol: varints, and structs that begin at a byte."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self.at = 0

    def take(self, nbytes: int) -> bytes:
        if not 0 <= nbytes <= len(self._data) - self.at:
            raise DecodeError(f"Parquet: {nbytes} bytes at {self.at} of {len(self._data)}")
        self.at += nbytes
        return bytes(self._data[self.at - nbytes : self.at])

    def varint(self) -> int:
        value = 0
        for place in range(10):  # 64 bits take no more bytes
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:  # noqa: PLR2004  the bit that says that more follow
                return value
        raise DecodeError(f"Parquet: a varint before {self.at} does not end")

    def fields(self, depth: int = 0) -> _Struct:
        fields = dict[int, Any]()
        number = 0
        while (head := self.take(1)[0]) != 0:
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _signed(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise DecodeError(f"Parquet: metadata are nested deeper than {_MOST_DEPTH} levels")
        found: Any
        match kind:
            case 1 | 2:
                found = kind == 1
            case 3:
                (found,) = self.take(1)
            case 4 | 5 | 6:
                found = self._signed()
            case 7:
                found = self.take(8)
            case 8:
                found = self.take(self.varint())
            case 9 | 10:
                found = self._list(depth + 1)
            case 12:
                found = self.fields(depth + 1)
            case _:
                raise DecodeError(f"Parquet: unknown type {kind} in metadata")
        return found

    def _list(self, depth: int) -> list[Any]:
        (head,) = self.take(1)
        count = head >> 4
        if count == 15:  # noqa: PLR2004  a length follows
            count = self.varint()
        kind = head & 15
        if kind in (1, 2):  # booleans have a byte each in lists
            kind = 3
        return [self._value(kind, depth) for _ in range(count)]


class Texts(NamedTuple):
    """A column of texts or bytes."""

    codes: NDArray[np.uint32]
    """Position of each row in `values`, or `NULL`."""
    values: Sequence[bytes]


class _Chunk(NamedTuple):
    """The pages of one column in one group of rows."""

    kind: int
    is_optional: bool
    coding: str
    rows: int
    start: int
    nbytes: int
    decoded_nbytes: int
    """Bytes of all pages, as the footer announces them: an upper bound."""
    steps: StepBudget
    """Of the file."""


class _ColumnPage(NamedTuple):
    """A decompressed page."""

    kind: int
    """Physical type of the values."""
    is_dictionary: bool
    is_plain: bool
    """False for values that are positions in the dictionary."""
    present: NDArray[np.bool_]
    """By row, whether it has a value; a dictionary has no rows."""
    value_count: int
    """Number of values in `data`."""
    data: bytes
    steps: StepBudget


class ParquetFile:
    """A file of at most *most_rows* rows. Its methods raise `DecodeError`."""

    def __init__(self, data: bytes, most_rows: int) -> None:
        if len(data) < len(_MAGIC) + _TAIL_NBYTES or data[:4] != _MAGIC or data[-4:] != _MAGIC:
            raise DecodeError("it is no Parquet file")
        (nbytes,) = _LENGTH.unpack_from(data, len(data) - _TAIL_NBYTES)
        start = len(data) - _TAIL_NBYTES - nbytes
        if nbytes > _MOST_HEADER_NBYTES or start < len(_MAGIC):
            raise DecodeError(f"Parquet: a footer of {nbytes} bytes")
        footer = _Reader(data[start:-_TAIL_NBYTES]).fields()
        # Steps of about 0.5 µs: a table has 10,000 texts as a rule, and these are for a million. So
        # few bytes inflate to many texts and runs that a limit of bytes is not enough.
        steps = StepBudget(2**22 + len(data) // 4)
        self._data = memoryview(data)[:start]
        fields = [_field(element) for element in _get(footer, 2, list)[1:]]
        self._chunks: dict[str, list[_Chunk]] = {name: [] for name, _ in fields}
        self.rows = 0
        for group in _get(footer, 4, list):
            what = f"expected at most {most_rows} rows: rows of a group"
            rows = _number(group, 3, what, most_rows - self.rows)
            self.rows += rows
            for (name, is_optional), column in zip(fields, _get(group, 1, list), strict=False):
                chunk = _chunk(_get(column, 3, dict), rows, start, steps, is_optional=is_optional)
                self._chunks[name].append(chunk)
        stored_nbytes = sum(chunk.nbytes for chunks in self._chunks.values() for chunk in chunks)
        if stored_nbytes > start:  # pages that several columns share would be decoded for each
            raise DecodeError(f"Parquet: columns of {stored_nbytes} bytes in {start}")

    @property
    def names(self) -> AbstractSet[str]:
        """The names of its columns."""
        return self._chunks.keys()

    @property
    def decoded_nbytes(self) -> int:
        """Most bytes of all pages once they are decompressed."""
        return sum(chunk.decoded_nbytes for chunks in self._chunks.values() for chunk in chunks)

    def integers(self, name: str) -> NDArray[np.int64]:
        """Return a column of integers; rows without a value are 0."""
        if name not in self.names:
            raise DecodeError(f"Parquet: there is no column {name}")
        return self._column(name, _integers, np.int64(0))

    def texts(self, name: str) -> Texts:
        """Return a column of texts or bytes; without the column no row has a value."""
        numbers: dict[bytes, int] = {}

        def number(page: _ColumnPage) -> NDArray[np.uint32]:
            found = (numbers.setdefault(text, len(numbers)) for text in _texts(page))
            return np.fromiter(found, np.uint32, page.value_count)

        return Texts(self._column(name, number, np.uint32(NULL)), list(numbers))

    def _column[T: np.generic](
        self, name: str, decode: Callable[[_ColumnPage], NDArray[T]], absent: T
    ) -> NDArray[T]:
        if name not in self.names:
            return np.full(self.rows, absent)
        nothing = np.full(0, absent)
        parts = [nothing]
        for chunk in self._chunks[name]:
            dictionary = nothing  # until its page comes
            for page in self._pages(chunk):
                if page.is_dictionary:
                    dictionary = decode(page)
                    continue
                column = np.full(len(page.present), absent)
                if page.value_count:
                    values = decode(page) if page.is_plain else _look_up(page, dictionary)
                    column[page.present] = values
                parts.append(column)
        column = np.concatenate(parts)
        if len(column) != self.rows:
            raise DecodeError(f"Parquet: {len(column)} of {self.rows} rows have the column {name}")
        return column

    def _pages(self, chunk: _Chunk) -> Iterator[_ColumnPage]:
        at = chunk.start
        stop = chunk.start + chunk.nbytes
        rows = 0
        room = chunk.decoded_nbytes
        while rows < chunk.rows:
            reader = _Reader(self._data[at : min(stop, at + _MOST_HEADER_NBYTES)])
            header = reader.fields()
            chunk.steps.spend(64 + reader.at)  # for the page, and for each byte of its header
            at += reader.at
            kind = _number(header, 1, "kind of a page")
            stored = _number(header, 3, "bytes of a page", stop - at)
            decoded = _number(header, 2, "bytes of an inflated page", room)
            if not chunk.coding and decoded != stored:
                raise DecodeError(f"Parquet: a page of {stored} bytes announces {decoded}")
            room -= decoded
            body = bytes(self._data[at : at + stored])
            at += stored
            if kind in _HEADERS:
                page = _page(chunk, _get(header, _HEADERS[kind], dict), kind, body, decoded)
                rows += len(page.present)
                yield page


def _get[T](fields: Any, number: int, kind: type[T]) -> T:
    """Return a field of metadata. Raises: `DecodeError`, unless it is there and of this *kind*."""
    found = fields.get(number) if isinstance(fields, dict) else None
    if not isinstance(found, kind):
        raise DecodeError(f"Parquet: a field {number} of metadata is missing or of another type")
    return found


def _number(fields: Any, number: int, name: str, most: int = _MOST_NUMBER) -> int:
    """Return a field of metadata that is an integer of 0 to *most*. Raises: `DecodeError`."""
    found = fields.get(number) if isinstance(fields, dict) else None
    return check_integer(found, f"Parquet: {name}", most, DecodeError)


def _field(element: Any) -> tuple[str, bool]:
    """Return the name of a column, and whether its values are optional."""
    name = _get(element, 4, bytes).decode(errors="replace")
    if element.get(5):  # the number of its children
        raise DecodeError(f"Parquet: the column {name[:80]!r} is nested")
    return name, _number(element, 3, "repetition of a column", _OPTIONAL) == _OPTIONAL


def _chunk(meta: _Struct, rows: int, stop: int, steps: StepBudget, *, is_optional: bool) -> _Chunk:
    """Read the metadata of a column whose pages end before *stop*."""
    compression = _number(meta, 4, "compression")
    if (coding := _CODINGS.get(compression)) is None:
        raise DecodeError(f"Parquet: compression {compression}, which is not zstd, gzip or brotli")
    kind = _number(meta, 1, "type of a column")
    start = _number(meta, 9, "offset of a column", stop)
    if 11 in meta:  # noqa: PLR2004  a dictionary
        start = min(start, _number(meta, 11, "offset of a dictionary", stop))
    nbytes = _number(meta, 7, "bytes of a column", stop - start)
    decoded_nbytes = _number(meta, 6, "bytes of an inflated column")
    return _Chunk(kind, is_optional, coding, rows, start, nbytes, decoded_nbytes, steps)


def _page(
    chunk: _Chunk, header: _Struct, kind: int, body: bytes, decoded_nbytes: int
) -> _ColumnPage:
    """Decompress a page of *kind*, and split it into levels and values."""
    is_dictionary = kind == _DICTIONARY_PAGE
    most = _MOST_NUMBER if is_dictionary else chunk.rows
    count = _number(header, 1, "values of a page", most)
    rows = 0 if is_dictionary else count
    levels = b""
    start = 0
    is_coded = bool(chunk.coding)
    if kind == _DATA_PAGE_2:
        room = min(len(body), decoded_nbytes)
        first = _number(header, 6, "bytes of repetition levels", room)
        start = first + _number(header, 5, "bytes of definition levels", room - first)
        levels = body[first:start]
        is_coded = is_coded and header.get(7, True)
    data = body[start:]
    if is_coded and data:
        data = decode_content(chunk.coding, data, decoded_nbytes - start)
    if kind == _DATA_PAGE and chunk.is_optional:
        reader = _Reader(data)
        levels = reader.take(*_LENGTH.unpack(reader.take(4)))
        data = data[reader.at :]
    present = np.ones(rows, np.bool_)
    if chunk.is_optional and rows:
        present = _unpack(levels, 1, rows, chunk.steps) == 1
        count = int(present.sum())
    encoding = _number(header, 4 if kind == _DATA_PAGE_2 else 2, "encoding of a page")
    is_plain = is_dictionary or encoding == _PLAIN
    if not is_plain and encoding not in _DICTIONARY:
        raise DecodeError(f"Parquet: the encoding {encoding} of values is not decoded")
    if is_plain and count * _LENGTH.size > len(data):  # each value has 4 bytes or more
        raise DecodeError(f"Parquet: a page of {len(data)} bytes has no {count} values")
    return _ColumnPage(chunk.kind, is_dictionary, is_plain, present, count, data, chunk.steps)


def _integers(page: _ColumnPage) -> NDArray[np.int64]:
    kind = _INTEGERS.get(page.kind)
    if kind is None or len(page.data) < page.value_count * kind.itemsize:
        raise DecodeError(f"Parquet: a page has no {page.value_count} integers")
    return np.frombuffer(page.data, kind, page.value_count).astype(np.int64)


def _texts(page: _ColumnPage) -> Iterator[bytes]:
    if page.kind != _BYTES:
        raise DecodeError("Parquet: a column has no texts or bytes")
    page.steps.spend(3 * page.value_count)  # a text takes 1.5 µs
    at = 0
    data = page.data
    for _ in range(page.value_count):
        start = at + _LENGTH.size
        at = start + int.from_bytes(data[at:start], "little")
        if at > len(data):
            raise DecodeError("Parquet: a text ends past its page")
        yield data[start:at]


def _look_up[T: np.generic](page: _ColumnPage, dictionary: NDArray[T]) -> NDArray[T]:
    """Return the values at the positions that *page* holds."""
    bits = page.data[0] if page.data else 0
    codes = _unpack(page.data[1:], bits, page.value_count, page.steps)
    if codes.max() >= len(dictionary):
        raise DecodeError(f"Parquet: a value {codes.max()} of {len(dictionary)} in a dictionary")
    return dictionary[codes]


def _unpack(data: bytes, bits: int, count: int, steps: StepBudget) -> NDArray[np.uint32]:
    """Decode *count* integers of so many *bits*: runs of one value, and packed groups of eight."""
    if bits > 32:  # noqa: PLR2004  the most that the format knows
        raise DecodeError(f"Parquet: integers of {bits} bits")
    unpacked = np.zeros(count, np.uint32)
    at = 0
    reader = _Reader(data)
    weights = 1 << np.arange(bits, dtype=np.uint32)
    while at < count and bits:
        steps.spend(16)  # beside those of numpy for the values of the run
        head = reader.varint()
        if head & 1:
            packed = np.frombuffer(reader.take((head >> 1) * bits), np.uint8)
            packed = packed[: ((count - at) * bits + 7) // 8]
            every = np.unpackbits(packed, bitorder="little")[: (count - at) * bits]
            values = every[: len(every) // bits * bits].reshape(-1, bits) @ weights
            unpacked[at : at + len(values)] = values
            at += len(values)
        else:
            value = int.from_bytes(reader.take((bits + 7) // 8), "little")
            unpacked[at : at + (head >> 1)] = value
            at += head >> 1
        if head < 2:  # noqa: PLR2004  a run of no values
            raise DecodeError("Parquet: an empty run")
    return unpacked
