"""Requests for many keys of a dataset: DeleteObjects, and deletion of a prefix."""

import asyncio

from app.errors import BadKeyError, BadParameterError, ShardgateError
from app.http import s3, s3_answers, s3_delete
from app.http.asked import Asked
from app.http.payload import read_payload
from app.http.preconditions import parse_demand
from app.http.target import check_key
from app.model import VirtualKey
from app.resolve.resolver import Dataset
from app.resolve.write import Eraser, KeyWrite, Outcome, Writer


class Bulk:
    """Handlers of requests to a dataset as a whole."""

    def __init__(self, writer: Writer, eraser: Eraser) -> None:
        self._writer = writer
        self._eraser = eraser

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
                    given.append(KeyWrite(VirtualKey(key), None, demand=demand))
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
