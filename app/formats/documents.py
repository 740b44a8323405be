"""Containers that a JSON document marks, in one of several dialects."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from app.errors import DamagedError
from app.formats.contract import Layout, Translator
from app.formats.reading import DecodeError, Fetch, Read, Versioned, Weighable
from app.model import ByteRange, Coded, ETag, Inline, ObjectRef, Stored, VirtualKey

type Json = Any

_BEFORE_JSON: Final = b"\xef\xbb\xbf \t\r\n"
_VIEW_REVISION: Final = "u1"
"""Changes whenever the same stored metadata are served in another form."""


def begins_like_json(data: bytes) -> bool:
    """Return whether *data* begins like a JSON object, or is empty like a truncated one."""
    text = data.lstrip(_BEFORE_JSON)
    return not text or text.startswith(b"{")


def begins_like_page(data: bytes) -> bool:
    """Return whether *data* begins like HTML or XML: an error page of a server or a proxy."""
    return data.lstrip(_BEFORE_JSON).startswith(b"<")


def check_not_blank(data: bytes) -> None:
    """Raise `DecodeError` for a marker that is empty or zeroed, as a crash leaves a file."""
    if not data.strip(b"\0"):
        raise DecodeError("it has only zero bytes" if data else "it is empty")


def as_integer(value: Json) -> Json:
    """Return an integer for ``4.0``, as JSON may spell it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Dialect[S: Weighable](Protocol):
    """One way to understand a marker."""

    def parse(self, document: Json, data: bytes) -> S | None:
        """Understand *document*, parsed from *data*; `None` if it is of another dialect."""

    def layout(self, directory: ObjectRef, spec: Versioned[S]) -> Layout:
        """Open the container at *directory* that *spec* describes."""

    def translator(self, directory: ObjectRef) -> Translator | None:
        """Return the translator of a marker in *directory*; `None` leaves it to other dialects."""


@dataclass(frozen=True, slots=True)
class Marked:
    """A decoded marker; empty if no dialect knows it."""

    dialect: Dialect[Any] | None = None
    spec: Weighable | None = None
    is_page: bool = False
    """True for an error page in place of the marker."""

    @property
    def is_metadata(self) -> bool:
        """False for a file that has the name of the marker by chance."""
        return self.dialect is not None

    @property
    def nbytes(self) -> int:
        return 0 if self.spec is None else self.spec.nbytes

    @property
    def why_sharded(self) -> str:
        """Reason why not all that the marker describes is served unsharded."""
        return getattr(self.spec, "why_sharded", "")


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
            raise DecodeError(f"metadata of more than {self.limit_bytes} bytes")
        try:
            return self.parse(json.loads(data), data)
        except DecodeError:
            raise
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"no JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class MarkerDecoder:
    """Decodes a document of at most *limit_bytes* by the first of *dialects* that claims it; they
    get `None` for a file that does not begin like a JSON object.
    """

    dialects: tuple[Dialect[Any], ...]
    limit_bytes: int

    def __call__(self, data: bytes) -> Marked:
        check_not_blank(data)
        if not begins_like_json(data):
            marked = self._claim(None, data)
            return marked if marked.is_metadata else Marked(is_page=begins_like_page(data))
        return DocumentDecoder(self._claim, self.limit_bytes)(data)

    def _claim(self, document: Json, data: bytes) -> Marked:
        for dialect in self.dialects:
            if (spec := dialect.parse(document, data)) is not None:
                return Marked(dialect, spec)
        return Marked()


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

    def markers(self, directory: ObjectRef) -> tuple[Read[Marked]]:
        request = ByteRange(0, self.limit_bytes + 1)
        decode = MarkerDecoder(self.dialects, self.limit_bytes)
        return (Read("metadata", directory.join(self.marker), request, decode),)

    async def open(self, directory: ObjectRef, fetch: Fetch) -> Layout | None:
        (read,) = self.markers(directory)
        found = await fetch(read)
        if found is None or found.value.dialect is None:
            if found is not None and self.is_named and not found.value.is_page:
                raise DamagedError(read.ref, f"no metadata of the format {self.name}")
            return None
        spec = Versioned(found.value.spec, found.etag, found.size, coding=found.coding)
        return found.value.dialect.layout(directory, spec)


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
    value, etag = document.value, document.etag
    if value.is_rewritten:
        return Inline(value.served, etag_of_rewritten(etag))
    if document.coding:
        return Coded(Stored(ref, ByteRange(0, document.size), etag), document.coding, etag)
    return Inline(value.served, etag)


def etag_of_rewritten(etag: ETag) -> ETag:
    """Return the ETag of a document that is stored as *etag* and served in another form."""
    return ETag(f'{etag[:-1]}-{_VIEW_REVISION}"')
