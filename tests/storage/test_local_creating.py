"""New files, made several at a time."""

import asyncio
import errno
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from app.errors import BadKeyError, ConflictError, ShardgateError, StorageUnavailableError
from app.model import ObjectRef
from app.storage.contract import ABSENT, CONFLICT
from app.storage.directories import Directory
from app.storage.local import LocalStore
from app.storage.local_creating import New, create_each


def let_be(_: Directory) -> None:
    """Do nothing to a folder."""


def new(folder: Path, key: str, data: bytes = b"new") -> New:
    """Want a file in *folder*, whatever was there."""
    return New(ObjectRef(folder.as_uri(), key), [data], None)


def test_each_folder_is_opened_once(tmp_path: Path) -> None:
    """Files of one folder share it, whichever others are made in between."""
    opened: list[str] = []

    create_each(
        [new(tmp_path, key) for key in ("a/0", "b/0", "0", "a/1", "b/c/0", "1")],
        lambda directory: opened.append(os.fsdecode(directory.path)),
    )

    assert opened == [str(tmp_path / name) for name in ("a", "b", "", "b/c")]


def test_nothing_has_a_name_before_it_is_durable(tmp_path: Path) -> None:
    """The bytes of all are made durable before the first has its name, and then each folder."""
    keys = ("a/0", "b/0", "a/1")
    for key in ("a", "b"):
        (tmp_path / key).mkdir()
    calls: list[str] = []

    def note(_: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function in (os.writev, os.fsync, os.link):
            calls.append(function.__name__)

    sys.setprofile(note)
    try:
        create_each([new(tmp_path, key) for key in keys], let_be)
    finally:
        sys.setprofile(None)

    assert calls == ["writev"] * 3 + ["fsync"] * 3 + ["link"] * 3 + ["fsync"] * 2


def test_many_pieces_are_written_at_once(tmp_path: Path) -> None:
    """Pieces of any number and size come out in order."""
    pieces = [bytes([number % 251]) * (number % 70) for number in range(5000)]

    [made] = create_each([new(tmp_path, "a")._replace(pieces=pieces)], let_be)

    assert isinstance(made, str)
    assert (tmp_path / "a").read_bytes() == b"".join(pieces)


def test_what_has_a_name_is_let_be(tmp_path: Path) -> None:
    """A file, a folder, and a link that leads nowhere are left to another way; others are made."""
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    names = ["file", "folder", "link", "free"]

    for expected in (None, ABSENT):
        wanted = [new(tmp_path, name)._replace(expected=expected) for name in names]
        *made, free = create_each(wanted, let_be)
        assert made == [None, None, None]
        assert isinstance(free, str)
        (tmp_path / "free").unlink()

    assert (tmp_path / "file").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link"]  # noqa: PTH208


def test_one_name_is_given_once(tmp_path: Path) -> None:
    """Of two that are made together under one name the first has it."""
    first, second = create_each([new(tmp_path, "a", b"1"), new(tmp_path, "a", b"2")], let_be)

    assert isinstance(first, str)
    assert second is None
    assert (tmp_path / "a").read_bytes() == b"1"


def test_a_failure_is_that_of_one(tmp_path: Path) -> None:
    """What was made together with what cannot be made is whole."""
    (tmp_path / "file").write_bytes(b"old")
    keys = ["a", "n" * 256, "../b", "file/b", "c"]

    told = create_each([new(tmp_path, key) for key in keys], let_be)

    kinds = [type(each) for each in told]
    assert kinds == [str, BadKeyError, BadKeyError, ConflictError, str]
    assert [(tmp_path / name).read_bytes() for name in "ac"] == [b"new"] * 2
    assert sorted(os.listdir(tmp_path)) == ["a", "c", "file"]  # noqa: PTH208


def test_names_that_are_not_durable_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that fails, of which the system tells once, all of the folder are told, no others."""
    sync, failed = Directory.sync, list[bytes]()

    def sync_but_once(directory: Directory) -> None:
        if directory.path.endswith(b"/a") and not failed:
            failed.append(directory.path)
            raise OSError(errno.EIO, "lost")
        sync(directory)

    monkeypatch.setattr(Directory, "sync", sync_but_once)
    for name in "ab":
        (tmp_path / name).mkdir()

    told = create_each([new(tmp_path, key) for key in ("a/0", "b/0", "a/1")], let_be)

    kinds = [type(each) for each in told]
    assert kinds == [StorageUnavailableError, str, StorageUnavailableError]


async def test_many_at_once_are_all_made(tmp_path: Path) -> None:
    """Whatever is made together, each object gets its own bytes, version, and one winner."""
    store = LocalStore()
    refs = [ObjectRef(tmp_path.as_uri(), f"{number % 7}/{number}") for number in range(200)]

    async def put(ref: ObjectRef, text: str) -> object:
        return await store.put(ref, [ref.key.encode(), text.encode()], expected=ABSENT)

    puts = [put(ref, text) for ref in refs for text in ("first", "second")]
    told = await asyncio.gather(*puts)

    for number, ref in enumerate(refs):
        both = told[2 * number : 2 * number + 2]
        assert both.count(CONFLICT) == 1
        winner = ("first", "second")[both.index(CONFLICT) ^ 1]
        assert (tmp_path / ref.key).read_text() == ref.key + winner
        stat = await store.stat(ref)
        assert stat is not None
        assert stat.etag in both
    await store.aclose()


async def test_large_and_small_go_together(tmp_path: Path) -> None:
    """What is too large to share a call is written whole beside small ones."""
    store = LocalStore()
    bodies = [os.urandom(nbytes) for nbytes in (3 * 1024**2, 10, 2**20, 2**20 + 1, 0)]
    refs = [ObjectRef(tmp_path.as_uri(), str(number)) for number in range(len(bodies))]

    puts = (store.put(ref, [b], expected=None) for ref, b in zip(refs, bodies, strict=True))
    told = await asyncio.gather(*puts)

    assert not any(isinstance(each, ShardgateError) for each in told)
    assert [(tmp_path / ref.key).read_bytes() for ref in refs] == bodies
    await store.aclose()
