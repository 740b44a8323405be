"""Opens files below a folder and nowhere else, wherever links lead meanwhile."""

import errno
import os
import stat
from typing import Final

_TRIES: Final = 3
_FOLDER: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


def open_beneath(folder: bytes, name: bytes) -> int:
    """Open the file *name* of *folder*, which may be reached through links that stay inside.

    Links are resolved first, and what they lead to is opened step by step without following any,
    so that one that is swapped in between is noticed. *folder* itself may be a link. What is no
    regular file is never opened.

    Raises: `PermissionError` where a link leads out, and `OSError`.
    """
    for _ in range(_TRIES):
        root = os.path.realpath(folder)
        found = os.path.realpath(root + b"/" + name)
        if os.path.commonpath([root, found]) != root:
            raise PermissionError(errno.EACCES, "a link leads out of the folder")
        try:
            return _open(root, os.path.relpath(found, root).split(b"/"))
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
    raise PermissionError(errno.EACCES, "a link moves, or leads in a circle")


def _open(root: bytes, segments: list[bytes]) -> int:
    folder = os.open(root, _FOLDER)
    try:
        for segment in segments[:-1]:
            outer, folder = folder, _open_folder(folder, segment)
            os.close(outer)
        if not stat.S_ISREG(_kind(folder, segments[-1])):
            raise OSError(errno.ENXIO, "no regular file")
        return os.open(segments[-1], _FLAGS, dir_fd=folder)
    finally:
        os.close(folder)


def _open_folder(folder: int, segment: bytes) -> int:
    if not stat.S_ISDIR(_kind(folder, segment)):
        raise NotADirectoryError(errno.ENOTDIR, "no folder")
    try:
        return os.open(segment, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError:  # it was one a moment ago
        raise OSError(errno.ELOOP, "a link") from None


def _kind(folder: int, segment: bytes) -> int:
    mode = os.stat(segment, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "a link")
    return mode
