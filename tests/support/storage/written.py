"""Objects in buckets that tests write, often behind a proxy, and read without it."""

from typing import Any, Final
from uuid import uuid4

import obstore

from shardgate.concurrency import Backoff
from shardgate.model import ETag, ObjectRef
from shardgate.settings import StoreSettings
from shardgate.storage.contract import ABSENT, Conflict, ObjectStore, WriteNotice
from shardgate.storage.obstore import CloudStore
from shardgate.storage.obstore_client import open_client
from shardgate.storage.obstore_write import CloudWriteOptions
from shardgate.storage.s3 import S3Store
from shardgate.storage.s3_write import S3WriteOptions
from tests.support.clients.filling import read_object
from tests.support.seaweedfs import SeaweedFS
from tests.support.storage.faulty import LONGEST_S
from tests.support.storage.proxy import Proxy
from tests.support.storage.reading import found

LARGE_NBYTES: Final = 1024**2
LARGEST_NBYTES: Final = 2 * LARGE_NBYTES


class _Written:
    """A store, an object below a prefix of its own, and notices of the store's writes."""

    store: ObjectStore

    def __init__(self, bucket: str) -> None:
        self.notices: list[WriteNotice] = []
        self.bucket = bucket
        self.move()

    def move(self) -> None:
        """Take another prefix, and forget all notices."""
        self.notices.clear()
        self.root = ObjectRef(self.bucket, f"written/{uuid4().hex}")
        self.ref = self.root.join("key")

    async def create(self, data: bytes) -> ETag:
        """Create the object by the store."""
        etag = await self.store.put(self.ref, [data], expected=ABSENT)
        assert not isinstance(etag, Conflict)
        return etag

    async def aclose(self) -> None:
        """Close the store."""
        await self.store.aclose()


class S3Written(_Written):
    """An object of S3, which boto3 reads."""

    def __init__(self, server: SeaweedFS, proxy: Proxy | None = None, **options: Any) -> None:
        super().__init__(f"s3://{server.bucket}")
        self.server = server
        url = server.endpoint_url if proxy is None else proxy.url
        self.store = S3Store(
            server.settings.model_copy(update={"endpoint_url": url}),
            timeout_s=LONGEST_S,
            options=S3WriteOptions(on_write=self.notices.append, **options),
        )

    def another(self) -> ObjectStore:
        """Open another store, without a proxy."""
        return S3Store(self.server.settings)

    async def put(self, data: bytes) -> ETag:
        """Replace the object without the store."""
        return ETag(self.server.put(self.ref.key, data))

    async def seen(self) -> tuple[bytes, str]:
        """Return bytes and ETag of the object."""
        answer = self.server.client.get_object(Bucket=self.server.bucket, Key=self.ref.key)
        return answer["Body"].read(), answer["ETag"]

    async def is_absent(self) -> bool:
        """Return whether there is no object."""
        return read_object(self.server.client, self.ref.key, self.server.bucket) is None

    async def left(self) -> list[Any]:
        """Return uploads, and objects beside the object."""
        where = {"Bucket": self.server.bucket, "Prefix": self.root.key}
        objects = self.server.client.list_objects_v2(**where).get("Contents", [])
        uploads = self.server.client.list_multipart_uploads(**where).get("Uploads", [])
        return [*uploads, *(each["Key"] for each in objects if each["Key"] != self.ref.key)]


class CloudWritten(_Written):
    """An object of Google's or Azure's service behind a proxy, which another store reads."""

    def __init__(
        self, scheme: str, settings: StoreSettings, proxy: Proxy, deadline_s: float = LONGEST_S
    ) -> None:
        super().__init__(f"{scheme}://bucket")
        self.scheme = scheme
        self.settings = settings
        self.proxy = proxy
        url = (settings.endpoint_url or "").replace(
            f"//{proxy.upstream}", proxy.url[len("http:") :]
        )
        backoff = Backoff(0.02, 0.1, 1)
        limits = LARGE_NBYTES, LARGEST_NBYTES
        self.store = CloudStore(
            scheme,
            settings.model_copy(update={"endpoint_url": url}),
            timeout_s=LONGEST_S,
            options=CloudWriteOptions(deadline_s, backoff, *limits, self.notices.append),
        )
        self.direct = self.another()

    def another(self) -> ObjectStore:
        """Open another store, without a proxy."""
        return CloudStore(self.scheme, self.settings, timeout_s=LONGEST_S)

    async def put(self, data: bytes) -> ETag:
        """Replace the object without the store."""
        etag = await self.direct.put(self.ref, [data], expected=None)
        assert not isinstance(etag, Conflict)
        return etag

    async def seen(self) -> tuple[bytes, str]:
        """Return bytes and ETag of the object."""
        answer = await found(self.direct, self.ref)
        return answer.data, answer.etag

    async def is_absent(self) -> bool:
        """Return whether there is no object."""
        return await self.direct.stat(self.ref) is None

    async def left(self) -> list[Any]:
        """Return objects beside the object."""
        longest = {"connect_s": LONGEST_S, "silence_s": LONGEST_S}
        client = open_client(self.root.bucket, self.settings, **longest)
        listed = await obstore.list(client, self.root.key).collect_async()
        return [each["path"] for each in listed if each["path"] != self.ref.key]

    async def aclose(self) -> None:
        """Close both stores."""
        await super().aclose()
        await self.direct.aclose()


type Written = S3Written | CloudWritten
