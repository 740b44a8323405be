"""An array of stripes, and the state in which Neuroglancer shows it."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zarr

from tests.support.viewers.viewing import sections

AXES: Final = ("z", "y", "x")
SHAPE: Final = (40, 60, 70)
CENTER: Final = (20, 30, 35)
INNER: Final = (16, 16, 16)
HOLE: Final = (slice(16, 32),) * 3
"""An inner chunk that no shard holds, in sight."""
SECTIONS: Final = sections(SHAPE, CENTER)
LAYOUTS: Final[dict[str, Any]] = {"plain": {}, "sharded": {"shards": (32, 32, 32)}}


def stripes() -> npt.NDArray[np.uint16]:
    """Return slanting stripes with a hole."""
    z, y, x = np.indices(SHAPE, np.uint16)
    values = np.asarray(((6 * z + 4 * y + 3 * x) % 251 + 1) * 257, np.uint16)
    values[HOLE] = 0
    return values


VALUES: Final = stripes()


def state(source: str, center: tuple[int, ...] = CENTER) -> dict[str, Any]:
    """Return a state with *source*, four pixels a voxel, in sections and in 3-d."""
    return {
        "dimensions": {axis: [1, ""] for axis in AXES},
        "position": [middle + 0.5 for middle in center],
        "crossSectionScale": 0.25,
        "projectionScale": 100,
        "showDefaultAnnotations": False,
        "showAxisLines": False,
        "layers": [{"type": "image", "name": "data", "source": f"{source}/|zarr3:"}],
        "layout": "4panel",
    }


def write(store: Any, values: npt.NDArray[np.uint16]) -> None:
    """Write *values* with and without shards."""
    options: Any = {"chunks": INNER, "dimension_names": AXES, "overwrite": True}
    for name, layout in LAYOUTS.items():
        zarr.create_array(store, name=name, data=values, **options, **layout)
