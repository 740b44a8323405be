"""Chunk files are looked up before a commit, among very many others."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.concurrency import yield_to_loop
from app.formats.icechunk.ids import encode_id
from app.model import ObjectRef
from app.resolve.icechunk.commit_files import ChunkFiles
from app.storage.contract import Listed
from app.storage.local import LocalStore
from tests.resolve.icechunk.replicas import Replica
from tests.writable_repositories import new_place


class CrowdedStore(LocalStore):
    """Lists other chunk files first, without end if *crowd* is `None`."""

    def __init__(self, crowd: int | None) -> None:
        super().__init__()
        self.crowd = crowd

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """Make names up."""
        others = 0
        while self.crowd is None or others < self.crowd:
            others += 1
            name = prefix.key + encode_id(secrets.token_bytes(12))[1:]
            yield Listed(ObjectRef(prefix.bucket, name), 1)
            await yield_to_loop(others)
        async for each in super().list(prefix, delimiter=delimiter, after=after):
            yield each


@pytest.mark.parametrize("crowd", [0, 2000, None])
@pytest.mark.parametrize("count", [3, 1000])
async def test_chunk_files_are_found_however_many_there_are(
    tmp_path: Path, crowd: int | None, count: int
) -> None:
    """Missing files are left out; an endless listing is given up."""
    store = CrowdedStore(crowd)
    place = new_place(tmp_path)
    place.create()
    directory = ObjectRef(place.folder.as_uri(), "")
    opened = (await Replica.of(store, directory=directory)).opened
    ids = [secrets.token_bytes(12) for _ in range(count)]
    (place.folder / "chunks").mkdir()
    for number, chunk_id in enumerate(ids[1:], 1):
        (place.folder / "chunks" / encode_id(chunk_id)).write_bytes(bytes(number))

    info = await opened.info()
    assert info is not None

    async with asyncio.timeout(20):
        found = await ChunkFiles(store).lengths(opened, info, dict.fromkeys(ids, 1))

    assert found == {chunk_id: number for number, chunk_id in enumerate(ids[1:], 1)}
