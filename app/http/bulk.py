"""Many keys in one request: batches both ways, DeleteObjects, all keys below a prefix."""

import asyncio
from asyncio import TaskGroup
from http import HTTPStatus
from typing import Final

from app.errors import BadKeyError, BadParameterError, ShardgateError
from app.http import batch_read, batch_write, s3, s3_answers, s3_delete
from app.http.answer import NO_STORE
from app.http.asked import Asked, Limits
from app.http.checksums import SignedDigest
from app.http.disconnect import UntilDisconnect
from app.http.payload import read_payload
from app.http.preconditions import parse_demand
from app.http.target import check_key
from app.model import VirtualKey
from app.resolve.erasing import Eraser
from app.resolve.resolver import Dataset, Resolver
from app.resolve.writing import Given, Outcome, Writer

_BATCH: Final = (b"content-type", batch_read.MEDIA_TYPE)


class Bulk:
    """Answers requests of a whole dataset."""

    def __init__(self, resolver: Resolver, writer: Writer, eraser: Eraser, limits: Limits) -> None:
        self._resolver = resolver
        self._writer = writer
        self._eraser = eraser
        self._limits = limits

    async def read(self, asked: Asked) -> None:
        """Send many keys."""
        asked.refuse_coding()
        async with asked.held() as held:
            payload = await read_payload(
                asked.incoming, asked.given, held, most_nbytes=batch_read.MAX_NBYTES
            )
            wanted = await asyncio.to_thread(batch_read.parse_batch, payload.body)
        async with UntilDisconnect(asked.incoming.receive):
            try:
                async with TaskGroup() as group:
                    reader = batch_read.BatchReader(self._resolver, asked.dataset, group)
                    pieces = reader.pieces(wanted)
                    await asked.answer.send(HTTPStatus.OK, [_BATCH, NO_STORE], pieces)
            except* ShardgateError as broken:
                raise broken.exceptions[0] from None

    async def put(self, asked: Asked) -> None:
        """Write many keys, or take them away."""
        asked.refuse_coding()
        length = asked.incoming.length(self._limits.max_batch_nbytes)
        frames = batch_write.Frames(most_nbytes=self._limits.max_chunk_nbytes)
        digest = SignedDigest(asked.given)
        async with asked.held() as held:
            async for piece in asked.incoming.pieces(length, held):
                digest.feed(piece)
                frames.feed(piece)
            digest.finish()
            given = frames.finish()
            outcomes = await self._writer.put_each(asked.dataset, given)
        await asked.tell_json({"results": batch_write.describe(given, outcomes)})

    async def delete(self, asked: Asked) -> None:
        """Answer DeleteObjects."""
        async with asked.held() as held:
            payload = await read_payload(
                asked.incoming, asked.given, held, most_nbytes=s3_delete.MAX_NBYTES
            )
            deletion = await asyncio.to_thread(s3_delete.parse_deletion, payload.body)
            outcomes = await self._delete(asked.dataset, deletion)
        keys = [key for key, _ in deletion.keys]
        text = s3_answers.deleted(keys, outcomes, is_quiet=deletion.is_quiet)
        await asked.tell(s3.MEDIA_TYPE, text)

    async def _delete(self, dataset: Dataset, deletion: s3_delete.Deletion) -> list[Outcome]:
        """Take keys away; where there can be none, as below a folder's name, none is."""
        outcomes: dict[str, Outcome] = {}
        given = []
        for key, etag in deletion.keys:
            try:
                demand = parse_demand(etag, None)
                if check_key(key) and not key.endswith("/"):
                    given.append(Given(VirtualKey(key), None, demand=demand))
            except ShardgateError as error:
                outcomes[key] = error
        written = await self._writer.put_each(dataset, given)
        for each, outcome in zip(given, written, strict=True):
            outcomes[each.key] = None if isinstance(outcome, BadKeyError) else outcome
        return [outcomes.get(key) for key, _ in deletion.keys]

    async def erase(self, asked: Asked) -> None:
        """Take all keys away that begin with the parameter ``prefix``."""
        prefix = asked.parameter("prefix")
        if not prefix.endswith("/"):
            raise BadParameterError(f"prefix ends in a slash, and {prefix!r} does not")
        count = await self._eraser.erase(asked.dataset, check_key(prefix))
        await asked.tell_json({"deleted": count})
