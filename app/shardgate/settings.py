"""Settings: one frozen model that refuses unknown names; `configuration` reads it."""

import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    IPvAnyNetwork,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    model_validator,
)

from shardgate.model import LogLevel

SIGN_IN: Final = frozenset({"auth_info", "login"})
"""First path segments of signing in."""
RESERVED: Final = SIGN_IN | {
    *("api", "docs", "redoc", "openapi.json", "healthz", "readyz", "metrics", "viewer")
}
"""First path segments of the service, which no dataset can be called."""
SCHEMES: Final = ("file", "s3", "gs", "az", "http", "https", "memory")
WRITABLE_SCHEMES: Final = ("file", "s3", "gs", "az", "memory")
"""Schemes of datasets that clients may write to."""
PUBLIC: Final = "public"
"""Rule that every caller fulfils."""
GROUP: Final = "group="
EMAIL: Final = "email="
CLAIM_RULES: Final = (GROUP, EMAIL)
"""Beginnings of the part of a rule after ``ISSUER:`` that name the claim it is about."""
Validator = Literal["etag", "last-modified"]
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_LONGEST_PREFIX: Final = 200  # names of cookies have it in them
_SHORTEST_SECRET: Final = 32

type TextCheck = Callable[[str], str]
"""Returns a text, or raises `ValueError`."""


def matches(pattern: str, complaint: str, *, reserved: Collection[str] = ()) -> TextCheck:
    """Return a check that raises *complaint* unless *pattern* matches a whole text."""

    def check(text: str) -> str:
        if text in reserved or not re.fullmatch(pattern, text):
            raise ValueError(complaint)
        return text

    return check


caller_name: Final = matches(_NAME, "is not a name for a caller or an issuer", reserved={PUBLIC})
server_url: Final = matches(
    r"https?://[^/@?#\s]+(/[^?#\s]*)?", "is not the http(s):// URL of a server"
)
issuer_url: Final = matches(
    r"(https://[^/@?#\s]+|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?)(/[^?#\s]*)?",
    "is not the https:// URL of a server, nor that of one on this machine",
)
"""Check of the URL of an issuer, which must be encrypted or local."""
inner_url: Final = matches(
    r"(https://[^/@?#\s]+|http://(127\.0\.0\.1|\[::1\]|"
    r"[A-Za-z][A-Za-z0-9-]*(\.[A-Za-z0-9-]+\.svc(\.cluster\.local)?)?)(:\d+)?)"
    r"(/[^?#\s]*)?(\?[^#\s]*)?",
    "is not the https:// URL of a server, nor that of an inner one such as http://keycloak:8080",
)
"""Check of what only this service asks for; it may also have the name of a container or service."""
_NO_USUAL_PORT: Final = r"(?!https:.*:443\Z|http:.*:80\Z)"  # browsers leave out the usual port
origin: Final = matches(
    rf"\*|null|{_NO_USUAL_PORT}[a-z][a-z0-9+.-]*://[^/@\s]+",
    "is no origin such as https://viewer.example (without :443)",
)
web_origin: Final = matches(
    rf"{_NO_USUAL_PORT}(https://[a-z0-9._-]+|http://(localhost|127\.0\.0\.1))(:[0-9]{{1,5}})?",
    "is no origin such as https://viewer.example (without :443), nor one on this machine",
)
"""Check of one origin as browsers spell it, which must be encrypted or local."""
host_name: Final = matches(
    r"\*|[A-Za-z0-9_][A-Za-z0-9._-]*", "is no host name such as chunks.example"
)
header_value: Final = matches(r"[\x20-\x7e]+", "is not a header value")
_WORD: Final = r"[\w!#$%&'*+.^`|~-]+"
_DIRECTIVE: Final = (
    r"((max-age|s-maxage|stale-[a-z-]+)=\d{1,10}"
    rf'|(?!max-age|s-maxage|stale-){_WORD}(=({_WORD}|"[ !#-+\--\[\]-~]*"))?)'
)
cache_directives: Final = matches(
    f"(?ai){_DIRECTIVE}( *, *{_DIRECTIVE})*",
    "is no list of directives such as public, max-age=60, with times in seconds",
)
"""Check of Cache-Control (RFC 9111 §5.2) whose commas are all between directives."""
scope: Final = matches(r"[\x21\x23-\x5b\x5d-\x7e]+", "is not a scope")
digest: Final = matches("[0-9A-Fa-f]{64}", "is not a SHA-256 digest of 64 hexadecimal characters")


def path_prefix(text: str) -> str:
    """Check the path that all others are below, and return it without a final slash."""
    path = text.removesuffix("/")
    if not re.fullmatch(f"(/{_NAME})*", path) or len(path) > _LONGEST_PREFIX:
        letters = f"{_LONGEST_PREFIX} letters, digits, and -_. within names"
        raise ValueError(f"is no path such as /arrays, of at most {letters}")
    return path


def first_segment(path: str) -> str:
    """Return the first segment of an absolute path; empty for an empty path."""
    return path[1:].partition("/")[0]


def dataset_name(name: str) -> str:
    """Check the first segment of the paths of a dataset."""
    if name in RESERVED or not re.fullmatch(_NAME, name):
        raise ValueError(f"is not a name for a dataset; try {_suggest_name(name)}")
    return name


def _suggest_name(name: str) -> str:
    allowed = re.sub("[^A-Za-z0-9._]+", "-", name).strip("-._") or "data"
    return f"{allowed}-data" if allowed in RESERVED else allowed


def dataset_url(url: str) -> str:
    """Check and complete the root of a dataset."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url:
            raise ValueError("is empty")
        # `Path.expanduser` would raise for the home of an unknown user.
        return Path(os.path.expanduser(url)).absolute().as_uri()  # noqa: PTH111
    if scheme not in SCHEMES:
        raise ValueError(f"begins with none of {', '.join(f'{name}://' for name in SCHEMES)}")
    if scheme == "file" and not rest.startswith("/"):
        raise ValueError("is relative: write file:///folder or a plain path")
    if scheme != "file" and not rest.strip("/"):
        raise ValueError("names no bucket or host")
    if "@" in rest.partition("/")[0]:
        raise ValueError("holds credentials, which every log and answer would show")
    if scheme != "file" and re.search("[\ud800-\udfff]", rest):  # bytes of a command line
        raise ValueError("is not UTF-8")
    parts = urlsplit(url)  # raises for a bracket without an address
    if scheme in {"http", "https"} and (parts.query or parts.fragment):
        raise ValueError("has a query or fragment, which the keys below it could not carry")
    return url.rstrip("/") if rest.strip("/") else url


def list_from_text(value: object) -> object:
    """Parse a list of the environment, which is JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError('is not a list such as ["*"]') from None


def table_of_url(value: object) -> object:
    """Return a table for a plain URL."""
    return {"url": value} if isinstance(value, str) else value


def not_empty(secret: SecretStr) -> SecretStr:
    """Check that *secret* is one: an empty variable of the environment was forgotten."""
    if not secret.get_secret_value():
        raise ValueError("is empty")
    return secret


def normal_host(name: str) -> str:
    """Check and normalize the name of a host, which has no port."""
    return host_name(name).lower().removesuffix(".")


type _List[T] = Annotated[tuple[T, ...], BeforeValidator(list_from_text)]
type _Names = _List[str]
type _Digest = Annotated[str, AfterValidator(digest), AfterValidator(str.lower)]
type _ServerUrl = Annotated[str, AfterValidator(server_url)]
type _IssuerUrl = Annotated[str, AfterValidator(issuer_url)]
type _InnerUrl = Annotated[str, AfterValidator(inner_url)]
type _RootUrl = Annotated[str, AfterValidator(dataset_url)]
type _Secret = Annotated[SecretStr, AfterValidator(not_empty)]
type _CallerName = Annotated[str, AfterValidator(caller_name)]


def _refuse(complaints: Iterable[str]) -> None:
    """Raise `ValueError` with all *complaints*, one a line, if there are any."""
    if text := "\n".join(complaints):
        raise ValueError(text)


class Section(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """A table of the file."""


class ServerSettings(Section):
    """Listening, logging, and pages that may read."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    hosts: _List[Annotated[str, AfterValidator(normal_host)]] = ()
    """Host names of the service besides `host`, `localhost`, IP addresses; `*` for any."""
    root_path: Annotated[str, AfterValidator(path_prefix)] = ""
    """Path of the service on its host, such as `/arrays`, which a proxy may strip; default: `/`."""
    workers: PositiveInt = 1
    """Number of processes; each has its own caches."""
    cors_origins: _List[Annotated[str, AfterValidator(origin)]] = ("*",)
    """Origins whose pages may read answers (CORS); `*` allows all."""
    metrics: _Names | None = None
    """Who may read `/metrics`, as in `datasets.NAME.read`; default: everybody, if all is public."""
    trusted_proxies: _List[IPvAnyNetwork] = ()
    """Networks of proxies whose X-Forwarded-For and -Prefix are trusted, such as `10.0.0.0/8`."""
    keep_alive_s: PositiveFloat = 75.0
    """Longest wait for the next request of a connection; proxies close theirs earlier."""
    log_level: LogLevel = "info"
    """Lowest level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """`text`, or `json` for one JSON object per line."""
    access_log: bool = False
    """Log a line for each request, with its key at level `debug` only."""
    audit_log: str | None = None
    """File for a line of JSON about each write, `-` for standard output; default: none."""


class CacheSettings(Section):
    """Sizes and freshness of caches."""

    index_bytes: ByteSize = ByteSize(256 * 1024**2)
    """Size of the cache of decoded shard indexes and metadata."""
    chunk_bytes: ByteSize = ByteSize(256 * 1024**2)
    """Size of the cache of encoded chunks; `0` disables it."""
    ttl_s: PositiveFloat = 60.0
    """Longest time to serve a mutable answer, absence included, without asking the store."""


class LimitSettings(Section):
    """Limits on single requests and on all of them together."""

    metadata_bytes: ByteSize = ByteSize(8 * 1024**2)
    """Largest metadata document that is rewritten; longer ones are passed on as stored."""
    whole_index_bytes: ByteSize = ByteSize(4 * 1024**2)
    """Largest shard index read whole; larger ones are read by entry, without their checksum."""
    decoded_bytes: ByteSize = ByteSize(64 * 1024**2)
    """Largest minishard index, mesh manifest, or object whose content coding is removed."""
    repository_file_bytes: ByteSize = ByteSize(512 * 1024**2)
    """Largest file of an Icechunk repository; 1/4 of it for reference sets, 1/8 for archives."""
    coalesce_gap_bytes: ByteSize = ByteSize(1024**2)
    """Most bytes read between or around wanted chunks, where that is faster than another read."""
    stream_bytes: ByteSize = ByteSize(4 * 1024**2)
    """Largest body read whole; larger ones are streamed, but cached up to 1/16 of the cache."""
    in_flight_bytes: ByteSize = ByteSize(256 * 1024**2)
    """Bytes in flight between stores and clients; one body may exceed it."""
    max_chunk_bytes: ByteSize = ByteSize(64 * 1024**2)
    """Largest body of a PUT."""
    connections: PositiveInt = 64
    """Concurrent reads from one server, and as many streams."""
    requests: PositiveInt = 1024
    """Concurrent requests; those answered from the cache are not counted."""
    client_requests: NonNegativeInt = 0
    """Concurrent requests of one client address; `0` for no limit."""
    answer_s: PositiveFloat = 120.0
    """Longest time until the answer to a read begins."""
    timeout_s: PositiveFloat = 10.0
    """Longest pause of a store, or of a client that sends a body."""
    deadline_s: PositiveFloat = 30.0
    """Longest time for one read from a store, retries included."""


class StoreSettings(Section):
    """Endpoint and credentials of a store, and what its server expects."""

    endpoint_url: _ServerUrl | None = None
    """URL of the S3, GCS or Azure server; default: `AWS_ENDPOINT_URL`, or the provider's."""
    region: str | None = None
    """Region to sign for; default: botocore's usual chain."""
    access_key_id: str | None = None
    """Key id, or the account of `az://`; default: botocore's usual chain."""
    secret_access_key: _Secret | None = None
    """S3 secret access key."""
    session_token: _Secret | None = None
    """Token of temporary credentials."""
    anonymous: bool = False
    """Send no credentials."""
    validator: Validator = "etag"
    """`http(s)://`: tells versions apart; `last-modified` is for mirrors with several ETags."""
    requester_pays: bool = False
    """S3: agree to pay for requests, which some buckets demand."""
    bearer_token: _Secret | None = None
    """`https://`: token to send to the server, and to no other that it redirects to."""
    bearer_token_file: Path | None = None
    """File of the token, which may change."""
    forbidden_is_absent: bool = False
    """Take 403 for absence: for public buckets that cannot be listed; not with `writable`."""

    @model_validator(mode="after")
    def _either_a_key_or_none(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")
        if self.anonymous and self.access_key_id is not None:
            raise ValueError("anonymous and access_key_id exclude each other")
        if self.anonymous and self.requester_pays:
            raise ValueError("anonymous and requester_pays exclude each other")
        if self.bearer_token is not None and self.bearer_token_file is not None:
            raise ValueError("bearer_token and bearer_token_file exclude each other")
        return self


class CallerSettings(Section):
    """A caller with credentials of this service."""

    token_sha256: _List[_Digest] = ()
    """SHA-256 digests of bearer tokens, in hexadecimal."""
    access_key_id: str | None = None
    """S3 access key id."""
    secret_access_key: _Secret | None = None
    """S3 secret access key."""

    @model_validator(mode="after")
    def _key_is_whole(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")
        if not self.token_sha256 and self.access_key_id is None:
            raise ValueError("has neither token_sha256 nor an access key")
        return self


class IssuerSettings(Section):
    """An OpenID Connect issuer, whose tokens are accepted as bearer tokens."""

    url: _IssuerUrl
    """URL of the issuer, equal to `iss` in its tokens."""
    audience: str
    """Required `aud` of its tokens."""
    discovery_url: _InnerUrl | None = None
    """URL of its `/.well-known/openid-configuration`, if that is not below `url`."""
    jwks_url: _InnerUrl | None = None
    """URL of its keys; default: from its configuration."""
    claims: _Names = ("scope", "groups")
    """Claims that a rule `NAME:VALUE` is compared with; `a.b` is `b` within `a`."""
    email_verified: Literal["claim", "assumed"] = "claim"
    """`assumed`: addresses count as verified where the issuer sends no `email_verified`."""


class LoginSettings(Section):
    """Signing in at an issuer, for people who use viewers that can ask for it."""

    issuer: str | None = None
    """Name of the `[issuers.NAME]` table where people sign in; default: they cannot."""
    client_id: Annotated[str, AfterValidator(header_value)] | None = None
    """Id that the issuer knows this service by."""
    client_secret: _Secret | None = None
    """Secret that belongs to it; default: none, a public client."""
    client_secret_file: Path | None = None
    """File of the secret, read at each sign-in."""
    scopes: _List[Annotated[str, AfterValidator(scope)]] = ("openid",)
    """Scopes to ask for; many issuers send groups only with one more."""
    userinfo: bool = False
    """Compare rules with the claims of the userinfo endpoint, not with those of the ID token."""
    viewers: _List[Annotated[str, AfterValidator(web_origin)]] = ()
    """Origins whose pages get a token when somebody signs in there; default: none."""
    lifetime_s: PositiveInt = 3600
    """Lifetime of such a token, `tokens.longest_s` at most."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.issuer is None) != (self.client_id is None):
            raise ValueError("issuer and client_id go together")
        if self.client_secret is not None and self.client_secret_file is not None:
            raise ValueError("client_secret and client_secret_file exclude each other")
        if "openid" not in self.scopes:
            raise ValueError("scopes includes openid")
        return self


class TokenSettings(Section):
    """Short-lived tokens for the paths of viewers."""

    secret: SecretStr = Field(
        default_factory=lambda: SecretStr(secrets.token_hex(_SHORTEST_SECRET)),
        min_length=_SHORTEST_SECRET,
    )
    """Key that signs tokens, 32 characters or more, equal on all replicas; default: random."""
    longest_s: PositiveInt = 12 * 3600
    """Longest lifetime of a token."""
    url: _RootUrl | None = None
    """Writable folder of records of tokens, for all replicas; default: memory of each process."""
    store: str | None = None
    """Name of a `[stores.NAME]` table for it."""


class VirtualPrefix(Section):
    """URL prefixes that end at segment boundaries."""

    url: _RootUrl
    """A folder, bucket or host, or a part of one."""
    store: str | None = None
    """Name of a `[stores.NAME]` table; default: that of the dataset, if on a server like its."""


class DatasetSettings(Section):
    """One served root."""

    url: _RootUrl
    """A local path or `file://`, `s3://bucket/prefix`, `gs://`, `az://`, `http(s)://`, `memory://`."""
    store: str | None = None
    """Name of a `[stores.NAME]` table."""
    format: Literal["auto", "zarr", "precomputed", "icechunk", "zip", "kerchunk"] = "auto"
    """Container format; `auto` looks for `zarr.json`, `info`, `repo`, `*.zip` and `*.ozx`."""
    view: Literal["unsharded", "raw"] = "unsharded"
    """`raw` serves the objects as stored, with Range, and nothing else."""
    writable: bool = False
    """Accept writes; `file://`, `s3://` and `memory://` only."""
    read: _Names = (PUBLIC,)
    """Who may read: `public`, names of callers, rules of an issuer; writers may read, too."""
    write: _Names | None = None
    """Who may write if `writable`; default: everybody, if everybody may read."""
    admin: _Names = ()
    """Callers that may change settings of Icechunk repositories if `writable`, and may read."""
    cache_control: Annotated[str, AfterValidator(cache_directives)] | None = None
    """Cache-Control of mutable answers; default: `public, max-age=60`, or `private, max-age=60`."""
    virtual_chunk_prefixes: _List[Annotated[VirtualPrefix, BeforeValidator(table_of_url)]] = ()
    """Icechunk, kerchunk: URL prefixes of allowed references; a table also names a store."""
    redirects: _List[_ServerUrl] = ()
    """URL prefixes, in addition to the root, to which an `http(s)://` root may redirect."""
    follow_links: bool = False
    """`file://`: follow symbolic links that lead out of the root."""

    @property
    def readers(self) -> frozenset[str]:
        """Rules of readers, and of writers and admins, who are readers too."""
        return frozenset({*self.read, *(self.write or ()), *self.admin})

    @property
    def is_public(self) -> bool:
        """Return whether every caller may read it."""
        return PUBLIC in self.readers

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        scheme = self.url.partition("://")[0]
        # The default is private where it has to be.
        directives = {each.strip().lower() for each in (self.cache_control or "private").split(",")}
        is_shared = any(each.startswith(("public", "s-maxage")) for each in directives)
        is_kept_apart = bool(directives & {"private", "no-store"}) and not is_shared
        schemes = ", ".join(f"{name}://" for name in WRITABLE_SCHEMES)
        complaints = (
            (self.writable and self.write is None and not self.is_public,
             "write says who may, where not everybody may read"),
            (self.write is not None and not self.writable, "write goes with writable = true"),
            (self.admin and not self.writable, "admin goes with writable = true"),
            (not self.is_public and not is_kept_apart,
             "cache_control says private or no-store and no s-maxage where not everybody may read"),
            (self.redirects and scheme not in {"http", "https"},
             "redirects goes with an http(s):// url only"),
            (self.follow_links and scheme != "file", "follow_links goes with a file:// url only"),
            (self.writable and scheme not in WRITABLE_SCHEMES,
             f"writable goes with one of {schemes} only"),
        )  # fmt: skip
        _refuse(complaint for is_wrong, complaint in complaints if is_wrong)
        return self


class Settings(Section):
    """The whole configuration."""

    server: ServerSettings = ServerSettings()
    cache: CacheSettings = CacheSettings()
    limits: LimitSettings = LimitSettings()
    login: LoginSettings = LoginSettings()
    tokens: TokenSettings = TokenSettings()
    stores: dict[str, StoreSettings] = Field(default_factory=dict)
    callers: dict[_CallerName, CallerSettings] = Field(default_factory=dict)
    issuers: dict[_CallerName, IssuerSettings] = Field(default_factory=dict)
    datasets: dict[Annotated[str, AfterValidator(dataset_name)], DatasetSettings] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _tables_agree(self) -> Self:
        faults = (
            self._unknown_stores,
            self._unknown_callers,
            self._duplicates,
            self._ambiguous_paths,
            self._wrong_login,
            self._wrong_records,
        )
        _refuse(complaint for find in faults for complaint in find())
        return self

    def _unknown_stores(self) -> Iterator[str]:
        known = {None, *self.stores}
        hiding = {name for name, store in self.stores.items() if store.forbidden_is_absent}
        for name, dataset in self.datasets.items():
            if dataset.store not in known:
                yield f"datasets.{name}.store: names no [stores] table"
            elif dataset.writable and dataset.store in hiding:
                reason = "excludes a store with forbidden_is_absent: writes need to know absence"
                yield f"datasets.{name}.writable: {reason}"
            if any(prefix.store not in known for prefix in dataset.virtual_chunk_prefixes):
                yield f"datasets.{name}.virtual_chunk_prefixes: names no [stores] table"

    def _unknown_callers(self) -> Iterator[str]:
        rules = {"server.metrics": self.server.metrics or ()}
        for name, dataset in self.datasets.items():
            rules[f"datasets.{name}.read"] = dataset.read
            rules[f"datasets.{name}.write"] = dataset.write or ()
            rules[f"datasets.{name}.admin"] = dataset.admin
        for setting, names in rules.items():
            for rule in names:
                if not self._is_rule(rule):
                    yield f"{setting}: {rule!r} names no caller and no issuer"

    def _duplicates(self) -> Iterator[str]:
        known: set[str] = set()
        for name, caller in self.callers.items():
            own = {*caller.token_sha256, *filter(None, [caller.access_key_id])}
            if own & known:
                yield f"callers.{name}: has the token or key of another caller"
            known |= own
        for name, issuer in self.issuers.items():
            if issuer.url in known:
                yield f"issuers.{name}: has the url of another issuer"
            known.add(issuer.url)

    def _ambiguous_paths(self) -> Iterator[str]:
        first = first_segment(self.server.root_path)
        if first in self.datasets:
            yield f"server.root_path: begins with the name of the dataset {first}; rename either"
        elif first in RESERVED:
            yield f"server.root_path: begins with /{first}, a path of the service itself"

    def _wrong_login(self) -> Iterator[str]:
        if self.login.issuer not in {None, *self.issuers}:
            yield "login.issuer: names no [issuers] table"
        allowed = self.server.cors_origins
        if "*" not in allowed and (others := set(self.login.viewers) - {*allowed}):
            yield f"login.viewers: {min(others)} is not in server.cors_origins, so cannot read"

    def _wrong_records(self) -> Iterator[str]:
        if self.tokens.store not in {None, *self.stores}:
            yield "tokens.store: names no [stores] table"
        url = self.tokens.url
        if url is not None and url.partition("://")[0] not in WRITABLE_SCHEMES:
            schemes = ", ".join(f"{name}://" for name in WRITABLE_SCHEMES)
            yield f"tokens.url: {url} begins with none of {schemes}, which can be written to"

    def _is_rule(self, rule: str) -> bool:
        issuer, colon, value = rule.partition(":")
        if colon:
            return issuer in self.issuers and value not in {"", *CLAIM_RULES}
        return rule == PUBLIC or rule in self.callers


TABLES: Final[Mapping[str, type[BaseModel]]] = {
    name: (get_args(field.annotation) or (field.annotation,))[-1]
    for name, field in Settings.model_fields.items()
}
"""Model of each section; sections in the plural have a table for each name."""
