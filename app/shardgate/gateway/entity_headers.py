"""Headers of the entities of datasets: types, caching, validators and ranges."""

import re
from functools import cache
from http import HTTPStatus
from typing import Final

from shardgate.auth.access import ServedDataset
from shardgate.model import VirtualKey
from shardgate.read.bodies import Entity, Selection
from shardgate.server.conditions import content_range, etag_of_selected, last_modified
from shardgate.server.request import Headers
from shardgate.server.responses import NO_REFERRER
from shardgate.storage.http_headers import METADATA

# For responses that depend on the caller; a token may be in the path.
_PRIVATE: Final[Headers] = [(b"vary", b"Authorization"), NO_REFERRER]
_LEAVE: Final = re.compile(rb"(?i)s-maxage|stale-|immutable")
_LIFETIME: Final = re.compile(rb"(?i)max-age|no-cache|no-store")
# By name or file extension; no type that a browser would run.
_CONTENT_TYPES: Final = {
    "json": b"application/json",
    "info": b"application/json",
    "zarray": b"application/json",
    "zattrs": b"application/json",
    "zgroup": b"application/json",
    "zmetadata": b"application/json",
    "txt": b"text/plain; charset=utf-8",
    "md": b"text/plain; charset=utf-8",
    "png": b"image/png",
    "jpg": b"image/jpeg",
    "jpeg": b"image/jpeg",
}


def content_type(key: str) -> bytes:
    """Return the media type of an object by its *key*."""
    extension = key.rpartition("/")[2].rpartition(".")[2]
    return _CONTENT_TYPES.get(extension, b"application/octet-stream")


def cache_headers(dataset: ServedDataset) -> Headers:
    """Return the caching headers of what no purge of a key reaches: absence, listings, pictures."""
    cache_control = (b"cache-control", _without_leave(dataset.cache_control))
    return [cache_control, *([] if dataset.is_public else _PRIVATE)]


@cache
def _without_leave(cache_control: bytes) -> bytes:
    """Return *cache_control* without leave to keep longer, to serve stale, or not to ask again when
    a page is reloaded (RFC 9111 §5.2, RFC 5861, RFC 8246).

    Absence that is out of date is fill value in the place of data to a reader of Zarr.
    """
    directives = [each.strip() for each in cache_control.split(b",")]
    kept = [each for each in directives if not _LEAVE.match(each)]
    if not any(map(_LIFETIME.match, kept)):
        kept.append(b"max-age=0")  # caches would choose a time themselves
    return b", ".join([*kept, b"must-revalidate"])


def entity_headers(
    dataset: ServedDataset, key: VirtualKey, entity: Entity, selection: Selection
) -> Headers | None:
    """Return the headers of a selected entity; `None` if the response is a problem instead."""
    status, part, _, coding, is_s3 = selection
    if part is None and status is not HTTPStatus.NOT_MODIFIED:
        return None
    cache_control = dataset.cache_control
    # The key always names these bytes (RFC 8246), which may be meant for no disk all the same.
    if entity.is_immutable and b"no-store" not in cache_control.lower():
        scope = b"public" if dataset.is_public else b"private"
        cache_control = scope + b", max-age=31536000, immutable"
    headers = [
        (b"etag", etag_of_selected(entity, selection).encode("latin-1")),
        (b"cache-control", cache_control),
        # An object of whatever type shares its origin with the pages of the service.
        (b"content-security-policy", b"sandbox"),
    ]
    if part is not None:
        stored = entity.headers
        headers += [
            (b"accept-ranges", b"bytes"),
            (b"content-length", b"%d" % (part.stop - part.start)),
            (b"content-type", stored.content_type.encode() or content_type(key)),
            *[(METADATA + name.encode(), value.encode()) for name, value in stored.metadata],
        ]
        if status is HTTPStatus.PARTIAL_CONTENT:
            headers.append((b"content-range", content_range(part, entity.length)))
        if coding:
            headers.append((b"content-encoding", coding.encode("latin-1")))
    if not dataset.is_public:
        headers += _PRIVATE
    if is_s3:  # by these a cache tells clients of S3 from others; see `speaks_s3`
        headers.append((b"vary", b"Accept-Encoding, Authorization, Amz-Sdk-Invocation-Id"))
    elif entity.coding or entity.is_inflated:
        headers.append((b"vary", b"Accept-Encoding"))
    return headers + last_modified(entity.modified_s)
