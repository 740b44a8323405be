"""Presigned URLs of objects, kept a while: the source of the range reader."""

import time
from typing import Final

from app.model import ObjectRef
from app.storage.http1.target import Target
from app.storage.refusals import Method, Refusal
from app.storage.s3.client import S3Client, bucket_of, translated
from app.storage.s3.presigning import Presigner, presign

_REUSED_S: Final = 300
_SIGNED: Final = 8192
_REFUSED: Final = frozenset({400, 403})
_EXPIRED_CODES: Final = frozenset({"InvalidToken", "TokenRefreshRequired"})


class Signer:
    """Presigns URLs with what botocore knows."""

    sends_etags = True

    def __init__(self, client: S3Client) -> None:
        self._client = client
        self._signed: dict[tuple[Method, ObjectRef], tuple[Target, float]] = {}
        self._presigners: dict[tuple[Method, str], Presigner | None] = {}

    async def target(self, method: Method, ref: ObjectRef) -> Target:
        """Presign, or take what was presigned in the last minutes."""
        target, until = self._signed.get((method, ref), (None, 0.0))
        if target is None or until < time.monotonic():
            target = await self._sign(method, ref)
            if len(self._signed) >= _SIGNED:
                del self._signed[next(iter(self._signed))]
            self._signed[method, ref] = target, time.monotonic() + _REUSED_S
        return target

    async def _sign(self, method: Method, ref: ObjectRef) -> Target:
        with translated(ref):
            client, bucket = await self._client.reader(), bucket_of(ref)
            if (method, bucket) not in self._presigners:
                self._presigners[method, bucket] = await Presigner.of(client, method, bucket)
            presigner = self._presigners[method, bucket]
            if presigner is None:
                return Target(await presign(client, method, bucket, ref.key))
            return Target(presigner.sign(ref.key, await self._client.credentials()))

    def renew(self, method: Method, ref: ObjectRef, refusal: Refusal) -> bool:
        """Forget a URL that died of age; a HEAD does not say of what it died."""
        if refusal.status not in _REFUSED or self._client.is_anonymous:
            return False
        told = f"{refusal.code} {refusal.message}".lower()
        if not (method == "HEAD" or "expired" in told or refusal.code in _EXPIRED_CODES):
            return False
        self._signed.pop((method, ref), None)  # unless another reader of the object was faster
        return True

    def proves_absence(self, refusal: Refusal) -> bool:
        """Accept only an error document of S3."""
        return refusal.is_no_such_key
