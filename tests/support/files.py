"""Files as objects of a store."""

from collections.abc import Mapping
from pathlib import Path


def write_files(objects: Mapping[str, bytes], folder: Path) -> None:
    """Write *objects* into *folder*."""
    for key, data in objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)


def read_files(folder: Path) -> dict[str, bytes]:
    """Read all files below *folder*, by their paths relative to it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
