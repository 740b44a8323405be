"""Files as objects of a store."""

from collections.abc import Mapping
from pathlib import Path


def write_files(objects: Mapping[str, bytes], folder: Path) -> None:
    """Write *objects* into *folder*."""
    for key, data in objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
