"""`shardgate.gateway.shard_affinity`: keys that belong to one replica."""

from collections.abc import Generator

import httpx
import pytest
import zarr

from shardgate.gateway.shard_affinity import PREFIX
from shardgate.settings import DatasetSettings, LimitSettings, Settings
from tests.support.serving import client_of


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve an array of four shards, each of 16 chunks, and a group of arrays."""
    folder = tmp_path_factory.mktemp("em")
    zarr.create_array(folder / "em", shape=(16, 16), chunks=(2, 2), shards=(8, 8), dtype="u1")
    group = zarr.create_group(folder / "group")
    for member in ("a", "b"):
        group.create_array(member, shape=(8, 8), chunks=(2, 2), shards=(8, 8), dtype="u1")
    datasets = {name: DatasetSettings(url=str(folder / "em")) for name in ("em", "again")}
    datasets["many"] = DatasetSettings(url=str(folder))
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


def name(client: httpx.Client, path: str, method: str = "GET") -> str | None:
    """Return the `X-Shard` of *path*."""
    answer = client.request(method, PREFIX.decode() + path)
    assert (answer.status_code, answer.headers["x-content-type-options"]) == (204, "nosniff")
    found: str | None = answer.headers.get("x-shard")
    return found


def test_chunks_of_a_shard_share_its_name(client: httpx.Client) -> None:
    """The chunks of a shard have one X-Shard, and other keys have their own."""
    keys = ["em/zarr.json", "em/c/8/0", "em/c/00/0", "em/else", "em/folder/"]
    assert len({name(client, key) for key in keys}) == len(keys)
    names = {(i, j): name(client, f"em/c/{i}/{j}") for i in range(8) for j in range(8)}

    assert all(names[i, j] == names[i // 4 * 4, j // 4 * 4] for i, j in names)
    assert len(set(names.values())) == 4


def test_group_does_not_hide_its_arrays(client: httpx.Client) -> None:
    """Chunks of arrays in a known group have the names of their own shards."""
    keys = ["group/c/0/0", "group/a/c/0/0", "group/a/c/1/1", "group/b/c/0/0", "group/b/c/2/2"]
    nothing, *names = [name(client, f"many/{key}") for key in keys]

    assert names[0] == names[1] != names[2] == names[3]
    assert nothing not in names
    assert [name(client, f"many/{key[:-1]}1") for key in keys[1:]] == names


def test_shard_has_one_name_in_all_datasets(client: httpx.Client) -> None:
    """X-Shard is the same for all methods, tokens and datasets that lead to the object."""
    expected = name(client, "em/c/1/2")

    assert name(client, "again/c/3/3") == name(client, "~dG9rZW4/em/c/1/2") == expected
    assert name(client, "~dG9rZW4/em/zarr.json") == name(client, "em/zarr.json")
    for method in ("HEAD", "PUT", "POST", "OPTIONS"):
        assert name(client, "em/c/1/2", method) == expected


def test_request_without_a_key_has_no_shard_name(client: httpx.Client) -> None:
    """A path without a key, such as a listing, has no X-Shard."""
    for path in ("em", "em/", "em?list-type=2", "~dG9rZW4/em", "", "?x"):
        assert name(client, path) is None


def test_invalid_key_has_a_shard_name(client: httpx.Client) -> None:
    """An invalid key, or one of an unknown dataset, has an X-Shard."""
    for path in ("none/c", "em/%2e%2e/c", "em//c", "em/%ff", "em/a%00", "~x/y/z"):
        found = client.get(f"{PREFIX.decode()}{path}").headers["x-shard"]

        assert len(found) == 16
        assert int(found, 16) >= 0


def test_keys_of_a_session_share_one_name(client: httpx.Client) -> None:
    """The keys of a session have one X-Shard, and other sessions have others."""
    keys = ["@session.X/zarr.json", "@session.X/a/c/0", "@session.X/b/c/5/6"]
    names = {name(client, f"em/{key}") for key in keys}

    assert len(names) == 1
    assert names != {name(client, "em/@session.Y/a/c/0")}
    assert names != {name(client, "em/a/@session.X/a/c/0")}


def test_unreachable_store_has_stable_names() -> None:
    """If the store is unreachable each key has its own X-Shard, the same for each request."""
    datasets = {"em": DatasetSettings(url="http://127.0.0.1:9/lost")}
    limits = LimitSettings(deadline_s=0.1)
    with client_of(Settings(datasets=datasets, limits=limits)) as client:
        names = [name(client, f"em/c/0/{number}") for number in (0, 1, 0)]

    assert names[0] == names[2] != names[1]
