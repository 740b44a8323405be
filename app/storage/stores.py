"""All stores behind one: each object lies in the store of its bucket."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote, unquote, urlsplit

from app.errors import ConfigurationError, StorageUnavailableError
from app.model import GUARDED, ObjectRef
from app.setting_fields import SCHEMES
from app.settings import LimitSettings, StoreSettings
from app.storage.beneath import open_beneath
from app.storage.by_bucket import ByBucket
from app.storage.contract import ObjectStore
from app.storage.guarded import GuardedStore, is_plain
from app.storage.http import HttpStore
from app.storage.http1.errors import BadUrlError
from app.storage.http1.target import Target
from app.storage.local import LocalStore
from app.storage.memory import MemoryStore
from app.storage.moved import OnWrite, unheard
from app.storage.retrying import RetryingStore
from app.storage.s3.store import S3Store
from app.storage.s3.writing import Writing
from app.storage.web_guard import WebGuard

_WEB: Final = ("http", "https")

type Wrap = Callable[[ObjectStore], ObjectStore]


class Stores(ByBucket):
    """Opens a store for each kind of root, and finds it by the bucket.

    *wrap* comes between a store and its retries, so that faults can be injected and every
    upstream call be counted. *on_write* hears how objects of S3 were written.
    """

    def __init__(
        self,
        limits: LimitSettings,
        *,
        wrap: Wrap = lambda store: store,
        on_write: OnWrite = unheard,
    ) -> None:
        self._limits = limits
        self._wrap = wrap
        self._on_write = on_write
        self._by_kind: dict[str, ObjectStore] = {}
        self._by_bucket: dict[str, ObjectStore] = {}
        self._redirects = defaultdict[str, list[Target]](list)
        """Where redirects may lead besides the root of a web server, by its bucket."""
        self.memory = MemoryStore()
        """What ``memory://`` roots read; tests put objects here."""

    def open_root(
        self,
        url: str,
        settings: StoreSettings | None = None,
        name: str | None = None,
        redirects: Sequence[str] = (),
    ) -> ObjectRef:
        """Register the bucket of *url* and name the root in it.

        Through the store *name* the bucket of ``s3://bucket`` is called ``s3+name://bucket``, for
        two stores may have buckets of one name; those of ``gs://`` and ``az://`` likewise. Of a
        web server the bucket is the whole root, which may redirect below the URLs *redirects* too.

        Raises: `ConfigurationError`.
        """
        root, kind = _named(parse_root(url), name)
        if kind in _WEB:
            root = _web_prefix(root)
            self._redirects[root.bucket] += map(_web_target, redirects)
        self._by_bucket[root.bucket] = self._kept(kind, lambda: self._opened(kind, settings))
        return root

    def open_prefix(
        self, url: str, settings: StoreSettings | None = None, name: str | None = None
    ) -> ObjectRef:
        """Register a bucket through which others than the operator may read what is below *url*.

        Its name, such as ``guarded+file:///folder``, is its own, so that a dataset at the same
        place is read without a guard. Of a folder or a web server the bucket is the whole prefix.

        Raises: `ConfigurationError`.
        """
        root, kind = _named(parse_root(url), name)
        if not all(map(is_plain, root.key.split("/"))):
            raise ConfigurationError(f"{url}: climbs")
        if kind == "memory":
            raise ConfigurationError(f"{url}: no reference can lead into memory")
        if kind in _WEB:
            root = _web_prefix(root)
            inner = self._kept(GUARDED + root.bucket, lambda: self._guarded_web(root.bucket))
        elif kind == "file":
            inner = self._kept(GUARDED + kind, self._guarded_files)
        else:
            inner = self._kept(kind, lambda: self._opened(kind, settings))
        root = ObjectRef(GUARDED + root.bucket, root.key)
        self._by_bucket[root.bucket] = GuardedStore(inner)
        return root

    async def aclose(self) -> None:
        """Close every store, whatever the others say."""
        async with AsyncExitStack() as stack:
            for store in self._by_kind.values():
                stack.push_async_callback(store.aclose)
            self._by_kind.clear()
            self._by_bucket.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def store_of(self, ref: ObjectRef) -> ObjectStore:
        """Find the store that was opened for the bucket of *ref*.

        Raises: `StorageUnavailableError`.
        """
        try:
            return self._by_bucket[ref.bucket]
        except KeyError:
            raise StorageUnavailableError(ref, "no store was opened", lasting=True) from None

    def _kept(self, kind: str, open_store: Callable[[], ObjectStore]) -> ObjectStore:
        """Take the store of *kind*, which is opened once."""
        if kind not in self._by_kind:
            self._by_kind[kind] = open_store()
        return self._by_kind[kind]

    def _guarded_files(self) -> ObjectStore:
        return self._wrap(LocalStore(open_file=open_beneath))

    def _guarded_web(self, url: str) -> ObjectStore:
        limits = self._limits
        guard = WebGuard(_web_target(url))
        store = HttpStore(connections=limits.connections, timeout_s=limits.timeout_s, guard=guard)
        return RetryingStore(self._wrap(store), limits.deadline_s)

    def _opened(self, scheme: str, settings: StoreSettings | None) -> ObjectStore:
        limits = self._limits
        if scheme == "file":
            return self._wrap(LocalStore())
        if scheme == "memory":
            return self._wrap(self.memory)
        store: ObjectStore
        if scheme in _WEB:
            store = HttpStore(
                connections=limits.connections,
                timeout_s=limits.timeout_s,
                redirects=self._redirects,
            )
        elif scheme.startswith(("gs", "az")):
            store = _cloud(scheme.partition("+")[0], settings or StoreSettings(), limits.timeout_s)
        else:
            store = S3Store(
                settings,
                connections=limits.connections,
                timeout_s=limits.timeout_s,
                writing=Writing(limits.deadline_s, on_write=self._on_write),
            )
        return RetryingStore(self._wrap(store), limits.deadline_s)


def _cloud(scheme: str, settings: StoreSettings, timeout_s: float) -> ObjectStore:
    try:
        from app.storage.objects import CloudStore  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        extra = {"gs": "gcs", "az": "azure"}[scheme]
        raise ConfigurationError(f"{scheme}://: needs pip install 'shardgate[{extra}]'") from error
    return CloudStore(scheme, settings, timeout_s=timeout_s)


def _named(root: ObjectRef, name: str | None) -> tuple[ObjectRef, str]:
    """Put the name of the store into that of the bucket, and tell the kind of store."""
    scheme, _, place = root.bucket.partition("://")
    if scheme in ("s3", "gs", "az") and name is not None:
        scheme = f"{scheme}+{name}"
    return ObjectRef(f"{scheme}://{place}", root.key), scheme


def _web_prefix(root: ObjectRef) -> ObjectRef:
    """Take a whole prefix for a bucket."""
    return ObjectRef(f"{root.bucket}/{quote(root.key, safe='/~')}".rstrip("/"), "")


def _web_target(url: str) -> Target:
    try:
        return Target(url)
    except BadUrlError as error:
        raise ConfigurationError(f"{url}: {error}") from error


def parse_root(url: str) -> ObjectRef:
    """Parse the URL of a dataset, which may hold no secret: it appears in messages."""
    scheme, separator, rest = url.partition("://")
    if scheme == "file" and separator:
        path = Path(unquote(rest))
        if not path.is_absolute():
            raise ConfigurationError(f"{url}: names no absolute path")
        return ObjectRef(path.as_uri(), "")
    bucket, _, key = rest.partition("/")
    key = key.strip("/")
    if scheme in _WEB:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigurationError(
                f"{scheme}://{parts.hostname}: only host and path may be given"
            )
        key = unquote(key)
    elif scheme not in SCHEMES:
        raise ConfigurationError(f"{scheme}: is no scheme of a store")
    if not bucket:
        raise ConfigurationError(f"{url}: names no bucket or host")
    return ObjectRef(f"{scheme}://{bucket}", key)
