"""Small example datasets of every supported format, generated, and written by public libraries."""

import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from shardgate.configuration import RootOptions
from shardgate.demo.tissue import tissue
from shardgate.errors import ConfigurationError, install_command

# The datasets, and the names of their folders and files.
ROOTS: Final = {
    "cells": "cells.precomputed",
    "film": "film.zarr",
    "history": "history.icechunk",
    "image": "image.zarr",
    "nested": "nested.zarr",
    "weather": "weather.json",
}
FIELD: Final = "weather.nc"  # the file that the reference set leads to
TAG: Final = "landfall"  # a state of the repository, beside those of its branches
BRANCHES: Final = ("forecast", "main")


def write(folder: Path, url: str | None = None) -> dict[str, Path]:
    """Write the examples below *folder*, unless they exist, and return their roots by name.

    References lead to the field at *url*, or to where it is now: the folder may have been moved.
    Raises: `ConfigurationError` if the extra is missing, or *folder* cannot be written.
    """
    url = url or (folder / FIELD).absolute().as_uri()
    references = folder / ROOTS["weather"]
    try:
        if references.exists() and json.dumps(url) not in references.read_text():
            references.unlink()
        from shardgate.demo import earth, microscopy, precomputed  # noqa: PLC0415 - of an extra

        writers: dict[str, Callable[[Path], None]] = {
            ROOTS["cells"]: precomputed.write,
            ROOTS["image"]: microscopy.write_image,
            ROOTS["nested"]: microscopy.write_nested,
            ROOTS["film"]: microscopy.write_film,
            ROOTS["history"]: partial(earth.write_history, tag=TAG, forecast=BRANCHES[0]),
            FIELD: earth.write_field,
            ROOTS["weather"]: partial(earth.write_set, field=folder / FIELD, url=url),
        }
        for name, put in writers.items():
            _write_once(folder / name, put)
    except ImportError as error:
        raise ConfigurationError(
            f"the demo needs {error.name}: {install_command('demo')} in the checkout"
        ) from error
    except Exception as error:  # each library has errors of its own for a full disk
        raise ConfigurationError(f"cannot write to {folder}: {error}") from error
    finally:
        tissue.cache_clear()  # 50 MB
    return {name: folder / root for name, root in ROOTS.items()}


def options(folder: Path) -> RootOptions:
    """Return options to serve the roots in *folder*: references lead to files in it."""
    return RootOptions((f"{folder.absolute().as_uri()}/",))


def guide(base: str) -> str:
    """Return instructions for the examples that are served at *base*."""
    chunk = f"{base}/image/s0/c/2/3/4"
    viewer = f"{base}/api/datasets/{{}}/viewer"
    states = [f"@tag.{TAG}", *(f"@branch.{branch}" for branch in BRANCHES)]
    lines = [
        "Open these in a browser. The first lists the examples, each of the others shows one:",
        f"  {base}/",
        *(f"  {base}/{name}/" for name in ROOTS),
        "",
        "One inner chunk of a shard is an object of its own:",
        f"  curl -sSD - -o /dev/null {chunk}",
        "The array, as if it were not sharded:",
        f"  {_show(f'{base}/image/s0', '80, 128, ::32')}",
        "Neurites in 3-d, over the image of an electron microscope:",
        f"  {viewer.format('cells')}",
        "Dividing cells, filmed in two colours:",
        f"  {viewer.format('film')}",
        "A field in a NetCDF file, which stays as it is:",
        f"  {_show(f'{base}/weather/t2m', ':4, 20, 90')}",
        "",
        "A repository keeps its past: a storm at the coast, then as expected, and as it came:",
        *(f"  {base}/history/{state}/" for state in states),
        *(f"  curl -sSD - -o /dev/null {base}/history/{state}/s0/c/2/4" for state in states),
        *(f"  {_show(f'{base}/history/{state}/s0', '160, ::64')}" for state in states),
        *(f"  {viewer.format('history')}?path={state}" for state in states),
        "",
        "Ctrl+C stops.",
    ]
    return "\n".join(lines)


def _show(url: str, at: str) -> str:
    """Return a shell command that prints elements *at* an index of the array at *url*."""
    script = f'import zarr; print(zarr.open_array("{url}", mode="r")[{at}])'
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(script)}"


def _write_once(path: Path, put: Callable[[Path], None]) -> None:
    """Call *put* on a path in a temporary folder and rename that, so that *path* is complete."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        put(beside / path.name)
        (beside / path.name).rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
