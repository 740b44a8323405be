"""Stores of all roots, which are found by bucket."""

import os
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, Unpack
from urllib.parse import unquote, urlsplit
from weakref import WeakValueDictionary

from shardgate.errors import (
    ConfigurationError,
    StorageDeniedError,
    StorageUnavailableError,
    StorageUnusableError,
    install_command,
)
from shardgate.model import (
    ByteRequest,
    GuardedBucket,
    ObjectRef,
    VolatileBucket,
    decode_path,
    encode_path,
)
from shardgate.settings import SCHEMES, LimitSettings, StoreSettings
from shardgate.storage.contract import Found, NotModified, ObjectStore, OnWrite, ReadOptions
from shardgate.storage.http1_client import BadUrlError, RequestTarget
from shardgate.storage.http_store import HttpStore, is_literal, is_public, resolve_public, url_of
from shardgate.storage.local import LocalStore, open_within
from shardgate.storage.local_files import FollowingBucket, folder_of
from shardgate.storage.memory import MemoryStore
from shardgate.storage.s3 import S3Store
from shardgate.storage.s3_write import S3WriteOptions
from shardgate.storage.wrappers import (
    GuardedStore,
    RetryingStore,
    RetryPolicy,
    StoreWrapper,
    is_plain,
)

_WEB: Final = ("http", "https")
_SCHEMES_OF: Final = {
    "requester_pays": ("s3",),
    "bearer_token": _WEB,
    "bearer_token_file": _WEB,
    "forbidden_is_absent": ("s3", "gs", *_WEB),
    "validator": _WEB,
}
"""Schemes of the roots that a setting of a store is for."""

type Wrap = Callable[[ObjectStore], ObjectStore]


class Stores(StoreWrapper):
    """Opens a store for each kind of root, and routes calls by bucket.

    *wrap* is applied to each store below its retries, to inject faults and to count upstream calls.
    *on_write* is called after each write to S3, Google Cloud Storage or Azure.
    """

    def __init__(
        self,
        limits: LimitSettings,
        *,
        wrap: Wrap = lambda store: store,
        on_write: OnWrite = lambda _: None,
    ) -> None:
        self._limits = limits
        self._connecting: dict[str, Any] = {
            "connections": limits.connections,
            "timeout_s": limits.timeout_s,
        }
        self._wrap = wrap
        self._on_write = on_write
        self._by_kind: dict[str, ObjectStore] = {}
        self._by_bucket: dict[str, ObjectStore] = {}
        self._verified: set[ObjectRef] = set()
        self._objects: set[ObjectRef] = set()
        """Roots that may be one object."""
        self.volatile = WeakValueDictionary[str, ObjectStore]()
        """Stores of volatile buckets, which their owners keep alive."""
        self._redirects = defaultdict[str, list[RequestTarget]](list)
        """URLs below which a web server may redirect, by bucket."""
        self.memory = MemoryStore()
        """Store of ``memory://`` roots; tests put objects here."""

    def open_root(  # noqa: PLR0913 - the settings of a dataset that are about its root
        self,
        url: str,
        settings: StoreSettings | None = None,
        name: str | None = None,
        redirects: Sequence[str] = (),
        *,
        follow_links: bool = False,
        may_be_object: bool = False,
    ) -> ObjectRef:
        """Register the bucket of *url* and return the root in it.

        With the store *name* the bucket of ``s3://bucket`` is called ``s3+name://bucket``, since
        two stores may have buckets of one name; likewise for other servers. The bucket of a web
        server is the whole root, which may redirect below the URLs *redirects* too. With
        *follow_links* that of a folder is called ``links+file:///folder``.

        A root that *may_be_object* is one object in the folder that is the bucket, unless it is a
        folder of this machine; see `check_absence`.

        Raises: `ConfigurationError`.
        """
        root, kind = _named(parse_root(url), name)
        _check_settings(url, settings or StoreSettings())
        if kind.startswith(_WEB):
            whole = url_of(_web_bucket(root.bucket, root.key))
            folder = root.key
            key = ""
            if may_be_object:
                folder, _, key = root.key.rpartition("/")
            root = ObjectRef(_web_bucket(root.bucket, folder), unquote(key))
            self._redirects[root.bucket] += map(_web_target, (whole, *redirects))
        elif kind == "file":
            if may_be_object:
                root = _split_file(root)
            elif os.path.isfile(folder_of(root.bucket)):  # noqa: PTH113  the path is bytes
                raise ConfigurationError(f"{url}: is a file; its format and view need a folder")
            if follow_links:
                root = ObjectRef(FollowingBucket(root.bucket), root.key)
        self._by_bucket[root.bucket] = self._kept(kind, lambda: self._open(kind, settings))
        if may_be_object and root.key:
            self._objects.add(root)
        return root

    def open_prefix(
        self,
        url: str,
        settings: StoreSettings | None = None,
        name: str | None = None,
        redirects: Sequence[str] = (),
    ) -> ObjectRef:
        """Register a bucket for virtual references to objects below *url*.

        Its name, such as ``guarded+file:///folder``, is its own, so that a dataset at the same
        place is read without a guard. The bucket of a folder or a web server is the whole prefix;
        a web server may redirect below the URLs *redirects* too.

        Raises: `ConfigurationError`.
        """
        root, kind = _named(parse_root(url), name)
        _check_settings(url, settings or StoreSettings())
        if not is_plain(unquote(root.key) if kind.startswith(_WEB) else root.key):
            raise ConfigurationError(f"{url}: contains '.' or '..' segments")
        if kind == "memory":
            raise ConfigurationError(f"{url}: virtual references cannot lead to memory://")
        if kind.startswith(_WEB):
            root = ObjectRef(_web_bucket(root.bucket, root.key), "")
            guarded = GuardedBucket(root.bucket)
            allowed = self._redirects[guarded]
            allowed += map(_web_target, (url_of(root.bucket), *redirects))
            guard = partial(resolve_public, allowed)
            inner = self._kept(guarded, lambda: self._web(settings, guard=guard))
        elif kind == "file":
            guarded_files = partial(LocalStore, open_file=open_within)
            inner = self._kept("guarded+file", lambda: self._wrap(guarded_files()))
        else:
            inner = self._kept(kind, lambda: self._open(kind, settings))
        root = ObjectRef(GuardedBucket(root.bucket), root.key)
        self._by_bucket[root.bucket] = GuardedStore(inner)
        return root

    async def check_reachable(self, root: ObjectRef) -> None:
        """Require a root that may be one object to exist, too."""
        await super().check_reachable(root)
        if root in self._objects and await self.stat(root) is None:
            await self.check_absence(root)

    async def check_absence(self, ref: ObjectRef) -> None:
        """Raise `StorageUnavailableError` if *ref*, which is no object, is a root that may be one,
        and no folder either: then no key of the root is known to be absent.
        """
        if ref not in self._objects:
            return
        with suppress(StorageUnusableError, StorageDeniedError):
            async for _ in self.list(ref.prefix, delimiter="/"):
                return
        raise StorageUnavailableError(ref, "there is no such object, nor a folder of that name")

    async def aclose(self) -> None:
        async with AsyncExitStack() as stack:
            for store in self._by_kind.values():
                stack.push_async_callback(store.aclose)
            self._by_kind.clear()
            self._by_bucket.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def store_of(self, ref: ObjectRef) -> ObjectStore:
        """Return the store that was opened for the bucket of *ref*."""
        store = self._by_bucket.get(ref.bucket) or self.volatile.get(ref.bucket)
        if store is None:
            raise StorageUnusableError(ref, "no store was opened")
        return store

    def get(
        self, ref: ObjectRef, request: ByteRequest | None = None, **options: Unpack[ReadOptions]
    ) -> Coroutine[Any, Any, Found | NotModified | None]:
        # Chunks are read this way: a bucket that is open is found by no further call.
        store = self._by_bucket.get(ref.bucket) or self.store_of(ref)
        return store.get(ref, request, **options)

    async def verify_conditional_writes(self, root: ObjectRef) -> None:
        """Have each store verified once for *root*; sessions pass this on to their repository."""
        if root not in self._verified:
            await self.store_of(root).verify_conditional_writes(root)
            if not isinstance(root.bucket, VolatileBucket):
                self._verified.add(root)

    def _kept(self, kind: str, open_store: Callable[[], ObjectStore]) -> ObjectStore:
        if kind not in self._by_kind:
            self._by_kind[kind] = open_store()
        return self._by_kind[kind]

    def _web(self, settings: StoreSettings | None, **options: Any) -> ObjectStore:
        options |= {"redirects": self._redirects, **self._connecting}
        return self._retrying(HttpStore(settings, **options))

    def _open(self, scheme: str, settings: StoreSettings | None) -> ObjectStore:
        if scheme.startswith(_WEB):
            return self._web(settings)
        if scheme == "file":
            return self._wrap(LocalStore())
        if scheme == "memory":
            return self._wrap(self.memory)
        if scheme.startswith(("gs", "az")):
            return self._retrying(self._cloud(scheme.partition("+")[0], settings))
        options = S3WriteOptions(self._limits.deadline_s, on_write=self._on_write)
        return self._retrying(S3Store(settings, options=options, **self._connecting))

    def _cloud(self, scheme: str, settings: StoreSettings | None) -> ObjectStore:
        try:
            from shardgate.storage.obstore import CloudStore  # noqa: PLC0415 - an extra
            from shardgate.storage.obstore_write import CloudWriteOptions  # noqa: PLC0415
        except ModuleNotFoundError as error:
            extra = {"gs": "gcs", "az": "azure"}[scheme]
            reason = f"needs {install_command(extra)} in the checkout"
            raise ConfigurationError(f"{scheme}://: {reason}") from error
        options = CloudWriteOptions(self._limits.deadline_s, on_write=self._on_write)
        timeout_s = self._limits.timeout_s
        return CloudStore(scheme, settings or StoreSettings(), timeout_s=timeout_s, options=options)

    def _retrying(self, store: ObjectStore) -> ObjectStore:
        return RetryingStore(self._wrap(store), RetryPolicy(self._limits.deadline_s))


def _check_settings(url: str, settings: StoreSettings) -> None:
    """Raise `ConfigurationError` for settings of a store that has no use for them."""
    scheme = url.partition("://")[0]
    for name, schemes in _SCHEMES_OF.items():
        is_set = getattr(settings, name) != StoreSettings.model_fields[name].default
        if is_set and scheme not in schemes:
            raise ConfigurationError(f"{url}: {scheme}:// takes no {name}")
    has_token = settings.bearer_token is not None or settings.bearer_token_file is not None
    host = urlsplit(url).hostname or ""
    if has_token and scheme == "http" and (is_public(host) or not is_literal(host)):
        raise ConfigurationError(f"{url}: a bearer token needs https://")


def _named(root: ObjectRef, name: str | None) -> tuple[ObjectRef, str]:
    """Put the name of the store into that of the bucket; return the kind of store too."""
    scheme, _, place = root.bucket.partition("://")
    if scheme in ("s3", "gs", "az", *_WEB) and name is not None:
        scheme = f"{scheme}+{name}"
    return ObjectRef(f"{scheme}://{place}", root.key), scheme


def _web_bucket(server: str, path: str) -> str:
    return f"{server}/{encode_path(path)}".rstrip("/")


def _web_target(url: str) -> RequestTarget:
    try:
        return RequestTarget(url)
    except BadUrlError as error:
        raise ConfigurationError(f"{url}: {error}") from error


def parse_root(url: str) -> ObjectRef:
    """Parse the URL of a dataset, which may hold no secret since messages show it."""
    scheme, separator, rest = url.partition("://")
    if scheme == "file" and separator:
        path = Path(unquote(rest))
        if not path.is_absolute() or "\0" in str(path):
            raise ConfigurationError(f"{url}: is not an absolute path")
        return ObjectRef(path.as_uri(), "")
    bucket, _, key = rest.partition("/")
    key = key.strip("/")
    if scheme in _WEB:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigurationError(
                f"{scheme}://{parts.hostname}: the URL of a root has a host and a path only"
            )
        try:
            key = decode_path(key)
        except UnicodeDecodeError:
            raise ConfigurationError(f"{url}: the path is not UTF-8") from None
    elif scheme not in SCHEMES:
        raise ConfigurationError(f"{scheme}: unknown scheme")
    if not bucket:
        raise ConfigurationError(f"{url}: has no bucket or host")
    return ObjectRef(f"{scheme}://{bucket}", key)


def _split_file(root: ObjectRef) -> ObjectRef:
    """Return a file as an object of its folder, or of that which a link leads to; or a folder."""
    path = Path(os.fsdecode(folder_of(root.bucket)))
    if os.path.isdir(path):  # noqa: PTH112  `Path.is_dir` raises for what is too long for a name
        return root
    real = Path(os.path.realpath(path))
    if real.parent != Path(os.path.realpath(path.parent)):  # a link leads out of its folder
        path = real
    return ObjectRef(path.parent.as_uri(), path.name)
