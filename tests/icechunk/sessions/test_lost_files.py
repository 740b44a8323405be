"""Commits of sessions whose chunk files garbage collection may have removed."""

import json
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any, Final

import pytest

from shardgate.errors import ConflictError
from shardgate.model import ObjectRef
from shardgate.storage.contract import Listed
from tests.support.clocks import Clock
from tests.support.icechunk.sessions.replicas import (
    ROOT,
    Counting,
    Replica,
    stored,
)
from tests.support.sessions import array_document

HOUR_S: Final = 3600
CHUNK: Final = b"\x09" * 600
"""Large enough for a file of its own."""


class Timeless(Counting):
    """A store that lists no times."""

    async def list(self, prefix: ObjectRef, **options: Any) -> AsyncGenerator[Listed]:
        """List keys."""
        async for each in self._store.list(prefix, **options):
            yield replace(each, modified_s=None)


class Lab:
    """A session that has written the chunks 0, 1 and 2 of ``a``, at a time that tests set."""

    def __init__(self, files: Mapping[str, bytes], kind: type[Counting] = Counting) -> None:
        self.clock = Clock(time.time())
        self.memory = stored(files, self.clock)
        self.store = kind(self.memory)

    async def begin(self) -> str:
        """Begin the session."""
        self.replica = await Replica.of(self.store, self.clock)
        session_id = await self.replica.begin()
        for at in range(3):
            await self.write(session_id, at)
        return session_id

    async def write(self, session_id: str, at: int) -> None:
        """Write a chunk."""
        await self.replica.write(session_id, f"a/c/{at}", CHUNK)

    @property
    def looked_up(self) -> int:
        """Number of chunk files that were looked up."""
        return self.store.calls["get", "chunks"] + self.store.calls["stat", "chunks"]

    async def collect(self) -> list[str]:
        """Delete all chunk files, and return their names."""
        found = [each.ref async for each in self.memory.list(ROOT.join("chunks/"))]
        for file in found:
            await self.memory.delete(file, expected=None)
        return [file.key for file in found]


async def test_commit_looks_up_no_chunk_file_of_the_last_hour(files: Mapping[str, bytes]) -> None:
    """A commit looks up the chunk files that are older than an hour, and no others."""
    lab = Lab(files)
    session_id = await lab.begin()
    lab.clock.now += HOUR_S + 1
    await lab.write(session_id, 1)

    await lab.replica.commit(session_id)
    assert lab.looked_up == 2


async def test_chunk_files_of_unknown_age_are_looked_up(files: Mapping[str, bytes]) -> None:
    """A commit looks up all chunk files on a store that lists no times."""
    lab = Lab(files, Timeless)
    session_id = await lab.begin()

    await lab.replica.commit(session_id)
    assert lab.looked_up == 3


async def test_commit_of_lost_chunk_files_is_refused_until_they_are_written_again(
    files: Mapping[str, bytes],
) -> None:
    """A commit of lost chunk files fails and names them; it succeeds after their chunks were
    written again.
    """
    lab = Lab(files)
    session_id = await lab.begin()
    lab.clock.now += HOUR_S + 1
    names = await lab.collect()

    with pytest.raises(ConflictError, match=r"/a: garbage .*write these chunks again") as refused:
        await lab.replica.commit(session_id)
    assert all(name in str(refused.value) for name in names)

    for at in range(3):
        await lab.write(session_id, at)
    await lab.replica.commit(session_id)
    read = await lab.replica.contents(session_id)
    assert [read[f"a/c/{at}"] for at in range(3)] == [CHUNK] * 3


async def test_commit_of_a_lost_shard_asks_for_another_session(files: Mapping[str, bytes]) -> None:
    """A commit of a lost shard asks for another session, as chunks are written into a shard whose
    index can be read.
    """
    lab = Lab(files)
    session_id = await lab.begin()
    inner = {"chunk_shape": [1], "codecs": [{"name": "bytes"}], "index_codecs": [{"name": "bytes"}]}
    codecs = [{"name": "sharding_indexed", "configuration": inner}]
    document = json.dumps(array_document((6,), (2,), codecs=codecs)).encode()
    await lab.replica.write(session_id, "a/zarr.json", document)
    lab.clock.now += HOUR_S + 1
    await lab.collect()

    with pytest.raises(ConflictError, match="write the chunks of these shards in another session"):
        await lab.replica.commit(session_id)
