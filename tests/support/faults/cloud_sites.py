"""Buckets of Google's and Azure's services that gateways write to, and tests read by obstore."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import icechunk
import obstore

from shardgate.settings import StoreSettings
from shardgate.storage.obstore_client import open_client
from tests.support.clouds import Azurite
from tests.support.gateways import Gateway, forked, of_dataset
from tests.support.labs import SMALL, Lab
from tests.support.storage.google import BUCKET, ENVIRON, GoogleServer, service_account
from tests.support.storage.proxy import Proxy


@dataclass(frozen=True)
class CloudSite:
    """A prefix of a bucket, and a proxy before its server."""

    scheme: str
    settings: StoreSettings
    server: GoogleServer | Azurite
    proxy: Proxy
    folder: Path
    prefix: str

    @property
    def url(self) -> str:
        """The root of a dataset there."""
        return f"{self.scheme}://bucket/{self.prefix}"

    @contextmanager
    def gateway(self, *, is_behind_proxy: bool = False) -> Generator[Gateway]:
        """Start a gateway before the prefix."""
        url = self.server.url
        if is_behind_proxy:
            url = url.replace(f"//{self.proxy.upstream}", self.proxy.url[len("http:") :])
        told = {"ENDPOINT_URL": url}
        if isinstance(self.server, Azurite):
            told |= {"ACCESS_KEY_ID": self.server.account, "SECRET_ACCESS_KEY": self.server.key}
        environ = {f"SHARDGATE_STORES__LAB__{name}": value for name, value in told.items()}
        environ |= of_dataset(self.url) | {"SHARDGATE_DATASETS__DATA__STORE": "lab"} | ENVIRON
        with forked(environ) as made:
            yield made

    def new_array(self, chunks: dict[int, bytes]) -> str:
        """Create an array with *chunks* by zarr-python, and return its name."""
        name = Lab(self.folder).new_array(SMALL, chunks)
        self.upload(name)
        return name

    def upload(self, name: str) -> None:
        """Store the files below *name* of the folder."""
        for path in (self.folder / name).rglob("*"):
            if path.is_file():
                key = path.relative_to(self.folder).as_posix()
                self.server.put(f"{self.prefix}/{key}", path.read_bytes())

    def library_storage(self, name: str) -> icechunk.Storage:
        """Return the Icechunk library's storage of the repository *name*."""
        prefix = f"{self.prefix}/{name}"
        if isinstance(self.server, Azurite):
            config = {"azure_storage_endpoint": self.server.url, "allow_http": "true"}
            account, key = self.server.account, self.server.key
            return icechunk.azure_storage(
                account=account, container=BUCKET, prefix=prefix, access_key=key, config=config
            )
        return icechunk.gcs_storage(
            bucket=BUCKET,
            prefix=prefix,
            service_account_key=service_account(self.server.url),
            config={"allow_http": "true"},
        )

    def read(self, name: str) -> dict[str, bytes | None]:
        """Read an array as zarr-python does from a copy of its objects."""
        return Lab(self.download()).read(name)

    def names(self) -> list[str]:
        """Return the names of all objects below the prefix, also of unfinished ones."""
        return sorted(self._objects())

    def download(self) -> Path:
        """Copy the objects into a new folder."""
        copy = self.folder / f"copy-{uuid4().hex}"
        for name, data in self._objects().items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(data)
        return copy

    def _objects(self) -> dict[str, bytes]:
        client = open_client(f"{self.scheme}://bucket", self.settings, connect_s=60, silence_s=60)
        listed = obstore.list(client, self.prefix).collect()
        keys = [each["path"] for each in listed]
        found = {key: bytes(obstore.get(client, key).bytes()) for key in keys}
        return {key.removeprefix(f"{self.prefix}/"): data for key, data in found.items()}


@contextmanager
def cloud_site(
    scheme: str, settings: StoreSettings, server: GoogleServer | Azurite, folder: Path
) -> Generator[CloudSite]:
    """Start the proxy before *server*."""
    with Proxy(server.url).running() as proxy:
        yield CloudSite(scheme, settings, server, proxy, folder, f"site/{uuid4().hex}")
