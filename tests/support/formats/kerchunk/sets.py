"""Reference sets by the real writers, read by the format and by fsspec."""

import json
import warnings
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
from kerchunk.df import refs_to_dataframe
from kerchunk.hdf import SingleHdf5ToZarr

from shardgate.formats.kerchunk.layout import Kerchunk
from shardgate.formats.references import allow
from shardgate.read.metadata_cache import uncached_reads
from shardgate.settings import LimitSettings
from shardgate.storage.stores import Stores
from tests.support.formats.members import Opened

LIMIT_NBYTES = 2**24


def write_hdf5(path: Path) -> None:
    """Write arrays with chunks, without, of no dimension, empty, and partly filled."""
    with h5py.File(path, "w") as file:
        values = np.arange(600, dtype="f4").reshape(20, 30)
        file.create_dataset("t", data=values, chunks=(5, 10), compression="gzip")
        file.create_dataset("c", data=np.arange(7))
        file.create_dataset("s", data=3.5)
        file.create_dataset("e", shape=(0, 4), chunks=(1, 4), maxshape=(None, 4), dtype="i4")
        partly = file.create_group("g").create_dataset("u", (400,), "i2", chunks=(10,), fillvalue=9)
        partly[10:20] = np.arange(10)
        partly[110:120] = np.arange(10)


def kerchunk_of(path: Path, *, inline_nbytes: int = 0) -> dict[str, Any]:
    """Return the references of an HDF5 file; chunks of up to *inline_nbytes* are in the set."""
    refs: dict[str, Any] = SingleHdf5ToZarr(str(path), inline_threshold=inline_nbytes).translate()
    return refs


def write_json(path: Path, refs: Mapping[str, Any]) -> None:
    """Write a set in JSON."""
    path.write_text(json.dumps(refs))


def write_parquet(path: Path, refs: Mapping[str, Any], record_size: int = 5) -> None:
    """Write a set in Parquet by kerchunk, and so by pandas and fastparquet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas would rather use another library
        refs_to_dataframe(dict(refs), str(path), record_size=record_size)


def fsspec_of(path: Path, **options: Any) -> Any:
    """Open a set with fsspec."""
    return fsspec.filesystem("reference", fo=str(path), **options)


def read_by_fsspec(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the bytes that fsspec reads by *names* from a set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        peer = fsspec_of(path, remote_protocol="file")  # else it fails for groups in Parquet
        return {name: peer.cat_file(name) for name in names}


@asynccontextmanager
async def opening(
    path: Path, *, limit_nbytes: int = LIMIT_NBYTES, buckets: Mapping[str, Path] | None = None
) -> AsyncGenerator[Opened]:
    """Open the set at *path*, which may refer to files beside it, and to those in the folders that
    stand for *buckets*.
    """
    async with Stores(LimitSettings()) as stores:
        beside = f"file://{path.parent}"
        prefixes = {beside: beside} | {url: f"file://{at}" for url, at in (buckets or {}).items()}
        allowed = tuple(allow(url, stores.open_prefix(at)) for url, at in prefixes.items())
        fetch = uncached_reads(stores)
        layout = await Kerchunk(limit_nbytes, limit_nbytes, allowed).open(
            stores.open_root(beside).join(path.name), fetch
        )
        assert layout is not None
        yield Opened(layout, stores, fetch)
