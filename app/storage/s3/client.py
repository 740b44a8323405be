"""Clients of botocore, made of our settings, and what it raises as our errors."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
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
from app.model import ObjectRef
from app.settings import StoreSettings
from app.storage.refusals import Refusal
from app.storage.s3.hashing import hash_aside

_NOT_FOUND: Final = 404
_NO_BUCKET: Final = "NoSuchBucket"

type Answer = dict[str, Any]


class S3Client:
    """A session of botocore, and the clients that are made of it when they are first needed.

    Writes have a client of their own: a server may be silent for long while it copies.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        connections: int = 64,
        timeout_s: float = 10.0,
        write_timeout_s: float = 30.0,
    ) -> None:
        self._settings = settings
        self._connections = connections
        self._timeouts = {"read": timeout_s, "write": write_timeout_s}
        self._session = get_session()
        self._session.register_component("data_loader", _loader())
        self._clients: dict[str, Any] = {}
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()

    @property
    def ca_file(self) -> str | None:
        """The certificates that botocore is told to trust: ``AWS_CA_BUNDLE`` or the profile's."""
        found: str | None = self._session.get_config_variable("ca_bundle")
        return found

    @property
    def is_anonymous(self) -> bool:
        """Whether nothing is signed."""
        return self._settings.anonymous

    async def credentials(self) -> Any:
        """Give what the settings say, or what botocore finds, as it is now."""
        key_id, secret = self._settings.access_key_id, self._settings.secret_access_key
        if key_id is not None and secret is not None:
            token = self._settings.session_token
            told = None if token is None else token.get_secret_value()
            return Credentials(key_id, secret.get_secret_value(), told)
        found = None if self._settings.anonymous else await self._session.get_credentials()
        return None if found is None else await found.get_frozen_credentials()

    async def reader(self) -> Any:
        """Give botocore's client for reads; to make it may ask the network for credentials."""
        return await self._made("read")

    async def ask(self, ref: ObjectRef, operation: str, **params: Any) -> Answer | Refusal:
        """Send one request about *ref*, which may take long; to be refused is an answer too.

        Raises: `StorageError` where there is no answer, or no bucket.
        """
        with translated(ref):
            client = await self._made("write")
            try:
                answer: Answer = await getattr(client, operation)(
                    Bucket=bucket_of(ref), Key=ref.key, **params
                )
            except ClientError as error:
                if (refusal := _refusal(error)).code == _NO_BUCKET:
                    raise
                return refusal
            return answer

    async def ask_bucket(self, ref: ObjectRef, operation: str, **params: Any) -> Answer:
        """Send one request about the bucket of *ref*."""
        with translated(ref):
            client = await self._made("write")
            answer: Answer = await getattr(client, operation)(Bucket=bucket_of(ref), **params)
            return answer

    async def reach(self, ref: ObjectRef) -> None:
        """Return if the bucket of *ref* answers."""
        with translated(ref):
            client = await self.reader()
            try:
                await client.head_bucket(Bucket=bucket_of(ref))
            except ClientError as error:
                if _refusal(error).status == _NOT_FOUND:
                    raise _no_bucket(ref) from error
                raise

    async def aclose(self) -> None:
        """Close the clients."""
        await self._stack.aclose()

    async def _made(self, purpose: str) -> Any:
        if purpose not in self._clients:
            async with self._lock:
                if purpose not in self._clients:
                    made = self._session.create_client("s3", **self._options(purpose))
                    client = await self._stack.enter_async_context(made)
                    hash_aside(client)
                    self._clients[purpose] = client
        return self._clients[purpose]

    def _options(self, purpose: str) -> dict[str, Any]:
        settings = self._settings
        secret, token = settings.secret_access_key, settings.session_token
        endpoint = settings.endpoint_url or self._session.get_config_variable("endpoint_url")
        region = settings.region or self._session.get_config_variable("region")
        config = AioConfig(
            signature_version=UNSIGNED if settings.anonymous else "s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=self._timeouts["read"],
            read_timeout=self._timeouts[purpose],
            max_pool_connections=self._connections,
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


def bucket_of(ref: ObjectRef) -> str:
    """Name the bucket to S3."""
    return ref.bucket.partition("://")[2]


def _no_bucket(ref: ObjectRef) -> StorageUnavailableError:
    """Tell that not only the object is missing."""
    return StorageUnavailableError(ref, "there is no such bucket", lasting=True)


@contextmanager
def translated(ref: ObjectRef) -> Iterator[None]:
    """Turn botocore's exceptions into ours; none leaves the modules of S3."""
    try:
        yield
    except ClientError as error:
        refusal = _refusal(error)
        if refusal.code == _NO_BUCKET:
            raise _no_bucket(ref) from error
        raise refusal.failure(ref) from error
    except (ConnectTimeoutError, ReadTimeoutError) as error:
        raise StorageTimeoutError(ref, "the server is silent") from error
    except (NoCredentialsError, CredentialRetrievalError, PartialCredentialsError) as error:
        raise StorageDeniedError(ref, f"no credentials to send: {type(error).__name__}") from error
    except (BotoCoreError, ResponseParserError, ValueError) as error:
        lasting = not isinstance(error, HTTPClientError | ConnectionError | ResponseParserError)
        raise StorageUnavailableError(ref, type(error).__name__, lasting=lasting) from error


def _refusal(error: ClientError) -> Refusal:
    code = str(error.response.get("Error", {}).get("Code", ""))
    if code.isdecimal():  # botocore repeats the status where there is no error document
        code = ""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
    return Refusal("GET", status, code)
