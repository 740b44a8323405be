"""CopyObject and UploadPartCopy: PUTs of bytes that this service reads from another key."""

import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote_to_bytes

from app.errors import (
    BadHeaderError,
    PreconditionFailedError,
    TooLargeError,
    UnsupportedError,
)
from app.http import s3, s3_answers
from app.http.asked import Asked, Limits
from app.http.payload import Payload
from app.http.selection import Selection
from app.http.target import check_key
from app.model import EVERYTHING, ByteRange, ETag, VirtualKey
from app.resolve.bodies import Coding, Entity, Opened
from app.resolve.budget import ByteReservation
from app.resolve.resolver import Dataset, Resolver
from app.storage.contract import ObjectHeaders

SOURCE: Final = b"x-amz-copy-source"
_RANGE: Final = b"x-amz-copy-source-range"
_BYTES: Final = re.compile(rb"bytes=([0-9]{1,18})-([0-9]{1,18})")
_UNSERVED: Final = (
    b"x-amz-copy-source-if-modified-since",
    b"x-amz-copy-source-if-unmodified-since",
    b"x-amz-copy-source-server-side-encryption-customer-algorithm",
)
"""A copy that went on without heeding them would not be what its client wants."""


class Copier:
    """Copies keys, from any dataset into those that are writable."""

    def __init__(self, resolver: Resolver, limits: Limits) -> None:
        self._resolver = resolver
        self._limits = limits

    async def copy(
        self,
        asked: Asked,
        write: Callable[[Payload, ObjectHeaders | None], Awaitable[ETag | None]],
        *,
        is_part: bool = False,
    ) -> None:
        """Pass what another key names now to *write*, up to the size that a body may have.

        With it go its headers, unless those of the request are to take their place.
        What is stored as gzip is passed so, but to parts: those have the bytes of a plain GET, of
        which the client may choose a range.
        """
        dataset, key = await _source(asked)
        demand = asked.demand(SOURCE + b"-")
        part = _range(asked.given) if is_part else None
        directive = asked.given.get(b"x-amz-metadata-directive", b"COPY")
        if directive not in (b"COPY", b"REPLACE"):
            raise BadHeaderError("x-amz-metadata-directive is COPY or REPLACE")

        def chosen(entity: Entity) -> Selection | None:
            if demand is not None and not demand(entity.names):
                raise PreconditionFailedError(f"{key}: is not what the request demands of it")
            is_gzip = entity.coding is Coding.GZIP
            if is_gzip and is_part:
                return None
            wanted = part or ByteRange(0, entity.length)
            if wanted.stop > entity.length:
                raise BadHeaderError(f"{_RANGE.decode()}: {key} has {entity.length} bytes")
            if wanted.length > self._limits.max_chunk_nbytes:
                raise TooLargeError(f"{key}: has {wanted.length} bytes, too many to be copied")
            return Selection(HTTPStatus.OK, wanted, wanted, is_gzip)

        held = ByteReservation(asked.budget)
        async with self._resolver.open(dataset, key, chosen, part or EVERYTHING, held) as opened:
            if opened is None:
                detail = f"{dataset.name} has no {key}"
                await asked.answer.problem(HTTPStatus.NOT_FOUND, detail)
                return
            body = await _read(opened, held)
            headers = opened.entity.headers if directive == b"COPY" else None
            etag = await write(Payload(body, opened.choice.is_gzip), headers)
        name = "CopyPartResult" if is_part else "CopyObjectResult"
        await asked.tell(s3.MEDIA_TYPE, s3_answers.copied(name, etag))


async def _source(asked: Asked) -> tuple[Dataset, VirtualKey]:
    """Read which key is to be copied.

    Raises: `BadHeaderError`, `BadKeyError`, `UnsupportedError`, and what `Door.enter` raises.
    """
    spelled, query, _ = asked.given[SOURCE].partition(b"?")
    if query or any(name in asked.given for name in _UNSERVED):
        raise UnsupportedError("copying a version, by dates or with a key is not served")
    try:
        name, _, key = unquote_to_bytes(spelled).decode().removeprefix("/").partition("/")
    except UnicodeDecodeError:
        raise BadHeaderError("x-amz-copy-source is not percent-encoded UTF-8") from None
    if not key or key.endswith("/"):
        raise BadHeaderError("x-amz-copy-source names no key")
    return await asked.enter(name), check_key(key)


def _range(given: Mapping[bytes, bytes]) -> ByteRange | None:
    """Read x-amz-copy-source-range; `None` is all.

    Raises: `BadHeaderError`.
    """
    if (text := given.get(_RANGE)) is None:
        return None
    if (found := _BYTES.fullmatch(text)) is None or int(found[1]) > int(found[2]):
        raise BadHeaderError(f"{_RANGE.decode()} is not of the form bytes=first-last")
    return ByteRange(int(found[1]), int(found[2]) + 1)


async def _read(opened: Opened[Selection], held: ByteReservation) -> bytes:
    if isinstance(opened.body, bytes):
        return opened.body
    if opened.choice.reads is not None:
        await held.grow(opened.choice.reads.length)
    return b"".join([piece async for piece in opened.body])
