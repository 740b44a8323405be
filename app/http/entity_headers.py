"""The headers that describe what a key names."""

from functools import lru_cache
from http import HTTPStatus
from typing import Final

from app.http.answer import Headers
from app.http.dates import last_modified
from app.http.heads import encode_headers
from app.http.pages import content_type
from app.http.ranges import content_range
from app.http.selection import Selection, etag_of_selected
from app.model import ETag, VirtualKey
from app.resolve.bodies import Coding, Entity, Opened
from app.resolve.icechunk.session_keys import is_of_session
from app.resolve.resolver import Dataset
from app.storage.contract import ObjectHeaders
from app.storage.http_headers import METADATA

_GZIP: Final = (b"content-encoding", b"gzip")
_LASTING: Final = b"public, max-age=31536000, immutable"
"""For what a key will name for ever (RFC 8246)."""
_LASTING_OF_PRIVATE: Final = b"private, max-age=31536000, immutable"
_OF_PRIVATE: Final[Headers] = [(b"vary", b"Authorization"), (b"referrer-policy", b"no-referrer")]
"""Answers that depend on who asks; a token may be in the path."""
_NO_STORE: Final = b"no-store"
_KEPT: Final = 4096
_VARY: Final = (b"vary", b"Accept-Encoding")
_SANDBOX: Final = (b"content-security-policy", b"sandbox")
"""Of every object, whatever its type: its origin is that of our own pages."""

type Common = tuple[ETag, int | None, VirtualKey, bytes, bool, bool, int | None, ObjectHeaders]
"""What the headers depend on that all answers with the same body have in common."""


def keeping(dataset: Dataset, key: str) -> Headers:
    """Tell who may keep an answer about *key* that can change, and how long."""
    cache_control = (b"cache-control", _cache_control(dataset, key))
    return [cache_control, *([] if dataset.is_public else _OF_PRIVATE)]


def listing_headers(dataset: Dataset, prefix: str, media_type: bytes, body: bytes) -> Headers:
    """Give the headers of the *body* that tells what is below *prefix*."""
    return [
        (b"content-type", media_type),
        (b"content-length", b"%d" % len(body)),
        *keeping(dataset, prefix),
    ]


def entity_headers(dataset: Dataset, key: VirtualKey, opened: Opened[Selection]) -> Headers | None:
    """Give the headers of what is sent of an entity; `None` if that is a problem instead."""
    described = describe(dataset, key, opened.entity, opened.choice)
    return described and [*_headers(described[0]), *described[1]]


def describe(
    dataset: Dataset, key: VirtualKey, entity: Entity, selection: Selection
) -> tuple[Common, Headers] | None:
    """Tell what the headers depend on, and those that depend on more."""
    status, part, _, is_gzip = selection
    if part is None and status is not HTTPStatus.NOT_MODIFIED:
        return None
    more: Headers = []
    if status is HTTPStatus.PARTIAL_CONTENT and part is not None:
        more.append((b"content-range", content_range(part, entity.length).encode()))
    if is_gzip and part is not None:
        more.append(_GZIP)
    common = (
        etag_of_selected(entity, selection),
        None if part is None else part.length,
        key,
        _lasting(dataset) if entity.is_lasting else _cache_control(dataset, key),
        dataset.is_public,
        entity.coding is not Coding.PLAIN,
        entity.modified_s,
        entity.headers,
    )
    return common, more


@lru_cache(maxsize=_KEPT)
def head_of(common: Common) -> bytes:
    """Write the headers that many answers have in common; those of hot chunks are written once."""
    return encode_headers(_headers(common))


def _cache_control(dataset: Dataset, key: str) -> bytes:
    """Tell how long answers about *key* are kept that can change: of sessions not at all."""
    return _NO_STORE if is_of_session(key) else dataset.cache_control


def _lasting(dataset: Dataset) -> bytes:
    return _LASTING if dataset.is_public else _LASTING_OF_PRIVATE


@lru_cache(maxsize=_KEPT)
def _headers(common: Common) -> Headers:
    """Give the headers that describe a body, or say that there is the same as before."""
    etag, length, key, cache_control, is_public, varies, modified_s, kept = common
    headers = [(b"etag", etag.encode("latin-1")), (b"cache-control", cache_control), _SANDBOX]
    if length is not None:
        headers += [
            (b"accept-ranges", b"bytes"),
            (b"content-length", b"%d" % length),
            (b"content-type", kept.content_type.encode() or content_type(key)),
            *((METADATA + name.encode(), value.encode()) for name, value in kept.metadata),
        ]
    if not is_public:
        headers += _OF_PRIVATE
    if varies:
        headers.append(_VARY)
    return headers + last_modified(modified_s)
