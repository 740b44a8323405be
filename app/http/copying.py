"""CopyObject: a PUT whose bytes are those of another key, which this service reads itself."""

from collections.abc import Mapping
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
from app.http.selection import Conditions, Selection, choose
from app.http.target import check_key
from app.model import EVERYTHING, VirtualKey
from app.resolve.entity import Entity, Opened
from app.resolve.opening import Held
from app.resolve.resolver import Dataset, Resolver
from app.resolve.writing import Given, Writer

SOURCE: Final = b"x-amz-copy-source"
_IF_MATCH: Final = b"x-amz-copy-source-if-match"
_IF_NONE_MATCH: Final = b"x-amz-copy-source-if-none-match"
_UNSERVED: Final = (
    b"x-amz-copy-source-if-modified-since",
    b"x-amz-copy-source-if-unmodified-since",
    b"x-amz-copy-source-server-side-encryption-customer-algorithm",
)
"""A copy that went on without heeding them would not be what its client wants."""


class Copier:
    """Copies keys, from any dataset into those that are writable."""

    def __init__(self, resolver: Resolver, writer: Writer, limits: Limits) -> None:
        self._resolver = resolver
        self._writer = writer
        self._limits = limits

    async def copy(self, asked: Asked) -> None:
        """Write what another key names now, up to the size that a body may have."""
        dataset, key = await _source(asked)
        conditions = _conditions(asked.given)
        demand = asked.demand()

        def chosen(entity: Entity) -> Selection | None:
            if (selection := choose(conditions, entity)) is None:
                return None
            if selection.status is not HTTPStatus.OK:
                raise PreconditionFailedError(f"{key}: is not what the request demands of it")
            if entity.length > self._limits.max_chunk_nbytes:
                raise TooLargeError(f"{key}: has {entity.length} bytes, too many to be copied")
            return selection

        async with asked.held() as held:
            async with self._resolver.open(dataset, key, chosen, EVERYTHING) as opened:
                body = None if opened is None else await _read(opened, held)
            if opened is None or body is None:
                detail = f"{dataset.name} has no {key}"
                await asked.answer.problem(HTTPStatus.NOT_FOUND, detail)
                return
            given = Given(asked.key, body, opened.choice.is_gzip, demand)
            etag = await self._writer.put(asked.dataset, given)
        await asked.tell(s3.MEDIA_TYPE, s3_answers.copied(etag))


async def _source(asked: Asked) -> tuple[Dataset, VirtualKey]:
    """Read which key is to be copied.

    Raises: `BadHeaderError`, `BadKeyError`, `UnsupportedError`, and what `Door.enter` raises.
    """
    spelled, query, _ = asked.given[SOURCE].partition(b"?")
    if query or any(name in asked.given for name in _UNSERVED):
        raise UnsupportedError("CopyObject of a version, by dates or with a key is not served")
    try:
        name, _, key = unquote_to_bytes(spelled).decode().removeprefix("/").partition("/")
    except UnicodeDecodeError:
        raise BadHeaderError("x-amz-copy-source is not percent-encoded UTF-8") from None
    if not key or key.endswith("/"):
        raise BadHeaderError("x-amz-copy-source names no key")
    return await asked.enter(name), check_key(key)


def _conditions(given: Mapping[bytes, bytes]) -> Conditions:
    if_match, if_none_match = (
        given[name].decode("latin-1") if name in given else None
        for name in (_IF_MATCH, _IF_NONE_MATCH)
    )
    return Conditions(if_match=if_match, if_none_match=if_none_match, takes_gzip=True)


async def _read(opened: Opened[Selection], held: Held) -> bytes:
    if isinstance(opened.body, bytes):
        return opened.body
    await held.reserve(opened.entity.length)
    return b"".join([piece async for piece in opened.body])
