"""What the values of settings have to be."""

import json
import re
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydantic import BaseModel

RESERVED: Final = frozenset(
    {"api", "docs", "redoc", "openapi.json", "healthz", "readyz", "metrics", "viewer"}
)
"""First path segments that are ours, so that no dataset can have the name."""

SCHEMES: Final = ("file", "s3", "gs", "az", "http", "https", "memory")
"""Where a dataset may lie."""

PUBLIC: Final = "public"
"""The rule that everybody keeps."""

_DATASET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/@\s]+")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_PLAIN_HOSTS: Final = re.compile(r"http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?(/|$)")


def dataset_name(name: str) -> str:
    """Check the first segment of the paths of a dataset."""
    if name in RESERVED or not _DATASET_NAME.fullmatch(name):
        raise ValueError("is not a name for a dataset")
    return name


def dataset_url(url: str) -> str:
    """Check and complete the root of a dataset."""
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


def header_value(value: str) -> str:
    """Check what is sent as the value of a header."""
    if not re.fullmatch(r"[\x20-\x7e]+", value):
        raise ValueError("is not a header value")
    return value


def server_url(url: str) -> str:
    """Check the URL of a server."""
    if not re.fullmatch(r"https?://[^/@?#\s]+(/[^?#\s]*)?", url):
        raise ValueError("is not the http(s):// URL of a server")
    return url


def list_from_text(value: object) -> object:
    """Take a list from the environment, as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError('is not a list such as ["*"]') from None


def table_of_url(value: object) -> object:
    """Take a URL for a table that has nothing else."""
    return {"url": value} if isinstance(value, str) else value


def origins(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check what browsers name in `Origin`."""
    for name in names:
        if name not in {"*", "null"} and not _ORIGIN.fullmatch(name):
            raise ValueError(f"{name!r} is no origin such as https://viewer.example")
    return names


def host_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check and normalize the names of hosts, which have no port."""
    for name in names:
        if name != "*" and not _HOST_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no host name such as chunks.example")
    return tuple(name.lower().removesuffix(".") for name in names)


def caller_name(name: str) -> str:
    """Check how a rule names a caller or an issuer."""
    if name == PUBLIC or not _DATASET_NAME.fullmatch(name):
        raise ValueError("is not a name for a caller or an issuer")
    return name


def digest(text: str) -> str:
    """Check a SHA-256 digest in hexadecimal."""
    if not _DIGEST.fullmatch(text.lower()):
        raise ValueError("is not a SHA-256 digest of 64 hexadecimal characters")
    return text.lower()


def issuer_url(url: str) -> str:
    """Check the URL of an issuer, whose keys nobody on the way may replace."""
    if not (url.startswith("https://") or _PLAIN_HOSTS.match(url)):
        raise ValueError("is not https://, nor a server on this machine")
    return server_url(url)


class Section(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """A table of the file."""
