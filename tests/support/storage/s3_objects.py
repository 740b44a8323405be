"""Objects of S3 that tests write, read without the store."""

from typing import Any
from uuid import uuid4

from shardgate.model import ETag, ObjectRef
from shardgate.storage.contract import WriteNotice
from shardgate.storage.s3 import S3Store
from shardgate.storage.s3_write import S3WriteOptions
from tests.support.seaweedfs import SeaweedFS


class Written:
    """A store, a prefix of its own, an object there, and notices of the store's writes."""

    def __init__(self, server: SeaweedFS, url: str | None = None, **options: Any) -> None:
        self.server = server
        self.notices: list[WriteNotice] = []
        self.store = S3Store(
            server.settings.model_copy(update={"endpoint_url": url or server.endpoint_url}),
            timeout_s=60,
            options=S3WriteOptions(on_write=self.notices.append, **options),
        )
        self.move()

    def move(self) -> None:
        """Take another prefix, and forget all notices."""
        self.notices.clear()
        self.root = ObjectRef(f"s3://{self.server.bucket}", f"written/{uuid4().hex}")
        self.ref = self.root.join("key")

    def put(self, data: bytes) -> ETag:
        """Replace the object."""
        return ETag(self.server.put(self.ref.key, data))

    def seen(self) -> tuple[bytes, str]:
        """Return bytes and ETag of the object."""
        answer = self.server.client.get_object(Bucket=self.server.bucket, Key=self.ref.key)
        return answer["Body"].read(), answer["ETag"]

    def left(self) -> list[Any]:
        """Return uploads and objects beside the object."""
        where = {"Bucket": self.server.bucket, "Prefix": self.root.key}
        objects = self.server.client.list_objects_v2(**where).get("Contents", [])
        uploads = self.server.client.list_multipart_uploads(**where).get("Uploads", [])
        return [*uploads, *(each["Key"] for each in objects if each["Key"] != self.ref.key)]
