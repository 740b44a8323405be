"""Documents of an OME-Zarr image."""

from typing import Any, Final

from tests.support.formats.zarr.building import LITTLE, array_metadata

ARRAY: Final = array_metadata([2, 3, 40, 96, 128], [1, 1, 8, 8, 8], [LITTLE])
AXES: Final = [
    {"name": "t", "type": "time", "unit": "second"},
    {"name": "c", "type": "channel"},
    *({"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"),
]


def image(**ome: Any) -> dict[str, Any]:
    """Return the document of an OME-Zarr image of two levels, with members *ome* changed."""
    levels = [
        {
            "path": f"s{level}",
            "coordinateTransformations": [
                {"type": "scale", "scale": [1, 1, 2.0, 2.0**level, 2.0**level]},
                {"type": "translation", "translation": [0, 0, 0, 10, 20]},
            ],
        }
        for level in range(2)
    ]
    multiscales = [{"axes": AXES, "datasets": levels}]
    members = {"version": "0.5", "multiscales": multiscales} | ome
    return {"zarr_format": 3, "node_type": "group", "attributes": {"ome": members}}
