"""Puts objects that were uploaded in parts in the place of others."""

import asyncio
from collections.abc import Sequence
from functools import partial

from app.errors import VersionChangedError
from app.model import ETag, ObjectRef
from app.storage.contract import CONFLICT, TEMPORARY, Conflict
from app.storage.moved import Moved
from app.storage.parts import Part
from app.storage.s3.client import bucket_of
from app.storage.s3.probe import Joining
from app.storage.s3.swap import Send, Swap, Write
from app.storage.s3.sweep import Sweeper
from app.storage.s3.upload import Tools, Upload


class Joiner:
    """Uploads parts, and swaps them in by the request that the server heeds conditions of.

    Where completing an upload does not, the object is completed under a name of its own, and
    copied from there.
    """

    def __init__(self, tools: Tools, sweeper: Sweeper) -> None:
        self._tools = tools
        self._sweeper = sweeper

    async def put(
        self, write: Write, parts: Sequence[Part], joining: Joining
    ) -> tuple[ETag | Conflict, Moved]:
        """Write what *parts* make, and tell how much was moved.

        Raises: `CannotCopyError`, `StorageError`.
        """
        await self._sweeper.sweep(write.ref)
        if joining == "complete":
            return await self._complete(write, parts)
        return await self._copy(write, parts)

    async def _complete(self, write: Write, parts: Sequence[Part]) -> tuple[ETag | Conflict, Moved]:
        upload, outcome = Upload(self._tools, write.ref, write), None
        try:
            await upload.fill(parts)
            outcome = await self._swap(write, upload.complete)
        except VersionChangedError:
            return CONFLICT, upload.moved
        else:
            return outcome, upload.moved
        finally:
            if not isinstance(outcome, str):
                await upload.abort()

    async def _copy(self, write: Write, parts: Sequence[Part]) -> tuple[ETag | Conflict, Moved]:
        aside = ObjectRef(write.ref.bucket, f"{write.ref.key}{TEMPORARY}{write.ids[0]}")
        upload = Upload(self._tools, aside, write)
        try:
            await upload.fill(parts)
            await self._swap(Write(aside, None, write.ids, write.kept), upload.complete)
            source = {"Bucket": bucket_of(aside), "Key": aside.key}
            send = partial(
                self._tools.client.ask,
                write.ref,
                "copy_object",
                CopySource=source,
                MetadataDirective="REPLACE",
                **write.headers,
            )
            return await self._swap(write, send), upload.moved
        except VersionChangedError:
            return CONFLICT, upload.moved
        finally:
            await asyncio.shield(self._sweeper.remove(aside))

    async def _swap(self, write: Write, send: Send) -> ETag | Conflict:
        return await Swap(self._tools.client, self._tools.patience, write, send).run()
