"""Repositories whose chunks are parts of objects elsewhere."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import icechunk
import numpy as np
import zarr
from icechunk import Repository, RepositoryConfig, VirtualChunkContainer, VirtualChunkSpec

from tests.clients.arrays import BY_NAME
from tests.clients.icechunk.repositories import commit, files_of, migrate, put, spec, storage
from tests.seaweedfs import SeaweedFS

DATA: Final = bytes((7 * at + at // 256) % 256 for at in range(5000))
"""Content of the object ``data.bin`` that references point into."""
MANY: Final = 1200
"""References enough for the library to compress their locations with a dictionary."""
SHARDED: Final = (
    "index/zarr_start_big_crc",
    "transpose/both",
    "nested/three_zarr",
    "after/crc_after_both",
    "shape/0d_default_zarr",
    "plain/v3",
)
UNREAD: Final = ("file/etag", "http/etag", "file/many", "s3/many", "http/many")
"""Not read by the library: it sends ETags without quotes as If-Match; and too many."""


@dataclass(frozen=True)
class Elsewhere:
    """A place that references lead to, as both sides are told of it."""

    prefix: str
    """URL with a final slash."""
    etag: str
    """Of ``data.bin``, without quotes."""
    modified: datetime
    """When it was there, and was not replaced yet."""
    store: Any
    """Object store of the library."""
    credentials: Any


def write_sources(folder: Path) -> None:
    """Write the objects that references lead to."""
    (folder / "data.bin").write_bytes(DATA)
    os.utime(folder / "data.bin", (1e9, 1e9))  # checksums are whole seconds, times of files not
    for case in SHARDED:
        files_of(BY_NAME[case], folder)


def in_folder(folder: Path, etag: str) -> Elsewhere:
    """Lead into a folder."""
    return Elsewhere(
        f"{folder.as_uri()}/",
        etag,
        datetime.now(UTC),
        icechunk.local_filesystem_store(str(folder)),
        icechunk.Credentials.LocalFileSystemAccess(),
    )


def in_bucket(seaweedfs: SeaweedFS, prefix: str, etag: str) -> Elsewhere:
    """Lead into SeaweedFS."""
    store = icechunk.s3_store(
        region=seaweedfs.region,
        endpoint_url=seaweedfs.endpoint_url,
        allow_http=True,
        s3_compatible=True,
        force_path_style=True,
    )
    credentials = icechunk.s3_static_credentials(
        access_key_id=seaweedfs.access_key_id, secret_access_key=seaweedfs.secret_access_key
    )
    return Elsewhere(
        f"s3://{seaweedfs.bucket}/{prefix}/", etag, datetime.now(UTC), store, credentials
    )


def in_web(url: str, etag: str) -> Elsewhere:
    """Lead to a plain HTTP server."""
    store = icechunk.http_store(opts={"allow_http": "true"})
    july = datetime(2026, 7, 6, 12, tzinfo=UTC)  # the server's dates are the 6th and the 7th
    return Elsewhere(f"{url}/", etag, july, store, icechunk.Credentials.HttpAccess())


def authorized(places: Mapping[str, Elsewhere]) -> Any:
    """Authorize the library to follow references to *places*."""
    return icechunk.containers_credentials(
        {place.prefix: place.credentials for place in places.values()}
    )


def configuration(places: Mapping[str, Elsewhere]) -> RepositoryConfig:
    """Make a container of each of *places*, named like its scheme."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    for name, place in places.items():
        config.set_virtual_chunk_container(
            VirtualChunkContainer(place.prefix, place.store, name=name)
        )
    return config


def write_virtual(
    folder: Path, version: str, places: Mapping[str, Elsewhere], cases: Path
) -> Repository:
    """Write a repository with a group for each of *places*."""
    repo = Repository.create(
        storage(folder),
        config=configuration(places),
        spec_version=spec(version),
        authorize_virtual_chunk_access=authorized(places),
    )
    repo.save_config()

    def refer(store: Any) -> None:
        zarr.create_group(store)
        for name, place in places.items():
            _refer(store, name, place, cases)

    commit(repo, "references", refer)
    repo.create_tag("v1", repo.lookup_branch("main"))
    migrate(repo, version)
    return open_virtual(storage(folder), places)


def open_virtual(where: icechunk.Storage, places: Mapping[str, Elsewhere]) -> Repository:
    """Open it so that the library follows references."""
    return Repository.open(where, authorize_virtual_chunk_access=authorized(places))


def _refer(store: Any, name: str, place: Elsewhere, cases: Path) -> None:
    group = zarr.create_group(store, path=name)
    location = f"{place.prefix}data.bin"
    checksums: dict[str, Any] = {"none": None, "etag": place.etag, "modified": place.modified}
    for kind, checksum in checksums.items():
        _array(group, kind, 3)
        for at in range(2):
            key = f"{name}/{kind}/c/{at}"
            store.set_virtual_ref(key, location, offset=100 * at + 7, length=4, checksum=checksum)
    _array(group, "named", 1)
    relative = f"vcc://{name}/data.bin"
    store.set_virtual_ref(f"{name}/named/c/0", relative, offset=9, length=4)
    _array(group, "many", MANY)
    chunks = [VirtualChunkSpec([at], location, 4 * at, 4) for at in range(MANY)]
    store.set_virtual_refs(f"{name}/many", chunks)
    for case in SHARDED:
        for key, data in files_of(BY_NAME[case], cases).items():
            if key.endswith("zarr.json"):
                put(store, {f"{name}/{key}": data})
            else:
                whole = f"{place.prefix}{key}"
                store.set_virtual_ref(f"{name}/{key}", whole, offset=0, length=len(data))
    for parent in sorted({case.partition("/")[0] for case in SHARDED}):
        zarr.create_group(store, path=f"{name}/{parent}")


def _array(group: zarr.Group, name: str, count: int) -> None:
    group.create_array(name, shape=(4 * count,), chunks=(4,), dtype=np.uint8, compressors=None)
