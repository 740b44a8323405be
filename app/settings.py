"""One frozen model of the configuration: a TOML file, and ``SHARDGATE_SECTION__NAME`` over it.

Unknown names are refused, and no message repeats a value, which could be a secret.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from app.errors import ConfigurationError

PREFIX: Final = "SHARDGATE_"
"""What the names of environment variables begin with."""

RESERVED: Final = frozenset(
    {"api", "docs", "redoc", "openapi.json", "healthz", "readyz", "metrics", "viewer"}
)
"""First path segments that are ours, so that no dataset can have the name."""

SCHEMES: Final = ("file", "s3", "gs", "az", "http", "https", "memory")
"""Where a dataset may lie."""

WRITABLE_SCHEMES: Final = ("file", "s3", "memory")
"""Where clients may write."""

_DATASET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SERVICE_LINK: Final = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""What Kubernetes tells every pod about a Service called ``shardgate`` or ``shardgate-web``."""


def _dataset_name(name: str) -> str:
    if name in RESERVED or not _DATASET_NAME.fullmatch(name):
        raise ValueError("is not a name for a dataset")
    return name


def _dataset_url(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url:
            raise ValueError("is empty")
        return Path(url).expanduser().absolute().as_uri()
    if scheme not in SCHEMES:
        raise ValueError(f"begins with none of {', '.join(f'{name}://' for name in SCHEMES)}")
    if scheme == "file" and not rest.startswith("/"):
        raise ValueError("is relative: write file:///folder or a plain path")
    if scheme != "file" and not rest.strip("/"):
        raise ValueError("names no bucket or host")
    if "@" in rest.partition("/")[0]:
        raise ValueError("holds credentials, which every log and answer would show")
    if scheme in {"http", "https"} and (urlsplit(url).query or urlsplit(url).fragment):
        raise ValueError("has a query or fragment, which the keys below it could not carry")
    return url.rstrip("/") if rest.strip("/") else url


def _header_value(value: str) -> str:
    if not re.fullmatch(r"[\x20-\x7e]+", value):
        raise ValueError("is not a header value")
    return value


def _server_url(url: str) -> str:
    if not re.match(r"https?://[^/@]+", url):
        raise ValueError("is not the http(s):// URL of a server")
    return url


def _list_from_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError('is not a list such as ["*"]') from None


def _table_of_url(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


class _Section(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """A table of the file."""


class ServerSettings(_Section):
    """How the service listens."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    workers: PositiveInt = 1
    """Processes; each has caches of its own."""
    cors_origins: Annotated[tuple[str, ...], BeforeValidator(_list_from_text)] = ("*",)
    """Origins whose pages may read answers; `*` allows all."""
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
    """Least severity that is logged."""


class CacheSettings(_Section):
    """What is kept in memory."""

    index_bytes: ByteSize = ByteSize(256 * 1024**2)
    """Weight limit of decoded shard indexes and metadata."""
    chunk_bytes: ByteSize = ByteSize(256 * 1024**2)
    """Weight limit of encoded chunk bodies; `0` switches that cache off."""
    ttl_s: PositiveFloat = 60.0
    """A mutable answer, absence too, is served without asking the store at most this long."""


class LimitSettings(_Section):
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
    """Bytes read from stores and not yet taken by clients, or from clients, at most."""
    max_chunk_bytes: ByteSize = ByteSize(64 * 1024**2)
    """A larger body of one key is refused before it is read."""
    max_batch_bytes: ByteSize = ByteSize(256 * 1024**2)
    """A larger batch of writes is refused before it is read."""
    connections: PositiveInt = 64
    """Reads under way from one server, at most; as many again that are passed on in pieces."""
    timeout_s: PositiveFloat = 10.0
    """Longest silence of a store, or of a client that sends a body."""
    deadline_s: PositiveFloat = 30.0
    """Longest time for one read of a store, retries included."""


class StoreSettings(_Section):
    """What the environment cannot say about an S3 store, or one of Google or Azure."""

    endpoint_url: Annotated[str, AfterValidator(_server_url)] | None = None
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


class VirtualPrefix(_Section):
    """Whole segments at the beginning of URLs."""

    url: Annotated[str, AfterValidator(_dataset_url)]
    """A folder, bucket or host, or a part of one."""
    store: str | None = None
    """Name of a `[stores.NAME]` table; default: that of the dataset."""


class DatasetSettings(_Section):
    """One root that is served."""

    url: Annotated[str, AfterValidator(_dataset_url)]
    """A local path or `file://`, `s3://bucket/prefix`, `gs://`, `az://`, `http(s)://`, `memory://`."""
    store: str | None = None
    """Name of a `[stores.NAME]` table."""
    format: Literal["auto", "zarr", "precomputed", "icechunk"] = "auto"
    """Container format; `auto` looks for markers at the root and below."""
    view: Literal["unsharded", "raw"] = "unsharded"
    """`raw` serves the objects as they are, with Range."""
    writable: bool = False
    """Whether clients may write, in `file://`, `s3://` and `memory://`."""
    cache_control: Annotated[str, AfterValidator(_header_value)] = "public, max-age=60"
    """For answers that can change."""
    virtual_chunk_prefixes: Annotated[
        tuple[Annotated[VirtualPrefix, BeforeValidator(_table_of_url)], ...],
        BeforeValidator(_list_from_text),
    ] = ()
    """Icechunk: below which URLs virtual references may be followed; a table names a store too."""

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        if self.writable and self.url.partition("://")[0] not in WRITABLE_SCHEMES:
            names = ", ".join(f"{name}://" for name in WRITABLE_SCHEMES)
            raise ValueError(f"writable goes with one of {names} only")
        return self


class Settings(_Section):
    """The whole configuration."""

    server: ServerSettings = ServerSettings()
    cache: CacheSettings = CacheSettings()
    limits: LimitSettings = LimitSettings()
    stores: dict[str, StoreSettings] = {}
    datasets: dict[Annotated[str, AfterValidator(_dataset_name)], DatasetSettings] = {}

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


TABLES: Final[Mapping[str, type[BaseModel]]] = {
    "server": ServerSettings,
    "cache": CacheSettings,
    "limits": LimitSettings,
    "stores": StoreSettings,
    "datasets": DatasetSettings,
}
"""The model of each section's values; stores and datasets have a table for each name."""


def load(
    path: Path | None,
    environ: Mapping[str, str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """Read the file *path*, put *environ* over it, and *options* of the command line over both.

    Raises: `ConfigurationError` with one line that names the setting.
    """
    document = {} if path is None else _parse(path)
    variables = {}
    for variable, path_in_capitals in _variables(environ):
        names = _as_spelled(path_in_capitals, document)
        variables[".".join(names)] = variable
        _put(document, names, environ[variable])
    for section, values in (options or {}).items():
        for name, value in values.items():
            _put(document, (section, name), value)
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        # The cause would show the values, and with them secrets.
        wrong = error.errors(include_url=False, include_input=False)
        # A misspelled name also leaves another one missing: tell the misspelling.
        first = min(wrong, key=lambda details: details["type"] != "extra_forbidden")
        raise ConfigurationError(_complaint(first, variables)) from None


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Find our variables, with the path of the setting that each names."""
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        rest = variable.removeprefix(PREFIX)
        if "__" in rest:
            section, _, rest = rest.lower().partition("__")
            yield variable, (section, *rest.rsplit("__", 1))
        elif not (_SERVICE_LINK.fullmatch(rest) or value.startswith(("tcp://", "udp://"))):
            raise ConfigurationError(f"{variable}: is no setting; write {PREFIX}SECTION__NAME")


def _as_spelled(names: tuple[str, ...], document: Mapping[str, Any]) -> tuple[str, ...]:
    """Take the file's spelling of a table that the environment can only name in capitals."""
    section, *table, name = names
    tables = document.get(section)
    spelled = {table.lower(): table for table in tables} if isinstance(tables, dict) else {}
    return (section, *(spelled.get(part, part) for part in table), name)


def _put(document: dict[str, Any], names: tuple[str, ...], value: Any) -> None:
    *tables, last = names
    table: Any = document
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            return  # validation says that this is no table
    table[last] = value


def _complaint(details: ErrorDetails, variables: Mapping[str, str]) -> str:
    """Say in one line which setting is wrong, and why."""
    location = [str(part) for part in details["loc"] if part != "[key]"]
    reason = details["msg"].removeprefix("Value error, ")
    if not location:
        setting, _, reason = reason.partition(": ")
        location = [setting]
    match details["type"]:
        case "extra_forbidden":
            reason = f"is no setting{_suggestion(location)}"
        case "missing":
            reason = "is missing"
        case "byte_size" | "byte_size_unit":
            reason = "is not a size such as 256MiB"
    setting = ".".join(location)
    for name, variable in variables.items():
        if name == setting or name.startswith(f"{setting}."):
            setting = variable
    return f"{setting}: {reason}"


def _suggestion(location: list[str]) -> str:
    """Guess what an unknown name was meant to be."""
    table: type[BaseModel] = Settings if len(location) == 1 else TABLES[location[0]]
    close = difflib.get_close_matches(location[-1], table.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""
