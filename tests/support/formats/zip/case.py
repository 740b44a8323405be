"""Zarr arrays in archives for the conformance suite."""

from collections.abc import Mapping
from functools import partial

from tests.support.formats.case import Case
from tests.support.formats.zarr.building import build, chunk_bytes
from tests.support.formats.zip.archives import Entry, archive

NAME = "scan.ozx"


def _build(chunks: Mapping[str, bytes], method: int) -> dict[str, bytes]:
    """Return an archive of a sharded array, and of an entry on its own."""
    inside = {key.removeprefix(f"{NAME}/"): data for key, data in chunks.items()}
    array = {key[6:]: data for key, data in inside.items() if key.startswith("array/")}
    files = {f"array/{key}": data for key, data in build(array).items()}
    files |= {key: data for key, data in inside.items() if not key.startswith("array/")}
    entries = [Entry(key.encode(), data, method) for key, data in files.items()]
    return {NAME: archive(*entries, comment=b"note")}


def _case(name: str, method: int) -> Case:
    keys = ["array/c/0/0", "array/c/0/1", "array/c/2/3", "notes/read me.txt"]
    return Case(
        f"archive-{name}",
        partial(_build, method=method),
        {f"{NAME}/{key}": chunk_bytes(number) for number, key in enumerate(keys)},
        absent=(f"{NAME}/array/c/1/1", f"{NAME}/array/c/3/0", f"{NAME}/notes", f"{NAME}/other"),
        checksummed=False,
        has_shards=False,
    )


CASES = (_case("stored", 0), _case("deflated", 8))
