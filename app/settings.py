"""One frozen model of the configuration."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

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

from app.setting_fields import (
    PUBLIC,
    Section,
    caller_name,
    dataset_name,
    dataset_url,
    digest,
    header_value,
    host_names,
    issuer_url,
    list_from_text,
    origins,
    server_url,
    table_of_url,
)

WRITABLE_SCHEMES: Final = ("file", "s3", "memory")
"""Where clients may write."""

_SHORTEST_SECRET: Final = 32

type _Networks = Annotated[tuple[IPvAnyNetwork, ...], BeforeValidator(list_from_text)]


def _long_enough(secret: SecretStr) -> SecretStr:
    if len(secret.get_secret_value()) < _SHORTEST_SECRET:
        raise ValueError(f"is shorter than {_SHORTEST_SECRET} characters")
    return secret


type _Names = Annotated[tuple[str, ...], BeforeValidator(list_from_text)]


class ServerSettings(Section):
    """Listening, logging, and pages that may read."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    hosts: Annotated[_Names, AfterValidator(host_names)] = ()
    """Host names of the service besides `host`, `localhost`, IP addresses; `*` for any."""
    workers: PositiveInt = 1
    """Number of processes; each has its own caches."""
    cors_origins: Annotated[_Names, AfterValidator(origins)] = ("*",)
    """Origins whose pages may read answers (CORS); `*` allows all."""
    metrics: _Names | None = None
    """Who may read `/metrics`, as in `datasets.NAME.read`; default: everybody, if all is public."""
    trusted_proxies: _Networks = ()
    """Networks of proxies whose X-Forwarded-For is trusted, such as `10.0.0.0/8`."""
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
    """Lowest level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """`text`, or `json` for one JSON object per line."""
    access_log: bool = False
    """Log a line for each request, with its key at level `debug` only."""


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
    """Largest metadata document."""
    whole_index_bytes: ByteSize = ByteSize(4 * 1024**2)
    """Largest shard index read whole; larger ones are read by entry, without their checksum."""
    decoded_bytes: ByteSize = ByteSize(64 * 1024**2)
    """Largest minishard index, mesh manifest, or inflated gzip chunk."""
    repository_file_bytes: ByteSize = ByteSize(512 * 1024**2)
    """Largest file of an Icechunk repository: `repo`, snapshots, manifests, logs."""
    coalesce_gap_bytes: ByteSize = ByteSize(4 * 1024)
    """Largest gap across which concurrent reads of an object are merged."""
    stream_bytes: ByteSize = ByteSize(4 * 1024**2)
    """Largest body that is read whole and cached; larger ones are streamed."""
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
    """Endpoint and credentials of an S3, GCS or Azure store."""

    endpoint_url: Annotated[str, AfterValidator(server_url)] | None = None
    """URL of the S3, GCS or Azure server; default: `AWS_ENDPOINT_URL`, or the provider's."""
    region: str | None = None
    """Region to sign for; default: botocore's usual chain."""
    access_key_id: str | None = None
    """Key id, or the account of `az://`; default: botocore's usual chain."""
    secret_access_key: SecretStr | None = None
    """S3 secret access key."""
    session_token: SecretStr | None = None
    """Token of temporary credentials."""
    anonymous: bool = False
    """Send no credentials."""

    @model_validator(mode="after")
    def _either_a_key_or_none(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")
        if self.anonymous and self.access_key_id is not None:
            raise ValueError("anonymous and access_key_id exclude each other")
        return self


class CallerSettings(Section):
    """A caller with credentials of this service."""

    token_sha256: Annotated[
        tuple[Annotated[str, AfterValidator(digest)], ...], BeforeValidator(list_from_text)
    ] = ()
    """SHA-256 digests of bearer tokens, in hexadecimal."""
    access_key_id: str | None = None
    """S3 access key id."""
    secret_access_key: SecretStr | None = None
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

    url: Annotated[str, AfterValidator(issuer_url)]
    """URL of the issuer, equal to `iss` in its tokens."""
    audience: str
    """Required `aud` of its tokens."""
    jwks_url: Annotated[str, AfterValidator(issuer_url)] | None = None
    """URL of its keys; default: from `/.well-known/openid-configuration`."""
    claims: _Names = ("scope", "groups")
    """Claims that a rule `NAME:VALUE` is compared with; `a.b` is `b` within `a`."""


class TokenSettings(Section):
    """Short-lived tokens for the paths of viewers."""

    secret: Annotated[SecretStr, AfterValidator(_long_enough)] = Field(
        default_factory=lambda: SecretStr(secrets.token_hex(_SHORTEST_SECRET))
    )
    """Key that signs tokens, 32 characters or more, equal on all replicas; default: random."""
    longest_s: PositiveInt = 12 * 3600
    """Longest lifetime of a token."""


class VirtualPrefix(Section):
    """URL prefixes that end at segment boundaries."""

    url: Annotated[str, AfterValidator(dataset_url)]
    """A folder, bucket or host, or a part of one."""
    store: str | None = None
    """Name of a `[stores.NAME]` table; default: that of the dataset."""


class DatasetSettings(Section):
    """One served root."""

    url: Annotated[str, AfterValidator(dataset_url)]
    """A local path or `file://`, `s3://bucket/prefix`, `gs://`, `az://`, `http(s)://`, `memory://`."""
    store: str | None = None
    """Name of a `[stores.NAME]` table."""
    format: Literal["auto", "zarr", "precomputed", "icechunk"] = "auto"
    """Container format; `auto` looks for `zarr.json`, `info`, `repo` at the root and below."""
    view: Literal["unsharded", "raw"] = "unsharded"
    """`raw` serves the objects as stored, with Range."""
    writable: bool = False
    """Accept writes; `file://`, `s3://` and `memory://` only."""
    read: _Names = (PUBLIC,)
    """Who may read: `public`, names of callers, `ISSUER:VALUE`; writers may read, too."""
    write: _Names | None = None
    """Who may write if `writable`; default: everybody, if everybody may read."""
    cache_control: Annotated[str, AfterValidator(header_value)] | None = None
    """Cache-Control of mutable answers; default: `public, max-age=60`, or `private, max-age=60`."""
    virtual_chunk_prefixes: Annotated[
        tuple[Annotated[VirtualPrefix, BeforeValidator(table_of_url)], ...],
        BeforeValidator(list_from_text),
    ] = ()
    """Icechunk: URL prefixes of allowed virtual references; a table also names a store."""

    redirects: Annotated[
        tuple[Annotated[str, AfterValidator(server_url)], ...], BeforeValidator(list_from_text)
    ] = ()
    """URL prefixes, in addition to the root, to which an `http(s)://` root may redirect."""

    @property
    def is_public(self) -> bool:
        """Whether everybody may read it."""
        return PUBLIC in {*self.read, *(self.write or ())}

    @model_validator(mode="after")
    def _says_who_writes(self) -> Self:
        if self.writable and self.write is None and not self.is_public:
            raise ValueError("write says who may, where not everybody may read")
        if self.write is not None and not self.writable:
            raise ValueError("write goes with writable = true")
        return self

    @model_validator(mode="after")
    def _is_not_shared_by_caches(self) -> Self:
        told = {each.strip().lower() for each in (self.cache_control or "private").split(",")}
        is_kept_apart = not told.isdisjoint({"private", "no-store"}) and "public" not in told
        if not self.is_public and not is_kept_apart:
            raise ValueError("cache_control says private or no-store where not everybody may read")
        return self

    @model_validator(mode="after")
    def _can_be_redirected(self) -> Self:
        if self.redirects and not self.url.startswith(("http://", "https://")):
            raise ValueError("redirects goes with an http(s):// url only")
        return self

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        if self.writable and self.url.partition("://")[0] not in WRITABLE_SCHEMES:
            names = ", ".join(f"{name}://" for name in WRITABLE_SCHEMES)
            raise ValueError(f"writable goes with one of {names} only")
        return self


class Settings(Section):
    """The whole configuration."""

    server: ServerSettings = ServerSettings()
    cache: CacheSettings = CacheSettings()
    limits: LimitSettings = LimitSettings()
    tokens: TokenSettings = TokenSettings()
    stores: dict[str, StoreSettings] = Field(default_factory=dict)
    callers: dict[Annotated[str, AfterValidator(caller_name)], CallerSettings] = Field(
        default_factory=dict
    )
    issuers: dict[Annotated[str, AfterValidator(caller_name)], IssuerSettings] = Field(
        default_factory=dict
    )
    datasets: dict[Annotated[str, AfterValidator(dataset_name)], DatasetSettings] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _stores_exist(self) -> Self:
        for name, dataset in self.datasets.items():
            known = {None, *self.stores}
            if dataset.store not in known:
                raise ValueError(f"datasets.{name}.store: names no [stores] table")
            if any(prefix.store not in known for prefix in dataset.virtual_chunk_prefixes):
                setting = f"datasets.{name}.virtual_chunk_prefixes"
                raise ValueError(f"{setting}: names no [stores] table")
        return self

    @model_validator(mode="after")
    def _rules_name_somebody(self) -> Self:
        rules = {"server.metrics": self.server.metrics or ()}
        for name, dataset in self.datasets.items():
            rules[f"datasets.{name}.read"] = dataset.read
            rules[f"datasets.{name}.write"] = dataset.write or ()
        for setting, names in rules.items():
            for rule in names:
                if not self._is_rule(rule):
                    raise ValueError(f"{setting}: {rule!r} names no caller and no issuer")
        return self

    @model_validator(mode="after")
    def _credentials_are_of_one(self) -> Self:
        known: set[str] = set()
        for name, caller in self.callers.items():
            own = {*caller.token_sha256, *filter(None, [caller.access_key_id])}
            if own & known:
                raise ValueError(f"callers.{name}: has the token or key of another caller")
            known |= own
        return self

    @model_validator(mode="after")
    def _issuers_are_told_apart(self) -> Self:
        known: set[str] = set()
        for name, issuer in self.issuers.items():
            if issuer.url in known:
                raise ValueError(f"issuers.{name}: has the url of another issuer")
            known.add(issuer.url)
        return self

    def _is_rule(self, rule: str) -> bool:
        issuer, colon, value = rule.partition(":")
        if colon:
            return issuer in self.issuers and bool(value)
        return rule == PUBLIC or rule in self.callers


TABLES: Final[Mapping[str, type[BaseModel]]] = {
    "server": ServerSettings,
    "cache": CacheSettings,
    "limits": LimitSettings,
    "tokens": TokenSettings,
    "stores": StoreSettings,
    "callers": CallerSettings,
    "issuers": IssuerSettings,
    "datasets": DatasetSettings,
}
"""The model of each section's values; those of the plural have a table for each name."""
