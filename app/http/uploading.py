"""Keys that S3 clients upload in parts."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final

from app.errors import BadBodyError, BadHeaderError, BadKeyError, BadParameterError
from app.http import s3, s3_answers, s3_parts
from app.http.answer import NO_STORE
from app.http.asked import Asked, Limits
from app.http.checksums import check
from app.http.copying import SOURCE, Copier
from app.http.payload import Payload, read_payload
from app.http.target import spell
from app.model import ETag
from app.resolve.uploads import Completion, Upload, Uploads
from app.storage.contract import ObjectHeaders

_CHECKSUM: Final = b"x-amz-checksum-"
_SIZE: Final = b"x-amz-mp-object-size"


class Uploading:
    """Answers each step of an upload."""

    def __init__(self, uploads: Uploads, copier: Copier, limits: Limits) -> None:
        self._uploads = uploads
        self._copier = copier
        self._limits = limits
        self.steps: Mapping[str, Callable[[Asked], Awaitable[None]]] = {
            "CreateMultipartUpload": self._create,
            "UploadPart": self._put_part,
            "CompleteMultipartUpload": self._complete,
            "AbortMultipartUpload": self._abort,
        }

    async def _create(self, asked: Asked) -> None:
        """Begin; the whole has the headers of this request."""
        asked.refuse_parameters()
        if asked.key.endswith("/"):
            raise BadKeyError("a key that ends in a slash names a folder: it has no bytes")
        upload_id = await self._uploads.create(asked.dataset, asked.key, asked.headers())
        text = s3_answers.upload_created(asked.dataset.name, asked.key, upload_id)
        await asked.tell(s3.MEDIA_TYPE, text)

    async def _put_part(self, asked: Asked) -> None:
        """Take a part, whose own coding is nothing to the whole."""
        asked.refuse_parameters()
        upload = _upload(asked)
        number = s3_parts.parse_number(asked.parameter("partNumber"))
        if number is None:
            raise BadParameterError(f"partNumber is a number from 1 to {s3_parts.MAX_PARTS}")
        if b"content-range" in asked.given:
            raise BadHeaderError("a part of a part, of which Content-Range tells, is not taken")

        def put(payload: Payload, _: ObjectHeaders | None = None) -> Awaitable[ETag]:
            return self._uploads.put_part(upload, number, payload.body)

        if SOURCE in asked.given:
            await self._copier.copy(asked, put, is_part=True)
            return
        async with asked.held() as held:
            payload = await read_payload(
                asked.incoming, asked.given, held, most_nbytes=self._limits.max_chunk_nbytes
            )
            etag = await put(payload)
        await asked.tell_written(etag)

    async def _complete(self, asked: Asked) -> None:
        """Join the parts; checksums in the headers are of the whole, not of the list."""
        asked.refuse_parameters()
        upload = _upload(asked)
        of_list = {k: v for k, v in asked.given.items() if not k.startswith(_CHECKSUM)}
        async with asked.held() as held:
            payload = await read_payload(
                asked.incoming, of_list, held, most_nbytes=s3_parts.MAX_NBYTES
            )
            parts = await asyncio.to_thread(s3_parts.parse_parts, payload.body)
            completion = Completion(parts, asked.demand(), partial(_check_whole, asked.given))
            etag = await self._uploads.complete(upload, completion, held)
        name = asked.dataset.name
        location = f"/{name}/{spell(asked.key)}"
        text = s3_answers.upload_completed(name, asked.key, location, etag or "")
        await asked.tell(s3.MEDIA_TYPE, text)

    async def _abort(self, asked: Asked) -> None:
        asked.refuse_parameters()
        await self._uploads.abort(_upload(asked))
        await asked.answer.send(HTTPStatus.NO_CONTENT, [NO_STORE])


def _upload(asked: Asked) -> Upload:
    return Upload(asked.dataset, asked.key, asked.parameter("uploadId"))


def _check_whole(given: Mapping[bytes, bytes], body: bytes) -> None:
    """Check what the headers *given* say of all parts together.

    Checksums of checksums, which end in how many those are, say nothing new.
    """
    told = {k: v for k, v in given.items() if k.startswith(_CHECKSUM) and b"-" not in v}
    check(b"", body, told)
    if given.get(_SIZE, b"%d" % len(body)) != b"%d" % len(body):
        raise BadBodyError(
            f"the parts have {len(body)} bytes, not those that {_SIZE.decode()} says"
        )
