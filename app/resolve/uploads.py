"""Keys that come in parts, which wait in the store: whichever process is asked can go on."""

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from app.concurrency import run_in_thread
from app.errors import (
    BadPartError,
    PreconditionFailedError,
    StorageError,
    TooLargeError,
    UnknownUploadError,
)
from app.model import ETag, VirtualKey
from app.resolve.abandoned import Abandoned
from app.resolve.entity import Demand
from app.resolve.opening import Held
from app.resolve.parts import PartName, Parts, Place, Told, missing
from app.resolve.resolver import Dataset
from app.resolve.writing import Given, Writer
from app.storage.contract import ObjectHeaders, ObjectStore

_IN_THREAD_NBYTES: Final = 128 * 1024


class Upload(NamedTuple):
    """An upload, as a client names it."""

    dataset: Dataset
    key: VirtualKey
    upload_id: str


class Completion(NamedTuple):
    """What joins an upload."""

    parts: Sequence[PartName]
    """In the order of their numbers."""
    demand: Demand | None
    check: Callable[[bytes], None]
    """Raises where the whole is not what the client says."""

    @property
    def digest(self) -> str:
        """Tell these parts from others."""
        return _md5(repr([tuple(part) for part in self.parts]).encode())


class Uploads:
    """Takes parts, and writes the key when all are there."""

    def __init__(
        self,
        store: ObjectStore,
        writer: Writer,
        *,
        max_nbytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._writer = writer
        self._max_nbytes = max_nbytes
        self._clock = clock
        self._parts = Parts(store)
        self._abandoned = Abandoned(self._parts, clock)

    async def create(self, dataset: Dataset, key: VirtualKey, headers: ObjectHeaders) -> str:
        """Begin an upload, and give its id.

        Raises: what `Writer.put` raises of the key.
        """
        await self._writer.demand_place(dataset, key, headers)
        await self._abandoned.sweep(dataset.root)
        place = Place.new(dataset.root, self._clock())
        await self._parts.tell(place.open, {"key": key, **headers._asdict()})
        return place.upload_id

    async def put_part(self, upload: Upload, number: int, body: bytes) -> ETag:
        """Keep one part; of parts with the same number the client chooses when it completes.

        Raises: `UnknownUploadError`, `TooLargeError`, `StorageError`.
        """
        place = await self._place(upload)
        await self._demand_open(place, upload.key)
        if number * len(body) > self._max_nbytes:  # or the parts before it are smaller: look
            await self._demand_room(place, number, len(body))
        md5 = await run_in_thread(_md5, body, is_long=len(body) > _IN_THREAD_NBYTES)
        await self._parts.put(place, PartName(number, md5), body)
        return ETag(f'"{md5}"')

    async def complete(self, upload: Upload, completion: Completion, held: Held) -> ETag | None:
        """Write the key as `Writer.put` does; bytes in memory are *held*.

        Who asks again within an hour is told the same again.

        Raises: `UnknownUploadError`, `BadPartError`, `TooLargeError`, and as `Writer.put`.
        """
        place = await self._place(upload)
        try:
            told = await self._demand_open(place, upload.key)
            body = await self._join(place, completion.parts, held)
            await run_in_thread(completion.check, body, is_long=len(body) > _IN_THREAD_NBYTES)
            metadata = tuple((name, value) for name, value in told.get("metadata", ()))
            headers = ObjectHeaders(told["is_gzip"], told.get("content_type", ""), metadata)
            given = Given(upload.key, body, headers, completion.demand)
            etag = await self._writer.put(upload.dataset, given)
        except (UnknownUploadError, BadPartError, PreconditionFailedError):
            done = await self._parts.told(place.done)
            if done is None or (done["key"], done["parts"]) != (upload.key, completion.digest):
                raise
            return None if done["etag"] is None else ETag(done["etag"])
        with suppress(StorageError):  # it is written, whatever is left behind
            done = {"key": upload.key, "parts": completion.digest, "etag": etag}
            await self._parts.tell(place.done, done)
            await self._parts.clear(place)
        return etag

    async def abort(self, upload: Upload) -> None:
        """Remove all parts.

        Raises: `UnknownUploadError`, `StorageError`.
        """
        place = await self._place(upload)
        await self._demand_open(place, upload.key)
        await self._parts.clear(place)

    async def _place(self, upload: Upload) -> Place:
        root = upload.dataset.root
        await self._store.verify_conditional_writes(root)
        return Place.parse(root, upload.upload_id)

    async def _demand_open(self, place: Place, key: VirtualKey) -> Told:
        told = await self._parts.told(place.open)
        if told is None or told["key"] != key:
            raise UnknownUploadError(f"there is no such upload of {key}, or no more")
        return told

    async def _demand_room(self, place: Place, number: int, nbytes: int) -> None:
        sizes = await self._parts.sizes(place)
        nbytes_of = {part.number: size for part, size in sizes.items()} | {number: nbytes}
        self._demand_bounded(sum(nbytes_of.values()))

    async def _join(self, place: Place, parts: Sequence[PartName], held: Held) -> bytes:
        """Read *parts*, once it is known that all are there and not too large."""
        sizes = await self._parts.sizes(place)
        for part in parts:
            if part not in sizes:
                raise missing(part)
        nbytes = sum(sizes[part] for part in parts)
        self._demand_bounded(nbytes)
        await held.reserve(2 * nbytes)
        body = await self._parts.join(place, parts)
        await held.reserve(len(body))
        return body

    def _demand_bounded(self, nbytes: int) -> None:
        if nbytes > self._max_nbytes:
            raise TooLargeError(f"the parts are larger than {self._max_nbytes} bytes together")


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
