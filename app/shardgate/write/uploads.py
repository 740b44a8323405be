"""Multipart uploads: parts wait as objects in the store, so that any replica can continue one.

An upload is the object ``{id}.upload``, which names its key; a part is ``{id}.{number}.{MD5}``; a
completed upload ``{id}.done``. Ids begin with the time, so that old ones are listed first.
"""

import hashlib
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from pydantic import BaseModel, ValidationError

from shardgate.concurrency import bounded_gather, run_in_thread
from shardgate.errors import (
    BadPartError,
    DamagedError,
    PreconditionFailedError,
    StorageError,
    TooLargeError,
    UnknownUploadError,
)
from shardgate.formats.documents import parse_json
from shardgate.formats.reading import check_format
from shardgate.model import ETag, ObjectRef, VirtualKey
from shardgate.read.bodies import Demand
from shardgate.read.budget import ByteReservation
from shardgate.read.containers import Dataset
from shardgate.storage.contract import UPLOADS, Found, ObjectHeaders, ObjectStore
from shardgate.write.writer import KeyWrite, Writer

_IN_THREAD_NBYTES: Final = 128 * 1024
_ID: Final = re.compile("([0-9a-f]{8})[0-9a-f]{24}")
_PART: Final = re.compile("([0-9]{1,5})[.](.+)")  # 10,000 parts
_RECORD_MAX_AGE_S: Final = 3600.0
"""Age at which the record of a completed upload is removed, and interval of sweeps."""
_SWEPT: Final = 100


class PartName(NamedTuple):
    """A part, as a client names it: *md5* is its ETag without quotes."""

    number: int
    md5: str


class Upload(NamedTuple):
    """An upload, as a client names it."""

    dataset: Dataset
    key: VirtualKey
    upload_id: str

    def object(self, name: str) -> ObjectRef:
        return self.dataset.root.join(f"{UPLOADS}{self.upload_id}.{name}")

    def part(self, part: PartName) -> ObjectRef:
        return self.object(f"{part.number:05}.{part.md5}")


class _Begun(BaseModel):
    """Record of an upload that was begun: its key, and the headers of that."""

    key: str
    coding: str
    content_type: str
    metadata: tuple[tuple[str, str], ...] = ()


class _Done(BaseModel):
    """Record of a completed upload, with a digest of its parts."""

    key: str
    parts: str
    etag: str | None


class Completion(NamedTuple):
    """Request to join the parts of an upload."""

    parts: Sequence[PartName]
    demand: Demand | None
    check: Callable[[bytes], None]
    """Raises if the joined body does not match the client's checksum."""

    @property
    def digest(self) -> str:
        """Identifies the list of parts."""
        return _md5(repr([tuple(part) for part in self.parts]).encode())


type Route = Callable[[Dataset, VirtualKey], Awaitable[tuple[Dataset, VirtualKey]]]
"""Returns the dataset, and the key in it, where a key is written."""


class Uploads:
    """Stores parts, and writes the key, by its *route*, when the upload is completed."""

    def __init__(
        self,
        store: ObjectStore,
        writer: Writer,
        route: Route,
        *,
        max_nbytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._writer = writer
        self._route = route
        self._max_nbytes = max_nbytes
        self._clock = clock
        self._next_sweep_s: dict[ObjectRef, float] = {}

    async def create(self, dataset: Dataset, key: VirtualKey, headers: ObjectHeaders) -> str:
        """Begin an upload, and return its id. Raises: what `Writer.put` raises for the key."""
        await self._writer.check_writable(*await self._route(dataset, key), headers)
        await self._sweep(dataset.root)
        upload_id = f"{int(self._clock()):08x}{secrets.token_hex(12)}"
        ref = Upload(dataset, key, upload_id).object("upload")
        await self._put_record(ref, _Begun(key=key, **headers._asdict()))
        return upload_id

    async def put_part(self, upload: Upload, number: int, body: bytes) -> ETag:
        """Store a part; the client chooses between parts of one number when it completes."""
        await self._verify(upload)
        await self._begun(upload)
        if number * len(body) > self._max_nbytes:  # unless earlier parts are smaller
            nbytes_of = {part.number: size for part, size in (await self._sizes(upload)).items()}
            nbytes_of[number] = len(body)
            self._check_total(sum(nbytes_of.values()))
        md5 = await run_in_thread(_md5, body, is_long=len(body) > _IN_THREAD_NBYTES)
        await self._store.put(upload.part(PartName(number, md5)), [body], expected=None)
        return ETag(f'"{md5}"')

    async def complete(
        self, upload: Upload, completion: Completion, held: ByteReservation
    ) -> ETag | None:
        """Write the key as `Writer.put` does; for an hour a repetition gets the same answer."""
        await self._verify(upload)
        try:
            begun = await self._begun(upload)
            body = await self._join(upload, completion.parts, held)
            await run_in_thread(completion.check, body, is_long=len(body) > _IN_THREAD_NBYTES)
            headers = ObjectHeaders(begun.coding, begun.content_type, begun.metadata)
            dataset, key = await self._route(upload.dataset, upload.key)
            write = KeyWrite(key, body, headers, completion.demand)
            etag = await self._writer.put(dataset, write)
        # The response to an earlier completion may have been lost.
        except (UnknownUploadError, BadPartError, PreconditionFailedError):
            done = await self._record(upload.object("done"), _Done)
            if done is None or (done.key, done.parts) != (upload.key, completion.digest):
                raise
            return None if done.etag is None else ETag(done.etag)
        with suppress(StorageError):  # the key is written, whatever objects are left behind
            done = _Done(key=upload.key, parts=completion.digest, etag=etag)
            await self._put_record(upload.object("done"), done)
            await self._clear(upload)
        return etag

    async def abort(self, upload: Upload) -> None:
        """Remove all parts. Raises: `UnknownUploadError`, `StorageError`."""
        await self._verify(upload)
        await self._begun(upload)
        await self._clear(upload)

    async def _verify(self, upload: Upload) -> None:
        await self._store.verify_conditional_writes(upload.dataset.root)
        if not _ID.fullmatch(upload.upload_id):
            raise UnknownUploadError(f"{upload.key} has no upload {upload.upload_id[:80]!r}")

    async def _begun(self, upload: Upload) -> _Begun:
        begun = await self._record(upload.object("upload"), _Begun)
        if begun is None or begun.key != upload.key:
            raise UnknownUploadError(f"{upload.key} has no upload {upload.upload_id}, or no longer")
        return begun

    def _check_total(self, nbytes: int) -> None:
        if nbytes > self._max_nbytes:
            raise TooLargeError(f"the parts are larger than {self._max_nbytes} bytes together")

    async def _join(
        self, upload: Upload, parts: Sequence[PartName], held: ByteReservation
    ) -> bytes:
        """Read *parts*, after checking that all exist and are not too large together."""

        async def read(part: PartName) -> bytes:
            found = await self._store.get(upload.part(part))
            if not isinstance(found, Found):
                raise _missing(part)
            return found.data

        sizes = await self._sizes(upload)
        for part in parts:
            if part not in sizes:
                raise _missing(part)
        nbytes = sum(sizes[part] for part in parts)
        self._check_total(nbytes)
        # The parts, and the body that they are joined to.
        await held.reserve(2 * nbytes)
        body = b"".join(await bounded_gather(read, parts))
        await held.reserve(len(body))
        return body

    async def _put_record(self, ref: ObjectRef, record: BaseModel) -> None:
        document = json.dumps({"format": 1, **record.model_dump()})
        await self._store.put(ref, [document.encode()], expected=None)

    async def _record[R: BaseModel](self, ref: ObjectRef, kind: type[R]) -> R | None:
        found = await self._store.get(ref)
        if not isinstance(found, Found):
            return None
        try:
            document = parse_json(found.data)
            check_format(document)
            return kind.model_validate(document)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"])) or "the document"
            raise DamagedError(ref, f"is no record of an upload: {place} is wrong") from None
        except ValueError as error:
            raise DamagedError(ref, f"is no record of an upload: {error}") from None

    async def _sizes(self, upload: Upload) -> dict[PartName, int]:
        prefix = upload.object("")
        sizes = {}
        async for each in self._store.list(prefix):
            found = _PART.fullmatch(each.ref.key.removeprefix(prefix.key))
            if found is not None and each.size is not None:
                sizes[PartName(int(found[1]), found[2])] = each.size
        return sizes

    async def _clear(self, upload: Upload) -> None:
        await self._store.delete(upload.object("upload"), expected=None)
        await self._remove([upload.part(part) for part in await self._sizes(upload)])

    async def _remove(self, refs: Sequence[ObjectRef]) -> None:
        await bounded_gather(lambda ref: self._store.delete(ref, expected=None), refs)

    async def _sweep(self, root: ObjectRef) -> None:
        """Remove abandoned uploads below *root*, at intervals; failures are ignored."""
        now_s = self._clock()
        if now_s < self._next_sweep_s.get(root, 0):
            return
        self._next_sweep_s[root] = now_s + _RECORD_MAX_AGE_S
        with suppress(StorageError):
            stale = await self._stale(root, now_s)
            await self._remove(stale)
            if len(stale) == _SWEPT:
                self._next_sweep_s[root] = now_s

    async def _stale(self, root: ObjectRef, now_s: float) -> list[ObjectRef]:
        stale: list[ObjectRef] = []
        folder = root.join(UPLOADS)
        async for each in self._store.list(folder):
            upload_id, _, kind = each.ref.key.removeprefix(folder.key).partition(".")
            if (parsed := _ID.fullmatch(upload_id)) is None:
                continue
            began_s = int(parsed[1], 16)
            # Ids begin with the time: all that follow are younger.
            if began_s > now_s - _RECORD_MAX_AGE_S or len(stale) == _SWEPT:
                break
            # A client may pause an upload for a day; a part that it adds is as young as that.
            age_s = now_s - (each.modified_s or began_s)
            if age_s > (_RECORD_MAX_AGE_S if kind == "done" else 24 * 3600.0):
                stale.append(each.ref)
        return stale


def _missing(part: PartName) -> BadPartError:
    return BadPartError(f"part {part.number} was not uploaded, or has another ETag")


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
