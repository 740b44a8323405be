"""The links of `shardgate demo` open its examples in Neuroglancer."""

import json
import re
from collections.abc import Generator
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from app import demo
from app.settings import DatasetSettings, Settings
from tests.serving import serving
from tests.viewers.viewing import Neuroglancer


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, Any]]:
    """Serve the examples, and give the states in the links by the names of their first layers."""
    written = demo.write(tmp_path_factory.mktemp("examples"))
    datasets = {name: DatasetSettings(url=str(path)) for name, path in written.items()}
    with serving(Settings(datasets=datasets)) as url:
        links = re.findall(r"http\S+/#!(\S+)", demo.guide(url))
        found = [json.loads(unquote(link)) for link in links]
        yield {state["layers"][0]["name"]: state for state in found}


@pytest.mark.parametrize("name", ["image", "cells", "tagged", "now"])
def test_shows_the_example(neuroglancer: Neuroglancer, states: dict[str, Any], name: str) -> None:
    """All that is asked for is answered, and there is a picture of many colours or greys."""
    view = neuroglancer.look(states[name], f"demo-{name}")

    assert not view.faults
    assert {asked.status for asked in view.asked} <= {200, 404}, [
        a for a in view.asked if a.status not in (200, 206)
    ]
    assert len(np.unique(view.pixels[70:320].reshape(-1, 3), axis=0)) > 40
