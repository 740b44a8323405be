"""Programs that treat inner chunks as the objects of a bucket: list, copy, delete, mirror."""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import zarr

from tests.clients.filling import open_boto3
from tests.clients.taking import Taker, taking_into_folder
from tests.clients.writing import counted, same
from tests.http.auth.test_signing_clients import program

VALUES: Final = counted((16, 16), "u2")
KEYS: Final = sorted(f"array/c/{y}/{x}" for y in range(8) for x in range(8))


@pytest.fixture
def taker(tmp_path: Path) -> Generator[Taker]:
    """Take data sets into a folder, in which a sharded array is stored, and an empty one."""
    for name in ("array", "copy"):
        array = zarr.create_array(
            tmp_path / name, shape=(16, 16), shards=(8, 8), chunks=(2, 2), dtype="u2"
        )
        if name == "array":
            array[...] = VALUES
    with taking_into_folder(tmp_path) as taker:
        yield taker


@pytest.fixture
def s3(taker: Taker) -> Any:
    """Open boto3's client."""
    return open_boto3(taker.url)


def listed(s3: Any, prefix: str) -> dict[str, Any]:
    """Find all keys below *prefix*, a page at a time, and what is told of each."""
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket="data", Prefix=prefix, PaginationConfig={"PageSize": 20}
    )
    return {each["Key"]: each for page in pages for each in page.get("Contents", ())}


def test_many_inner_chunks_are_deleted(s3: Any, taker: Taker) -> None:
    """In one request, from all four shards; the last ones of a shard take it away."""
    gone = [f"array/c/{y}/{x}" for y in range(8) for x in range(8) if y < 4 or x % 2]
    told = s3.delete_objects(
        Bucket="data", Delete={"Objects": [{"Key": key} for key in gone], "Quiet": True}
    )
    expected = VALUES.copy()
    expected[:8] = 0
    expected[:, [x for x in range(16) if x // 2 % 2]] = 0

    assert "Errors" not in told
    assert sorted(listed(s3, "array/c/")) == sorted(set(KEYS) - set(gone))
    assert taker.stored("array") == {"c/1/0", "c/1/1"}
    same(zarr.open_array(taker.folder / "array", mode="r")[...], expected)


@pytest.mark.parametrize("client", ["aws", "rclone", "s5cmd"])
def test_a_second_run_moves_nothing(client: str, taker: Taker, tmp_path: Path) -> None:
    """Programs mirror an array into a folder, and that into another array, in one run each."""
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
    """Run *client*; what is no path begins with the name of a bucket."""
    command = {
        "aws": [program("aws"), "--endpoint-url", url, "s3", "sync"],
        # It keeps times in metadata otherwise, which inner chunks have none of.
        "rclone": [program("rclone"), "sync", "--update", "--use-server-modtime"],
        "s5cmd": [str(Path(sys.executable).with_name("s5cmd")), "--endpoint-url", url, "sync"],
    }[client]
    bucket = (
        f":s3,provider=Other,env_auth=true,endpoint='{url}':" if client == "rclone" else "s3://"
    )
    for place in (source, target):
        text = f"{place}/" if isinstance(place, Path) else f"{bucket}{place}/"
        command.append(f"{text}*" if client == "s5cmd" and place == "data/array" else text)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    environ |= {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=60)


def state(folder: Path) -> list[tuple[Path, int, int]]:
    """Tell apart the files below *folder*: one that was written again is another."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
