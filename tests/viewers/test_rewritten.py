"""Neuroglancer shows a volume and meshes out of shards that took them over HTTP."""

import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from tests.clients.precomputed.segments import IDS, labels, write_segments
from tests.clients.precomputed.volumes import Scale, Volume, by_cloudvolume
from tests.clients.services import Taker, chunks_in, taking_into_folder
from tests.viewers.test_precomputed import GREEN, RED, SECTIONS, SPACE, scene
from tests.viewers.viewing import Neuroglancer, View, count


@contextmanager
def serving_files(folder: Path) -> Generator[str]:
    """Serve *folder*, and give the URL."""
    leave = Middleware(CORSMiddleware, allow_origins=["*"], expose_headers=["*"])
    app = Starlette(routes=[Mount("/", StaticFiles(directory=folder))], middleware=[leave])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


BALL, PLATE, BAR = IDS
NAME: Final = "segments"
MIRRORED: Final = labels()[::-1, ::-1].copy()


def state(base: str) -> dict[str, Any]:
    """Show the voxels of all segments and the meshes of two."""
    layer = {
        "type": "segmentation",
        "name": NAME,
        "source": f"precomputed://{base}/{NAME}",
        "segments": [str(BALL), str(PLATE)],
        "segmentColors": {str(BALL): RED, str(PLATE): GREEN},
    }
    return scene([layer])


@pytest.fixture(scope="module")
def taker(tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Write a segmentation, and mirror it over HTTP."""
    source, twin, twin_before = (tmp_path_factory.mktemp(name) for name in ("source", "to", "from"))
    write_segments(source / NAME)
    scale = Scale(labels(), None, chunk=(20, 20, 20))
    for values, folder in ((scale.values, twin_before), (MIRRORED, twin)):
        volume = Volume("", by_cloudvolume, [replace(scale, values=values)], "segmentation")
        by_cloudvolume(volume, folder, sharded=False)
    with taking_into_folder(tmp_path_factory.mktemp("taken")) as taker:
        taker.place(source / NAME, NAME)
        taker.push(NAME, chunks_in(twin_before), chunks_in(twin))
        yield taker


@pytest.fixture(scope="module")
def view(neuroglancer: Neuroglancer, taker: Taker) -> View:
    """Look at it through the service that took it."""
    return neuroglancer.look(state(f"{taker.url}/data"), "rewritten-served", {NAME: SECTIONS})


def test_shows_what_was_put(view: View) -> None:
    """Each voxel of three sections is the mirrored one, and both meshes are drawn as before."""
    assert not view.faults
    assert view.values[NAME] == MIRRORED[..., 0][tuple(SECTIONS.T)].tolist()
    assert all(count(colour, view.pixels[SPACE]) > 100 for colour in (RED, GREEN))


def test_plain_files_look_the_same(neuroglancer: Neuroglancer, taker: Taker, view: View) -> None:
    """No pixel differs where a plain web server gives the page the shards that were rewritten."""
    with serving_files(taker.folder) as url:
        other = neuroglancer.look(state(url), "rewritten-files", {NAME: SECTIONS})

    assert any(each.url.endswith(".shard") for each in other.asked)
    assert other.values == view.values
    np.testing.assert_array_equal(view.pixels, other.pixels)
