"""Reference sets in JSON, of version 0 and 1, decoded to columns without a Python object for each
reference.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

from shardgate.formats.compression import announced_nbytes, decode_content
from shardgate.formats.documents import Json, json_memory_nbytes
from shardgate.formats.kerchunk.reference_table import (
    CONSOLIDATED,
    MEMORY_PER_BYTE,
    ReferenceSet,
    TableBuilder,
    check_size,
    consolidate,
)
from shardgate.formats.kerchunk.templates import Templates, generate
from shardgate.formats.reading import DecodeError
from shardgate.formats.references import inline_bytes

_DOCUMENTS: Final = (b".zgroup", b".zarray", b".zattrs")
"""Names of the metadata documents of Zarr v2."""
_LEAST_NBYTES: Final = 32
"""Bytes of the limit for each reference, which takes 250 bytes of memory while it is decoded."""
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_MOST_CONSOLIDATED_NBYTES: Final = 16 * 1024**2
_MEMBERS: Final = ("version", "templates", "gen")
_SPACE: Final = r"[ \t\r\n]*"
_BEGIN, _QUOTE, _COLON, _NEXT, _END = (
    re.compile(f"{_SPACE}({mark}){_SPACE}") for mark in (r"\{", '(?=")', ":", "[,}]", r"\Z")
)


def memory_nbytes(data: bytes | None, most_nbytes: int) -> int:
    """Return the memory that decoding takes: the text, and what it is decoded to."""
    if data is None:
        return MEMORY_PER_BYTE * most_nbytes
    if (coding := _coding(data)) is not None:
        return MEMORY_PER_BYTE * min(announced_nbytes(coding, data), most_nbytes)
    return json_memory_nbytes(data)


def _coding(data: bytes) -> str | None:
    """Return the compression that *data* begins like; `None` for JSON."""
    return next((name for magic, name in _COMPRESSED.items() if data.startswith(magic)), None)


def decode_json_set(data: bytes, limit_nbytes: int) -> ReferenceSet:
    """Decode a set of at most *limit_nbytes*, also once it is inflated."""
    if (coding := _coding(data)) is not None:
        data = decode_content(coding, data, limit_nbytes)
    check_size(data, limit_nbytes)
    try:
        return _decode(_Cursor(data.decode()), limit_nbytes // _LEAST_NBYTES)
    except DecodeError:
        raise
    except ValueError as error:
        raise DecodeError(f"no reference set: {error}") from None
    except RecursionError:
        raise DecodeError("no reference set: it is nested too deeply") from None


class _Cursor:
    """Position in a JSON text, after the values that were read and the space behind them.

    Objects are read with a Python call for each member, so that other threads can run.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._decode = json.JSONDecoder().raw_decode

    def begins(self, text: str) -> bool:
        """Return whether *text* follows."""
        return self._text.startswith(text, self._at)

    def skip(self, mark: re.Pattern[str]) -> str:
        """Read a *mark* with the space around it, and return it."""
        if (found := mark.match(self._text, self._at)) is None:
            raise DecodeError(f"no reference set: malformed JSON at letter {self._at}")
        self._at = found.end()
        return found[1]

    def value(self) -> Json:
        """Read the value here."""
        value, self._at = self._decode(self._text, self._at)
        return value

    def members(self) -> Iterator[str]:
        """Yield the names of the object here; the caller reads the value of each."""
        self.skip(_BEGIN)
        is_last = self.begins("}") and bool(self.skip(_NEXT))
        while not is_last:
            self.skip(_QUOTE)
            name: str = self.value()
            self.skip(_COLON)
            yield name
            is_last = self.skip(_NEXT) == "}"


def _decode(cursor: _Cursor, most_rows: int) -> ReferenceSet:
    flat, nested, others = TableBuilder(most_rows), TableBuilder(most_rows), dict[str, Json]()
    invalid: DecodeError | None = None  # a member that is no reference, as version 1 may have some
    for name in cursor.members():
        if name == "refs" and cursor.begins("{"):
            for key in cursor.members():
                _add(nested, key, cursor.value())
        elif name in _MEMBERS:
            others[name] = cursor.value()
        else:
            value = cursor.value()
            try:
                _add(flat, name, value)
            except DecodeError as error:
                invalid = invalid or error
    cursor.skip(_END)
    match others.pop("version", None):
        case None if invalid is not None:
            raise invalid
        case None if not len(nested):
            for name, value in others.items():
                _add(flat, name, value)
            builder, urls = flat, flat.urls
        case 1:
            builder, urls = nested, _expand(nested, others)
        case version:
            raise DecodeError(f"no reference set of version 0 or 1: {repr(version)[:80]}")
    _consolidate(builder)
    return builder.build(urls)


def _add(builder: TableBuilder, name: str, value: Json) -> None:
    match value:
        case [str() | None as url, int(offset), int(length)]:
            builder.add_source(name, url or "", (offset, length))
        case [str() | None as url]:
            builder.add_source(name, url or "", None)
        case str():
            builder.add_bytes(name, inline_bytes(value.encode()))
        case dict():
            builder.add_bytes(name, json.dumps(value).encode())
        case _:
            reason = "expected a text, an object, [url] or [url, offset, length]"
            raise DecodeError(f"no reference set: {name[:200]!r}: {reason}")


def _expand(builder: TableBuilder, others: Json) -> Sequence[str]:
    """Add the references that ``gen`` generates, and return the URLs without templates."""
    texts = others.get("templates", {})
    templates = Templates(texts)
    urls = [templates.render(url) for url in builder.urls] if texts else builder.urls
    for reference in generate(others.get("gen", []), templates):
        builder.add_source(*reference)
    return [*urls, *builder.urls[len(urls) :]]


def _consolidate(builder: TableBuilder) -> None:
    """Add consolidated metadata of a Zarr v2 group, where the set itself has its documents."""
    if builder.bytes_of(b".zgroup") is None or builder.bytes_of(CONSOLIDATED.encode()) is not None:
        return
    documents, room = dict[str, Json](), _MOST_CONSOLIDATED_NBYTES
    for name in builder.names:
        if name.rpartition(b"/")[2] not in _DOCUMENTS:
            continue
        data = builder.bytes_of(name)
        if data is None or (room := room - len(data)) < 0:
            return
        try:
            documents[name.decode()] = json.loads(data)
        except (ValueError, RecursionError):
            return
    builder.add_bytes(CONSOLIDATED, consolidate(documents))
