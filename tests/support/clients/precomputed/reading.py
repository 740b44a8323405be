"""Segmentations and annotations as cloud-volume and neuroglancer read them."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from tests.support.deferred import Deferred

cloudvolume: Any = Deferred("cloudvolume")
neuroglancer: Any = Deferred("neuroglancer.read_precomputed_annotations")
SKELETONS: Final = "skeletons_mip_0"


def opened(url: str) -> Any:
    """Open the segmentation at *url* with cloud-volume."""
    return cloudvolume.CloudVolume(url, progress=False)


def read_annotations(url: str, keys: Iterable[str]) -> dict[str, Sequence[str] | None]:
    """Return the annotations in each of the files *keys*, or None if the file is absent."""
    reader = neuroglancer.AnnotationReader(url)
    found: dict[str, Sequence[str] | None] = {}
    for key in keys:
        folder, name = key.split("/")
        try:
            if folder == "by_id":
                found[key] = [_spelled(reader.by_id[int(name)])]
            elif folder.startswith("spatial"):
                level = reader.spatial[int(folder.removeprefix("spatial"))]
                found[key] = list(map(_spelled, level[tuple(map(int, name.split("_")))]))
            else:
                related = reader.relationships[folder.removeprefix("rel_")]
                found[key] = list(map(_spelled, related[int(name)]))
        except KeyError:
            found[key] = None
    return found


def _spelled(annotation: Any) -> str:
    """Return all members of an annotation as text."""
    related = [list(map(int, ids)) for ids in annotation.segments or []]
    return f"{annotation.to_json()} {related}"
