"""`shardgate.survey.images`: documents that are images, and others."""

from typing import Any, Final

import pytest

from shardgate.survey.images import read_ome
from tests.support.web.images import AXES, image

LEVELS: Final = [{"axes": AXES, "datasets": [{"path": "s0"}]}]
OLDER: Final[dict[str, Any]] = LEVELS[0] | {"version": "0.4"}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (image(), True),
        ({"attributes": {"ome": {"multiscales": LEVELS}}}, True),
        ({"attributes": {"ome": {"multiscales": [{}]}}}, False),
        ({"attributes": {"ome": {"multiscales": []}}}, False),
        ({"attributes": {"multiscales": LEVELS}}, False),
        ({"zarr_format": 2, "attributes": {"multiscales": [OLDER]}}, True),
        ({"zarr_format": 2, "attributes": {"multiscales": LEVELS}}, False),
        ({"zarr_format": 2, "attributes": {"multiscales": [OLDER | {"version": "0.3"}]}}, False),
        ({"zarr_format": 2, "attributes": {"multiscales": [{"version": "0.4"}]}}, False),
        ({"attributes": {"ome": []}}, False),
        ({"attributes": None}, False),
        ([], False),
    ],
)
def test_image_has_multiscales(document: Any, *, expected: bool) -> None:
    """A group is an image by attributes of OME-Zarr 0.5, that of Zarr v2 by those of 0.4; other
    documents, also invalid, are none.
    """
    assert (read_ome(document) is not None) is expected
