"""Authentication of requests: bearer tokens in headers and paths, and signatures of S3."""

import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address
from math import inf
from typing import Final, cast
from urllib.parse import unquote_to_bytes

from shardgate.auth.access import (
    NOBODY,
    Caller,
    Datasets,
    Identity,
    ServedDataset,
    configured_caller,
    demand_writing,
    may_read,
)
from shardgate.auth.sigv4 import Signatures
from shardgate.errors import MisdirectedError, UnauthenticatedError
from shardgate.observability.metrics import note_caller
from shardgate.server.request import Request, token_in
from shardgate.settings import PUBLIC, RESERVED, SIGN_IN, CallerSettings

_CACHED: Final = 4096  # most tokens, and most readers, that are cached
_BEARER: Final = b"bearer "
_HOST: Final = re.compile(r"(?:\[(.+)\]|([^:]+?)\.?)(?::[0-9]*)?")
_ADDRESS: Final = ""  # stands for all IP addresses in `Hosts`


class Hosts:
    """Names that the service answers to, against DNS rebinding.

    A page whose host name is changed to this address shares the origin of the service under that
    name. IP addresses cannot be rebound.
    """

    def __init__(self, host: str, names: Sequence[str]) -> None:
        """Answer to *names*, or to all with ``*``, and to *host*, which is listened on."""
        self._any = "*" in names
        self._names = frozenset({_ADDRESS, "localhost", host.lower(), *names})

    def admits(self, host: bytes) -> bool:
        """Return whether the header *host* is a name of the service, with any port."""
        # Names of hosts have up to 253 characters; a longer header would fill the cache.
        return self._any or _hostname(host[:300]) in self._names


@lru_cache(maxsize=1024)
def _hostname(host: bytes) -> str | None:
    found = _HOST.fullmatch(host.decode("latin-1").lower())
    if found is None:
        return None
    address, name = found.groups()
    try:
        ip_address(address or name)
    except ValueError:
        return name
    return _ADDRESS


type SentToken = bytes | str
"""A token as it was sent: the value of ``Authorization``, or as text the segment of a path."""

type Identify = Callable[[str], Awaitable[Identity | None]]
"""Identifies a token; `None` for other kinds. Raises: `UnauthenticatedError` if invalid."""


class BearerTokens:
    """Identifies bearer tokens (RFC 6750) by configured digests, then by *others*.

    Digests are compared in constant time. Results are cached by the bytes that were sent; the
    keyed hash of the look-up does not leak them.
    """

    def __init__(self, callers: Mapping[str, CallerSettings], others: Sequence[Identify]) -> None:
        self._others = others
        self._digests = [
            (bytes.fromhex(digest), Identity(configured_caller(name), inf))
            for name, caller in callers.items()
            for digest in caller.token_sha256
        ]
        self._cached: dict[SentToken, Identity] = {}

    def cached(self, sent: SentToken) -> Identity | None:
        """Return the identity of the token *sent*, if it is cached and valid."""
        known = self._cached.get(sent)
        return known if known is not None and known.until_s > time.time() else None

    def forget(self) -> None:
        """Identify each token anew."""
        self._cached = {}

    async def identify(self, sent: SentToken) -> Caller:
        """Return the caller. Raises: `UnauthenticatedError`, `IssuerUnavailableError`."""
        if (cached := self.cached(sent)) is not None:
            return cached.caller
        kept = self._cached  # `forget` replaces it: a token may end while others are asked
        token = unquote_to_bytes(sent) if isinstance(sent, str) else sent[len(_BEARER) :].strip()
        known = self._configured(token) or await self._ask_others(token)
        if known is None:
            raise UnauthenticatedError("the token is not known to this service")
        # Percent-encoding spells one token in many ways, the longest of which are not kept.
        if len(sent) <= 4 * 1024:
            if len(kept) >= _CACHED:
                del kept[next(iter(kept))]  # the oldest
            kept[sent] = known
        return known.caller

    def _configured(self, token: bytes) -> Identity | None:
        digest = hashlib.sha256(token).digest()
        found = None
        for each, known in self._digests:  # all of them, so that the time does not tell which
            if hmac.compare_digest(each, digest):
                found = known
        return found

    async def _ask_others(self, token: bytes) -> Identity | None:
        if len(token) > 16 * 1024 or not token.isascii():  # headers are not longer
            return None
        for identify in self._others:
            if (known := await identify(token.decode("ascii"))) is not None:
                return known
        return None


class Authenticator:
    """Identifies callers, except of public data: S3 clients always send credentials."""

    def __init__(
        self,
        datasets: Datasets,
        tokens: BearerTokens,
        signatures: Signatures,
        hosts: Hosts,
        find_login: Callable[[Request], Awaitable[Caller | None]] | None = None,
    ) -> None:
        """*find_login* returns the caller of a cookie, for requests without other credentials."""
        self._find_login = find_login
        self._hosts = hosts
        self._datasets = datasets
        self._tokens = tokens
        self._signatures = signatures
        # Readers with the end of validity, by dataset, credentials and whether in the path.
        self._readers: dict[tuple[str, bytes, bool], tuple[Caller, float]] = {}

    def forget(self) -> None:
        """Identify each caller anew, as a token has ended."""
        self._tokens.forget()
        self._readers.clear()

    def cached_reader(self, request: Request, dataset: ServedDataset | None) -> Caller | None:
        """Return the cached caller with the right to read *dataset*; see `ReadPlane.cached`.

        The dataset is private or does not exist.
        """
        segment = request.segment
        now = time.monotonic()
        sent = segment or request.headers.get(b"authorization", b"")
        name = "" if dataset is None else dataset.name
        key = (name, sent, segment is not None)
        caller, until = self._readers.get(key, (NOBODY, -inf))
        if until <= now:
            known = self._tokens.cached(sent if segment is None else token_in(segment))
            if known is None or not may_read(known.caller, dataset):
                return None
            if len(self._readers) >= _CACHED:
                self._readers.clear()
            caller = known.caller
            self._readers[key] = caller, now + min(known.until_s - time.time(), 1.0)
        if not self._hosts.admits(request.headers.get(b"host", b"")):
            return None
        request.caller = caller
        return caller

    def demand_host(self, request: Request) -> None:
        """Check the host, except of reads of public data. Raises: `MisdirectedError`.

        Beside private datasets, an unknown one counts as private.
        """
        if request.method in {"GET", "HEAD"} and request.name not in SIGN_IN:
            dataset = self._datasets.get(request.dataset)
            if dataset is None:
                is_reserved = request.dataset in RESERVED or not request.dataset
                is_public = is_reserved or self._datasets.is_all_public
            else:
                is_public = dataset.is_public
            if is_public:
                return
        host = request.headers.get(b"host", b"")
        if not self._hosts.admits(host):
            raise MisdirectedError(f"server.hosts does not name {host.decode('latin-1')[:255]!r}")

    async def caller(self, request: Request) -> Caller:
        """Return the caller of a request.

        Raises: `UnauthenticatedError`, `SignatureError`, `IssuerUnavailableError`.
        """
        caller = cast("Caller | None", request.caller)  # which only this class sets
        if caller is None:
            # Where everything is public, credentials make no difference.
            is_public = self._datasets.is_all_public
            caller = NOBODY if is_public else await self._identify(request)
            request.caller = caller
        note_caller(caller.name)
        return caller

    async def enter(self, request: Request, name: str) -> ServedDataset:
        """Return a dataset the caller may read. Raises: `UnknownDatasetError`, see `caller`."""
        dataset = self._datasets.get(name)
        if dataset is not None and dataset.is_public:
            return dataset
        return self._datasets.find(name, await self.caller(request))

    async def demand_writing(self, request: Request, dataset: ServedDataset) -> None:
        """Check that the caller may write. Raises: `ForbiddenError`, see `caller`."""
        if PUBLIC not in dataset.writers:
            demand_writing(await self.caller(request), dataset)

    async def _identify(self, request: Request) -> Caller:
        if (token := request.token) is not None:
            return await self._tokens.identify(token)
        authorization = request.headers.get(b"authorization", b"")
        if authorization[: len(_BEARER)].lower() == _BEARER:
            return await self._tokens.identify(authorization)
        path, *others = request.client_paths  # the client has signed one of them
        signed = self._signatures.check(request.method, path, request.query, request.fields, others)
        if signed is not None:
            if request.body is not None:
                request.body.signatures = signed.frames
            return signed.caller
        if authorization:
            raise UnauthenticatedError("Authorization is neither a bearer token nor S3's signature")
        found = None if self._find_login is None else await self._find_login(request)
        return found or NOBODY
