"""Removes what writers have left behind that live no more."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final

from cachetools import TTLCache

from app.errors import StorageError
from app.model import ObjectRef
from app.storage.contract import TEMPORARY
from app.storage.s3.client import Answer
from app.storage.s3.upload import Tools, abort

_SWEPT: Final = 4096
_SWEEP_S: Final = 600


class Sweeper:
    """Looks for unfinished uploads and objects beside those that are written."""

    def __init__(self, tools: Tools, stale_s: float) -> None:
        self._tools = tools
        self._stale = timedelta(seconds=stale_s)
        self._swept: TTLCache[ObjectRef, bool] = TTLCache(_SWEPT, _SWEEP_S)

    async def sweep(self, ref: ObjectRef) -> None:
        """Remove what is old beside *ref*, once in a while; if that fails, another day."""
        if ref in self._swept:
            return
        self._swept[ref] = True
        with suppress(StorageError):
            await self._abort(ref, self._stale)
            ours = ObjectRef(ref.bucket, f"{ref.key}{TEMPORARY}")
            for found in await self._objects(ours):
                await self._tools.try_to(found, "delete_object")

    async def remove(self, aside: ObjectRef) -> None:
        """Remove the object *aside*, and uploads to it, also one whose beginning nobody saw."""
        with suppress(StorageError):
            await self._abort(aside, timedelta(0))
        await self._tools.try_to(aside, "delete_object")

    async def _abort(self, ref: ObjectRef, age: timedelta) -> None:
        answer = await self._list(ref, "list_multipart_uploads")
        for each in _older(answer, answer.get("Uploads", ()), "Initiated", age):
            key = str(each["Key"])
            if key == ref.key or key.startswith(f"{ref.key}{TEMPORARY}"):
                await abort(self._tools, ObjectRef(ref.bucket, key), str(each["UploadId"]))

    async def _objects(self, ours: ObjectRef) -> list[ObjectRef]:
        answer = await self._list(ours, "list_objects_v2")
        stale = _older(answer, answer.get("Contents", ()), "LastModified", self._stale)
        return [ObjectRef(ours.bucket, str(each["Key"])) for each in stale]

    async def _list(self, ref: ObjectRef, operation: str) -> Answer:
        """Ask for the first page; what is further is found when that is gone."""
        patience = self._tools.patience
        return await patience.run(
            ref, lambda: self._tools.client.ask_bucket(ref, operation, Prefix=ref.key)
        )


def _older(answer: Answer, listed: Any, member: str, age: timedelta) -> Iterator[dict[str, Any]]:
    """Give what is older than *age* by the clock of the server."""
    told = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        now = parsedate_to_datetime(told).astimezone(UTC)
    except ValueError:
        now = datetime.now(UTC)
    for each in listed:
        if not age or each[member] < now - age:
            yield each
