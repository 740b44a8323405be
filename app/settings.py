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
    """How the service listens."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    hosts: Annotated[_Names, AfterValidator(host_names)] = ()
    """Names of the service besides `host`, `localhost` and IP addresses; `*` for any."""
    workers: PositiveInt = 1
    """Processes; each has caches of its own."""
    cors_origins: Annotated[_Names, AfterValidator(origins)] = ("*",)
    """Origins whose pages may read answers; `*` allows all."""
    metrics: _Names | None = None
    """Who may read `/metrics`, as in `datasets.NAME.read`; default: everybody, if all is public."""
    trusted_proxies: _Networks = ()
    """Networks of proxies whose X-Forwarded-For tells the client, such as `10.0.0.0/8`."""
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
    """Least severity that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Lines of the log: for people, or one JSON object each."""
    access_log: bool = False
    """Whether each request is a line of the log; keys are named in it at `debug` only."""


class CacheSettings(Section):
    """What is kept in memory."""

    index_bytes: ByteSize = ByteSize(256 * 1024**2)
    """Weight limit of decoded shard indexes and metadata."""
    chunk_bytes: ByteSize = ByteSize(256 * 1024**2)
    """Weight limit of encoded chunk bodies; `0` switches that cache off."""
    ttl_s: PositiveFloat = 60.0
    """A mutable answer, absence too, is served without asking the store at most this long."""


class LimitSettings(Section):
    """Bounds on single reads and on all of them together."""

    metadata_bytes: ByteSize = ByteSize(8 * 1024**2)
    """A larger metadata document is refused."""
    whole_index_bytes: ByteSize = ByteSize(4 * 1024**2)
    """A larger shard index is read one entry at a time, its checksum unseen."""
    decoded_bytes: ByteSize = ByteSize(64 * 1024**2)
    """A larger minishard index or mesh manifest is refused, and gzip that holds more."""
    repository_file_bytes: ByteSize = ByteSize(512 * 1024**2)
    """A larger file of an Icechunk repository is refused: `repo`, snapshots, manifests, logs."""
    coalesce_gap_bytes: ByteSize = ByteSize(4 * 1024)
    """Ranges of one object asked for at once are read together across gaps up to this."""
    stream_bytes: ByteSize = ByteSize(4 * 1024**2)
    """A larger body is passed on in pieces and not cached."""
    in_flight_bytes: ByteSize = ByteSize(256 * 1024**2)
    """Bytes read from stores and not yet taken by clients, or from clients, and one body more."""
    max_chunk_bytes: ByteSize = ByteSize(64 * 1024**2)
    """A larger body of one key is refused before it is read."""
    connections: PositiveInt = 64
    """Reads under way from one server, at most; as many again that are passed on in pieces."""
    requests: PositiveInt = 1024
    """Requests answered at once, at most; chunks in the cache are not counted."""
    client_requests: NonNegativeInt = 0
    """The same for each address that they come from; `0` sets no bound."""
    answer_s: PositiveFloat = 120.0
    """Longest wait for the answer to a read to begin."""
    timeout_s: PositiveFloat = 10.0
    """Longest silence of a store, or of a client that sends a body."""
    deadline_s: PositiveFloat = 30.0
    """Longest time for one read of a store, retries included."""


class StoreSettings(Section):
    """What the environment cannot say about an S3 store, or one of Google or Azure."""

    endpoint_url: Annotated[str, AfterValidator(server_url)] | None = None
    """Server that speaks S3, or as the scheme's own do; default: AWS, or `AWS_ENDPOINT_URL`."""
    region: str | None = None
    """Region to sign for; default: botocore's usual chain."""
    access_key_id: str | None = None
    """Key id, or the account of `az://`; default: botocore's usual chain."""
    secret_access_key: SecretStr | None = None
    """Secret of the key."""
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
    """Somebody who has credentials of this service."""

    token_sha256: Annotated[
        tuple[Annotated[str, AfterValidator(digest)], ...], BeforeValidator(list_from_text)
    ] = ()
    """SHA-256 digests of bearer tokens, in hexadecimal."""
    access_key_id: str | None = None
    """Key id of a client of S3."""
    secret_access_key: SecretStr | None = None
    """Secret of the key."""

    @model_validator(mode="after")
    def _key_is_whole(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")
        if not self.token_sha256 and self.access_key_id is None:
            raise ValueError("has neither token_sha256 nor an access key")
        return self


class IssuerSettings(Section):
    """An OpenID Connect issuer, whose tokens are bearer tokens here."""

    url: Annotated[str, AfterValidator(issuer_url)]
    """The issuer, spelled as `iss` of its tokens."""
    audience: str
    """What `aud` of its tokens has to name."""
    jwks_url: Annotated[str, AfterValidator(issuer_url)] | None = None
    """Where its keys are; default: where `/.well-known/openid-configuration` says."""
    claims: _Names = ("scope", "groups")
    """Claims that a rule `NAME:VALUE` looks for the value in; `a.b` is `b` within `a`."""


class TokenSettings(Section):
    """Short-lived tokens for the paths of viewers."""

    secret: Annotated[SecretStr, AfterValidator(_long_enough)] = Field(
        default_factory=lambda: SecretStr(secrets.token_hex(_SHORTEST_SECRET))
    )
    """32 characters or more that sign them, the same for all replicas; default: made at start."""
    longest_s: PositiveInt = 12 * 3600
    """Longest life of one."""


class VirtualPrefix(Section):
    """Whole segments at the beginning of URLs."""

    url: Annotated[str, AfterValidator(dataset_url)]
    """A folder, bucket or host, or a part of one."""
    store: str | None = None
    """Name of a `[stores.NAME]` table; default: that of the dataset."""


class DatasetSettings(Section):
    """One root that is served."""

    url: Annotated[str, AfterValidator(dataset_url)]
    """A local path or `file://`, `s3://bucket/prefix`, `gs://`, `az://`, `http(s)://`, `memory://`."""
    store: str | None = None
    """Name of a `[stores.NAME]` table."""
    format: Literal["auto", "zarr", "precomputed", "icechunk"] = "auto"
    """Container format; `auto` looks for markers at the root and below."""
    view: Literal["unsharded", "raw"] = "unsharded"
    """`raw` serves the objects as they are, with Range."""
    writable: bool = False
    """Whether clients may write, in `file://`, `s3://` and `memory://`."""
    read: _Names = (PUBLIC,)
    """Who may read: `public`, names of callers, `ISSUER:VALUE`; who may write may also read."""
    write: _Names | None = None
    """Who may write where `writable`; default: everybody, if everybody may read."""
    cache_control: Annotated[str, AfterValidator(header_value)] | None = None
    """For answers that can change; default: `public, max-age=60`, or `private` instead."""
    virtual_chunk_prefixes: Annotated[
        tuple[Annotated[VirtualPrefix, BeforeValidator(table_of_url)], ...],
        BeforeValidator(list_from_text),
    ] = ()
    """Icechunk: below which URLs virtual references may be followed; a table names a store too."""

    redirects: Annotated[
        tuple[Annotated[str, AfterValidator(server_url)], ...], BeforeValidator(list_from_text)
    ] = ()
    """Below which URLs redirects of an `http(s)://` root are followed, besides the root itself."""

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
