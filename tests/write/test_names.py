"""A write outdates the cached answers of all names of an object."""

from collections.abc import Callable, Generator
from pathlib import Path

import httpx
import pytest

from shardgate.settings import DatasetSettings, Settings
from tests.support.formats.neuroglancer_precomputed import case as precomputed
from tests.support.serving import client_of
from tests.support.zipped import zipped

_IDENTITY = {"accept-encoding": "identity"}


@pytest.fixture
def client(tmp_path: Path) -> Generator[httpx.Client]:
    """Serve one folder whole, by links, and a folder in it whose name is percent-encoded."""
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/other").write_bytes(b"keeps the folder")
    whole, inner = tmp_path.as_uri(), (tmp_path / "a b").as_uri()
    datasets = {
        "whole": DatasetSettings(url=whole, writable=True),
        "linked": DatasetSettings(url=whole, writable=True, follow_links=True),
        "inner": DatasetSettings(url=inner, writable=True),
    }
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


_NAMES = ("/whole/a b/x", "/linked/a b/x", "/inner/x")


@pytest.mark.parametrize("written", _NAMES)
def test_write_below_one_root_outdates_answers_of_others(
    client: httpx.Client, written: str
) -> None:
    """An object is present, changed and absent at once below all roots that reach it."""
    assert [client.get(name).status_code for name in _NAMES] == [404] * 3
    for body in (b"one", b"another"):
        assert client.put(written, content=body).is_success
        assert [client.get(name).content for name in _NAMES] == [body] * 3
    assert client.delete(written).is_success
    assert [client.get(name).status_code for name in _NAMES] == [404] * 3


@pytest.mark.parametrize(
    ("written", "read", "coding"),
    [
        pytest.param("/whole/a b/info", "/inner/info", bytes, id="another root"),
        pytest.param("/whole/info.gz", "/whole/info", zipped, id="a coded file"),
    ],
)
def test_removed_metadata_are_absent_by_their_other_name(
    client: httpx.Client, written: str, read: str, coding: Callable[[bytes], bytes]
) -> None:
    """Metadata that were removed by one name are 404 by the other, not missing for a time."""
    info = coding(precomputed.build({})["info"])
    assert client.put(written, content=info).is_success
    assert client.get(read, headers=_IDENTITY).status_code == 200
    assert client.delete(written).is_success

    assert client.get(read).status_code == 404


@pytest.mark.parametrize("ending", [".gz", ".br", ".zstd"])
def test_write_of_a_coded_file_outdates_its_plain_name(client: httpx.Client, ending: str) -> None:
    """The plain name of a coded file is present and absent together with the file."""
    for name in ("x", "info"):
        assert client.get(f"/whole/{name}").status_code == 404
        assert client.put(f"/whole/{name}{ending}", content=b"coded").is_success
        assert client.head(f"/whole/{name}", headers={"accept-encoding": "*"}).status_code != 404
        assert client.delete(f"/whole/{name}{ending}").is_success
        assert client.get(f"/whole/{name}").status_code == 404


def test_removed_plain_file_shows_the_coded_one(client: httpx.Client, tmp_path: Path) -> None:
    """A coded file that a plain one hid is served once the plain one is deleted."""
    assert client.put("/whole/x", content=b"plain").is_success
    (tmp_path / "x.gz").write_bytes(zipped(b"coded"))
    assert client.get("/whole/x").content == b"plain"
    assert client.delete("/whole/x").is_success

    assert client.get("/whole/x", headers=_IDENTITY).content == b"coded"
