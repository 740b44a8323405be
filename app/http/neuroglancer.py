"""Links that open data in Neuroglancer."""

import json
from typing import Final
from urllib.parse import quote

from app.formats.surveying import Description

PUBLIC_PAGE: Final = "https://neuroglancer-demo.appspot.com/"
_OF_LABELS: Final = ("uint32", "uint64")


def zarr_source(url: str) -> str:
    """Name the Zarr v3 array, or OME-Zarr image, at *url* as Neuroglancer does."""
    return f"{url}/|zarr3:"


def precomputed_source(url: str) -> str:
    """Name the precomputed volume, meshes or annotations at *url* as Neuroglancer does."""
    return f"precomputed://{url}"


def kind_of(collection: Description) -> str:
    """Name the type of layer for *collection*: integers that are that wide are mostly labels."""
    match collection.kind:
        case "array":
            return "segmentation" if collection.data_type in _OF_LABELS else "image"
        case "annotations":
            return "annotation"
        case _:
            return "segmentation"


def link(page: str, kind: str, name: str, source: str) -> str:
    """Open *source* in the viewer at *page*, as a layer of *kind* with a *name*.

    The kind that the viewer would choose itself, ``auto``, measures the contrast of an image
    before its chunks have come.
    """
    state = {"layers": [{"type": kind, "name": name, "source": source}], "layout": "4panel"}
    return f"{page}#!{quote(json.dumps(state), safe=':/')}"
