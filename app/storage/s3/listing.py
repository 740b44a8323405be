"""Listings of S3 in the order of whole keys, also of servers that keep another one.

Amazon's are in the order of the bytes of keys. Servers on top of folders (SeaweedFS) list a folder
by names, in which ``a`` comes before ``a-b``: what is in the folder ``a/`` then comes too early.
"""

import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from app.errors import StorageUnavailableError
from app.model import ETag, ObjectRef
from app.storage.contract import Listed
from app.storage.ranges import is_strong

_IN_ORDER: Final = ("AmazonS3", "MinIO", "Ceph")
"""How servers call themselves that are known to list keys in the order of their bytes."""
_LAST: Final = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class S3Listing:
    """Lists one bucket with a botocore *client*."""

    client: Any
    bucket: str
    """As the server knows it."""
    in_order: dict[str, bool]
    """Of each bucket that was listed, whether that is in the order of keys."""

    async def walk(self, prefix: ObjectRef, after: str) -> AsyncGenerator[Listed]:
        """Give the objects behind *after*, folder by folder where the server has another order."""
        if self.in_order.get(self.bucket, True):
            async for page in self._pages(prefix, "", after):
                if not self.in_order[self.bucket]:
                    break
                for each in page:
                    yield each
            else:
                return
        async for each in self.folder(prefix, after):
            if each.size is not None:
                yield each
            elif each.ref.key > after or after.startswith(each.ref.key):
                async for below in self.walk(each.ref, after):
                    yield below

    async def folder(self, prefix: ObjectRef, after: str) -> AsyncIterator[Listed]:
        """Give what is right below *prefix*, rolled up; the prefix that *after* is in comes too."""
        waiting: list[tuple[str, Listed]] = []
        start = after if self.in_order.get(self.bucket, False) else _begin(prefix.key, after)
        async for page in self._pages(prefix, "/", start):
            for each in page:
                if each.ref.key > after or (each.size is None and after.startswith(each.ref.key)):
                    heapq.heappush(waiting, (each.ref.key, each))
            reached = max((each.ref.key.removesuffix("/") for each in page), default="")
            while waiting and waiting[0][0] <= reached:
                yield heapq.heappop(waiting)[1]
        while waiting:
            yield heapq.heappop(waiting)[1]

    async def _pages(
        self, prefix: ObjectRef, delimiter: str, after: str
    ) -> AsyncGenerator[list[Listed]]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=prefix.key, Delimiter=delimiter, StartAfter=after
        )
        async for page in pages:
            if "IsTruncated" not in page:  # botocore takes any XML for a listing, and no body too
                raise StorageUnavailableError(prefix, "the answer is no listing of S3")
            server = page["ResponseMetadata"].get("HTTPHeaders", {}).get("server", "")
            self.in_order[self.bucket] = server.startswith(_IN_ORDER)
            listed = [_object(prefix, each) for each in page.get("Contents", ())] + [
                Listed(ObjectRef(prefix.bucket, each["Prefix"]), None)
                for each in page.get("CommonPrefixes", ())
            ]
            yield listed


def _begin(prefix: str, after: str) -> str:
    """Find a key before all that comes behind *after*, in whichever of the two orders.

    Folders that begin like the name of *after* may come before it, and are behind it.
    """
    if not after.startswith(prefix):
        return "" if after < prefix else f"{prefix}{_LAST}"
    folder = prefix[: prefix.rfind("/") + 1]
    name = after[len(folder) :].partition("/")[0]
    low = next((at for at, letter in enumerate(name) if letter < "/"), len(name))
    start = name[:low]
    if not start or not start.isascii():
        return folder
    before = "." if start[-1] == "0" else chr(ord(start[-1]) - 1)  # no slash, which is between
    return f"{folder}{start[:-1]}{before}{_LAST}"


def _object(prefix: ObjectRef, told: Mapping[str, Any]) -> Listed:
    """Describe an object; what a HEAD would not tell for an ETag is no version."""
    etag = str(told.get("ETag", ""))
    return Listed(
        ObjectRef(prefix.bucket, told["Key"]),
        told["Size"],
        ETag(etag) if is_strong(etag) else None,
        told["LastModified"].timestamp() if "LastModified" in told else None,
    )
