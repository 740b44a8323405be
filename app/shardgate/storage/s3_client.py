"""Clients of botocore, their errors as ours, and writes of single objects under conditions."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from http import HTTPStatus
from io import BytesIO
from types import SimpleNamespace
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import get_session
from aiohttp import ClientRequest
from botocore import UNSIGNED
from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004  botocore's own
    ConnectTimeoutError,
    CredentialRetrievalError,
    HTTPClientError,
    InvalidRegionError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    SSLError,
)
from botocore.handlers import add_expect_header
from botocore.loaders import create_loader
from botocore.parsers import ResponseParserError

from shardgate.concurrency import divide, is_large, resolve
from shardgate.errors import (
    ConfigurationError,
    StorageTimeoutError,
    StorageUnavailableError,
    StorageUnusableError,
)
from shardgate.model import ETag, ObjectRef
from shardgate.settings import StoreSettings
from shardgate.storage.contract import ABSENT, Conflict
from shardgate.storage.http_headers import METADATA, skew_of, version_of
from shardgate.storage.http_reader import HttpReader
from shardgate.storage.refusals import Refusal, no_bucket, no_credentials, other_region
from shardgate.storage.swapping import (
    WRITE_IDS,
    ObjectState,
    ObjectWrite,
    Swapper,
    ids_metadata,
    is_transient_write,
    parse_ids,
)
from shardgate.storage.wrappers import RetryPolicy

NO_BUCKET: Final = "NoSuchBucket"
_REQUIRED: Final = {
    "create_multipart_upload": "UploadId",
    "upload_part": "ETag",
    "upload_part_copy": "CopyPartResult",
}
"""Members without which a response is not that of S3."""
_BEFORE: Final = "before-call.s3"
_SIGNATURE: Final = "s3v4-hashed-before"
DIGEST: Final = "shardgate_sha256"
PAYER: Final = ("x-amz-request-payer", "requester")
"""Header, or parameter of a presigned URL, by which the caller agrees to pay."""

shared_loader: Final = cache(create_loader)
"""Shares botocore's descriptions of S3 among stores; loading them takes 0.1 s, at the start."""

type S3Answer = dict[str, Any]
type SendS3 = Callable[..., Awaitable[S3Answer | Refusal]]
"""Sends the write with the conditions it is called with."""


def _open_session() -> Any:
    """Open a session of botocore. Raises: `ConfigurationError` for a missing profile or file."""
    session = get_session()
    try:
        session.get_scoped_config()
        if (ca_file := session.get_config_variable("ca_bundle")) is not None:
            ssl.create_default_context(cafile=ca_file)
    except BotoCoreError as error:
        raise ConfigurationError(f"the configuration of AWS: {error}") from error
    except OSError as error:
        reason = f"AWS_CA_BUNDLE cannot be read: {error.strerror}: {ca_file}"
        raise ConfigurationError(reason) from error
    return session


def _configured_endpoint(session: Any) -> Any:
    """Return the URL of the server of S3 in the environment or the profile."""
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    profile = session.get_scoped_config()
    return ConfiguredEndpointProvider(session.full_config, profile, "s3").provide()


@cache
def _aws_regions() -> frozenset[str]:
    partitions = shared_loader().load_data("partitions")["partitions"]
    names = (name for partition in partitions for name in partition["regions"])
    return frozenset(name for name in names if "global" not in name)  # ``aws-global`` is no region


class _EndpointError(BotoCoreError):
    fmt = "AWS_ENDPOINT_URL, or endpoint_url of the profile, is no URL of a server"


class S3Client:
    """Clients of botocore, in each region one for reads and one, more patient, for writes."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        connections: int = 64,
        timeout_s: float = 10.0,
        deadline_s: float = 30.0,
    ) -> None:
        self._settings = settings
        self.is_anonymous = settings.anonymous
        """True if requests are not signed."""
        self._connections = connections
        self._timeouts = {"read": timeout_s, "write": max(timeout_s, deadline_s)}
        self.policy = RetryPolicy(2 * deadline_s)
        self._session = _open_session()
        self._session.register_component("data_loader", shared_loader())
        self._session.warm_up_loader_caches("s3")  # else the first request waits for it
        key_id = settings.access_key_id
        secret = settings.secret_access_key
        if key_id is not None and secret is not None:
            token = settings.session_token and settings.session_token.get_secret_value()
            self._session.set_credentials(key_id, secret.get_secret_value(), token)
        self._endpoint_url = settings.endpoint_url or _configured_endpoint(self._session)
        region = settings.region or self._session.get_config_variable("region")
        self._region: str = region or "us-east-1"
        self._regions: dict[str, str] = {}
        """Regions of buckets that are in another one, as S3 has said."""
        self._clients: dict[tuple[str, str], Any] = {}
        self._stack = AsyncExitStack()
        self._lock = asyncio.Lock()

    @property
    def ca_file(self) -> str | None:
        found: str | None = self._session.get_config_variable("ca_bundle")
        return found

    async def credentials(self) -> Any:
        """Return frozen credentials from the settings or botocore's chain, `None` without any."""
        found = None if self.is_anonymous else await self._session.get_credentials()
        return None if found is None else await found.get_frozen_credentials()

    def region_of(self, ref: ObjectRef) -> str:
        """Return the region for which requests about *ref* are signed."""
        return self._regions.get(bucket_of(ref), self._region)

    def learn_region(self, ref: ObjectRef, refusal: Refusal) -> bool:
        """Return whether *refusal* names a region of AWS, to which requests go from now on.

        The name becomes part of a host, as nothing else does that a server says.
        """
        if self._endpoint_url is not None or refusal.region not in _aws_regions():
            return False
        self._regions[bucket_of(ref)] = refusal.region
        return True

    async def call(
        self, ref: ObjectRef, operation: str, purpose: str = "read", **params: Any
    ) -> S3Answer:
        """Send one request about the bucket of *ref*, and again if that is in another region.

        Raises: `ClientError`, as botocore does.
        """
        params["Bucket"] = bucket_of(ref)
        client = await self.client(ref, purpose)
        try:
            answer: S3Answer = await getattr(client, operation)(**params)
        except ClientError as error:
            if not self.learn_region(ref, _refusal(error)):
                raise
            client = await self.client(ref, purpose)
            answer = await getattr(client, operation)(**params)
        return answer

    async def send(self, ref: ObjectRef, operation: str, **params: Any) -> S3Answer | Refusal:
        """Send one request about *ref*; raise without a response, or without the bucket."""
        key = "Prefix" if operation.startswith("list_") else "Key"
        with translated(ref):
            try:
                return await self.call(ref, operation, "write", **{key: ref.key}, **params)
            except ClientError as error:
                if (refusal := _refusal(error)).code == NO_BUCKET:
                    raise
                return refusal

    async def do(self, ref: ObjectRef, operation: str, **params: Any) -> S3Answer:
        """Send an idempotent request until it is done; raise the error of a refusal."""
        answer = await self.send_until_answered(ref, operation, **params)
        if isinstance(answer, Refusal):
            raise answer.failure(ref)
        return answer

    async def send_until_answered(
        self, ref: ObjectRef, operation: str, **params: Any
    ) -> S3Answer | Refusal:
        """Send an idempotent request until the response is S3's and not transient."""

        async def attempt() -> S3Answer | Refusal:
            answer = await self.send(ref, operation, **params)
            if isinstance(answer, Refusal):
                error = answer.failure(ref)
                if is_transient_write(error):
                    raise error
            elif (member := _REQUIRED.get(operation)) and not answer.get(member):
                raise StorageUnavailableError(ref, f"the response to {operation} has no {member}")
            return answer

        return await self.retried(ref, attempt)

    async def retried[T](self, ref: ObjectRef, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat *attempt* after errors that may be gone a moment later, also time-outs."""
        return await self.policy.run(ref, attempt, is_transient=is_transient_write)

    async def check_reachable(self, ref: ObjectRef) -> None:
        with translated(ref):
            try:
                await self.call(ref, "head_bucket")
            except ClientError as error:
                if _refusal(error).status == HTTPStatus.NOT_FOUND:
                    raise no_bucket(ref) from error
                # Unlike the answer to a HEAD, that to a listing has S3's code.
                await self.call(ref, "list_objects_v2", MaxKeys=1)

    async def aclose(self) -> None:
        await self._stack.aclose()

    async def client(self, ref: ObjectRef, purpose: str = "read") -> Any:
        """Return botocore's client for the bucket of *ref*; creating it may fetch credentials."""
        region = self.region_of(ref)
        if (purpose, region) not in self._clients:
            async with self._lock:
                if (purpose, region) not in self._clients:  # nobody else has created it by now
                    options = self._options(purpose, region)
                    created = self._session.create_client("s3", **options)
                    try:
                        client = await self._stack.enter_async_context(created)
                    except BotoCoreError:
                        raise
                    except ValueError as error:  # it holds the URL, and that may hold a password
                        raise _EndpointError from error
                    _prepare_for_large_bodies(client)
                    if self._settings.requester_pays:
                        client.meta.events.register("before-sign.s3", agree_to_pay)
                    self._clients[purpose, region] = client
        return self._clients[purpose, region]

    def _options(self, purpose: str, region: str) -> dict[str, Any]:
        config = AioConfig(
            signature_version=UNSIGNED if self.is_anonymous else "s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=self._timeouts["read"],
            read_timeout=self._timeouts[purpose],
            max_pool_connections=self._connections,
            retries={"total_max_attempts": 1},  # it would repeat a write without a look at it
            http_session_cls=_HTTPSession,
            user_agent="shardgate",  # botocore assembles its own for each request
            # By path, URLs of AWS lead to the endpoint of all regions, which redirects new buckets.
            s3={"addressing_style": "path" if self._endpoint_url else "virtual"},
        )
        return {"region_name": region, "endpoint_url": self._endpoint_url, "config": config}


def bucket_of(ref: ObjectRef) -> str:
    """Return the name of the bucket in S3."""
    return ref.bucket.partition("://")[2]


@contextmanager
def translated(ref: ObjectRef) -> Iterator[None]:
    """Raise `StorageError` in place of botocore's exceptions."""
    try:
        yield
    except ClientError as error:
        refusal = _refusal(error)
        if refusal.code == NO_BUCKET:
            raise no_bucket(ref) from error
        raise refusal.failure(ref) from error
    except (ConnectTimeoutError, ReadTimeoutError) as error:
        raise StorageTimeoutError(ref, f"{_endpoint(error)} is silent") from error
    except (InvalidRegionError, _EndpointError) as error:
        raise StorageUnusableError(ref, str(error)) from error
    except (NoCredentialsError, CredentialRetrievalError, PartialCredentialsError) as error:
        raise no_credentials(ref, type(error).__name__) from error
    except SSLError as error:
        raise StorageUnusableError(ref, _reason(error)) from error
    except (ConnectionError, HTTPClientError, ResponseParserError, RecursionError) as error:
        # botocore recurses into the elements of error documents
        raise StorageUnavailableError(ref, _reason(error)) from error
    except (BotoCoreError, ValueError) as error:
        raise StorageUnusableError(ref, type(error).__name__) from error


def _reason(error: Exception) -> str:
    if isinstance(error, BotoCoreError) and "endpoint_url" in error.kwargs:
        return f"cannot reach {_endpoint(error)}: {type(error).__name__}"
    return type(error).__name__


def _endpoint(error: BotoCoreError) -> str:
    """Return the server of the URL in *error*, which may hold a signature."""
    url = urlsplit(str(error.kwargs.get("endpoint_url", "")))
    return f"{url.scheme}://{url.netloc}" if url.netloc else "the server"


def _refusal(error: ClientError) -> Refusal:
    found = error.response.get("Error", {})
    code = str(found.get("Code", ""))
    if code.isdecimal():  # botocore repeats the status if there is no error document
        code = ""
    metadata = error.response.get("ResponseMetadata", {})
    headers = metadata.get("HTTPHeaders", {})
    date = headers.get("date", "").encode("latin-1", "replace")
    status = metadata.get("HTTPStatusCode", 500)
    named = headers.get("x-amz-bucket-region", ""), str(found.get("Region", ""))
    region = other_region(status, code, *named)
    return Refusal("GET", status, code, skew_s=skew_of({b"date": date}), region=region)


def etag_of(answer: Mapping[str, Any]) -> ETag | None:
    """Return the version in the response to a write, if it has one."""
    etag = str(answer.get("CopyObjectResult", answer).get("ETag") or "")
    if not etag or etag.startswith("W/"):
        return None
    return ETag(etag if '"' in etag else f'"{etag}"')  # some servers leave the quotes out


@dataclass(frozen=True, slots=True)
class S3Write(ObjectWrite):
    """An object of S3 to be written."""

    @property
    def conditions(self) -> dict[str, str]:
        """Parameters of botocore for the precondition."""
        if self.expected is None:
            return {}
        if self.expected == ABSENT:
            return {"IfNoneMatch": "*"}
        return {"IfMatch": str(self.expected)}

    @property
    def headers(self) -> dict[str, Any]:
        """Parameters of botocore for the headers and the ids of the object."""
        coding, content_type, metadata = self.kept
        return {
            "Metadata": {**dict(metadata), **ids_metadata(self.ids)},
            # The default of AWS: without a type, SeaweedFS guesses one from the bytes.
            "ContentType": content_type or "binary/octet-stream",
            **({"ContentEncoding": coding} if coding else {}),
        }


class S3Swapper(Swapper):
    """Writes and removes objects of S3 under conditions."""

    def __init__(self, client: S3Client, reader: HttpReader) -> None:
        super().__init__(client.policy, partial(_look, reader))
        self._client = client

    async def put(self, write: S3Write, send: SendS3) -> ETag | Conflict:
        """Write once by *send*, which gets the conditions as parameters of botocore."""

        async def attempt() -> ETag | Refusal | None:
            answer = await send(**write.conditions)
            return answer if isinstance(answer, Refusal) else etag_of(answer)

        return await self.write(write, attempt)

    async def delete(self, ref: ObjectRef, expected: ETag | None) -> Literal[True] | Conflict:
        """Remove *ref*, in the version *expected* only if that is one."""
        condition = {} if expected is None else {"IfMatch": str(expected)}

        async def attempt() -> Literal[True] | Refusal | None:
            answer = await self._client.send(ref, "delete_object", **condition)
            if isinstance(answer, Refusal):
                return answer
            status = answer["ResponseMetadata"]["HTTPStatusCode"]
            return True if status == HTTPStatus.NO_CONTENT else None

        return await self.remove(ref, expected, attempt)


async def _look(reader: HttpReader, ref: ObjectRef) -> ObjectState | None:
    if (found := await reader.head(ref)) is None:
        return None
    headers, size = found
    ids = headers.get(METADATA + WRITE_IDS.encode(), b"").decode("latin-1")
    return ObjectState(version_of(headers, size), parse_ids(ids))


def _prepare_for_large_bodies(client: Any) -> None:
    """Keep *client* from holding up the event loop when it sends large bodies, or in vain.

    botocore hashes a body while it signs; here a thread does in the event before. botocore makes
    each body a file in memory, which aiohttp would copy. It sends ``Expect: 100-continue``, which
    costs a round trip and spares the body of a request that is refused, with small ones too.
    """
    AUTH_TYPE_MAPS.setdefault(_SIGNATURE, HashedBeforeAuth)
    events = client.meta.events
    events.unregister(_BEFORE, add_expect_header)
    # botocore would choose a region by itself, also for a configured endpoint.
    events.register(_BEFORE, lambda context, **_: context["s3_redirect"].update(redirected=True))
    for operation in "PutObject", "UploadPart":
        events.register(f"{_BEFORE}.{operation}", _expect)
        events.register_first(f"choose-signer.s3.{operation}", _choose_signer)
        events.register(f"before-sign.s3.{operation}", _hash)
        events.register(f"before-send.s3.{operation}", _divide)


def agree_to_pay(request: Any, signature_version: Any, **_: Any) -> None:
    """Agree to pay for a request of botocore; the agreement is signed with it."""
    is_presigned = str(signature_version).endswith("-query")
    name, value = PAYER
    (request.params if is_presigned else request.headers)[name] = value


class HashedBeforeAuth(S3SigV4Auth):
    """Signs with the digest of the body in the context of the request, if it has one."""

    def payload(self, request: Any) -> Any:
        return request.context.get(DIGEST) or super().payload(request)


def _choose_signer(signature_version: Any, **_: Any) -> str | None:
    return _SIGNATURE if signature_version in {"v4", "s3v4"} else None


async def _hash(request: Any, signature_version: Any, **_: Any) -> None:
    if signature_version == _SIGNATURE and (body := _large(request.data)) is not None:
        request.context[DIGEST] = (await asyncio.to_thread(sha256, body)).hexdigest()


def _divide(request: Any, **_: Any) -> None:
    if (body := _large(request.body)) is not None:
        request.body = divide(body, 256 * 1024)


def _large(body: Any) -> bytes | None:
    """Return the bytes of a file in memory, without a copy, if they are many."""
    data = body.getvalue() if isinstance(body, BytesIO) else b""
    return data if is_large(len(data)) else None


def _expect(params: Any, **_: Any) -> None:
    if _large(params["body"]) is not None:
        params["headers"]["Expect"] = "100-continue"


class _ExpectingRequest(ClientRequest):
    """Request that sends its body though the server does not ask for it (RFC 9110 §10.1.1)."""

    def update_expect_continue(self, expect: bool = False) -> None:  # noqa: FBT001, FBT002  aiohttp's
        super().update_expect_continue(expect)
        if self._continue is not None:
            self.loop.call_later(1.0, resolve, self._continue, True)  # noqa: FBT003


class _HTTPSession(AIOHTTPSession):  # type: ignore[misc]  # has no types
    async def _get_session(self, proxy_url: Any) -> Any:
        session = await super()._get_session(proxy_url)
        session._request_class = _ExpectingRequest  # noqa: SLF001  aiobotocore has no setting for it
        # aiohttp would follow any ``Location``, with the body of a write too.
        return SimpleNamespace(request=partial(session.request, allow_redirects=False))
