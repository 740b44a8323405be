"""Neuroglancer's views of sharded precomputed volumes, meshes, skeletons and annotations."""

from collections.abc import Generator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from neuroglancer import CoordinateSpace
from neuroglancer.write_annotations import AnnotationWriter

from tests.support.clients.precomputed.segments import (
    BOUND,
    COLLECTIONS,
    COUNT,
    EDGE,
    IDS,
    labels,
    number_fragments,
    shard_annotations,
    write_annotations,
    write_legacy,
    write_segments,
)
from tests.support.clients.precomputed.volumes import (
    MURMUR,
    Scale,
    Volume,
    by_cloudvolume,
    sharding,
)
from tests.support.clients.services import Taker, chunks_in, from_folder, taking_into_folder
from tests.support.viewers.viewing import Neuroglancer, View, count, sections

LINES: Final = (((2, 38, 36), (38, 38, 36)), ((2, 2, 2), (2, 38, 2)), ((22, 2, 30), (38, 2, 10)))
"""Lines with ids from 1, each related to the segment at its place in `IDS`."""


def write_notes(path: Path, source: Path) -> None:
    """Write the lines without shards to *source*, and from there into shards at *path*."""
    space = CoordinateSpace(names=["x", "y", "z"], units=["nm"] * 3, scales=[8] * 3)
    writer = AnnotationWriter(space, "line", relationships=["segment"])
    for number, (line, segment) in enumerate(zip(LINES, IDS, strict=True), start=1):
        writer.add_line(*line, id=number, segment=[segment])
    writer.write(source)
    how = sharding((0, 1, 1), MURMUR, index="gzip", data="gzip")
    shard_annotations(source, path, lambda _: how)


NAME: Final = "segments"
BALL, PLATE, BAR = IDS
CENTER: Final = (14, 15, 18)
SECTIONS: Final = sections((EDGE,) * 3, CENTER)

RED, GREEN, YELLOW, MAGENTA, CYAN = "#ff0000", "#00ff00", "#ffff00", "#ff00ff", "#00ffff"
SHADER: Final = "void main() { setColor(defaultColor()); setLineWidth(%.1f); }"
SPACE: Final = (slice(340, 585), slice(40, 230))
"""Rows and columns of the view in 3-d, without the writing on it."""


def scene(layers: list[Any]) -> dict[str, Any]:
    """Return a state with *layers* around the middle, in sections and in 3-d."""
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


def segments_layer(source: str) -> dict[str, Any]:
    """Return a layer of the voxels of all segments and the meshes of two."""
    return {
        "type": "segmentation",
        "name": "segments",
        "source": source,
        "segments": [str(BALL), str(PLATE)],
        "segmentColors": {str(BALL): RED, str(PLATE): GREEN},
    }


def state(base: str) -> dict[str, Any]:
    """Return a state with two meshes, a skeleton, all lines, and the second selected."""
    segments = f"precomputed://{base}/{NAME}"
    notes = {"type": "annotation", "source": f"precomputed://{base}/notes"}
    linked = {"linkedSegmentationLayer": {"segment": "skeletons"}}
    related = linked | {"filterBySegmentation": ["segment"]}
    skeletons: dict[str, Any] = {"url": segments, "subsources": {"skeletons": True}}
    skeletons |= {"enableDefaultSubsources": False}
    layers = [
        segments_layer(segments),
        {
            "type": "segmentation",
            "name": "skeletons",
            "source": skeletons,
            "segments": [str(BAR)],
            "segmentColors": {str(BAR): YELLOW},
            "skeletonRendering": {"mode3d": "lines_and_points", "lineWidth3d": 4},
        },
        notes | {"name": "notes", "annotationColor": MAGENTA, "shader": SHADER % 3},
        notes | related | {"name": "related", "annotationColor": CYAN, "shader": SHADER % 9},
    ]
    selected = {"notes": {"annotationId": "2", "annotationSource": 0}}
    selection = {"layers": selected, "visible": True}
    return scene(layers) | {"showDefaultAnnotations": False, "selection": selection}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write segments and notes."""
    root = tmp_path_factory.mktemp("bucket")
    write_segments(root / NAME)
    write_notes(root / "notes", tmp_path_factory.mktemp("source"))
    return root


@pytest.fixture(scope="module")
def service(written: Path) -> Generator[str]:
    """Serve a bucket twice: without shards, and as it is."""
    with from_folder(written) as url:
        yield url


@pytest.fixture(scope="module")
def view(neuroglancer: Neuroglancer, service: str) -> View:
    """Open the state with everything."""
    shown = state(f"{service}/bucket")
    return neuroglancer.look(shown, "precomputed-sharded", {"segments": SECTIONS})


def test_voxels_have_the_written_labels(view: View) -> None:
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
def test_each_object_is_drawn_in_3d(view: View, thing: str, colour: str) -> None:
    """Each mesh, skeleton and line is drawn in 3-d in a colour of its own."""
    assert count(colour, view.pixels[SPACE]) > 100


def test_requests_are_answered_without_shards(view: View, service: str) -> None:
    """Each request of the page is answered with 200 or 206, and none is for a shard."""
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


def test_view_equals_that_of_the_raw_shards(
    neuroglancer: Neuroglancer, service: str, view: View
) -> None:
    """The view has the same pixels as one for which the page reads the shards itself."""
    other = neuroglancer.look(state(f"{service}/raw"), "precomputed-raw")

    np.testing.assert_array_equal(view.pixels, other.pixels)


BOXES: Final = COLLECTIONS["boxes"]


def state_of_annotations(source: str) -> dict[str, Any]:
    """Return a state with all annotations, those of the finest level too."""
    layer = {
        "type": "annotation",
        "name": "annotations",
        "source": f"precomputed://{source}",
        "projectionAnnotationSpacing": 1,
        "crossSectionAnnotationSpacing": 1,
    }
    return scene([layer]) | {
        "dimensions": {axis: [1e-9, "m"] for axis in "xyz"},
        "position": [BOUND / 2] * 3,
        "projectionScale": 2 * BOUND,
    }


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write boxes into shards, and the same without shards."""
    root = tmp_path_factory.mktemp("bucket")
    write_annotations(BOXES, root / "sharded", root / "plain")
    return root


@pytest.fixture(scope="module")
def annotations(bucket: Path) -> Generator[str]:
    """Serve the folder twice: without shards, and as it is."""
    with from_folder(bucket) as url:
        yield url


@pytest.fixture(scope="module")
def annotated(neuroglancer: Neuroglancer, annotations: str) -> View:
    """Open the boxes in shards."""
    shown = state_of_annotations(f"{annotations}/bucket/sharded")
    return neuroglancer.look(shown, "annotations-sharded")


def test_annotation_cells_are_answered(annotated: View, annotations: str, bucket: Path) -> None:
    """Each cell of annotations is 200, or 404 if it has none."""
    root = f"{annotations}/bucket/sharded/"
    asked = {(each.url.removeprefix(root), each.status) for each in annotated.asked}
    cells = {
        f"spatial{level}/{'_'.join(map(str, cell))}"
        for level, grid in enumerate(BOXES.grids)
        for cell in product(*map(range, grid))
    }

    assert not annotated.faults
    assert asked == {("info", 200)} | {
        (cell, 200 if (bucket / "plain" / cell).exists() else 404) for cell in cells
    }


def test_annotations_are_drawn_in_3d(annotated: View) -> None:
    """The annotations are drawn in 3-d in the default colour."""
    assert count("#ffff00", annotated.pixels[340:585, 40:380]) > 5 * COUNT


@pytest.mark.parametrize(
    "twin", ["bucket/plain", pytest.param("raw/sharded", marks=pytest.mark.soak)]
)
def test_annotation_view_equals_the_unsharded_one(
    neuroglancer: Neuroglancer, annotations: str, annotated: View, twin: str
) -> None:
    """The view has the same pixels as that of unsharded annotations, or of the raw shards."""
    shown = state_of_annotations(f"{annotations}/{twin}")
    other = neuroglancer.look(shown, f"annotations-{twin.replace('/', '-')}")

    np.testing.assert_array_equal(annotated.pixels, other.pixels)


MIRRORED: Final = labels()[::-1, ::-1].copy()


def state_of_rewritten(base: str) -> dict[str, Any]:
    """Return a state with the voxels of all segments and the meshes of two."""
    return scene([segments_layer(f"precomputed://{base}/{NAME}")])


@pytest.fixture(scope="module")
def taker(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Mirror the segmentation over HTTP."""
    twin, twin_before = (tmp_path_factory.mktemp(name) for name in ("to", "from"))
    scale = Scale(labels(), None, chunk=(20, 20, 20))
    for values, folder in ((scale.values, twin_before), (MIRRORED, twin)):
        volume = Volume("", by_cloudvolume, [replace(scale, values=values)], "segmentation")
        by_cloudvolume(volume, folder, sharded=False)
    with taking_into_folder(tmp_path_factory.mktemp("taken")) as taker:
        taker.place(written / NAME, NAME)
        taker.push(NAME, chunks_in(twin_before), chunks_in(twin))
        yield taker


@pytest.fixture(scope="module")
def rewritten(neuroglancer: Neuroglancer, taker: Taker) -> View:
    """Open the segmentation through the service that rewrote it."""
    return neuroglancer.look(
        state_of_rewritten(f"{taker.url}/data"), "rewritten-served", {NAME: SECTIONS}
    )


def test_rewritten_voxels_are_shown(rewritten: View) -> None:
    """Each voxel of three sections is the rewritten one, and both meshes are drawn as before."""
    assert not rewritten.faults
    assert rewritten.values[NAME] == MIRRORED[..., 0][tuple(SECTIONS.T)].tolist()
    assert all(count(colour, rewritten.pixels[SPACE]) > 100 for colour in (RED, GREEN))


def test_rewritten_view_equals_that_of_the_raw_shards(
    neuroglancer: Neuroglancer, taker: Taker, rewritten: View
) -> None:
    """The rewritten view has the same pixels as one for which the page reads the shards itself."""
    with from_folder(taker.folder) as url:
        shown = state_of_rewritten(f"{url}/raw")
        other = neuroglancer.look(shown, "rewritten-raw", {NAME: SECTIONS})

    assert any(each.url.endswith(".shard") for each in other.asked)
    assert other.values == rewritten.values
    np.testing.assert_array_equal(rewritten.pixels, other.pixels)


def test_meshes_in_numbered_fragments_are_drawn(neuroglancer: Neuroglancer, tmp_path: Path) -> None:
    """Neuroglancer draws meshes whose manifests name fragments in shards by bare ids."""
    write_legacy(tmp_path / NAME)
    fragments = number_fragments(tmp_path / NAME, sharding((0, 1, 1), MURMUR, data="gzip"))
    with from_folder(tmp_path) as url:
        view = neuroglancer.look(state_of_rewritten(f"{url}/bucket"), "numbered-fragments")
    folder = f"{url}/bucket/{NAME}/mesh/"
    asked = {each.url.removeprefix(folder) for each in view.asked if each.url.startswith(folder)}

    assert not view.faults
    assert {each.status for each in view.asked} <= {200, 206}
    assert all(count(colour, view.pixels[SPACE]) > 100 for colour in (RED, GREEN))
    assert len(asked & set(map(str, fragments))) == 4
