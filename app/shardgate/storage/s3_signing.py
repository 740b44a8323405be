"""Requests to S3 signed with a single look-up of the endpoint for each bucket, unlike botocore's.

Reads go to presigned URLs. PUTs of small objects carry a signature in their headers, which is made
here: botocore takes three times as long. Both take their endpoint from a URL that botocore has
presigned, and are left to botocore if that was signed in another way than by SigV4.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final, Self
from urllib.parse import parse_qs, quote

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import NoCredentialsError

from shardgate.model import ObjectRef
from shardgate.storage.http1_client import RequestTarget
from shardgate.storage.refusals import HttpMethod
from shardgate.storage.s3_client import PAYER, S3Client, bucket_of, translated

_EXPIRES_S: Final = 900
_SAMPLE_KEY: Final = "key"
_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_QUERY_OF_SIGV4: Final = frozenset(
    {
        "X-Amz-Algorithm",
        "X-Amz-Credential",
        "X-Amz-Date",
        "X-Amz-Expires",
        "X-Amz-Security-Token",
        "X-Amz-Signature",
        "X-Amz-SignedHeaders",
        PAYER[0],
    }
)


class S3Signer:
    """Signs requests about objects with the credentials of a client."""

    def __init__(self, client: S3Client) -> None:
        self._client = client
        self._buckets: dict[tuple[HttpMethod, str, str], BucketSigner | None] = {}
        """Signers by method, bucket and region."""

    async def presign(self, method: HttpMethod, ref: ObjectRef) -> RequestTarget:
        """Return a URL of *ref* for *method*, valid for 900 s."""
        with translated(ref):
            if (signer := await self._of(method, ref)) is None:
                client = await self._client.client(ref)
                return RequestTarget(await presign(client, method, bucket_of(ref), ref.key))
            return RequestTarget(signer.presign(ref.key, await self._client.credentials()))

    async def sign_put(
        self, ref: ObjectRef, headers: Mapping[str, str], body: bytes
    ) -> tuple[RequestTarget, bytes] | None:
        """Return the URL and all header lines of a PUT, `None` if only botocore can send it."""
        if not all(value.isascii() and value.isprintable() for value in headers.values()):
            return None
        with translated(ref):
            if (signer := await self._of("PUT", ref)) is None:
                return None
            return signer.sign_put(ref.key, headers, body, await self._client.credentials())

    async def _of(self, method: HttpMethod, ref: ObjectRef) -> "BucketSigner | None":
        bucket = bucket_of(ref)
        of = method, bucket, self._client.region_of(ref)
        if of not in self._buckets:
            client = await self._client.client(ref)
            self._buckets[of] = await BucketSigner.of(client, method, bucket)
        return self._buckets[of]


async def presign(client: Any, method: HttpMethod, bucket: str, key: str) -> str:
    """Return botocore's presigned URL; without credentials it is not signed."""
    url: str = await client.generate_presigned_url(
        f"{method.lower()}_object",
        Params={"Bucket": bucket, "Key": key},
        ExpiresIn=_EXPIRES_S,
        HttpMethod=method,
    )
    return url


@dataclass(frozen=True, slots=True)
class BucketSigner:
    """Signs requests with one method about objects of one bucket."""

    method: HttpMethod
    base: str
    region: str
    query: str = ""
    """Parameter of presigned URLs that is signed too, with its question mark."""

    @classmethod
    async def of(cls, client: Any, method: HttpMethod, bucket: str) -> Self | None:
        """Derive from a URL of botocore; `None` if that has more than SigV4's parameters."""
        url, _, query = (await presign(client, method, bucket, _SAMPLE_KEY)).partition("?")
        base = url.removesuffix(_SAMPLE_KEY)
        if not query:
            return cls(method, base, "")
        params = parse_qs(query)
        match params.get("X-Amz-Credential", [""])[0].split("/"):
            case [_, _, region, "s3", _] if params.keys() <= _QUERY_OF_SIGV4:
                payer = "?{}={}".format(*PAYER) if PAYER[0] in params else ""
                return cls(method, base, region, payer)
        return None

    def presign(self, key: str, credentials: Any) -> str:
        """Return the URL of the object *key*, signed with frozen *credentials*."""
        url = self._url(key)
        if not self.region:
            return url
        request = AWSRequest(self.method, url + self.query)
        S3SigV4QueryAuth(credentials, "s3", self.region, expires=_EXPIRES_S).add_auth(request)
        return str(request.url)

    def sign_put(
        self, key: str, headers: Mapping[str, str], body: bytes, credentials: Any
    ) -> tuple[RequestTarget, bytes]:
        """Return the URL of the object *key* and all header lines of a PUT of *body*."""
        target = RequestTarget(self._url(key))
        sent = dict(headers)
        if self.query:
            sent |= [PAYER]
        if self.region:
            sent |= self._authorize(target.path, sent, body, credentials)
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        return target, f"{lines}Content-Length: {len(body)}\r\n".encode()

    def _authorize(
        self, path: str, headers: Mapping[str, str], body: bytes, credentials: Any
    ) -> dict[str, str]:
        """Return the headers by which a request without a query is signed: SigV4, as S3 has it."""
        if credentials is None:
            raise NoCredentialsError
        digest = sha256(body).hexdigest()
        moment = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        added = {"X-Amz-Date": moment, "X-Amz-Content-SHA256": digest}
        if credentials.token:
            added["X-Amz-Security-Token"] = credentials.token
        values = {"host": self.base.split("/")[2]}
        for name, value in (*headers.items(), *added.items()):
            values[name.lower()] = " ".join(value.split())
        names = sorted(values)
        signed = ";".join(names)
        pairs = [f"{name}:{values[name]}" for name in names]
        canonical = "\n".join([self.method, path, "", *pairs, "", signed, digest])
        scope = f"{moment[:8]}/{self.region}/s3/aws4_request"
        hashed = sha256(canonical.encode()).hexdigest()
        text = f"{_ALGORITHM}\n{moment}\n{scope}\n{hashed}"
        key = f"AWS4{credentials.secret_key}".encode()
        for part in (*scope.split("/"), text):
            key = hmac.digest(key, part.encode(), "sha256")
        credential = f"Credential={credentials.access_key}/{scope}"
        added["Authorization"] = (
            f"{_ALGORITHM} {credential}, SignedHeaders={signed}, Signature={key.hex()}"
        )
        return added

    def _url(self, key: str) -> str:
        return self.base + quote(key, safe="/~")
