"""Reference sets in JSON, of version 0 and 1, decoded to columns without a Python object for each
reference.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from shardgate.formats.compression import announced_nbytes, decode_content
from shardgate.formats.documents import (
    Json,
    as_integer,
    check_levels,
    json_memory_nbytes,
    may_contain,
    parse_json,
)
from shardgate.formats.kerchunk.reference_table import (
    CONSOLIDATED,
    MEMORY_PER_BYTE,
    InvalidReference,
    ReferenceSet,
    TableBuilder,
    check_size,
    consolidate,
)
from shardgate.formats.kerchunk.templates import (
    MOST_STEPS,
    STEPS_PER_BYTE,
    Failed,
    Generated,
    TemplateError,
    Templates,
    generate,
)
from shardgate.formats.reading import DecodeError, StepBudget
from shardgate.formats.references import inline_bytes

_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_TEMPLATES: Final = re.compile(rb'"(?:templates|gen)"')
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
    nbytes = json_memory_nbytes(data)
    if may_contain(data, _TEMPLATES):
        # `MOST_STEPS` can generate 192 MiB.
        nbytes += min(192 * 1024**2, MEMORY_PER_BYTE * most_nbytes)
    return nbytes


def _coding(data: bytes) -> str | None:
    """Return the compression that *data* begins like; `None` for JSON."""
    return next((name for magic, name in _COMPRESSED.items() if data.startswith(magic)), None)


def decode_json_set(data: bytes, limit_nbytes: int) -> ReferenceSet:
    """Decode a set of at most *limit_nbytes*, also once it is inflated."""
    # Any set may have 2^18 references, of about 3 µs, and one more for each byte as it is stored:
    # they take five bytes or more in JSON, and as many in most that are compressed.
    members = StepBudget(2**18 + len(data))
    if (coding := _coding(data)) is not None:
        data = decode_content(coding, data, limit_nbytes)
    check_size(data, limit_nbytes)
    try:
        check_levels(data)
        # A reference takes 250 bytes of memory while it is decoded: 32 bytes of the limit each.
        return _decode(_Cursor(data.decode(), members), limit_nbytes // 32, len(data))
    except DecodeError:
        raise
    except ValueError as error:
        raise DecodeError(f"no reference set: {error}") from None


class _Cursor:
    """Position in a JSON text, after the values that were read and the space behind them.

    Objects are read with a Python call for each member, so that other threads can run.
    """

    def __init__(self, text: str, steps: StepBudget) -> None:
        self._text = text
        self._steps = steps  # for members of objects
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
        if self.begins("}"):
            self.skip(_NEXT)
            return
        is_last = False
        while not is_last:
            self._steps.spend(1)
            self.skip(_QUOTE)
            name: str = self.value()
            self.skip(_COLON)
            yield name
            is_last = self.skip(_NEXT) == "}"


def _decode(cursor: _Cursor, most_rows: int, nbytes: int) -> ReferenceSet:
    flat = TableBuilder(most_rows)
    nested = TableBuilder(most_rows)
    others = dict[str, Json]()
    for name in cursor.members():
        if name == "refs" and cursor.begins("{"):
            for key in cursor.members():
                _add(nested, key, cursor.value())
        elif name in ("version", "templates", "gen"):
            others[name] = cursor.value()
        else:  # a reference in version 0; version 1 may have such members beside "refs"
            _add(flat, name, cursor.value())
    cursor.skip(_END)
    match others.pop("version", None):
        case None if not len(nested):
            for name, value in others.items():
                _add(flat, name, value)
            if len(flat) and not flat.has_valid:
                raise DecodeError("no reference set: none of its members is a reference")
            builder = flat
            urls = flat.urls
        case 1 if "refs" not in flat:
            steps = StepBudget(MOST_STEPS + STEPS_PER_BYTE * nbytes)
            builder = nested
            urls = _expand(nested, others, steps)
        case 1:
            raise DecodeError("no reference set: refs: expected an object")
        case version:
            raise DecodeError(f"no reference set of version 0 or 1: {repr(version)[:80]}")
    _consolidate(builder)
    return builder.build(urls)


def _add(builder: TableBuilder, name: str, value: Json) -> None:
    """Add a member; an invalid one is a reference that cannot be followed."""
    try:
        match value:
            case [str() | None as url] | [str() | None as url, None, None]:
                builder.add_source(name, url or "", None)
            case [str() | None as url, first, second]:
                offset = as_integer(first)
                length = as_integer(second)
                if type(offset) is not int or type(length) is not int:
                    raise DecodeError("expected integers for offset and length")
                builder.add_source(name, url or "", (offset, length))
            case str():
                builder.add_bytes(name, inline_bytes(value.encode()))
            case dict():
                builder.add_bytes(name, json.dumps(value).encode())
            case _:
                raise DecodeError("expected a text, an object, [url] or [url, offset, length]")
    except ValueError as error:
        builder.add_invalid(name, str(error))


def _expand(
    builder: TableBuilder, others: Json, steps: StepBudget
) -> Sequence[str | InvalidReference]:
    """Add the references that ``gen`` generates, and return the URLs without templates."""
    texts = others.get("templates")
    templates = Templates(texts, steps)
    urls = [_render(templates, url) for url in builder.urls] if texts else builder.urls
    for found in generate(others.get("gen"), templates):
        match found:
            case Generated(key, url, part):
                _add(builder, key, [url, *(part or ())])
            case Failed(None, reason):
                builder.fault = builder.fault or reason
            case Failed(str() as key, reason):
                builder.add_invalid(key, reason)
    return [*urls, *builder.urls[len(urls) :]]


def _render(templates: Templates, url: str | InvalidReference) -> str | InvalidReference:
    if isinstance(url, InvalidReference):
        return url
    try:
        return templates.render(url)
    except TemplateError as error:
        return InvalidReference(str(error))


def _consolidate(builder: TableBuilder) -> None:
    """Add consolidated metadata of a Zarr v2 group, where the set itself has its documents."""
    if builder.bytes_of(b".zgroup") is None or builder.bytes_of(CONSOLIDATED.encode()) is not None:
        return
    documents = dict[str, Json]()
    nbytes = 0
    for name in builder.names:
        if name.rpartition(b"/")[2] not in (b".zgroup", b".zarray", b".zattrs"):
            continue
        data = builder.bytes_of(name)
        if data is None:
            return
        nbytes += max(len(data), 64)  # a short one has its name too
        if nbytes > 16 * 1024**2:
            return
        try:
            documents[name.decode()] = parse_json(data)
        except ValueError:
            return
    with suppress(ValueError):  # of NaN
        builder.add_bytes(CONSOLIDATED, consolidate(documents))
