"""Objects of Google Cloud Storage and of Azure, which obstore reads.

obstore finds credentials in its own environment variables and on the machine. What its answers are
held against is ours, for servers ignore conditions.
"""

from calendar import timegm
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore.exceptions import BaseError, NotModifiedError, PreconditionError
from obstore.store import AzureStore, GCSStore

from app.errors import (
    StorageDeniedError,
    StorageUnavailableError,
    TruncatedReadError,
    VersionChangedError,
)
from app.model import (
    ByteRange,
    ByteRequest,
    Condition,
    ETag,
    ObjectRef,
    SuffixRange,
    UnmodifiedSince,
)
from app.settings import StoreSettings
from app.storage.conditions import demand
from app.storage.contract import NOT_MODIFIED, Found, Listed, NotModified, Stat
from app.storage.obstore_clients import demand_settings, open_client
from app.storage.obstore_errors import is_about_range, no_bucket, refusal_of, translated
from app.storage.ranges import clamp, is_derived, is_gzip, version
from app.storage.read_only import ReadOnly
from app.storage.writes import is_ours

if TYPE_CHECKING:  # of these names obstore has no more than the types
    from obstore import GetOptions, GetResult, ObjectMeta

_ABSENT_CODES: Final = frozenset({"BlobNotFound", "NoSuchKey"})
_NO_BUCKET_CODES: Final = frozenset({"ContainerNotFound", "NoSuchBucket"})
_NOBODYS: Final = "shardgate-looks-for-the-bucket"
_PIECE_BYTES: Final = 1024**2
_PAGE: Final = 1000
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was found, and an open body with *byte_range* of it unless that is empty."""

    result: "GetResult | None"
    byte_range: ByteRange
    size: int
    etag: ETag
    is_gzip: bool
    modified_s: int


class CloudStore(ReadOnly):
    """Reads ranges of what lies in ``gs://bucket`` or ``az://container``.

    Azure has no suffix ranges, so that a suffix costs two requests there.
    """

    def __init__(self, scheme: str, settings: StoreSettings, *, timeout_s: float = 10.0) -> None:
        """Raise `ConfigurationError` for settings that mean nothing to *scheme*."""
        demand_settings(scheme, settings)
        self._settings = settings
        self._timeout = timedelta(seconds=timeout_s)
        self._stores: dict[str, AzureStore | GCSStore] = {}
        self._alive: set[str] = set()

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Send one GET."""
        with translated(ref):
            answer = await self._answer(ref, request, if_match, if_none_match)
            if not isinstance(answer, _Answer):
                return answer
            body = answer.result
            data = b"" if body is None else bytes(await body.bytes_async())
        if len(data) != answer.byte_range.length:
            raise TruncatedReadError(ref, f"{len(data)} of {answer.byte_range.length} bytes came")
        return Found(
            data,
            answer.byte_range,
            answer.size,
            answer.etag,
            answer.is_gzip,
            answer.modified_s,
        )

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Send one GET and pass its body on."""
        with translated(ref):
            answer = await self._answer(ref, byte_range, if_match, None)
        if not isinstance(answer, _Answer) or answer.byte_range != byte_range:
            raise VersionChangedError(ref)
        yield _pieces(ref, answer)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Send one HEAD."""
        with translated(ref):
            found = await self._ask(ref, None, None, None, is_head=True)
        if not isinstance(found, _Answer):
            return None
        return Stat(found.size, found.etag, found.is_gzip, found.modified_s)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """Page through the listing; keys and prefixes of a page are merged by name.

        obstore lists whole folders: with a delimiter at once, and always from their beginnings.
        """
        folder = prefix.key[: prefix.key.rfind("/") + 1]
        if folder and not _is_name(folder.removesuffix("/")):
            return
        with translated(prefix):
            async for each in self._list(ObjectRef(prefix.bucket, folder), delimiter, after):
                if each.ref.key > after and each.ref.key.startswith(prefix.key):
                    yield each

    async def _list(self, folder: ObjectRef, delimiter: str, after: str) -> AsyncIterator[Listed]:
        store = self._store(folder)
        if delimiter:
            found = await obstore.list_with_delimiter_async(store, folder.key)
            for each in _listed(folder, found["objects"], found["common_prefixes"]):
                yield each
            return
        begin = after if after.startswith(folder.key) else None
        async for page in obstore.list(store, folder.key, offset=begin, chunk_size=_PAGE):
            for each in _listed(folder, page, ()):
                yield each

    async def reach(self, root: ObjectRef) -> None:
        """List what nobody has."""
        with translated(root):
            async for _ in obstore.list(self._store(root), _NOBODYS):
                pass

    async def aclose(self) -> None:
        """Let go of the connections."""
        self._stores.clear()

    async def _answer(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        if_match: Condition | None,
        if_none_match: ETag | None,
    ) -> _Answer | NotModified | None:
        """Ask for *request* in the words that the server knows."""
        is_empty = isinstance(request, ByteRange) and not request.length
        is_unknown = isinstance(request, SuffixRange) and isinstance(self._store(ref), AzureStore)
        if request is None or not (is_empty or is_unknown):
            return await self._ask(ref, request, if_match, if_none_match)
        for _ in range(_TRIES):
            whole = await self._ask(ref, None, if_match, if_none_match, is_head=True)
            if not isinstance(whole, _Answer):
                return whole
            wanted = clamp(ref, request, whole.size, if_match)
            if is_empty:
                return _Answer(
                    None, wanted, whole.size, whole.etag, whole.is_gzip, whole.modified_s
                )
            with suppress(VersionChangedError):
                return await self._ask(ref, wanted, whole.etag, None)
        raise VersionChangedError(ref)

    async def _ask(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        if_match: Condition | None,
        if_none_match: ETag | None,
        *,
        is_head: bool = False,
    ) -> _Answer | NotModified | None:
        """Send one request, and hold the answer's headers against it."""
        if not _is_name(ref.key):
            raise StorageUnavailableError(ref, "obstore has no such names", lasting=True)
        options = _options(request, if_match, if_none_match) | {"head": is_head}
        try:
            result: Any = await obstore.get_async(self._store(ref), ref.key, options=options)
        except NotModifiedError:
            return NOT_MODIFIED
        except PreconditionError:
            raise VersionChangedError(ref) from None
        except FileNotFoundError as error:
            await self._confirm(ref, error)
            if if_match is not None:
                raise VersionChangedError(ref) from None
            return None
        except BaseError as error:
            if request is None or not is_about_range(error):
                raise
            await self._demand_range(ref, request, if_match)
            raise
        answer = _checked(ref, result, request, if_match)
        return NOT_MODIFIED if answer.etag == if_none_match else answer

    async def _confirm(self, ref: ObjectRef, error: FileNotFoundError) -> None:
        """Ask for the bucket unless the 404 speaks of the key, or the bucket was seen."""
        refusal = refusal_of(error)
        code = "" if refusal is None else refusal.code
        if code in _NO_BUCKET_CODES:
            self._alive.discard(ref.bucket)
            raise no_bucket(ref)
        if code not in _ABSENT_CODES and ref.bucket not in self._alive:
            with suppress(StorageDeniedError):  # refused, and so there
                await self.reach(ref)
            self._alive.add(ref.bucket)

    async def _demand_range(
        self, ref: ObjectRef, request: ByteRequest, if_match: Condition | None
    ) -> None:
        """Raise what it means that there is no such range, unless there is."""
        if (found := await self.stat(ref)) is None:
            raise VersionChangedError(ref)
        clamp(ref, request, found.size, if_match)

    def _store(self, ref: ObjectRef) -> AzureStore | GCSStore:
        """Make the client of a bucket when it is first asked for."""
        if (store := self._stores.get(ref.bucket)) is None:
            store = open_client(ref.bucket, self._settings, self._timeout)
            self._stores[ref.bucket] = store
        return store


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
) -> _Answer:
    """Believe no server that it saw the condition."""
    meta = result.meta
    headers = {b"etag": (meta["e_tag"] or "").encode("latin-1")}
    modified = meta["last_modified"]
    headers[b"last-modified"] = str(modified).encode()
    etag = version(headers, meta["size"])
    modified_s = timegm(modified.utctimetuple())
    demand(ref, if_match, etag, modified_s)
    given = ByteRange(*result.range)
    if given != clamp(ref, request, meta["size"], if_match):
        raise StorageUnavailableError(ref, "the server sent another range than was asked for")
    coding = str(result.attributes.get("Content-Encoding", ""))
    gzipped = bool(coding) and is_gzip({b"content-encoding": coding.encode("latin-1")})
    return _Answer(result, given, meta["size"], etag, gzipped, modified_s)


async def _pieces(ref: ObjectRef, answer: _Answer) -> AsyncIterator[bytes]:
    if answer.result is None:
        return
    left = answer.byte_range.length
    with translated(ref):
        async for piece in answer.result.stream(min_chunk_size=_PIECE_BYTES):
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
    found = (each for each in listed if not is_ours(prefix, each.ref))
    return sorted(found, key=lambda each: each.ref.key.encode())


def _is_name(key: str) -> bool:
    """Tell whether obstore takes *key* as it is: of others it would strip slashes."""
    return all(segment not in ("", ".", "..") for segment in key.split("/"))
