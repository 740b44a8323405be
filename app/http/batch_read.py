"""``POST /{dataset}?batch``: many keys read in one request.

Of each key, in the order in which they were asked for, a line of JSON is sent that tells its
``key``, ``status``, ``length`` and ``etag``, and behind the line break so many bytes.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, ValidationError

from app.errors import BadBodyError, ShardgateError
from app.http.problems import status_of
from app.http.ranges import content_range
from app.http.selection import Conditions, Selection, choose, etag_of_selected
from app.http.target import check_key
from app.model import VirtualKey
from app.resolve.entity import Body, Entity, Opened
from app.resolve.resolver import Dataset, Resolver

MEDIA_TYPE: Final = b"application/vnd.shardgate.batch"
MAX_KEYS: Final = 10_000
MAX_NBYTES: Final = 8 * 1024**2
_AT_ONCE: Final = 16
"""Keys that are read at once, at most, and as many again while those are sent."""
_AT_FIRST: Final = 4
_HELD_NBYTES: Final = 8 * 1024**2
"""So much those at once may be, if they are like the ones before."""
_JOINED_NBYTES: Final = 256 * 1024
"""A larger body is not copied to be sent with its line."""

type _Found = Opened[Selection] | ShardgateError | None


class Wanted(BaseModel, frozen=True, extra="forbid", strict=True):
    """A key, and the part of its bytes that is wanted."""

    key: str
    range: str | None = None


class _Batch(BaseModel, frozen=True, extra="forbid", strict=True):
    keys: Annotated[tuple[Wanted, ...], Field(max_length=MAX_KEYS, strict=False)]


def parse_batch(body: bytes) -> Sequence[Wanted]:
    """Read what is asked for.

    Raises: `BadBodyError`, `BadKeyError`.
    """
    try:
        wanted = _Batch.model_validate_json(body).keys
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        told = f"{where}: {first['msg']}" if where else first["msg"]
        raise BadBodyError(f"the body is no batch of reads: {told}") from None
    for each in wanted:
        check_key(each.key)
    return wanted


class _Reading:
    """A key that is being read, and held until it has been sent."""

    __slots__ = ("found", "is_sent", "wanted")

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.found: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()
        self.is_sent = asyncio.Event()


class BatchReader:
    """Reads many keys of *dataset*, some at once, with tasks of *group*."""

    def __init__(self, resolver: Resolver, dataset: Dataset, group: asyncio.TaskGroup) -> None:
        self._resolver = resolver
        self._dataset = dataset
        self._group = group

    async def pieces(self, wanted: Sequence[Wanted]) -> AsyncIterator[bytes]:
        """Give the bytes of the answer; what fails before it is sent says so in its line."""
        rest = iter(wanted)
        ahead = self._start(rest, _AT_FIRST)
        at_once = _AT_FIRST
        while now := ahead:
            ahead = self._start(rest, at_once)
            largest = 1
            for reading in now:
                line, length, body = _described(reading.wanted.key, await reading.found)
                largest = max(largest, length)
                if isinstance(body, bytes) and length <= _JOINED_NBYTES:
                    yield line + body
                else:
                    yield line
                    async for piece in _in_pieces(body):
                        yield piece
                reading.is_sent.set()
            at_once = max(1, min(_AT_ONCE, _HELD_NBYTES // largest))

    def _start(self, rest: Iterator[Wanted], at_once: int) -> Sequence[_Reading]:
        readings = [_Reading(wanted) for wanted in islice(rest, at_once)]
        for reading in readings:
            self._group.create_task(self._hold(reading))
        return readings

    async def _hold(self, reading: _Reading) -> None:
        conditions = Conditions(range=reading.wanted.range)

        def choose_part(entity: Entity) -> Selection | None:
            return choose(conditions, entity)

        key = VirtualKey(reading.wanted.key)
        try:
            opening = self._resolver.open(self._dataset, key, choose_part, conditions.reading)
            async with opening as opened:
                reading.found.set_result(opened)
                await reading.is_sent.wait()
        except ShardgateError as error:
            if reading.found.done():
                raise
            reading.found.set_result(error)


def _described(key: str, found: _Found) -> tuple[bytes, int, Body]:
    """Write the line of *key*, and give the bytes that follow it, and how many they are."""
    told: dict[str, Any] = {"key": key, "status": HTTPStatus.NOT_FOUND, "length": 0}
    body: Body = b""
    if isinstance(found, ShardgateError):
        told |= {"status": status_of(found), "detail": str(found)}
    elif found is not None:
        (status, part, _, _), entity = found.choice, found.entity
        told |= {"status": status, "etag": etag_of_selected(entity, found.choice)}
        if part is not None:
            told["length"], body = part.length, found.body
        if part is not None and status is HTTPStatus.PARTIAL_CONTENT:
            told["content_range"] = content_range(part, entity.length)
    return json.dumps(told).encode() + b"\n", told["length"], body


async def _in_pieces(body: Body) -> AsyncIterator[bytes]:
    if isinstance(body, bytes):
        yield body
        return
    async for piece in body:
        yield piece
