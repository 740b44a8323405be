"""A real S3 server for the tests: SeaweedFS in one process, on ports of its own."""

import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import batched
from pathlib import Path
from typing import Any, Final, cast

import httpx
import obstore
import trustme
from botocore.exceptions import BotoCoreError, ClientError
from obstore.store import S3Store
from zarr.storage import ObjectStore

from shardgate.settings import DatasetSettings, StoreSettings
from tests.support.clients.filling import open_boto3, open_obstore
from tests.support.processes import free_ports, store_process

REGION: Final = "eu-central-1"
DOMAINS: Final = (f"s3.{REGION}.amazonaws.com", "s3.amazonaws.com")
"""Hosts of Amazon; the servers know buckets also by names of hosts below them."""
_SERVICES: Final = ("master", "volume", "filer", "s3", "admin")


class SeaweedFS:
    """The server's address and keys, and synchronous methods to store objects."""

    access_key_id = "testkey"
    secret_access_key = "testsecret"
    region = "us-east-1"

    vacuum_url = ""
    """Where its master frees the space of removed objects."""
    safe_url = ""
    """Its S3 over TLS, if it has a certificate."""

    def __init__(self, port: int, bucket: str) -> None:
        self.endpoint_url = f"http://127.0.0.1:{port}"
        self.bucket = bucket
        self.client = open_boto3(
            self.endpoint_url,
            self.access_key_id,
            self.secret_access_key,
            connect_timeout=5,
            read_timeout=60,
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )

    @property
    def environ(self) -> dict[str, str]:
        """Variables by which botocore finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
        }

    @property
    def settings(self) -> StoreSettings:
        """Settings of a named store that reaches the server."""
        names = ("endpoint_url", "region", "access_key_id", "secret_access_key")
        return StoreSettings.model_validate({name: getattr(self, name) for name in names})

    def is_ready(self) -> bool:
        """Return whether objects can be stored."""
        try:
            self.put("ready", b"ready")
            self.delete("ready")
        except (BotoCoreError, ClientError):
            return False
        return True

    def put(self, key: str, data: bytes) -> str:
        """Store *data* under *key* and return its ETag."""
        answer = self.client.put_object(Bucket=self.bucket, Key=key, Body=data)
        return cast(str, answer["ETag"])

    def delete(self, key: str) -> None:
        """Remove *key*; it need not exist."""
        self.client.delete_object(Bucket=self.bucket, Key=key)

    def remove_below(self, prefix: str) -> None:
        """Remove the objects below *prefix*, and free what removed and replaced ones take."""
        for each in self.client.list_objects_v2(Bucket=self.bucket, Prefix=prefix)["Contents"]:
            self.delete(each["Key"])
        answer = httpx.get(self.vacuum_url, params={"garbageThreshold": 0.3}, timeout=60)
        answer.raise_for_status()

    def upload_folder(self, path: Path, prefix: str) -> None:
        """Store each file below *path* under its relative name below *prefix*."""
        store = self.store(prefix.strip("/"))  # by boto3 it takes four times as long
        for file in sorted(path.rglob("*")):
            if file.is_file():
                name = file.relative_to(path).as_posix()
                obstore.put(store, name, file.read_bytes(), use_multipart=False)

    def zarr_store(self, prefix: str) -> ObjectStore[S3Store]:
        """Return zarr-python's store of the objects below *prefix*."""
        return ObjectStore(self.store(prefix), read_only=True)

    def store(self, prefix: str) -> S3Store:
        """Return obstore's client of the objects below *prefix*."""
        keys = self.access_key_id, self.secret_access_key
        return open_obstore(self.endpoint_url, self.bucket, prefix or None, *keys)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


@contextmanager
def running(
    weed: Path,
    folder: Path,
    ports: tuple[int, Sequence[str]] | None = None,
    certificate: trustme.LeafCert | None = None,
) -> Generator[SeaweedFS]:
    """Run the binary *weed* with its data in *folder*, and kill it at the end.

    A second run on the same ports, of `own_ports`, is the same server again.
    """
    if certificate is not None:
        certificate.private_key_pem.write_to_path(folder / "tls.key")
        certificate.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    with ExitStack() as stack:
        for left in reversed(range(5)):
            try:
                server = stack.enter_context(_listening(weed, folder, ports or own_ports(folder)))
            except RuntimeError as error:
                # Another process has taken a port that was free before.
                if ports is not None or not left or "is not available" not in str(error):
                    raise
            else:
                break
        yield server


@contextmanager
def _listening(weed: Path, folder: Path, ports: tuple[int, Sequence[str]]) -> Generator[SeaweedFS]:
    port, listening = ports
    (master,) = (each for each in listening if each.startswith("-master.port="))
    server = SeaweedFS(port, "test")
    server.vacuum_url = f"http://127.0.0.1:{master.partition('=')[2]}/vol/vacuum"
    for safe in (each for each in listening if each.startswith("-s3.port.https=")):
        server.safe_url = f"https://127.0.0.1:{safe.partition('=')[2]}"
    command = [
        str(weed),
        f"-logdir={folder}",
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-bucket={server.bucket}",
        f"-s3.domainName={','.join(DOMAINS)}",
        *listening,
    ]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")} | server.environ
    with closing(server):
        try:
            with store_process(command, server.is_ready, folder, environ):
                yield server
        finally:
            remove_sockets(listening)


def stored_in(
    folder: Path, seaweedfs: SeaweedFS | None, prefix: str, **dataset: Any
) -> tuple[dict[str, StoreSettings], DatasetSettings]:
    """Configure a dataset in *folder*, or below *prefix* of SeaweedFS if that is given."""
    if seaweedfs is None:
        return {}, DatasetSettings(url=str(folder), **dataset)
    url = f"s3://{seaweedfs.bucket}/{prefix}"
    return {"lab": seaweedfs.settings}, DatasetSettings(url=url, store="lab", **dataset)


def own_ports(folder: Path) -> tuple[int, list[str]]:
    """Return the free port of S3, and the arguments with all free ports.

    The server speaks TLS too if its *folder* has a certificate.
    """
    listen = dict(zip(_SERVICES, batched(free_ports(2 * len(_SERVICES)), 2), strict=True))
    arguments = [f"-s3.localSocket={folder}/s3.sock", f"-filer.localSocket={folder}/filer.sock"]
    for name, (http, grpc) in listen.items():
        arguments += [f"-{name}.port={http}", f"-{name}.port.grpc={grpc}"]
    if (folder / "tls.key").exists():
        arguments += [f"-s3.key.file={folder}/tls.key", f"-s3.cert.file={folder}/tls.crt"]
        arguments += [f"-s3.port.https={free_ports(1)[0]}"]
    return listen["s3"][0], arguments


def remove_sockets(listening: Sequence[str]) -> None:
    """Remove the sockets that a killed server has left."""
    for argument in listening:
        name, _, port = argument.removeprefix("-").partition(".port.grpc=")
        Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)
