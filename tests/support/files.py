"""Files that stand for objects of a store."""

from collections.abc import Mapping
from pathlib import Path


def write_files(objects: Mapping[str, bytes], folder: Path) -> None:
    """Put *objects* into *folder*."""
    for key, data in objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
