"""Objects of Google's and Azure's services that tests write behind a proxy, and read without it."""

from typing import Final
from uuid import uuid4

import obstore

from shardgate.concurrency import Backoff
from shardgate.model import ETag, ObjectRef
from shardgate.settings import StoreSettings
from shardgate.storage.contract import ABSENT, Conflict, WriteNotice
from shardgate.storage.obstore import CloudStore
from shardgate.storage.obstore_client import open_client
from shardgate.storage.obstore_write import CloudWriteOptions
from tests.support.storage.faulty import LONGEST_S
from tests.support.storage.proxy import Proxy
from tests.support.storage.reading import found

LARGE_NBYTES: Final = 1024**2
LARGEST_NBYTES: Final = 2 * LARGE_NBYTES


class CloudWritten:
    """A store behind a proxy, another one without, and an object below a prefix of its own."""

    def __init__(self, scheme: str, settings: StoreSettings, deadline_s: float = LONGEST_S) -> None:
        self.scheme = scheme
        self.settings = settings
        self.notices: list[WriteNotice] = []
        url = settings.endpoint_url or ""
        self.proxy = Proxy(url)
        self.direct = CloudStore(scheme, settings, timeout_s=LONGEST_S)
        behind = settings.model_copy(
            update={"endpoint_url": url.replace(f"//{self.proxy.upstream}", self.proxy.url[5:])}
        )
        options = CloudWriteOptions(
            deadline_s,
            Backoff(0.02, 0.1, 1),
            LARGE_NBYTES,
            LARGEST_NBYTES,
            self.notices.append,
        )
        self.store = CloudStore(scheme, behind, timeout_s=LONGEST_S, options=options)
        self.move()

    def move(self) -> None:
        """Take another prefix, and pass on all requests."""
        self.proxy.heal()
        self.notices.clear()
        self.root = ObjectRef(f"{self.scheme}://bucket", f"written/{uuid4().hex}")
        self.ref = self.root.join("key")

    async def put(self, data: bytes) -> ETag:
        """Replace the object without the proxy."""
        etag = await self.direct.put(self.ref, [data], expected=None)
        assert not isinstance(etag, Conflict)
        return etag

    async def create(self, data: bytes) -> ETag:
        """Create the object behind the proxy."""
        etag = await self.store.put(self.ref, [data], expected=ABSENT)
        assert not isinstance(etag, Conflict)
        return etag

    async def seen(self) -> tuple[bytes, ETag]:
        """Return bytes and ETag of the object."""
        answer = await found(self.direct, self.ref)
        return answer.data, answer.etag

    async def left(self) -> list[str]:
        """Return the keys of other objects below the prefix."""
        longest = {"connect_s": LONGEST_S, "silence_s": LONGEST_S}
        client = open_client(self.root.bucket, self.settings, **longest)
        listed = await obstore.list(client, self.root.key).collect_async()
        return [each["path"] for each in listed if each["path"] != self.ref.key]
