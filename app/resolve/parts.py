"""The objects of uploads, below a dataset's root.

An upload is ``{id}.upload``, which tells its key; a part ``{id}.{number}.{MD5}``; and what was
completed ``{id}.done``. Ids begin with the time, so that listings begin with what is old.
"""

import json
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

from app.concurrency import bounded_gather
from app.errors import BadPartError, DamagedError, UnknownUploadError
from app.model import ObjectRef
from app.storage.contract import UPLOADS, Found, ObjectStore

_ID: Final = re.compile("([0-9a-f]{8})[0-9a-f]{24}")

type Told = dict[str, Any]
"""What an object tells of an upload."""


class PartName(NamedTuple):
    """A part, as a client tells it: *md5* is the ETag without quotes."""

    number: int
    md5: str


class Place(NamedTuple):
    """Where the objects of one upload are."""

    root: ObjectRef
    upload_id: str

    @classmethod
    def new(cls, root: ObjectRef, now_s: float) -> "Place":
        """Choose a place for an upload that begins now."""
        return cls(root, f"{int(now_s):08x}{secrets.token_hex(12)}")

    @classmethod
    def parse(cls, root: ObjectRef, upload_id: str) -> "Place":
        """Read what a client says.

        Raises: `UnknownUploadError`.
        """
        if not _ID.fullmatch(upload_id):
            raise UnknownUploadError("that is the id of no upload")
        return cls(root, upload_id)

    @property
    def open(self) -> ObjectRef:
        """Name what is there as long as the upload goes on."""
        return self._name("upload")

    @property
    def done(self) -> ObjectRef:
        """Name what is there when it was completed."""
        return self._name("done")

    @property
    def prefix(self) -> ObjectRef:
        """Name all that there is of it."""
        return self._name("")

    def part(self, part: PartName) -> ObjectRef:
        """Name a part."""
        return self._name(f"{part.number:05}.{part.md5}")

    def _name(self, name: str) -> ObjectRef:
        return self.root.join(f"{UPLOADS}{self.upload_id}.{name}")


class Parts:
    """Reads, writes and removes the objects of uploads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def put(self, place: Place, part: PartName, body: bytes) -> None:
        """Keep a part; one of that name has the same bytes."""
        await self._store.put(place.part(part), [body], expected=None)

    async def tell(self, ref: ObjectRef, told: Told) -> None:
        """Keep what an object tells."""
        await self._store.put(ref, [json.dumps(told).encode()], expected=None)

    async def told(self, ref: ObjectRef) -> Told | None:
        """Read that; `None` if it is not there."""
        found = await self._store.get(ref)
        if not isinstance(found, Found):
            return None
        try:
            return dict(json.loads(found.data))
        except ValueError as error:
            raise DamagedError(ref, "tells of no upload") from error

    async def sizes(self, place: Place) -> dict[PartName, int]:
        """List the parts that there are, with their sizes."""
        return {part: nbytes async for part, nbytes in self._listed(place)}

    async def join(self, place: Place, parts: Sequence[PartName]) -> bytes:
        """Read *parts*, one behind the other.

        Raises: `BadPartError`.
        """

        async def read(part: PartName) -> bytes:
            found = await self._store.get(place.part(part))
            if not isinstance(found, Found):
                raise missing(part)
            return found.data

        return b"".join(await bounded_gather(read, parts))

    async def clear(self, place: Place) -> None:
        """Remove the upload, and its parts after it."""
        await self._store.delete(place.open, expected=None)
        await self.remove([place.part(part) async for part, _ in self._listed(place)])

    async def remove(self, refs: Sequence[ObjectRef]) -> None:
        """Remove objects."""
        await bounded_gather(lambda ref: self._store.delete(ref, expected=None), refs)

    async def old(
        self, root: ObjectRef, before_s: float
    ) -> AsyncIterator[tuple[ObjectRef, str, float]]:
        """List objects of uploads that began *before_s*: with their kind, and when they came."""
        folder = root.join(UPLOADS)
        async for each in self._store.list(folder):
            upload_id, _, kind = each.ref.key.removeprefix(folder.key).partition(".")
            if (parsed := _ID.fullmatch(upload_id)) is None:
                continue
            if (began_s := int(parsed[1], 16)) > before_s:
                return
            yield each.ref, kind, each.modified_s or began_s

    async def _listed(self, place: Place) -> AsyncIterator[tuple[PartName, int]]:
        async for each in self._store.list(place.prefix):
            number, dot, md5 = each.ref.key.removeprefix(place.prefix.key).partition(".")
            if dot and number.isdigit() and each.size is not None:
                yield PartName(int(number), md5), each.size


def missing(part: PartName) -> BadPartError:
    """Make the error that *part* is not there."""
    return BadPartError(f"part {part.number} was not uploaded, or has another ETag")
