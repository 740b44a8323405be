"""Large bodies, hashed for the signature in a thread, and sent without a copy."""

import asyncio
from hashlib import sha256
from io import BytesIO
from typing import Any, Final

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth

from app.storage.abreast import is_large

_PIECE_NBYTES: Final = 256 * 1024
_VERSION: Final = "s3v4-hashed-before"
_INSTEAD_OF: Final = frozenset({"v4", "s3v4"})
_DIGEST: Final = "shardgate_sha256"
_OPERATIONS: Final = ("PutObject", "UploadPart")


def hash_aside(client: Any) -> None:
    """Let *client* of botocore not hold the event loop where it sends large bodies.

    botocore hashes a body where it signs, here that happens in the event before; aiohttp copies a
    body that is a file in memory, as botocore makes of each.
    """
    AUTH_TYPE_MAPS.setdefault(_VERSION, _HashedBefore)
    for operation in _OPERATIONS:
        client.meta.events.register_first(f"choose-signer.s3.{operation}", _choose)
        client.meta.events.register(f"before-sign.s3.{operation}", _hash)
        client.meta.events.register(f"before-send.s3.{operation}", _divide)


class _HashedBefore(S3SigV4Auth):
    """Signs the digest that is known already, if one is."""

    def payload(self, request: Any) -> Any:
        return request.context.get(_DIGEST) or super().payload(request)


class _Divided(Payload):
    """Bytes that are written piece by piece, as fast as they are taken."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        view = memoryview(self._value)
        for at in range(0, len(view), _PIECE_NBYTES):
            await writer.write(view[at : at + _PIECE_NBYTES])
            await asyncio.sleep(0)


def _choose(signature_version: Any, **_: Any) -> str | None:
    """Sign in our way what is signed with SigV4, and what else there is in botocore's."""
    return _VERSION if signature_version in _INSTEAD_OF else None


async def _hash(request: Any, signature_version: Any, **_: Any) -> None:
    body = _large(request.data)
    if signature_version == _VERSION and body is not None:
        request.context[_DIGEST] = (await asyncio.to_thread(sha256, body)).hexdigest()


def _divide(request: Any, **_: Any) -> None:
    body = _large(request.body)
    if body is not None:
        request.body = _Divided(body)


def _large(body: Any) -> bytes | None:
    """Give what botocore has put into a file, which does not copy it, if it is large."""
    data = body.getvalue() if isinstance(body, BytesIO) else b""
    return data if is_large(len(data)) else None
