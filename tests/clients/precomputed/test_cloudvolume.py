"""cloud-volume reads the service, and sees no shards."""

from typing import Final

import pytest
from cloudvolume import CloudVolume
from cloudvolume.exceptions import EmptyVolumeException

from tests.clients.conftest import from_each_store
from tests.clients.precomputed.cases import BY_NAME, VALUES
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.volumes import LOSSY, Volume, read_cloudvolume
from tests.clients.writing import same

_CHANNELS: Final = "takes the channels of such a picture in another order than TensorStore"
OWN_WAY: Final = {
    "encoding/jpeg_uint8_3_raw": _CHANNELS,
    "encoding/jpeg_uint8_3_gzip": _CHANNELS,
    "encoding/png_uint8_3_raw": _CHANNELS,
    "encoding/png_uint8_3_gzip": _CHANNELS,
    "encoding/png_uint8_4_raw": _CHANNELS,
    "encoding/png_uint8_4_gzip": _CHANNELS,
}
"""What cloud-volume decodes in another way than the writer meant it, sharded or not."""
_DEPTH: Final = "takes every png for one of eight bits"
BEYOND: Final = {"encoding/png_uint16_1_raw": _DEPTH, "encoding/png_uint16_1_gzip": _DEPTH}
"""What cloud-volume cannot decode from any server, and why."""


@from_each_store
def test_reads_the_values(service: str, written: Written, volume: Volume) -> None:
    """Each scale of each volume reads as it was written, and as its unsharded twin does."""
    if volume.name in BEYOND:
        with pytest.raises(ValueError, match="reshape"):
            read_cloudvolume(f"precomputed://{service}/bucket/{volume.name}")
        return
    for index, scale in enumerate(volume.scales):
        found = read_cloudvolume(f"precomputed://{service}/bucket/{volume.name}", index)

        same(found, read_cloudvolume(f"file://{written.twins / volume.name}", index))
        if scale.encoding not in LOSSY and volume.name not in OWN_WAY:
            same(found, scale.values)


def test_part_of_a_volume_reads(service: str) -> None:
    """A box across chunks and shards reads like numpy's, counted from the volume's offset."""
    url = f"precomputed://{service}/bucket/grid/negative_offset"
    cloud = CloudVolume(url, progress=False)

    same(cloud[-4:7, -98:-91, -3:2], VALUES[3:14, 2:9, 1:6])


def test_sees_no_shards(service: str) -> None:
    """For cloud-volume no scale is sharded."""
    cloud = CloudVolume(f"precomputed://{service}/bucket/scales/all", progress=False)

    assert not any(cloud.image.is_sharded(mip) for mip in cloud.available_mips)


def test_is_told_of_absent_chunks(service: str) -> None:
    """Without leave to fill them cloud-volume reports absent chunks, as it does of files."""
    cloud = CloudVolume(f"precomputed://{service}/bucket/holes/identity_raw", progress=False)

    same(cloud[:8, :4, :4], BY_NAME["holes/identity_raw"].scales[0].values[:8, :4, :4])
    with pytest.raises(EmptyVolumeException):
        cloud[8:12, :4, :4]
