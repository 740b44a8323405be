"""Creates files where there are none, several at a time, so that they share what is waited for.

A new file has no name until it is whole and durable, and gets one only if nobody else has it. The
names in a folder are made durable once for all files that are made there together.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

from app.errors import BadKeyError, ShardgateError
from app.model import ETag, ObjectRef
from app.storage.contract import Absent
from app.storage.directories import Directory, make_folders
from app.storage.local_names import folder_of, name_of, translated_write
from app.storage.temporary_files import UnnamedFile
from app.storage.warm_files import file_version


class New(NamedTuple):
    """A file that is wanted."""

    ref: ObjectRef
    pieces: Sequence[bytes]
    expected: Absent | None


type Created = ETag | ShardgateError | None
"""The version of a file, why it was not made, or `None` where another way has to be taken."""


def create_each(wanted: Sequence[New], prepare: Callable[[Directory], None]) -> list[Created]:
    """Create *wanted*, in folders that *prepare* is called with; what is given is durable.

    `None` is given of names that something has, be it a link, and where the file system knows no
    files without names.
    """
    with ExitStack() as stack:
        folders = _Folders(stack, prepare)
        files = [_File(each) for each in wanted]
        for file in files:
            file.attempt(partial(file.begin, folders, stack))
        for step in _File.flush, _File.link, _File.settle:
            for file in files:
                file.attempt(partial(step, file))
        return [file.created for file in files]


class _Folder:
    """An open folder, whose names are made durable when the first of them has to be."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._is_synced = False
        self._failure: OSError | None = None

    def sync(self) -> None:
        """Make the names durable; the system tells once if that has failed, but for all of them."""
        if not self._is_synced:
            self._is_synced = True
            try:
                self.directory.sync()
            except OSError as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure


class _Folders:
    """The folders that files are made in, each opened once."""

    def __init__(self, stack: ExitStack, prepare: Callable[[Directory], None]) -> None:
        self._stack = stack
        self._prepare = prepare
        self._opened: dict[bytes, _Folder] = {}

    def open(self, root: bytes, path: bytes) -> _Folder:
        """Open the folder *path* below *root*, which is made if need be."""
        whole = root + b"/" + path if path else root
        if (known := self._opened.get(whole)) is not None:
            return known
        try:
            directory = self._stack.enter_context(Directory.opened(whole or b"/"))
        except FileNotFoundError:
            make_folders(root, path.split(b"/") if path else [])
            directory = self._stack.enter_context(Directory.opened(whole or b"/"))
        self._prepare(directory)
        opened = self._opened[whole] = _Folder(directory)
        return opened


class _File:
    """A file on its way to its name."""

    def __init__(self, wanted: New) -> None:
        self.created: Created = None
        self._wanted = wanted
        self._name = b""
        self._folder: _Folder | None = None
        self._file: UnnamedFile | None = None

    def attempt(self, step: Callable[[], None]) -> None:
        """Take *step*, unless one before it has failed."""
        if self.created is None:
            try:
                with translated_write(self._wanted.ref):
                    step()
            except ShardgateError as error:
                self.created = error

    def begin(self, folders: _Folders, stack: ExitStack) -> None:
        """Write the bytes, unless it is known that something has the name."""
        ref, pieces, expected = self._wanted
        if not (path := name_of(ref.key)):
            raise BadKeyError(f"{ref.key!r} can be the name of no file")
        above, _, self._name = path.rpartition(b"/")
        with suppress(FileNotFoundError):  # the folder was empty, and another process removed it
            self._folder = folders.open(folder_of(ref.bucket), above)
            if expected is None and self._folder.directory.has(self._name):
                return
            self._file = stack.enter_context(UnnamedFile.made(self._folder.directory))
        if self._file is not None:
            self._file.write(pieces)
            self._file.date(None)

    def flush(self) -> None:
        """Make the bytes durable."""
        if self._file is not None:
            os.fsync(self._file.fd)

    def link(self) -> None:
        """Take the name."""
        if self._file is not None and not self._file.link(self._name):
            self._file = None

    def settle(self) -> None:
        """Make the name durable, and tell the version."""
        if self._file is not None and self._folder is not None:
            self._folder.sync()
            self.created = file_version(self._file.status())
