"""`shardgate.survey.images`: documents that are images, and others."""

from typing import Any, Final

import pytest

from shardgate.survey.images import read_ome
from tests.support.web.images import AXES, image

LEVELS: Final = [{"axes": AXES, "datasets": [{"path": "s0"}]}]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (image(), True),
        ({"attributes": {"ome": {"multiscales": LEVELS}}}, True),
        ({"attributes": {"ome": {"multiscales": [{}]}}}, False),
        ({"attributes": {"ome": {"multiscales": []}}}, False),
        ({"attributes": {"multiscales": LEVELS}}, False),
        ({"attributes": {"ome": []}}, False),
        ({"attributes": None}, False),
        ([], False),
    ],
)
def test_image_has_multiscales(document: Any, *, expected: bool) -> None:
    """A group is an image by OME-Zarr 0.5 attributes; other documents, also invalid, are none."""
    assert (read_ome(document) is not None) is expected
