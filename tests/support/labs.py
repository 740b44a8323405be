"""Arrays in stores that zarr-python reads without the service."""

import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import zarr

from tests.support.seaweedfs import SeaweedFS

_numbers = itertools.count(1)


class Shape(NamedTuple):
    """Numbers of chunks and shards of an array, and the length of a chunk."""

    chunks: int
    chunk_length: int
    """Numbers of 8 bytes in an inner chunk."""
    shards: int

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of an inner chunk, which no codec compresses."""
        return 8 * self.chunk_length


SMALL: Final = Shape(16, 4, 2)
LARGE: Final = Shape(24, 128 * 1024, 1)
"""One shard of 24 MiB, more than is sent when a part of it changes."""


@dataclass
class Lab:
    """A folder, or a bucket of SeaweedFS, with arrays."""

    folder: Path
    seaweedfs: SeaweedFS | None = None

    @property
    def url(self) -> str:
        """The URL or path of the folder."""
        if self.seaweedfs is None:
            return str(self.folder)
        return f"s3://{self.seaweedfs.bucket}/{self.folder.name}"

    def new_array(self, shape: Shape = SMALL, chunks: Mapping[int, bytes] | None = None) -> str:
        """Create an array with *chunks* and no others, and return its name."""
        name = f"a{next(_numbers)}"
        values = np.zeros((shape.chunks, shape.chunk_length), "<u8")
        for at, data in (chunks or {}).items():
            values[at] = np.frombuffer(data, "<u8")
        zarr.create_array(
            self.folder / name,
            data=values.reshape(-1),
            chunks=(shape.chunk_length,),
            shards=(values.size // shape.shards,),
            compressors=None,
        )
        if self.seaweedfs is not None:
            self.seaweedfs.upload_folder(self.folder / name, f"{self.folder.name}/{name}")
        return name

    def read(self, name: str) -> dict[str, bytes | None]:
        """Read the array's shards directly, as zarr-python does."""
        array = self.open(name)
        length = array.chunks[0]
        values = np.asarray(array[:]).reshape(-1, length)
        return {
            f"{name}/c/{at}": row.tobytes() if row.any() else None for at, row in enumerate(values)
        }

    def open(self, name: str) -> Any:
        """Open the array with zarr-python."""
        if self.seaweedfs is None:
            return zarr.open_array(self.folder / name, mode="r")
        return zarr.open_array(self.seaweedfs.zarr_store(f"{self.folder.name}/{name}"), mode="r")

    def remove(self, name: str) -> None:
        """Remove the array, and free its place on the disk."""
        shutil.rmtree(self.folder / name)
        if self.seaweedfs is not None:
            self.seaweedfs.remove_below(f"{self.folder.name}/{name}/")

    def left(self, name: str) -> list[str]:
        """Return the names of unfinished objects and uploads, or of temporary files."""
        if self.seaweedfs is None:
            files = [path.name for path in (self.folder / name).rglob(".*")]
            return sorted(files)
        where = {"Bucket": self.seaweedfs.bucket, "Prefix": f"{self.folder.name}/{name}/"}
        objects = self.seaweedfs.client.list_objects_v2(**where).get("Contents", [])
        uploads = self.seaweedfs.client.list_multipart_uploads(**where).get("Uploads", [])
        asides = [each["Key"] for each in objects if ".shardgate-" in each["Key"]]
        return sorted(asides + [each["UploadId"] for each in uploads])


def value(shape: Shape, writer: int, number: int) -> bytes:
    """Return the bytes of a chunk, unlike those of any other write."""
    random = np.random.default_rng((writer, number))
    return random.integers(1, 2**63, shape.chunk_length, "<u8").tobytes()


def requested_lab(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Lab:
    """Return a lab in the store that the parameter names: ``folder`` or ``seaweedfs``."""
    is_remote = request.param == "seaweedfs"
    seaweedfs = request.getfixturevalue("seaweedfs") if is_remote else None
    return Lab(factory.mktemp("lab"), seaweedfs)
