"""A few lines between segments, written by the `neuroglancer` package and put into shards."""

import json
from pathlib import Path
from typing import Final

from neuroglancer import CoordinateSpace
from neuroglancer.write_annotations import AnnotationWriter

from tests.clients.precomputed.segments import IDS
from tests.clients.precomputed.volumes import MURMUR, document, sharding, write_shards

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
