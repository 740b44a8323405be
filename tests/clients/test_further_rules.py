"""What real clients need besides the rules: clamped ranges, whole metadata, many connections."""

import asyncio
import json
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.clients.arrays import VALUES
from tests.clients.asking import ARRAY, KINDS, ask
from tests.clients.conftest import IN_GROUPS
from tests.clients.writing import Json

RANGES: Final[dict[str, tuple[slice, int]]] = {
    "bytes=0-3": (slice(0, 4), 206),
    "bytes=4-": (slice(4, None), 206),
    "bytes=-7": (slice(-7, None), 206),
    "bytes=3-9999999": (slice(3, None), 206),
    "bytes=-9999999": (slice(None), 206),
    "bytes=0-1,4-5": (slice(None), 200),
}


@pytest.mark.parametrize("asked", RANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_range_is_clamped_to_the_body(client: httpx.Client, kind: str, asked: str) -> None:
    """Viv asks past the end of a shard, and wants what is there."""
    whole = ask(client, KINDS[kind]).content
    part, status = RANGES[asked]

    answer = ask(client, KINDS[kind], Range=asked)

    assert (answer.status_code, answer.content) == (status, whole[part])
    if status == 206:
        start, stop, _ = part.indices(len(whole))
        assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(whole)}"


@pytest.mark.parametrize("asked", ["bytes=9999999-", "bytes=-0"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_range_behind_the_body_is_416(client: httpx.Client, kind: str, asked: str) -> None:
    """Nothing can be given, and Content-Range tells the length."""
    length = len(ask(client, KINDS[kind]).content)

    answer = ask(client, KINDS[kind], Range=asked)

    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{length}"


@pytest.mark.parametrize("name", [c.name for c in IN_GROUPS if not c.name.startswith("plain/")])
def test_other_members_of_the_metadata_are_untouched(
    client: httpx.Client, bucket: Path, name: str
) -> None:
    """Only grid and codecs of an array are rewritten."""
    stored = json.loads((bucket / name / "zarr.json").read_text())
    served: Json = ask(client, f"/bucket/{name}/zarr.json").json()

    for document in (stored, served):
        del document["chunk_grid"], document["codecs"]
    assert served == stored


@pytest.mark.parametrize("name", ["after/gzip", "after/zstd", "after/crc_then_zstd", "plain/v3"])
def test_what_cannot_be_unsharded_is_served_as_it_is(
    client: httpx.Client, bucket: Path, name: str
) -> None:
    """Metadata and objects are the stored ones, byte for byte."""
    for file in (bucket / name).rglob("*"):
        if file.is_file():
            path = f"/bucket/{file.relative_to(bucket).as_posix()}"
            assert ask(client, path).content == file.read_bytes()


def test_many_connections_at_once(local: str) -> None:
    """A page of zarrita opens 120 connections at the same moment, and none is reset."""
    host, port = httpx.URL(local).host, httpx.URL(local).port

    async def one(number: int) -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        path = f"{ARRAY}/c/{number % 3}/{number % 2}/{number % 3}"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def all_of_them() -> list[bytes]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(120)]
        return [task.result() for task in tasks]

    answers = asyncio.run(all_of_them())

    assert {answer.partition(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 200 OK"}
    first = answers[0].partition(b"\r\n\r\n")[2]
    assert first == VALUES[:2, :3, :4].astype("<u2").tobytes()
