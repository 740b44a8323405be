"""Keys of shard objects behind the service: writes through them lose no chunk."""

from collections.abc import Generator
from typing import Final, NamedTuple

import httpx
import pytest

from app.settings import DatasetSettings, Settings
from tests.formats.case import Case
from tests.formats.neuroglancer_precomputed.case import CASES as PRECOMPUTED
from tests.formats.zarr.case import CASES as ZARR
from tests.serving import serving

CASES: Final = [*PRECOMPUTED, *ZARR]


class Served(NamedTuple):
    """A container behind the service."""

    client: httpx.Client
    name: str
    case: Case
    objects: dict[str, bytes]

    @property
    def shards(self) -> list[str]:
        """Name the objects that chunks are in."""
        return [name for name in self.objects if not self.case.is_metadata(name)]

    def chunks(self) -> dict[str, bytes | None]:
        """Read all chunks."""
        answers = {key: self.client.get(f"/new/{self.name}/{key}") for key in self.case.chunks}
        return {key: each.content if each.is_success else None for key, each in answers.items()}


@pytest.fixture(scope="module")
def client() -> Generator[httpx.Client]:
    """Serve a place that may be written, and the same as it is."""
    datasets = {
        "new": DatasetSettings(url="memory://shards", writable=True),
        "raw": DatasetSettings(url="memory://shards", writable=True, view="raw"),
    }
    with (
        serving(Settings(datasets=datasets)) as url,
        httpx.Client(base_url=url, timeout=20) as opened,
    ):
        yield opened


@pytest.fixture
def served(client: httpx.Client, request: pytest.FixtureRequest) -> Served:
    """Store a container."""
    name, case = f"case-{CASES.index(request.param)}", request.param
    served = Served(client, name, case, case.build(case.chunks))
    for key, data in served.objects.items():
        client.put(f"/raw/{name}/{key}", content=data).raise_for_status()
    assert served.chunks() == case.chunks
    return served


@pytest.mark.parametrize("served", CASES, indirect=True, ids=str)
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_no_shard_is_lost_by_its_name(served: Served, method: str) -> None:
    """Its name is refused, or is that of one chunk."""
    assert served.shards
    for shard in served.shards:
        before = served.chunks()
        url = f"/new/{served.name}/{shard}"
        body = None if method == "DELETE" else served.objects[shard]
        served.client.request(method, url, content=body)

        after = served.chunks()
        assert [key for key in before if after[key] != before[key]] in ([], [shard])


@pytest.mark.parametrize("served", PRECOMPUTED, indirect=True, ids=str)
def test_shards_with_names_of_their_own_are_refused_with_what_to_do(served: Served) -> None:
    """Through every door; who asks for one reads it as before, and writes it as it is."""
    client = served.client
    for shard in served.shards:
        path = f"/new/{served.name}/{shard}"
        answers = [
            client.put(path, content=b"new"),
            client.delete(path),
            client.post(f"{path}?uploads"),
            client.put(path, headers={"x-amz-copy-source": f"new/{served.name}/info"}),
        ]
        assert [answer.status_code for answer in answers] == [409] * 4
        expected = (
            f"{shard} is a shard: its chunks are written by their own keys, and the whole object "
            'through a dataset with view = "raw"'
        )
        assert answers[0].json()["detail"] == answers[1].json()["detail"] == expected
        assert client.get(path).content == served.objects[shard]
        assert client.put(path.replace("/new/", "/raw/"), content=b"new").is_success
