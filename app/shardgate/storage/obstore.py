"""Objects of Google Cloud Storage and Azure, through obstore.

Its results are checked against the request, for servers ignore conditions.
"""

from calendar import timegm
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import obstore
from obstore.exceptions import BaseError, NotModifiedError, PreconditionError

from shardgate.errors import (
    StorageDeniedError,
    StorageUnavailableError,
    StorageUnusableError,
    TruncatedReadError,
    VersionChangedError,
)
from shardgate.model import (
    ByteRange,
    ByteRequest,
    Condition,
    ETag,
    ObjectRef,
    SuffixRange,
    UnmodifiedSince,
)
from shardgate.settings import StoreSettings
from shardgate.storage.contract import (
    NOT_MODIFIED,
    OBJECT,
    Found,
    Listed,
    NotModified,
    Stat,
    check_condition,
    clamp,
    is_unfinished,
)
from shardgate.storage.http_headers import (
    METADATA,
    content_coding,
    is_derived,
    object_headers,
    version_of,
)
from shardgate.storage.obstore_client import (
    NO_BUCKET_CODES,
    check_settings,
    is_about_range,
    is_google,
    is_name,
    open_client,
    refusal_of,
    stored_headers,
    translated,
)
from shardgate.storage.obstore_write import CloudWriteOptions, CloudWriter
from shardgate.storage.refusals import no_bucket
from shardgate.storage.swapping import WRITE_IDS, ObjectState, parse_ids

if TYPE_CHECKING:  # obstore defines these names for type checkers only
    from obstore import GetOptions, GetResult, ObjectMeta

_NO_PREFIX: Final = "shardgate-looks-for-the-bucket"


class _OpenObject(NamedTuple):
    """The version that was found, still without its bytes, and its body, `None` if empty."""

    found: Found
    headers: dict[bytes, bytes]
    result: "GetResult | None"


class CloudStore(CloudWriter):
    """Reads and writes ``gs://bucket`` or ``az://container``.

    A suffix costs two requests in Azure.
    """

    def __init__(
        self,
        scheme: str,
        settings: StoreSettings,
        *,
        timeout_s: float = 10.0,
        options: CloudWriteOptions = CloudWriteOptions(),  # noqa: B008  immutable
    ) -> None:
        """Raise `ConfigurationError` for settings that *scheme* does not have."""
        check_settings(scheme, settings)
        self._settings = settings
        self._client = cache(
            partial(open_client, settings=settings, connect_s=timeout_s, silence_s=timeout_s)
        )
        CloudWriter.__init__(self, self, settings, self._look, options)

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
        kind: str = OBJECT,  # noqa: ARG002  the contract's argument
    ) -> Found | NotModified | None:
        with translated(ref):
            opened = await self._open(ref, request, if_match, if_none_match)
            if not isinstance(opened, _OpenObject):
                return opened
            found, _, body = opened
            data = b"" if body is None else bytes(await body.bytes_async())
        if len(data) != found.byte_range.length:
            raise TruncatedReadError(ref, f"{len(data)} of {found.byte_range.length} bytes came")
        return replace(found, data=data)

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        with translated(ref):
            opened = await self._open(ref, byte_range, if_match, None)
        if not isinstance(opened, _OpenObject) or opened.found.byte_range != byte_range:
            raise VersionChangedError(ref)
        yield _pieces(ref, opened)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        with translated(ref):
            opened = await self._ask(ref, None, None, None, is_head=True)
        if not isinstance(opened, _OpenObject):
            return None
        found = opened.found
        headers = object_headers(opened.headers)
        return Stat(found.size, found.etag, found.coding, found.modified_s, headers)

    async def _look(self, ref: ObjectRef) -> ObjectState | None:
        with translated(ref):
            opened = await self._ask(ref, None, None, None, is_head=True)
        if not isinstance(opened, _OpenObject) or opened.result is None:
            return None
        ids = opened.headers.get(METADATA + WRITE_IDS.encode(), b"").decode("latin-1")
        return ObjectState(opened.found.etag, parse_ids(ids), opened.result.meta["version"])

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
        """Page through the listing: of whole folders, and with a delimiter from the start."""
        folder = prefix.key[: prefix.key.rfind("/") + 1]
        if folder and not is_name(folder.removesuffix("/")):
            return  # obstore would list another folder
        with translated(prefix):
            async for each in self._list(ObjectRef(prefix.bucket, folder), delimiter, after):
                if each.ref.key > after and each.ref.key.startswith(prefix.key):
                    yield each

    async def _list(self, folder: ObjectRef, delimiter: str, after: str) -> AsyncGenerator[Listed]:
        client = self._client(folder.bucket)
        if delimiter:
            found = await obstore.list_with_delimiter_async(client, folder.key)
            for each in _listed(folder, found["objects"], found["common_prefixes"]):
                yield each
            return
        begin = after if after.startswith(folder.key) else None
        async for page in obstore.list(client, folder.key, offset=begin, chunk_size=1000):
            for each in _listed(folder, page, ()):
                yield each

    async def check_reachable(self, root: ObjectRef) -> None:
        try:
            with translated(root):
                await obstore.list(self._client(root.bucket), _NO_PREFIX).collect_async()
        except StorageDeniedError:
            if not self._settings.forbidden_is_absent:
                raise
            await self.stat(root.join(_NO_PREFIX))

    async def aclose(self) -> None:
        self._client.cache_clear()
        self._write_client.cache_clear()

    async def _open(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        if_match: Condition | None,
        if_none_match: ETag | None,
    ) -> _OpenObject | NotModified | None:
        # No header can ask for an empty range, and Azure has no suffix ranges.
        is_empty = isinstance(request, ByteRange) and not request.length
        is_unknown = isinstance(request, SuffixRange) and not is_google(ref.bucket)
        if request is None or not (is_empty or is_unknown):
            return await self._ask(ref, request, if_match, if_none_match)
        for _ in range(3):
            whole = await self._ask(ref, None, if_match, if_none_match, is_head=True)
            if not isinstance(whole, _OpenObject):
                return whole
            wanted = clamp(ref, request, whole.found.size, if_match)
            if is_empty:
                return _OpenObject(replace(whole.found, byte_range=wanted), whole.headers, None)
            with suppress(VersionChangedError):
                return await self._ask(ref, wanted, whole.found.etag, None)
        raise VersionChangedError(ref)

    async def _ask(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        if_match: Condition | None,
        if_none_match: ETag | None,
        *,
        is_head: bool = False,
    ) -> _OpenObject | NotModified | None:
        if not is_name(ref.key):
            raise StorageUnusableError(ref, "obstore cannot name keys with empty or dot segments")
        options = _options(request, if_match, if_none_match) | {"head": is_head}
        try:
            client = self._client(ref.bucket)
            result: Any = await obstore.get_async(client, ref.key, options=options)
        except NotModifiedError:
            return NOT_MODIFIED
        except PreconditionError:
            raise VersionChangedError(ref) from None
        except FileNotFoundError as error:
            await self._check_absence(ref, error, is_head=is_head)
            if if_match is not None:
                raise VersionChangedError(ref) from None
            return None
        except BaseError as error:
            if if_match is None and await self._hides_absence(ref, error, is_head=is_head):
                return None
            if request is None or not is_about_range(error):
                raise
            if (found := await self.stat(ref)) is None:
                raise VersionChangedError(ref) from None
            clamp(ref, request, found.size, if_match)
            raise
        opened = _checked(ref, result, request, if_match)
        return NOT_MODIFIED if opened.found.etag == if_none_match else opened

    async def _check_absence(
        self, ref: ObjectRef, error: FileNotFoundError, *, is_head: bool
    ) -> None:
        """Return if *ref* is absent, else raise: proxies answer 404 too.

        The error document of the service proves it, which the response to a HEAD does not have, or
        a listing without the object.
        """
        refusal = refusal_of(error)
        code = "" if refusal is None else refusal.code
        if code in NO_BUCKET_CODES:
            raise no_bucket(ref)
        if code in {"BlobNotFound", "NoSuchKey"}:
            return
        if is_head:
            # By a GET, whose 404 has the error document.
            is_there = await self._ask(ref, None, None, None) is not None
        else:
            is_there = await self._is_listed(ref)
        if is_there:
            raise StorageUnavailableError(ref, "the server answered 404 for an object that it has")

    async def _hides_absence(self, ref: ObjectRef, error: BaseError, *, is_head: bool) -> bool:
        """Return whether 403 means absence by the settings; a GET tells the code of a HEAD."""
        refusal = refusal_of(error)
        if not self._settings.forbidden_is_absent or refusal is None:
            return False
        if is_head and refusal.status == HTTPStatus.FORBIDDEN:
            return await self._ask(ref, ByteRange(0, 1), None, None) is None
        return bool(refusal.code) and refusal.may_hide_absence

    async def _is_listed(self, ref: ObjectRef) -> bool:
        """Look for *ref* in a listing of its folder, from a little before it if the server can."""
        folder = ObjectRef(ref.bucket, ref.key[: ref.key.rfind("/") + 1])
        async for each in self._list(folder, "", ref.key[:-1]):
            if each.ref.key >= ref.key:
                return each.ref.key == ref.key
        return False


def _options(
    request: ByteRequest | None, if_match: Condition | None, if_none_match: ETag | None
) -> "GetOptions":
    options: GetOptions = {}
    if isinstance(request, SuffixRange):
        options["range"] = {"suffix": request.length}
    elif request is not None:
        options["range"] = (request.start, request.stop)
    if isinstance(if_match, UnmodifiedSince):
        options["if_unmodified_since"] = datetime.fromtimestamp(if_match.epoch_s, UTC)
    elif if_match is not None and not is_derived(if_match):
        options["if_match"] = if_match
    if if_none_match is not None and not is_derived(if_none_match):
        options["if_none_match"] = if_none_match
    return options


def _checked(
    ref: ObjectRef, result: "GetResult", request: ByteRequest | None, if_match: Condition | None
) -> _OpenObject:
    """Check version and range of the response, whatever the server did with the conditions."""
    meta = result.meta
    modified = meta["last_modified"]
    headers = stored_headers(result.attributes)
    headers[b"etag"] = (meta["e_tag"] or "").encode("latin-1")
    headers[b"last-modified"] = str(modified).encode()
    etag = version_of(headers, meta["size"])
    modified_s = timegm(modified.utctimetuple())
    check_condition(ref, if_match, etag, modified_s)
    sent = ByteRange(*result.range)
    wanted = clamp(ref, request, meta["size"], if_match)
    if sent != wanted:
        raise StorageUnusableError(ref, f"the server sent {sent} instead of {wanted}")
    coding = content_coding(headers)
    found = Found(b"", sent, meta["size"], etag, coding, modified_s, headers)
    return _OpenObject(found, headers, result)


async def _pieces(ref: ObjectRef, opened: _OpenObject) -> AsyncIterator[bytes]:
    if opened.result is None:
        return
    left = opened.found.byte_range.length
    with translated(ref):
        async for piece in opened.result.stream(min_chunk_size=1024**2):
            left -= len(piece)
            yield bytes(piece)
    if left:
        raise TruncatedReadError(ref, f"{left} bytes are missing")


def _listed(
    prefix: ObjectRef, objects: Sequence["ObjectMeta"], prefixes: Sequence[str]
) -> list[Listed]:
    listed = [
        Listed(
            ObjectRef(prefix.bucket, each["path"]),
            each["size"],
            modified_s=each["last_modified"].timestamp(),
        )
        for each in objects
    ]
    listed += [Listed(ObjectRef(prefix.bucket, f"{each}/"), None) for each in prefixes]
    found = (each for each in listed if not is_unfinished(prefix, each.ref))
    return sorted(found, key=lambda each: each.ref.key.encode())
