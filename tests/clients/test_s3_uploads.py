"""Multipart uploads and mirroring of inner chunks by clients of S3."""

import io
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import zarr
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from tests.support.clients.filling import open_boto3, over_obstore, read_object
from tests.support.clients.services import Taker, taking_into_folder
from tests.support.clients.writing import counted, same
from tests.support.gateways import Gateway, forked, of_dataset
from tests.support.labs import Lab, Shape, requested_lab
from tests.support.lacking import need
from tests.support.processes import environ
from tests.support.sessions import listed_keys

SITES: Final = (pytest.param("folder", marks=pytest.mark.soak), "seaweedfs")
MIB: Final = 1024**2
PART: Final = 5 * MIB
DATA: Final = random.Random(1).randbytes(PART + 70_000)
LARGE_CHUNKS: Final = Shape(chunks=2, chunk_length=6 * MIB // 8, shards=1)
"""Shape whose inner chunks are longer than 5 MiB."""


@dataclass
class Uploads:
    """A store, and two gateways before it."""

    lab: Lab
    gateways: Sequence[Gateway]

    def boto3(self, number: int) -> Any:
        """Open boto3's client of a gateway."""
        return open_boto3(self.gateways[number].url)

    def parts(self) -> list[str]:
        """Return the names of objects of uploads that are not complete."""
        return [name for name in self._hidden() if not name.endswith(".done")]

    def completed(self) -> int:
        """Return the number of completed uploads."""
        return len(self._hidden()) - len(self.parts())

    def _hidden(self) -> list[str]:
        """Return the names of all objects of uploads."""
        folder, server = self.lab.folder, self.lab.seaweedfs
        if server is None:
            return [path.name for path in folder.glob(".shardgate-uploads/*")]
        prefix = f"{folder.name}/.shardgate-uploads/"
        pages = server.client.get_paginator("list_objects_v2").paginate(
            Bucket=server.bucket, Prefix=prefix
        )
        return [each["Key"] for page in pages for each in page.get("Contents", ())]


@pytest.fixture(scope="module", params=SITES)
def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Uploads]:
    """Start the store and two gateways."""
    stored = requested_lab(request, tmp_path_factory)
    told = of_dataset(stored.url, stored.seaweedfs, ttl_s=0.001)
    with ExitStack() as stack:
        yield Uploads(stored, [stack.enter_context(forked(told)) for _ in range(2)])


def turns(lab: Uploads) -> Iterator[Any]:
    """Return clients of both gateways in turns, without end."""
    return itertools.cycle([lab.boto3(0), lab.boto3(1)])


def test_boto3_uploads_and_copies_large_objects_in_parts(lab: Uploads) -> None:
    """boto3 uploads an object in concurrent parts, and copies it and a large chunk in parts.

    No object of the parts remains.
    """
    config = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART)
    one, other = lab.boto3(0), lab.boto3(1)
    chunk = f"{lab.lab.new_array(LARGE_CHUNKS)}/c/1"
    one.put_object(Bucket="data", Key=chunk, Body=bytes(6 * MIB - 1) + b"1")
    before = lab.completed()
    one.upload_fileobj(io.BytesIO(DATA), "data", "large/source", Config=config)
    copies = {"large/source": "large/copy", chunk: f"{lab.lab.new_array(LARGE_CHUNKS)}/c/0"}
    for source, copy in copies.items():
        other.copy({"Bucket": "data", "Key": source}, "data", copy, Config=config)

    assert read_object(other, "large/source") == DATA
    for source, copy in copies.items():
        assert read_object(one, copy) == read_object(one, source)
    assert (lab.completed() - before, lab.parts()) == (3, [])


def test_parts_of_an_upload_go_to_several_gateways(lab: Uploads) -> None:
    """An upload completes with parts sent out of order, and one twice, to two gateways."""
    clients = turns(lab)
    upload = {"Bucket": "data", "Key": "by hand/a+b"}
    upload["UploadId"] = next(clients).create_multipart_upload(**upload)["UploadId"]
    pieces = {7: b"tail", 2: DATA[:PART], 3: DATA[PART:]}
    etags = {}
    for number, body in [(2, b"wrong"), *pieces.items()]:
        told = next(clients).upload_part(**upload, PartNumber=number, Body=body)
        etags[number] = told["ETag"]
    listed = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
    told = next(clients).complete_multipart_upload(
        **upload, MultipartUpload={"Parts": listed}, IfNoneMatch="*"
    )

    assert read_object(next(clients), "by hand/a+b") == DATA + b"tail"
    assert next(clients).head_object(Bucket="data", Key="by hand/a+b")["ETag"] == told["ETag"]
    assert lab.parts() == []


def test_upload_is_aborted_by_another_gateway(lab: Uploads) -> None:
    """An upload aborted by another gateway leaves no parts; its next part gets NoSuchUpload."""
    clients = turns(lab)
    upload = {"Bucket": "data", "Key": "aborted"}
    upload["UploadId"] = next(clients).create_multipart_upload(**upload)["UploadId"]
    next(clients).upload_part(**upload, PartNumber=1, Body=b"1")
    assert len(lab.parts()) == 2

    next(clients).abort_multipart_upload(**upload)

    assert lab.parts() == []
    with pytest.raises(ClientError, match=r"\(NoSuchUpload\)"):
        next(clients).upload_part(**upload, PartNumber=1, Body=b"1")


def part_of(s3: Any, upload: dict[str, str], etag: str) -> None:
    """Complete an upload of one part."""
    parts = [{"PartNumber": 1, "ETag": etag}]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})


def test_zarr_python_writes_large_chunks_in_parts(lab: Uploads) -> None:
    """zarr-python uploads each large chunk in parts, and the stored shards have its values."""
    name, before = lab.lab.new_array(LARGE_CHUNKS), lab.completed()
    arrays = [zarr.open_array(over_obstore(each.url, name), mode="r+") for each in lab.gateways]
    values = np.random.default_rng(2).integers(1, 2**60, arrays[0].shape, dtype="uint64")
    length = len(values) // 2
    for at in range(2):
        chunk = slice(at * length, (at + 1) * length)
        arrays[at][chunk] = values[chunk]

    assert arrays[0].chunks == (length,)
    stored = lab.lab.open(name)
    assert stored.shards == (2 * length,)
    assert np.array_equal(np.asarray(stored[:]), values)
    assert np.array_equal(np.asarray(arrays[0][:]), values)
    assert (lab.completed() - before, lab.parts()) == (2, [])


def test_upload_of_a_killed_gateway_is_completed_by_another(lab: Uploads) -> None:
    """An upload whose gateway is killed is completed by another one."""
    upload = {"Bucket": "data", "Key": "cut"}
    with forked(of_dataset(lab.lab.url, lab.lab.seaweedfs)) as third:
        s3 = open_boto3(third.url)
        upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
        etag = s3.upload_part(**upload, PartNumber=1, Body=b"kept")["ETag"]
        third.kill()
        with suppress(Exception):
            part_of(s3, upload, etag)

    part_of(lab.boto3(0), upload, etag)

    assert read_object(lab.boto3(1), "cut") == b"kept"
    assert lab.parts() == []


VALUES: Final = counted((16, 16), "u2")
KEYS: Final = {f"array/c/{y}/{x}" for y in range(8) for x in range(8)}


@pytest.fixture
def taker(tmp_path: Path) -> Generator[Taker]:
    """Serve a folder with a sharded array, and an empty one of the same shape."""
    for name, values in (("array", VALUES), ("copy", np.zeros_like(VALUES))):
        zarr.create_array(tmp_path / name, data=values, shards=(8, 8), chunks=(2, 2))
    with taking_into_folder(tmp_path) as taker:
        yield taker


@pytest.fixture
def s3(taker: Taker) -> Any:
    """Open boto3's client."""
    return open_boto3(taker.url)


def test_delete_objects_removes_inner_chunks_and_empty_shards(s3: Any, taker: Taker) -> None:
    """One DeleteObjects request deletes inner chunks of four shards, and shards without chunks."""
    gone = [f"array/c/{y}/{x}" for y in range(8) for x in range(8) if y < 4 or x % 2]
    told = s3.delete_objects(
        Bucket="data", Delete={"Objects": [{"Key": key} for key in gone], "Quiet": True}
    )
    expected = VALUES.copy()
    expected[:8] = 0
    expected[:, [x for x in range(16) if x // 2 % 2]] = 0

    assert "Errors" not in told
    assert set(listed_keys(taker.client, "data", "array/c/")) == KEYS - set(gone)
    assert taker.stored("array") == {"c/1/0", "c/1/1"}
    same(zarr.open_array(taker.folder / "array", mode="r")[...], expected)


@pytest.mark.parametrize("client", ["aws", "rclone", "s5cmd"])
def test_second_mirror_run_transfers_nothing(client: str, taker: Taker, tmp_path: Path) -> None:
    """A second run of the AWS CLI, rclone or s5cmd transfers nothing, down or up."""
    down, copy = tmp_path / "down", taker.folder / "copy"
    down.mkdir()
    for source, target in (("data/array", down), (down, "data/copy")):
        states = []
        for _ in range(2):
            mirror(client, taker.url, source, target)
            states.append([*state(down), *state(copy)])
        assert states[0] == states[1]
        for path in down.rglob("*"):
            os.utime(path, (0, 0))  # what is uploaded is newer: stores have times in seconds

    assert zarr.open_array(copy, mode="r").shards == (8, 8)
    for folder in (down, copy):
        same(np.asarray(zarr.open_array(folder, mode="r")[...]), VALUES)


def mirror(client: str, url: str, source: str | Path, target: str | Path) -> None:
    """Run *client* from *source* to *target*, of which a string names a bucket and prefix."""
    command = {
        "aws": [need("aws"), "--endpoint-url", url, "s3", "sync"],
        # By default, rclone keeps times in metadata, which inner chunks do not have.
        "rclone": [need("rclone"), "sync", "--update", "--use-server-modtime"],
        "s5cmd": [str(Path(sys.executable).with_name("s5cmd")), "--endpoint-url", url, "sync"],
    }[client]
    bucket = (
        f":s3,provider=Other,env_auth=true,endpoint='{url}':" if client == "rclone" else "s3://"
    )
    for place in (source, target):
        text = f"{place}/" if isinstance(place, Path) else f"{bucket}{place}/"
        command.append(f"{text}*" if client == "s5cmd" and place == "data/array" else text)
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    told = environ(AWS_REGION="us-east-1", AWS_DEFAULT_REGION="us-east-1", **keys)
    subprocess.run(command, env=told, check=True, capture_output=True, timeout=60)


def state(folder: Path) -> list[tuple[Path, int, int]]:
    """Return path, inode and time of each file below *folder*."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
