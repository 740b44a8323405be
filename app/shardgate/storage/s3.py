"""Objects of S3 and of servers that speak its protocol.

aiobotocore finds credentials, lists and writes; only the modules ``s3*`` import it. Reads go to
presigned URLs, which do not name the range, so that one signature serves many reads. They, and PUTs
of small objects, are sent by our own HTTP client.
"""

import heapq
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from shardgate.errors import StorageDeniedError, StorageUnavailableError
from shardgate.model import EVERYTHING, ETag, ObjectRef, check_integer
from shardgate.settings import StoreSettings
from shardgate.storage.contract import Listed, is_unfinished
from shardgate.storage.http1_client import HttpClient, RequestTarget
from shardgate.storage.http_headers import is_strong
from shardgate.storage.http_reader import HttpReader
from shardgate.storage.refusals import NO_SUCH_KEY, HttpMethod, Refusal
from shardgate.storage.s3_client import S3Client, bucket_of, translated
from shardgate.storage.s3_signing import S3Signer
from shardgate.storage.s3_write import PutSender, S3WriteOptions, S3Writer

_LAST: Final = "\U0010ffff"  # the last character in the order of UTF-8


class S3Store(S3Writer, HttpReader):
    """Reads and writes objects of ``s3://bucket``, all buckets with the same credentials."""

    requires_etags = True

    def __init__(
        self,
        settings: StoreSettings | None,
        *,
        connections: int = 64,
        timeout_s: float = 10.0,
        options: S3WriteOptions = S3WriteOptions(),  # noqa: B008  immutable
    ) -> None:
        settings = settings or StoreSettings()
        client = S3Client(
            settings, connections=connections, timeout_s=timeout_s, deadline_s=options.deadline_s
        )
        http = partial(HttpClient, connections=connections, ca_file=client.ca_file)
        HttpReader.__init__(self, http(silence_s=timeout_s), settings)
        self.is_signed = not client.is_anonymous
        self._signer = S3Signer(client)
        self._http_of_puts = http(silence_s=max(timeout_s, options.deadline_s))
        puts = PutSender(client, self._signer, self._http_of_puts)
        S3Writer.__init__(self, client, self, puts, options)
        self._in_order: dict[str, bool] = {}
        self._urls: dict[tuple[HttpMethod, ObjectRef], tuple[RequestTarget, float]] = {}
        """URLs by method and object, and until when they are reused."""

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
        with translated(prefix):
            listing = _S3Listing(self._client, bucket_of(prefix), self._in_order)
            found = listing.folder(prefix, after) if delimiter else listing.walk(prefix, after)
            async for each in found:
                if each.ref.key > after and not is_unfinished(prefix, each.ref):
                    yield each

    async def check_reachable(self, root: ObjectRef) -> None:
        """Look for the bucket, or for a key where buckets that cannot be listed answer 403."""
        try:
            await self._client.check_reachable(root)
        except StorageDeniedError:
            if not self._forbidden_is_absent:
                raise
            await self.head(root.join("key"))

    def keeps_headers(self, ref: ObjectRef) -> bool:  # noqa: ARG002  the contract's argument
        return True

    async def aclose(self) -> None:
        await HttpReader.aclose(self)
        await self._http_of_puts.aclose()
        await self._client.aclose()

    async def _target(self, method: HttpMethod, ref: ObjectRef) -> RequestTarget:
        """Return a presigned URL, which is reused for five minutes."""
        kept_as = method, ref
        target, until = self._urls.get(kept_as, (None, 0.0))
        if target is None or until < time.monotonic():
            target = await self._signer.presign(method, ref)
            if len(self._urls) >= 8 * 1024:
                del self._urls[next(iter(self._urls))]  # the oldest
            self._urls[kept_as] = target, time.monotonic() + 5 * 60
        return target

    def _renew(self, method: HttpMethod, ref: ObjectRef, refusal: Refusal) -> bool:
        """Drop a URL that has expired; the response to a HEAD does not give the reason."""
        if self._client.learn_region(ref, refusal):
            self._urls.clear()  # those of this bucket are signed for another region
            return True
        if refusal.status not in {400, 403} or self._client.is_anonymous:
            return False
        reason = f"{refusal.code} {refusal.message}".lower()
        is_token_invalid = refusal.code in {"InvalidToken", "TokenRefreshRequired"}
        if not (method == "HEAD" or "expired" in reason or is_token_invalid):
            return False
        self._urls.pop((method, ref), None)  # unless another reader has dropped it
        return True

    def _proves_absence(self, refusal: Refusal) -> bool:
        return refusal.status == HTTPStatus.NOT_FOUND and refusal.code == NO_SUCH_KEY

    def _may_hide_absence(self, refusal: Refusal) -> bool:
        return bool(refusal.code) and refusal.may_hide_absence


@dataclass(frozen=True, slots=True)
class _S3Listing:
    """Listings of one bucket in the order of whole keys, also from servers with another order.

    Amazon lists in the order of the bytes of keys. Servers on top of folders (SeaweedFS) order the
    names in a folder, so that the contents of ``a/`` come before ``a-b``.
    """

    client: S3Client
    bucket: str
    in_order: dict[str, bool]
    """True if a bucket is listed in the order of keys, once that is known."""

    async def walk(self, prefix: ObjectRef, after: str) -> AsyncGenerator[Listed]:
        """Yield the objects behind *after*, folder by folder if the server has another order."""
        # The first page shows whether it is in order; one that is the whole listing can be sorted.
        if self.in_order.get(self.bucket, True) or not after:
            async for page, is_whole in self._pages(prefix, "", after):
                if is_whole and not after:
                    page.sort(key=lambda each: each.ref.key)
                elif not self.in_order[self.bucket]:
                    break
                for each in page:
                    yield each
            else:  # every page was in order
                return
        waiting = [self.folder(prefix, after)]
        while waiting:
            async for each in waiting[-1]:
                if each.size is not None:
                    yield each
                elif each.ref.key > after or after.startswith(each.ref.key):
                    waiting.append(self.folder(each.ref, after))
                    break
            else:
                waiting.pop()

    async def folder(self, prefix: ObjectRef, after: str) -> AsyncGenerator[Listed]:
        waiting: list[tuple[str, Listed]] = []
        start = after if self.in_order.get(self.bucket, False) else _begin(prefix.key, after)
        async for page, _ in self._pages(prefix, "/", start):
            for each in page:
                if each.ref.key > after or (each.size is None and after.startswith(each.ref.key)):
                    heapq.heappush(waiting, (each.ref.key, each))
            # Later pages may have ``a-b`` behind the folder ``a/``, but nothing before ``a``.
            reached = max((each.ref.key.removesuffix("/") for each in page), default="")
            while waiting and waiting[0][0] <= reached:
                yield heapq.heappop(waiting)[1]
        while waiting:
            yield heapq.heappop(waiting)[1]

    async def _pages(
        self, prefix: ObjectRef, delimiter: str, after: str
    ) -> AsyncGenerator[tuple[list[Listed], bool]]:
        """Yield pages of a listing, and whether each is all of it."""
        params = {"Prefix": prefix.key, "Delimiter": delimiter, "StartAfter": after}
        is_last = False
        while not is_last:
            page = await self.client.call(prefix, "list_objects_v2", **params)
            if "IsTruncated" not in page:  # botocore takes any XML for a listing, and no body too
                raise StorageUnavailableError(prefix, "the response is not a listing of S3")
            server = page["ResponseMetadata"].get("HTTPHeaders", {}).get("server", "")
            self.in_order[self.bucket] = server.startswith(("AmazonS3", "MinIO", "Ceph"))
            listed = [_object(prefix, each) for each in page.get("Contents", ())] + [
                Listed(_ref(prefix, each, "Prefix"), None)
                for each in page.get("CommonPrefixes", ())
            ]
            is_last = not page["IsTruncated"]
            yield listed, is_last and "ContinuationToken" not in params
            token = str(page.get("NextContinuationToken", ""))
            if not is_last and token in ("", params.get("ContinuationToken")):
                raise StorageUnavailableError(prefix, "the listing has no next page")
            params["ContinuationToken"] = token


def _begin(prefix: str, after: str) -> str:
    """Return a key before all that follow *after*, in either of the two orders.

    Folders whose names start like that of *after* may come before it, and follow it in key order.
    """
    if not after.startswith(prefix):
        return "" if after < prefix else f"{prefix}{_LAST}"
    folder = prefix[: prefix.rfind("/") + 1]
    name = after[len(folder) :].partition("/")[0]
    # The folder ``a/`` follows ``a-b`` as a key, and comes before it by its name: begin before it.
    low = next((at for at, letter in enumerate(name) if letter < "/"), len(name))
    start = name[:low]
    if not start or not start.isascii():
        return folder
    # Between "." and "0" lies the slash, which no name has.
    before = "." if start[-1] == "0" else chr(ord(start[-1]) - 1)
    return f"{folder}{start[:-1]}{before}{_LAST}"


def _ref(prefix: ObjectRef, entry: Mapping[str, Any], member: str) -> ObjectRef:
    """Return the object that *member* names; botocore takes any XML for an entry."""
    if (key := entry.get(member)) is None:
        raise StorageUnavailableError(prefix, f"the listing has an entry without {member}")
    return ObjectRef(prefix.bucket, key)


def _object(prefix: ObjectRef, entry: Mapping[str, Any]) -> Listed:
    """Convert an entry of a listing; an ETag that a HEAD would not return is dropped."""
    etag = str(entry.get("ETag", ""))
    error = partial(StorageUnavailableError, prefix)
    return Listed(
        _ref(prefix, entry, "Key"),
        check_integer(entry.get("Size"), "Size in the listing", EVERYTHING.stop, error),
        ETag(etag) if is_strong(etag) else None,
        entry["LastModified"].timestamp() if "LastModified" in entry else None,
    )
