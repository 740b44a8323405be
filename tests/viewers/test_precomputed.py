"""Neuroglancer shows precomputed volumes, meshes, skeletons and annotations out of shards."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from neuroglancer import CoordinateSpace
from neuroglancer.write_annotations import AnnotationWriter

from tests.clients.precomputed.segments import EDGE, IDS, labels, write_segments
from tests.clients.precomputed.volumes import MURMUR, document, sharding, write_shards
from tests.clients.services import from_folder
from tests.viewers.viewing import Neuroglancer, View, count, sections

LINES: Final = (
    ((2, 38, 36), (38, 38, 36)),
    ((2, 2, 2), (2, 38, 2)),
    ((22, 2, 30), (38, 2, 10)),
)
"""Their ids count from 1; each is related to the segment at its place in `IDS`."""


def write_notes(path: Path, source: Path) -> None:
    """Write the lines to *source*, and from there into shards at *path*."""
    space = CoordinateSpace(names=["x", "y", "z"], units=["nm"] * 3, scales=[8] * 3)
    writer = AnnotationWriter(space, "line", relationships=["segment"])
    for number, (line, segment) in enumerate(zip(LINES, IDS, strict=True), start=1):
        writer.add_line(*line, id=number, segment=[segment])
    writer.write(source)
    info = document(source)
    for part in (info["by_id"], *info["relationships"], *info["spatial"]):
        part["sharding"] = sharding((0, 1, 1), MURMUR, index="gzip", data="gzip")
        folder = path / part["key"]
        folder.mkdir(parents=True)
        files = (source / part["key"]).iterdir()
        values = {0 if "_" in file.name else int(file.name): file.read_bytes() for file in files}
        write_shards(folder, part["sharding"], values)
    (path / "info").write_text(json.dumps(info))


BALL, PLATE, BAR = IDS
CENTER: Final = (14, 15, 18)
SECTIONS: Final = sections((EDGE,) * 3, CENTER)

RED, GREEN, YELLOW, MAGENTA, CYAN = "#ff0000", "#00ff00", "#ffff00", "#ff00ff", "#00ffff"
SPACE: Final = (slice(340, 585), slice(40, 230))
"""Rows and columns of the view in 3-d, without the writing on it."""


def scene(layers: list[Any]) -> dict[str, Any]:
    """Show *layers* around the middle, in sections and in 3-d."""
    return {
        "dimensions": {axis: [8e-9, "m"] for axis in "xyz"},
        "position": [middle + 0.5 for middle in CENTER],
        "crossSectionScale": 0.25,
        "projectionScale": 80,
        "projectionOrientation": [0.3, 0.2, 0, 0.93],
        "showSlices": False,
        "showAxisLines": False,
        "layers": layers,
        "layout": "4panel",
    }


def state(base: str) -> dict[str, Any]:
    """Show two meshes, one skeleton, all lines, the last once more, and facts of the second."""
    segments = f"precomputed://{base}/segments"
    notes = f"precomputed://{base}/notes"
    skeletons = {
        "url": segments,
        "subsources": {"skeletons": True},
        "enableDefaultSubsources": False,
    }
    layers = [
        {
            "type": "segmentation",
            "name": "segments",
            "source": segments,
            "segments": [str(BALL), str(PLATE)],
            "segmentColors": {str(BALL): RED, str(PLATE): GREEN},
        },
        {
            "type": "segmentation",
            "name": "skeletons",
            "source": skeletons,
            "segments": [str(BAR)],
            "segmentColors": {str(BAR): YELLOW},
            "skeletonRendering": {"mode3d": "lines_and_points", "lineWidth3d": 4},
        },
        {
            "type": "annotation",
            "name": "notes",
            "source": notes,
            "annotationColor": MAGENTA,
            "shader": "void main() { setColor(defaultColor()); setLineWidth(3.0); }",
        },
        {
            "type": "annotation",
            "name": "related",
            "source": notes,
            "annotationColor": CYAN,
            "linkedSegmentationLayer": {"segment": "skeletons"},
            "filterBySegmentation": ["segment"],
            "shader": "void main() { setColor(defaultColor()); setLineWidth(9.0); }",
        },
    ]
    selected = {"notes": {"annotationId": "2", "annotationSource": 0}}
    selection = {"layers": selected, "visible": True}
    return scene(layers) | {"showDefaultAnnotations": False, "selection": selection}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve a bucket twice: without shards, and as it is."""
    root = tmp_path_factory.mktemp("bucket")
    write_segments(root / "segments")
    write_notes(root / "notes", tmp_path_factory.mktemp("source"))
    with from_folder(root) as url:
        yield url


@pytest.fixture(scope="module")
def view(neuroglancer: Neuroglancer, service: str) -> View:
    """Look at everything together."""
    shown = state(f"{service}/bucket")
    return neuroglancer.look(shown, "precomputed-sharded", {"segments": SECTIONS})


def test_shows_the_values(view: View) -> None:
    """Each voxel of the three sections has the label that was written."""
    assert view.values["segments"] == labels()[..., 0][tuple(SECTIONS.T)].tolist()


@pytest.mark.parametrize(
    ("thing", "colour"),
    [
        ("the mesh of the ball", RED),
        ("the mesh of the plate", GREEN),
        ("the skeleton of the bar", YELLOW),
        ("all lines", MAGENTA),
        ("the line related to the bar", CYAN),
    ],
)
def test_draws_in_3d(view: View, thing: str, colour: str) -> None:
    """Nothing else has its colour: the sections and the axes are not drawn in 3-d."""
    assert count(colour, view.pixels[SPACE]) > 100


def test_every_request_is_answered(view: View, service: str) -> None:
    """The page may read all answers, and asks for no shard."""
    asked = {(each.url.removeprefix(f"{service}/bucket/"), each.status) for each in view.asked}

    assert not view.faults
    assert {status for _, status in asked} == {200, 206}
    assert {
        ("segments/8_8_8/0-20_0-20_20-40", 200),
        (f"segments/mesh/{BALL}.index", 200),
        (f"segments/mesh/{BALL}", 206),
        (f"segments/skeletons_mip_0/{BAR}", 200),
        ("notes/spatial0/0_0_0", 200),
        (f"notes/rel_segment/{BAR}", 200),
        ("notes/by_id/2", 200),
    } <= asked
    assert not [path for path, _ in asked if path.endswith(".shard")]


def test_looks_the_same(neuroglancer: Neuroglancer, service: str, view: View) -> None:
    """No pixel differs where the page reads the shards itself."""
    other = neuroglancer.look(state(f"{service}/raw"), "precomputed-raw")

    np.testing.assert_array_equal(view.pixels, other.pixels)
