"""Clients of obstore, made of our settings."""

from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore

from app.errors import ConfigurationError
from app.settings import StoreSettings

_FOREVER: Final = timedelta(days=365)


def demand_settings(scheme: str, settings: StoreSettings) -> None:
    """Raise `ConfigurationError` for what means nothing to the stores of *scheme*."""
    if scheme == "gs" and settings.access_key_id is not None:
        raise ConfigurationError("gs:// takes no access_key_id; see GOOGLE_APPLICATION_CREDENTIALS")
    for name in ("session_token", "region"):
        if getattr(settings, name) is not None:
            raise ConfigurationError(f"{scheme}:// takes no {name}")


def open_client(bucket: str, settings: StoreSettings, silence: timedelta) -> AzureStore | GCSStore:
    """Make the client of *bucket*, which repeats nothing: `RetryingStore` does.

    Without TLS only the server that *settings* name is asked.
    """
    kind, _, name = bucket.partition("://")
    url = settings.endpoint_url
    told: dict[str, Any] = {
        "client_options": {
            "connect_timeout": silence,
            "read_timeout": silence,
            "timeout": _FOREVER,  # a body may be passed on slowly
        },
        "retry_config": {"max_retries": 0},
    }
    if url is not None and url.startswith("http://"):
        told["client_options"]["allow_http"] = True
    if settings.anonymous:
        told["skip_signature"] = True
    if "gs" in kind.split("+"):
        # Without this header, gzip is inflated on the way, and no length is right.
        told["client_options"]["default_headers"] = {"Accept-Encoding": "gzip"}
        return GCSStore(name, **told | ({} if url is None else {"base_url": url}))
    if url is not None:
        told |= {"endpoint": url, "account_name": _account(url)}
    if settings.access_key_id is not None and settings.secret_access_key is not None:
        told["account_name"] = settings.access_key_id
        told["account_key"] = settings.secret_access_key.get_secret_value()
    return AzureStore(name, **told)


def _account(url: str) -> str:
    """Take the account out of the URL of its server: that of an emulator has it in the path."""
    parts = urlsplit(url)
    return parts.path.strip("/") or (parts.hostname or "").partition(".")[0]
