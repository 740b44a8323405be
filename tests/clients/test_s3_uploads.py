"""Clients of S3 upload in parts through two gateways that take turns; readers go to the store."""

import io
import itertools
import random
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import obstore
import pytest
import zarr
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError
from obstore.store import S3Store
from zarr.storage import ObjectStore

from tests.clients.filling import open_boto3, open_obstore
from tests.gateways import Gateway, forked, of_dataset
from tests.labs import Lab, Shape

SITES: Final = (pytest.param("folder", marks=pytest.mark.soak), "seaweedfs")
MIB: Final = 1024**2
PART: Final = 5 * MIB
DATA: Final = random.Random(1).randbytes(PART + 70_000)
LARGE_CHUNKS: Final = Shape(chunks=4, chunk_length=6 * MIB // 8, shards=2)
"""Each inner chunk is longer than 5 MiB."""


@dataclass
class Uploads:
    """A store, and two gateways before it."""

    lab: Lab
    gateways: Sequence[Gateway]

    def boto3(self, number: int) -> Any:
        """Open boto3's client of one gateway."""
        return open_boto3(self.gateways[number].url)

    def obstore(self, number: int) -> S3Store:
        """Open obstore's client of one gateway."""
        return open_obstore(self.gateways[number].url)

    def parts(self) -> list[str]:
        """Name the objects of uploads that are not completed."""
        return [name for name in self._hidden() if not name.endswith(".done")]

    def completed(self) -> int:
        """Count the uploads that were completed."""
        return len(self._hidden()) - len(self.parts())

    def _hidden(self) -> list[str]:
        """List the objects of uploads, completed or not."""
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
    """Start the gateways."""
    is_remote = request.param == "seaweedfs"
    seaweedfs = request.getfixturevalue("seaweedfs") if is_remote else None
    stored = Lab(tmp_path_factory.mktemp("uploads"), seaweedfs)
    environ = of_dataset(stored.url, seaweedfs, ttl_s=0.001)
    with ExitStack() as stack:
        yield Uploads(stored, [stack.enter_context(forked(environ)) for _ in range(2)])


def turns(lab: Uploads) -> Iterator[Any]:
    """Give the clients of both gateways in turns, for ever."""
    return itertools.cycle([lab.boto3(0), lab.boto3(1)])


def read(s3: Any, key: str) -> bytes | None:
    """Read what is there now."""
    try:
        body: bytes = s3.get_object(Bucket="data", Key=key)["Body"].read()
    except s3.exceptions.NoSuchKey:
        return None
    return body


def test_boto3_uploads_what_is_large(lab: Uploads) -> None:
    """In parts, several at a time, with its checksums; nothing of them is left."""
    before = lab.completed()
    config = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART)
    one = lab.boto3(0)

    one.upload_fileobj(io.BytesIO(DATA), "data", "large/boto3", Config=config)

    assert read(lab.boto3(1), "large/boto3") == DATA
    assert (lab.completed() - before, lab.parts()) == (1, [])


def test_boto3_copies_what_is_large(lab: Uploads) -> None:
    """An object, and a chunk into another array, a range of the source at a time."""
    config = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART)
    one, other = lab.boto3(0), lab.boto3(1)
    chunk = f"{lab.lab.new_array(LARGE_CHUNKS)}/c/1"
    one.put_object(Bucket="data", Key="large/source", Body=DATA)
    one.put_object(Bucket="data", Key=chunk, Body=bytes(6 * MIB - 1) + b"1")
    before = lab.completed()
    copies = {"large/source": "large/copy", chunk: f"{lab.lab.new_array(LARGE_CHUNKS)}/c/2"}
    for source, copy in copies.items():
        other.copy({"Bucket": "data", "Key": source}, "data", copy, Config=config)

    assert [read(one, copy) == read(one, source) for source, copy in copies.items()] == [True, True]
    assert (lab.completed() - before, lab.parts()) == (2, [])


def test_parts_go_to_both(lab: Uploads) -> None:
    """Out of order, one of them twice, to whichever gateway."""
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

    assert read(next(clients), "by hand/a+b") == DATA + b"tail"
    assert next(clients).head_object(Bucket="data", Key="by hand/a+b")["ETag"] == told["ETag"]
    assert lab.parts() == []


def test_an_upload_is_aborted_by_the_other(lab: Uploads) -> None:
    """Its parts are gone."""
    clients = turns(lab)
    upload = {"Bucket": "data", "Key": "aborted"}
    upload["UploadId"] = next(clients).create_multipart_upload(**upload)["UploadId"]
    next(clients).upload_part(**upload, PartNumber=1, Body=b"1")
    assert len(lab.parts()) == 2

    next(clients).abort_multipart_upload(**upload)

    assert lab.parts() == []
    with pytest.raises(ClientError) as caught:
        next(clients).upload_part(**upload, PartNumber=1, Body=b"1")
    assert caught.value.response["Error"]["Code"] == "NoSuchUpload"


def part_of(s3: Any, upload: dict[str, str], etag: str) -> None:
    """Complete with one part."""
    parts = [{"PartNumber": 1, "ETag": etag}]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})


def test_obstore_puts_what_is_large(lab: Uploads) -> None:
    """In parts, as it does without being told; the other gateway has it under the same ETag."""
    stores, before = [lab.obstore(0), lab.obstore(1)], lab.completed()

    told = obstore.put(stores[0], "large/obstore", DATA)

    assert bytes(obstore.get(stores[1], "large/obstore").bytes()) == DATA
    assert obstore.head(stores[1], "large/obstore")["e_tag"] == told["e_tag"]
    assert (lab.completed() - before, lab.parts()) == (1, [])


def test_zarr_python_writes_large_chunks(lab: Uploads) -> None:
    """Each in parts, into shards, in which who reads directly finds what was written."""
    name, before = lab.lab.new_array(LARGE_CHUNKS), lab.completed()
    arrays = [
        zarr.open_array(ObjectStore(lab.obstore(number)), path=name, mode="r+")
        for number in range(2)
    ]
    values = np.random.default_rng(2).integers(1, 2**60, arrays[0].shape, dtype="uint64")
    length = len(values) // 4
    for at in range(4):
        chunk = slice(at * length, (at + 1) * length)
        arrays[at % 2][chunk] = values[chunk]

    assert arrays[0].chunks == (length,)
    stored = lab.lab.open(name)
    assert stored.shards == (2 * length,)
    assert np.array_equal(np.asarray(stored[:]), values)
    assert np.array_equal(np.asarray(arrays[0][:]), values)
    assert (lab.completed() - before, lab.parts()) == (4, [])


def test_an_upload_goes_on_after_a_power_cut(lab: Uploads) -> None:
    """The other gateway has all that the first one had."""
    upload = {"Bucket": "data", "Key": "cut"}
    with forked(of_dataset(lab.lab.url, lab.lab.seaweedfs)) as third:
        s3 = open_boto3(third.url)
        upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
        etag = s3.upload_part(**upload, PartNumber=1, Body=b"kept")["ETag"]
        third.kill()
        with suppress(Exception):
            part_of(s3, upload, etag)

    part_of(lab.boto3(0), upload, etag)

    assert read(lab.boto3(1), "cut") == b"kept"
    assert lab.parts() == []
