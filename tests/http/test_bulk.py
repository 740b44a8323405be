"""`app.http.bulk`: many keys in one request."""

from collections.abc import Generator

import httpx
import pytest

from tests.http.taking import NEW, get, taking


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve an array and more, which may be written."""
    with taking(tmp_path_factory.mktemp("writing")) as opened:
        yield opened


def test_everything_below_a_prefix_is_taken_away(client: httpx.Client) -> None:
    """And nothing beside it."""
    for key in ("tree/a/1", "tree/a/2/3", "tree/ab"):
        client.put(f"/any/{key}", content=NEW)
    answer = client.delete("/any", params={"prefix": "tree/a/"})

    assert (answer.status_code, answer.json()) == (200, {"deleted": 2})
    assert get(client, "/any/tree/ab") == NEW
    assert get(client, "/any/tree/a/1") is None


@pytest.mark.parametrize("query", ["prefix=", "prefix=a", "prefix=/", "prefix=../", "prefix=%ff/"])
def test_a_prefix_is_a_folder(client: httpx.Client, query: str) -> None:
    """Neither everything nor the beginning of a name can be taken away."""
    client.put("/any/kept", content=NEW)

    assert client.delete(f"/any?{query}").status_code == 400
    assert client.delete("/any/kept?prefix=kept/").status_code == 400
    assert get(client, "/any/kept") == NEW


def test_a_part_of_an_array_is_taken_away(client: httpx.Client) -> None:
    """The chunks in one folder, then all; the array stays."""
    for key in ("c/0/0", "c/0/1", "c/1/1"):
        client.put(f"/em/{key}", content=NEW)

    assert client.delete("/em?prefix=c/0/").json() == {"deleted": 2}
    assert [get(client, f"/em/{key}") for key in ("c/0/0", "c/0/1", "c/1/1")] == [None, None, NEW]
    assert client.delete("/em?prefix=c/9/").json() == {"deleted": 0}
    assert client.delete("/em?prefix=c/").json() == {"deleted": 1}
    assert get(client, "/em/c/1/1") is None
    assert get(client, "/em/zarr.json") is not None
