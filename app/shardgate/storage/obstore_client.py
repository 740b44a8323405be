"""Clients of obstore, attributes of objects, and obstore's errors as ours.

obstore finds credentials in its own environment variables and on the machine. Its exceptions are
text only, and repeat URLs that may hold signatures: they are classified by their text, and never
shown.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore

from shardgate.errors import (
    BadHeaderError,
    ConfigurationError,
    StorageDeniedError,
    StorageError,
    StorageTimeoutError,
    StorageUnavailableError,
    StorageUnusableError,
    TruncatedReadError,
)
from shardgate.model import ObjectRef
from shardgate.settings import StoreSettings
from shardgate.storage.contract import ObjectHeaders
from shardgate.storage.http_headers import METADATA
from shardgate.storage.refusals import Refusal, no_bucket, no_credentials, parse_document
from shardgate.storage.swapping import WRITE_IDS, WriteIds

if TYPE_CHECKING:  # obstore defines this name for type checkers only
    from obstore import Attributes

NO_BUCKET_CODES: Final = frozenset({"ContainerNotFound", "NoSuchBucket"})
_STATUS: Final = re.compile(r"status code: ([0-9]{3})")
_BATCH: Final = "Bulk delete request failed for key "
_BATCH_STATUS: Final = re.compile(r"\(code: ([0-9]{3})\)\Z")  # after the key, which may be anything
_TOKEN: Final = "token request"  # noqa: S105  a phrase of errors
_KINDS: Final[tuple[tuple[tuple[str, ...], type[StorageError], str], ...]] = (
    (("kind: Timeout", "TimedOut"), StorageTimeoutError, "the server is silent"),
    (("body error",), TruncatedReadError, "the connection closed within the body"),
    (
        ("Received non-partial response", "Requested "),
        StorageUnusableError,
        "the server sent another range than was requested",
    ),
    (("InvalidCertificate",), StorageUnusableError, "the certificate is not trusted"),
    (("HTTP error",), StorageUnavailableError, "the server did not respond"),
    (
        ("Header missing from response", "invalid bulk delete response"),
        StorageUnavailableError,
        "the response is not that of the service",  # but of a proxy, perhaps for a while only
    ),
)
"""Phrases of a text without a status, the most specific first."""
_OWN: Final = "shardgate_"
_AZURE_WRITE_IDS: Final = WRITE_IDS.replace("-", "_")  # names are identifiers there
_ODD_METADATA: Final = f"{_OWN}metadata"
"""Item of metadata with the pairs of a client whose names the server or obstore would not keep."""
_HEADERS: Final = frozenset(
    {"Content-Type", "Content-Encoding", "Content-Disposition", "Content-Language"}
    | {"Cache-Control", "Storage-Class"}
)
"""Attributes that obstore returns for headers; all others are user metadata, in lower case."""
_TAKEN: Final = frozenset(name.lower().replace("-", "") for name in _HEADERS)
"""Names that obstore takes for headers in any case, with their dashes or without."""
_METADATA_NBYTES: Final = 7680
"""Most bytes of names and values of metadata. Google and Azure keep 8 KiB."""

FAILURES: Final = (BaseError, FileNotFoundError, ValueError)
"""What obstore raises."""

type Client = AzureStore | GCSStore


def attributes_of(ref: ObjectRef, headers: ObjectHeaders, ids: WriteIds) -> dict[str, str]:
    """Return the attributes of an object that is written with *headers* and *ids*.

    Raises: `BadHeaderError` for more metadata than the server keeps.
    """
    is_azure = not is_google(ref.bucket)
    attributes: dict[str, str] = {}
    odd: list[tuple[str, str]] = []
    for name, value in headers.metadata:
        is_taken = name.lower().replace("-", "") in _TAKEN or name.startswith(_OWN)
        if is_taken or (is_azure and not name.isidentifier()):
            odd.append((name, value))
        else:
            attributes[name] = value
    if odd:
        attributes[_ODD_METADATA] = urlencode(odd)
    attributes[_AZURE_WRITE_IDS if is_azure else WRITE_IDS] = " ".join(ids)
    if sum(len(name) + len(value) for name, value in attributes.items()) > _METADATA_NBYTES:
        raise BadHeaderError(
            f"{ref}: over {_METADATA_NBYTES} bytes of metadata, as they are stored"
        )
    if not is_azure:
        # Google's default for public objects, an hour, has its caches answer with old versions.
        # no-store would also keep 304 from those who read the bucket itself.
        attributes["Cache-Control"] = "no-cache"
    attributes["Content-Type"] = headers.content_type or "application/octet-stream"
    if headers.coding:
        attributes["Content-Encoding"] = headers.coding
    return attributes


def stored_headers(attributes: "Attributes") -> dict[bytes, bytes]:
    """Return *attributes* as the headers with which S3 returns an object."""
    headers: dict[bytes, bytes] = {}
    for name, value in attributes.items():
        pairs = [(name, value)]
        if name in _HEADERS:
            pairs = []
            headers[name.lower().encode()] = value.encode("latin-1", "replace")
        elif name == _AZURE_WRITE_IDS:
            pairs = [(WRITE_IDS, value)]
        elif name == _ODD_METADATA:
            pairs = parse_qsl(value, keep_blank_values=True)
        for own, text in pairs:
            headers[METADATA + own.encode("latin-1", "replace")] = text.encode("latin-1", "replace")
    return headers


def is_name(key: str) -> bool:
    """Return whether obstore sends *key* unchanged: from others it strips slashes."""
    return all(segment not in ("", ".", "..") for segment in key.split("/"))


def check_settings(scheme: str, settings: StoreSettings) -> None:
    """Raise `ConfigurationError` for settings that *scheme* does not have."""
    if scheme == "gs" and settings.access_key_id is not None:
        raise ConfigurationError("gs:// takes no access_key_id; see GOOGLE_APPLICATION_CREDENTIALS")
    for name in ("session_token", "region"):
        if getattr(settings, name) is not None:
            raise ConfigurationError(f"{scheme}:// takes no {name}")


def is_google(bucket: str) -> bool:
    """Return whether *bucket* is one of Google Cloud Storage, else it is a container of Azure."""
    kind = bucket.partition("://")[0].removeprefix("guarded+")
    return kind.partition("+")[0] == "gs"  # the name of a store, which follows, may be anything


def open_client(
    bucket: str, settings: StoreSettings, *, connect_s: float, silence_s: float
) -> Client:
    """Open a client without retries; plain HTTP is allowed only to the endpoint in *settings*."""
    name = bucket.partition("://")[2]
    url = settings.endpoint_url
    options: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=connect_s),
            "read_timeout": timedelta(seconds=silence_s),
            "timeout": timedelta(days=365),  # a body may be streamed slowly
        },
        "retry_config": {"max_retries": 0},
    }
    if url is not None and url.startswith("http://"):
        options["client_options"]["allow_http"] = True
    if settings.anonymous:
        options["skip_signature"] = True
    if is_google(bucket):
        # Otherwise gzip is inflated on the way, and the lengths are wrong.
        options["client_options"]["default_headers"] = {"Accept-Encoding": "gzip"}
        return GCSStore(name, **options | ({} if url is None else {"base_url": url}))
    if url is not None:
        parts = urlsplit(url)  # emulators have the account in the path
        account = parts.path.strip("/") or (parts.hostname or "").partition(".")[0]
        options |= {"endpoint": url, "account_name": account}
    if settings.access_key_id is not None and settings.secret_access_key is not None:
        options["account_name"] = settings.access_key_id
        options["account_key"] = settings.secret_access_key.get_secret_value()
    return AzureStore(name, **options)


@contextmanager
def translated(ref: ObjectRef) -> Iterator[None]:
    """Raise `StorageError` in place of obstore's exceptions."""
    try:
        yield
    except FAILURES as error:
        raise failure(ref, error) from error


def refusal_of(error: Exception) -> Refusal | None:
    """Return the response of the server in the text of *error*, `None` if there was none."""
    text = str(error)
    if _TOKEN in text:
        return None  # it is that of another server, which gives credentials
    status = _STATUS.search(text)
    if _BATCH in text:
        status = _BATCH_STATUS.search(text.rpartition("\n\nDebug source:")[0] or text)
    if status is None:
        return None
    return Refusal("GET", int(status[1]), *parse_document(text.encode(errors="replace")))


def is_about_range(error: Exception) -> bool:
    """Return whether the object may be too short for the requested range."""
    if (refusal := refusal_of(error)) is not None:
        return refusal.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    return _says(error, ("Wanted range starting at", "Failed to parse value for CONTENT_RANGE"))


def failure(ref: ObjectRef, error: Exception) -> StorageError:
    """Return our error for one of obstore, without its text if that may hold a URL."""
    if (refusal := refusal_of(error)) is not None:
        return no_bucket(ref) if refusal.code in NO_BUCKET_CODES else refusal.failure(ref)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return StorageDeniedError(ref, "the server refuses")
    if _says(error, (_TOKEN, "redential")):  # with either case of the first letter
        status = _STATUS.search(str(error))
        if status is not None and (status[1] in ("408", "429") or status[1] >= "500"):
            reason = f"the server that gives credentials answered {status[1]}"
            return StorageUnavailableError(ref, reason)
        return no_credentials(ref, "none in the environment or on this machine")
    for phrases, kind, reason in _KINDS:
        if _says(error, phrases):
            return kind(ref, reason)
    first = str(error).partition("\n")[0]
    reason = type(error).__name__ if "://" in first else first  # a URL may hold a signature
    return StorageUnusableError(ref, reason)


def _says(error: Exception, phrases: tuple[str, ...]) -> bool:
    text = str(error)
    return any(phrase in text for phrase in phrases)
