"""Objects of S3 and of servers that speak it: the one door to botocore.

aiobotocore finds credentials, signs and lists. Reads go to presigned URLs,
which need not name the range, so that one signature serves many reads of an object.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from functools import cache
from typing import Any, Final

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore import UNSIGNED
from botocore.credentials import Credentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004  botocore's own
    ConnectTimeoutError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
)
from botocore.loaders import create_loader
from botocore.parsers import ResponseParserError

from app.errors import StorageDeniedError, StorageTimeoutError, StorageUnavailableError
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef
from app.settings import StoreSettings
from app.storage.contract import Found, Listed, NotModified, Stat
from app.storage.http1.client import Client
from app.storage.http1.target import Target
from app.storage.presigning import Presigner, presign
from app.storage.range_reader import RangeReader
from app.storage.refusals import Method, Refusal

_REUSED_S: Final = 300
_SIGNED: Final = 8192
_ABSENT: Final = 404
_REFUSED: Final = frozenset({400, 403})
_EXPIRED_CODES: Final = frozenset({"InvalidToken", "TokenRefreshRequired"})
_NO_BUCKET: Final = "NoSuchBucket"
_NO_KEY: Final = "NoSuchKey"


class S3Store:
    """Reads ranges of what lies in ``s3://bucket``, all buckets with the same credentials."""

    def __init__(
        self, settings: StoreSettings | None, *, connections: int = 64, timeout_s: float = 10.0
    ) -> None:
        self._signer = _Signer(settings or StoreSettings(), timeout_s)
        client = Client(connections=connections, silence_s=timeout_s, ca_file=self._signer.ca_file)
        self._reader = RangeReader(self._signer, client)

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Send one GET."""
        return await self._reader.get(ref, request, if_match, if_none_match)

    def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Send one GET and pass its body on."""
        return self._reader.stream(ref, byte_range, if_match)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Send one HEAD."""
        return await self._reader.stat(ref)

    async def list(self, prefix: ObjectRef, *, delimiter: str = "") -> AsyncIterator[Listed]:
        """Page through ListObjectsV2; keys and prefixes of a page are merged by name."""
        with _translated(prefix):
            client = await self._signer.client()
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=_bucket(prefix), Prefix=prefix.key, Delimiter=delimiter
            )
            async for page in pages:
                listed = [
                    Listed(ObjectRef(prefix.bucket, each["Key"]), each["Size"])
                    for each in page.get("Contents", ())
                ] + [
                    Listed(ObjectRef(prefix.bucket, each["Prefix"]), None)
                    for each in page.get("CommonPrefixes", ())
                ]
                for each in sorted(listed, key=lambda each: each.ref.key.encode()):
                    yield each

    async def reach(self, root: ObjectRef) -> None:
        """Ask for the bucket."""
        await self._signer.reach(root)

    async def aclose(self) -> None:
        """Close both pools."""
        await self._reader.aclose()
        await self._signer.aclose()


class _Signer:
    """Presigns URLs with botocore, and keeps them a while; the source of the range reader."""

    def __init__(self, settings: StoreSettings, timeout_s: float) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._session = get_session()
        self._session.register_component("data_loader", _loader())
        self._signed: dict[tuple[Method, ObjectRef], tuple[Target, float]] = {}
        self._presigners: dict[tuple[Method, str], Presigner | None] = {}
        self._alive: set[str] = set()
        self._client: Any = None
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()

    @property
    def ca_file(self) -> str | None:
        """The certificates that botocore is told to trust: ``AWS_CA_BUNDLE`` or the profile's."""
        found: str | None = self._session.get_config_variable("ca_bundle")
        return found

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
        with _translated(ref):
            client, bucket = await self.client(), _bucket(ref)
            if (method, bucket) not in self._presigners:
                self._presigners[method, bucket] = await Presigner.of(client, method, bucket)
            presigner = self._presigners[method, bucket]
            if presigner is None:
                return Target(await presign(client, method, bucket, ref.key))
            return Target(presigner.sign(ref.key, await self._credentials()))

    async def _credentials(self) -> Any:
        """Give what the settings say, or what botocore finds, as it is now."""
        key_id, secret = self._settings.access_key_id, self._settings.secret_access_key
        if key_id is not None and secret is not None:
            token = self._settings.session_token
            told = None if token is None else token.get_secret_value()
            return Credentials(key_id, secret.get_secret_value(), told)
        found = None if self._settings.anonymous else await self._session.get_credentials()
        return None if found is None else await found.get_frozen_credentials()

    def renew(self, method: Method, ref: ObjectRef, refusal: Refusal) -> bool:
        """Forget a URL that died of age; a HEAD does not say of what it died."""
        if refusal.status not in _REFUSED or self._settings.anonymous:
            return False
        told = f"{refusal.code} {refusal.message}".lower()
        if not (method == "HEAD" or "expired" in told or refusal.code in _EXPIRED_CODES):
            return False
        self._signed.pop((method, ref), None)  # unless another reader of the object was faster
        return True

    async def confirm(self, ref: ObjectRef, refusal: Refusal) -> None:
        """Ask for the bucket unless the 404 speaks of the key, or the bucket was seen."""
        if refusal.code == _NO_BUCKET:
            self._alive.discard(ref.bucket)
            raise _no_bucket(ref)
        if refusal.code != _NO_KEY and ref.bucket not in self._alive:
            with suppress(StorageDeniedError):  # refused, and so there
                await self.reach(ref)
            self._alive.add(ref.bucket)

    async def reach(self, ref: ObjectRef) -> None:
        """Return if the bucket of *ref* answers."""
        with _translated(ref):
            client = await self.client()
            await client.head_bucket(Bucket=_bucket(ref))

    async def client(self) -> Any:
        """Make the client when it is first needed: it may ask the network for credentials."""
        if self._client is None:
            async with self._lock:
                if self._client is None:
                    made = self._session.create_client("s3", **self._options())
                    self._client = await self._stack.enter_async_context(made)
        return self._client

    async def aclose(self) -> None:
        """Close the client."""
        await self._stack.aclose()

    def _options(self) -> dict[str, Any]:
        settings = self._settings
        secret, token = settings.secret_access_key, settings.session_token
        endpoint = settings.endpoint_url or self._session.get_config_variable("endpoint_url")
        region = settings.region or self._session.get_config_variable("region")
        config = AioConfig(
            signature_version=UNSIGNED if settings.anonymous else "s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=self._timeout_s,
            read_timeout=self._timeout_s,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"} if endpoint else {},
        )
        return {
            "region_name": region or "us-east-1",
            "endpoint_url": settings.endpoint_url,
            "aws_access_key_id": settings.access_key_id,
            "aws_secret_access_key": secret and secret.get_secret_value(),
            "aws_session_token": token and token.get_secret_value(),
            "config": config,
        }


@cache
def _loader() -> Any:
    """Share botocore's descriptions of S3 among stores; to read them takes 0.1 s."""
    return create_loader()


def _bucket(ref: ObjectRef) -> str:
    return ref.bucket.partition("://")[2]


def _no_bucket(ref: ObjectRef) -> StorageUnavailableError:
    return StorageUnavailableError(ref, "there is no such bucket", lasting=True)


@contextmanager
def _translated(ref: ObjectRef) -> Iterator[None]:
    """Turn botocore's exceptions into ours; none leaves this module."""
    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        if code == _NO_BUCKET or status == _ABSENT:
            raise _no_bucket(ref) from error
        raise Refusal("GET", status, code).failure(ref) from error
    except (ConnectTimeoutError, ReadTimeoutError) as error:
        raise StorageTimeoutError(ref, "the server is silent") from error
    except (NoCredentialsError, CredentialRetrievalError, PartialCredentialsError) as error:
        raise StorageDeniedError(ref, f"no credentials to send: {type(error).__name__}") from error
    except (BotoCoreError, ResponseParserError, ValueError) as error:
        lasting = not isinstance(error, HTTPClientError | ConnectionError | ResponseParserError)
        raise StorageUnavailableError(ref, type(error).__name__, lasting=lasting) from error
