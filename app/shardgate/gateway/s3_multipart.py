"""Multipart uploads of S3 clients, and copies: CopyObject and UploadPartCopy."""

import asyncio
import re
from collections.abc import Awaitable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote_to_bytes

from shardgate.auth.access import ServedDataset
from shardgate.errors import (
    BadBodyError,
    BadHeaderError,
    BadKeyError,
    BadParameterError,
    BadPartError,
    PartOrderError,
    PreconditionFailedError,
    TooLargeError,
    UnsupportedError,
)
from shardgate.formats.compression import is_sendable
from shardgate.gateway import s3_dialect as dialect
from shardgate.gateway.write import COPY_SOURCE, Copy, Handler, Put, WriteRequest
from shardgate.icechunk.sessions.registry import Sessions
from shardgate.model import EVERYTHING, ByteRange, ETag, VirtualKey
from shardgate.read.bodies import Entity, Opened, Selection
from shardgate.read.budget import ByteReservation
from shardgate.read.resolver import Resolver
from shardgate.server.body import Payload, check_digests, read_payload
from shardgate.server.request import RequestHeaders, check_key, quote_segment
from shardgate.server.responses import NO_STORE
from shardgate.storage.contract import ObjectHeaders
from shardgate.write.uploads import Completion, PartName, Upload, Uploads

MAX_PARTS: Final = 10_000  # as in S3
_CHECKSUM: Final = b"x-amz-checksum-"
_SIZE: Final = b"x-amz-mp-object-size"
_MD5: Final = re.compile('"?([0-9a-f]{32})"?')
_NUMBER: Final = re.compile("[0-9]{1,5}")
_SOURCE_RANGE: Final = b"x-amz-copy-source-range"
_BYTES: Final = re.compile(rb"bytes=([0-9]{1,18})-([0-9]{1,18})")
# Headers that change the meaning of a copy, so that it must not be done without them.
_UNSERVED: Final = (
    b"x-amz-copy-source-if-modified-since",
    b"x-amz-copy-source-if-unmodified-since",
    b"x-amz-copy-source-server-side-encryption-customer-algorithm",
)


class MultipartUploads:
    """Handlers of the steps of a multipart upload."""

    def __init__(self, uploads: Uploads, copy_part: Copy) -> None:
        self._uploads = uploads
        self._copy_part = copy_part
        self.steps: Mapping[str, Handler] = {
            "CreateMultipartUpload": self._create,
            "UploadPart": self._put_part,
            "CompleteMultipartUpload": self._complete,
            "AbortMultipartUpload": self._abort,
        }

    async def _create(self, request: WriteRequest) -> None:
        key = request.key
        if key.endswith("/"):
            raise BadKeyError("a key that ends in a slash is a folder: it has no bytes")
        upload_id = await self._uploads.create(request.dataset, key, request.object_headers())
        members = {"Bucket": request.dataset.name, "Key": key, "UploadId": upload_id}
        await request.send_xml(dialect.to_xml("InitiateMultipartUploadResult", members))

    async def _put_part(self, request: WriteRequest) -> None:
        upload = _upload(request)
        number = parse_part_number(request.parameter("partNumber"))
        if number is None:
            raise BadParameterError(f"partNumber is a number from 1 to {MAX_PARTS}")
        if b"content-range" in request.headers:
            raise BadHeaderError("a part with Content-Range is not served: parts are written whole")

        def put(payload: Payload, _: ObjectHeaders | None = None) -> Awaitable[ETag]:
            # The object has the headers of the request that began the upload.
            return self._uploads.put_part(upload, number, payload.body)

        if COPY_SOURCE in request.headers:
            await self._copy_part(request, put)
        else:
            await request.send_written(await put(await request.read_payload()))

    async def _complete(self, request: WriteRequest) -> None:
        upload = _upload(request)
        # Checksums in the headers are of the object, not of the list of its parts.
        of_list = {k: v for k, v in request.headers.items() if not k.startswith(_CHECKSUM)}
        most = dialect.MAX_DOCUMENT_NBYTES
        payload = await read_payload(request.incoming, of_list, request.held, most_nbytes=most)
        parts = await asyncio.to_thread(parse_parts, payload.body)
        check = partial(_check_object, request.headers)
        completion = Completion(parts, request.demand(), check)
        etag = await self._uploads.complete(upload, completion, request.held)
        name = request.dataset.name
        base_path = request.responder.request.base_path
        members = {
            "Location": f"{base_path}/{name}/{quote_segment(request.key)}",
            "Bucket": name,
            "Key": request.key,
            "ETag": etag or "",
        }
        await request.send_xml(dialect.to_xml("CompleteMultipartUploadResult", members))

    async def _abort(self, request: WriteRequest) -> None:
        await self._uploads.abort(_upload(request))
        await request.responder.send(HTTPStatus.NO_CONTENT, [NO_STORE])


def _upload(request: WriteRequest) -> Upload:
    return Upload(request.dataset, request.key, request.parameter("uploadId"))


def _check_object(headers: RequestHeaders, body: bytes) -> None:
    """Check all parts together against *headers*."""
    # A value with a hyphen is a checksum of the checksums of parts.
    checksums = {k: v for k, v in headers.items() if k.startswith(_CHECKSUM) and b"-" not in v}
    check_digests(b"", body, checksums)
    length = b"%d" % len(body)
    if headers.get(_SIZE, length) != length:
        raise BadBodyError(f"the parts have {len(body)} bytes, {_SIZE.decode()} says otherwise")


def parse_parts(body: bytes) -> list[PartName]:
    """Parse CompleteMultipartUpload. Raises: `BadBodyError`, `BadPartError`, `PartOrderError`."""
    parts: list[PartName] = []
    for part in dialect.parse_xml(body, "CompleteMultipartUpload", {"Part"}):
        texts = dialect.texts_of(part)
        number = parse_part_number(texts.get("PartNumber", "").strip())
        if number is None:
            raise BadBodyError(f"a part has a number from 1 to {MAX_PARTS}")
        if parts and number <= parts[-1].number:
            raise PartOrderError(f"part {number} is not in ascending order")
        if (md5 := _MD5.fullmatch(texts.get("ETag", "").strip())) is None:
            raise BadPartError(f"the ETag of part {number} is not that of a part")
        parts.append(PartName(number, md5[1]))
    if not parts:
        raise BadBodyError("the body names no part")
    return parts


def parse_part_number(text: str) -> int | None:
    """Parse the number of a part; `None` if it is none."""
    number = int(text) if _NUMBER.fullmatch(text) else 0
    return number if 1 <= number <= MAX_PARTS else None


async def copy(
    sessions: Sessions,
    resolver: Resolver,
    request: WriteRequest,
    put: Put,
    *,
    is_part: bool = False,
) -> None:
    """Pass the bytes and headers of the source, of any dataset, to *put*, and answer.

    With the directive REPLACE the headers of the request replace those of the source. The stored
    form is copied, with its coding unless the request names another.
    """
    dataset, key = await sessions.route(*await _parse_source(request))
    demand = request.demand(COPY_SOURCE + b"-")
    part = _parse_source_range(request.headers) if is_part else None
    directive = request.headers.get(b"x-amz-metadata-directive", b"COPY")
    if directive not in (b"COPY", b"REPLACE"):
        raise BadHeaderError("x-amz-metadata-directive is COPY or REPLACE")

    def choose(entity: Entity) -> Selection | None:
        if not is_sendable(entity.coding):
            return None  # it is inflated first
        if demand is not None and demand(entity.names) is not None:
            raise PreconditionFailedError(f"{key}: its version fails a precondition of the copy")
        wanted = part or ByteRange(0, entity.length)
        if wanted.stop > entity.length:
            raise BadHeaderError(f"{_SOURCE_RANGE.decode()}: {key} has {entity.length} bytes")
        if wanted.length > request.max_nbytes:
            raise TooLargeError(f"{key}: {wanted.length} bytes are too many for a copy")
        return Selection(HTTPStatus.OK, wanted, wanted, entity.coding)

    held = request.held
    async with resolver.open(dataset, key, choose, part or EVERYTHING, held) as opened:
        if opened is None:
            detail = f"{dataset.name} has no {key}"
            await request.responder.problem(HTTPStatus.NOT_FOUND, detail)
            return
        body = await _read(opened, held)
        coding = opened.entity.coding or opened.entity.headers.coding
        kept = opened.entity.headers._replace(coding=coding)
        etag = await put(Payload(body, coding), kept if directive == b"COPY" else None)
    name = "CopyPartResult" if is_part else "CopyObjectResult"
    await request.send_xml(dialect.copied(name, etag))


async def _parse_source(request: WriteRequest) -> tuple[ServedDataset, VirtualKey]:
    """Parse x-amz-copy-source. Raises: `BadHeaderError`, `BadKeyError`, `UnsupportedError`."""
    quoted, query, _ = request.headers[COPY_SOURCE].partition(b"?")
    if query or any(name in request.headers for name in _UNSERVED):
        raise UnsupportedError("copying a version, by dates or with a key is not served")
    try:
        name, _, key = unquote_to_bytes(quoted).decode().removeprefix("/").partition("/")
    except UnicodeDecodeError:
        raise BadHeaderError("x-amz-copy-source is not percent-encoded UTF-8") from None
    if not key or key.endswith("/"):
        raise BadHeaderError("x-amz-copy-source names no key")
    return await request.find(name), check_key(key)


def _parse_source_range(headers: RequestHeaders) -> ByteRange | None:
    if (text := headers.get(_SOURCE_RANGE)) is None:
        return None
    if (found := _BYTES.fullmatch(text)) is None or int(found[1]) > int(found[2]):
        raise BadHeaderError(f"{_SOURCE_RANGE.decode()} is not of the form bytes=first-last")
    return ByteRange(int(found[1]), int(found[2]) + 1)


async def _read(opened: Opened, held: ByteReservation) -> bytes:
    if isinstance(opened.body, bytes):
        return opened.body
    if opened.selection.reads is not None:
        await held.grow(opened.selection.reads.length)
    return b"".join([piece async for piece in opened.body])
