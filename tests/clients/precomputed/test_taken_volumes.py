"""Chunks of volumes are put over HTTP; TensorStore and cloud-volume read the shards themselves."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from tests.clients.precomputed.cases import BY_NAME
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.test_cloudvolume import BEYOND, OWN_WAY
from tests.clients.precomputed.volumes import (
    LOSSY,
    Volume,
    read_cloudvolume,
    read_tensorstore,
)
from tests.clients.taking import Files, Taker, chunks_in, lay_out, mixed
from tests.clients.writing import Values, same

TABLE: Final = [name for name in BY_NAME if not name.startswith("older/")]
"""Shards in two objects are not rewritten."""
BY_CLOUDVOLUME: Final = [
    name
    for name in TABLE
    if name.startswith(("shards/", "encoding/", "cloudvolume/", "holes/"))
    and name not in (*BEYOND, *OWN_WAY, "holes/everything")
]
"""What cloud-volume reads, too; it is slow at it."""
LESS: Final = (
    "bits/",
    "dtype/",
    "cloudvolume/",
    "grid/one_axis",
    "plain/",
    "shards/murmurhash3",
)
FURTHER: Final = [
    name
    for name in TABLE
    if (name.startswith(LESS) and name != "cloudvolume/identity_index_raw_data_raw")
    or name.endswith(("_data_gzip", "_1_raw"))
    or (name.startswith("encoding/") and name.endswith("_gzip"))
]
"""Cases that differ from others only in ways that shards do not depend on, or that take long."""


def other_values(values: Values) -> Values:
    """Turn each axis round, so that other chunks are all zero."""
    return values[::-1, ::-1, ::-1].copy()


def check(volume: Volume, taker: Taker, twin: Path, *, exact: Volume | None = None) -> None:
    """Read each scale past the service, and compare it with the twin's and with *exact*."""
    url = f"file://{taker.folder / volume.name}"
    for index, scale in enumerate(volume.scales):
        found = read_tensorstore(f"{url}/", index)
        same(found, read_tensorstore(f"file://{twin}/", index))
        if exact is not None and scale.encoding not in LOSSY:
            same(found, exact.scales[index].values)
        if volume.name in BY_CLOUDVOLUME:
            same(read_cloudvolume(url, index), read_cloudvolume(f"file://{twin}", index))


def write_through(name: str, written: Written, taker: Taker, twin: Path) -> None:
    """Keep, replace and delete a third of the chunks each, put all anew, and delete them all."""
    volume = BY_NAME[name]
    taker.place(written.bucket / name, name)
    before = chunks_in(written.twins / name)
    other = replace(
        volume, scales=[replace(s, values=other_values(s.values)) for s in volume.scales]
    )
    other.write(other, twin, False)  # noqa: FBT003  # a Writer
    after: Files = chunks_in(twin)

    some = mixed(before, after)
    lay_out(twin, after, some)
    taker.push(name, before, some)
    check(volume, taker, twin)
    lay_out(twin, some, after)
    taker.push(name, some, after)
    check(volume, taker, twin, exact=other)
    taker.push(name, after, {})
    assert taker.stored(name) == set()
    assert not np.any(read_tensorstore(f"file://{taker.folder / name}/"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.soak if n in FURTHER else ()) for n in TABLE],
)
def test_shards_hold_what_was_put(
    name: str, written: Written, taker: Taker, tmp_path: Path
) -> None:
    """Each voxel of each scale is the one that was put last, and no shard is left at the end."""
    write_through(name, written, taker, tmp_path / "twin")
