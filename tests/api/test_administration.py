"""Status, metadata and feature flags over HTTP, compared with those of the icechunk library."""

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import icechunk
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.settings import CallerSettings, DatasetSettings, Settings
from tests.support.committing import Client, put_group
from tests.support.repositories import ROOT_ID
from tests.support.seaweedfs import SeaweedFS
from tests.support.serving import client_of
from tests.support.sessions import GROUP
from tests.support.writable_repositories import Api, Place, new_place, serve

NAMES: Final = ("ann", "wim", "rea")
"""The caller who may administer, the one who may write, and the one who may read."""
BODIES: Final[dict[str, Any]] = {
    "/status": {"availability": "read_only", "limited_availability_reason": "moving"},
    "/metadata": {"metadata": {"who": "é🧊", "n": [1, 2.5, None, {"deep": True}]}},
    "/flags": {"move_node": False, "create_tag": True, "delete_tag": None},
}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Path, Api]]:
    """Serve a folder of repositories to everybody as an administrator."""
    folder = tmp_path_factory.mktemp("bucket")
    with serve(folder, writable=True, admin=("public",)) as api:
        yield folder, api


@pytest.fixture
def place(bucket: tuple[Path, Api]) -> Place:
    """Create a repository with the library."""
    made = new_place(bucket[0])
    made.create()
    return made


@pytest.fixture
def opened(bucket: tuple[Path, Api], place: Place) -> Api:
    """Return the control plane of the repository."""
    return Api(bucket[1].client, place.folder.name)


@pytest.fixture(scope="module")
def unchanged(bucket: tuple[Path, Api]) -> tuple[Place, Api]:
    """Create a repository for the tests whose requests are all refused."""
    made = new_place(bucket[0])
    made.create()
    return made, Api(bucket[1].client, made.folder.name)


def replace(opened: Api, route: str, body: Any) -> Any:
    """Replace a setting, and return its document."""
    answer = opened.do("PUT", route, body, if_match=opened.answer(route).headers["etag"])
    assert opened.answer(route).headers["etag"] == answer.headers["etag"]
    assert opened.tell(route) == answer.json()
    return answer.json()


def by_library(place: Place) -> dict[str, Any]:
    """Return the settings as the library reads them."""
    repo = place.open()
    return {
        "/status": (repr(repo.status.availability), repo.status.limited_availability_reason),
        "/metadata": repo.metadata,
        "/flags": {flag.name: flag.setting for flag in repo.feature_flags()},
    }


def test_settings_are_read_by_the_library(place: Place, opened: Api) -> None:
    """The library reads settings and their operations, and those that it sets are returned."""
    replace(opened, "/metadata", BODIES["/metadata"])
    replace(opened, "/flags", BODIES["/flags"])
    replace(opened, "/status", BODIES["/status"])

    found = by_library(place)
    assert "readonly" in found["/status"][0].lower().replace("_", "")
    assert found["/status"][1] == "moving"
    assert found["/metadata"] == BODIES["/metadata"]["metadata"]
    assert found["/flags"] == BODIES["/flags"]
    kinds = [str(each.kind) for each in place.open().ops_log()]
    for kind, told in zip(
        ["RepoStatusChanged", "id=4, new_value=True", "id=3, new_value=False", "MetadataChanged"],
        kinds,
        strict=False,
    ):
        assert kind in told
    operations = [each["kind"] for each in opened.pages("/operations", "operations")]
    flags = ["feature_flag_changed"] * 2
    assert operations == ["repo_status_changed", *flags, "metadata_changed", "repo_initialized"]

    repo = place.open()
    repo.set_status(icechunk.RepoStatus(icechunk.RepoAvailability.online))
    repo.set_metadata({"by": "library"})
    repo.set_feature_flag("move_node", setting=None)
    assert opened.tell("/status")["availability"] == "online"
    assert opened.tell("/metadata") == {"metadata": {"by": "library"}}
    assert opened.tell("/flags") == {"move_node": None, "create_tag": True, "delete_tag": None}


def test_replacement_is_conditional_and_can_be_repeated(place: Place, opened: Api) -> None:
    """A stale `If-Match` is 412, none is 400, and a request that is repeated changes nothing."""
    for route, body in BODIES.items():
        before = opened.answer(route).headers["etag"]
        assert opened.send("PUT", route, body).status_code == 400
        assert opened.send("PUT", route, body, if_match='"other"').status_code == 412
        made = opened.do("PUT", route, body, if_match=before)
        again = opened.do("PUT", route, body, if_match=before)
        assert again.json() == made.json()
        replace(opened, "/status", {"availability": "online"})
    kinds = [str(each.kind) for each in place.open().ops_log()]
    assert sum("MetadataChanged" in each for each in kinds) == 1
    assert sum("FeatureFlagChanged" in each for each in kinds) == 2


@pytest.mark.parametrize("availability", ["read_only", "offline"])
def test_locked_repository_admits_only_its_status(opened: Api, availability: str) -> None:
    """Other settings of a repository that is not online are 423; its status brings it back."""
    replace(opened, "/status", {"availability": availability})
    for route in ("/metadata", "/flags"):
        assert opened.send("PUT", route, BODIES[route], if_match="*").status_code == 423
    assert opened.answer("/branches").status_code == (503 if availability == "offline" else 200)
    replace(opened, "/status", {"availability": "online"})
    replace(opened, "/metadata", BODIES["/metadata"])


def test_session_of_an_offline_repository_is_not_read(opened: Api) -> None:
    """Keys of an open session are 503 while its repository is offline."""
    session_id = opened.do("POST", "/sessions", {}).json()["session_id"]
    key = f"/repo/{opened.path}/@session.{session_id}/zarr.json"
    assert opened.client.put(key, content=GROUP).is_success
    assert opened.client.get(key).is_success
    replace(opened, "/status", {"availability": "offline"})
    assert opened.client.get(key).status_code == 503
    replace(opened, "/status", {"availability": "online"})
    assert opened.client.get(key).is_success


def test_flag_forbids_moves(place: Place, opened: Api) -> None:
    """A commit with a move is 409 while the flag `move_node` is off, and others are made."""
    client = Client(opened, place)
    client.commit(put_group("/"), put_group("/a"))
    move = {"op": "move_node", "path": "/a", "to": "/b"}
    replace(opened, "/flags", {"move_node": False})
    for more in ({}, {"branch": None, "parent_id": client.tip}):
        refused = client.ask(move, **more)
        assert refused.status_code == 409
        assert "move_node" in refused.json()["detail"]
    client.commit(put_group("/c"))
    replace(opened, "/flags", {})
    client.commit(move)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/status", {}),
        ("/status", {"availability": "ajar"}),
        ("/status", {"availability": "online", "set_at": "2026-01-01T00:00:00Z"}),
        ("/metadata", {"metadata": []}),
        ("/metadata", {"metadata": {"n": 2**64}}),
        ("/metadata", {"metadata": {"n": {"a\0": 1}}}),
        ("/flags", {"commit": False}),
        ("/flags", {"move_node": 0}),
    ],
)
def test_wrong_setting_is_refused(unchanged: tuple[Place, Api], route: str, body: Any) -> None:
    """A wrong document is 400, and changes nothing."""
    place, opened = unchanged
    before = by_library(place)
    assert opened.send("PUT", route, body, if_match="*").status_code == 400
    assert by_library(place) == before


def test_only_admins_change_settings(place: Place) -> None:
    """By default nobody changes settings; readers read them, and an admin need not be a writer."""
    datasets = {
        name: DatasetSettings(
            url=place.folder.as_uri(), writable=True, read=("rea",), write=("wim",), admin=admin
        )
        for name, admin in {"repo": ("ann",), "nobody": ()}.items()
    }
    callers = {
        name: CallerSettings(token_sha256=(sha256(name.encode()).hexdigest(),)) for name in NAMES
    }
    with client_of(Settings(datasets=datasets, callers=callers)) as client:
        for name in NAMES:
            bearer = {"authorization": f"Bearer {name}", "if_match": "*"}
            may_administer = name == "ann"
            repo, other = Api(client), Api(client, dataset="nobody")
            for route, body in BODIES.items():
                assert repo.send("GET", "/config", **bearer).is_success == may_administer
                if name != "ann":
                    assert other.send("GET", route, **bearer).status_code == 200
                    assert other.send("PUT", route, body, **bearer).status_code == 403
                assert repo.send("GET", route, **bearer).status_code == 200
                status = repo.send("PUT", route, body, **bearer).status_code
                assert status == (200 if may_administer else 403)
                online = {"availability": "online"}
                assert (
                    not may_administer or repo.send("PUT", "/status", online, **bearer).is_success
                )
        branch = {"name": "b", "snapshot_id": ROOT_ID}
        refused = Api(client).send("POST", "/branches", branch, authorization="Bearer ann")
        assert refused.status_code == 403
        assert Api(client).send("GET", "/status").status_code == 401
        assert Api(client).send("PUT", "/status", BODIES["/status"]).status_code == 401


def test_public_dataset_asks_its_admins_for_credentials(place: Place) -> None:
    """No caller but an admin changes settings, even where everybody may read and write."""
    callers = {"ann": CallerSettings(token_sha256=(sha256(b"ann").hexdigest(),))}
    dataset = DatasetSettings(url=place.folder.as_uri(), writable=True, admin=("ann",))
    with client_of(Settings(datasets={"repo": dataset}, callers=callers)) as client:
        opened = Api(client)
        body = BODIES["/metadata"]
        assert opened.send("PUT", "/metadata", body, if_match="*").status_code == 401
        opened.do("PUT", "/metadata", body, if_match="*", authorization="Bearer ann")
        opened.do("POST", "/branches", {"name": "b", "snapshot_id": ROOT_ID})
        assert client.get("/metrics").status_code == 200


def test_version_1_has_no_settings(bucket: tuple[Path, Api]) -> None:
    """Settings of a repository of version 1 are 404, and cannot be set."""
    place = new_place(bucket[0])
    icechunk.Repository.create(place.storage, spec_version=1)
    opened = Api(bucket[1].client, place.folder.name)
    for route, body in BODIES.items():
        assert opened.answer(route).status_code == 404
        assert opened.send("PUT", route, body, if_match="*").status_code == 405


def test_concurrent_changes_by_library_and_service_lose_nothing(
    seaweedfs: SeaweedFS, tmp_path: Path
) -> None:
    """Each change of any kind that either of them acknowledges is one operation in the log."""
    place = new_place(tmp_path, seaweedfs)
    place.create()
    writable = place.settings()
    dataset = writable.datasets["repo"].model_copy(update={"admin": ("public",)})
    administered = writable.model_copy(update={"datasets": {"repo": dataset}})
    with client_of(administered) as client, ThreadPoolExecutor() as pool:
        service = Client(Api(client), place)
        first = service.commit(put_group("/"), put_group("/here"))

        def move(number: int) -> None:
            source, target = ("/here", "/there")[:: 1 - number % 2 * 2]
            service.commit({"op": "move_node", "path": source, "to": target})

        def detach(number: int) -> None:
            service.commit(put_group(f"/d{number}"), branch=None, parent_id=first)

        def describe(number: int) -> None:
            service.api.do("PUT", "/metadata", {"metadata": {"n": number}}, if_match="*")

        def flag(number: int) -> None:
            wanted = {"delete_tag": number % 2 == 0}
            service.api.do("PUT", "/flags", wanted, if_match="*")

        def tag(number: int) -> None:
            place.open().create_tag(f"t{number}", ROOT_ID)

        def branch(number: int) -> None:
            place.open().create_branch(f"b{number}", ROOT_ID)

        def repeat(change: Callable[[int], None]) -> None:
            for number in range(4):
                change(number)

        list(pool.map(repeat, (move, detach, describe, flag, tag, branch)))
    kinds = [str(each.kind).partition("(")[0].rpartition(".")[2] for each in place.open().ops_log()]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "NewCommit": 5,
        "NewDetachedSnapshot": 4,
        "MetadataChanged": 4,
        "FeatureFlagChanged": 4,
        "TagCreated": 4,
        "BranchCreated": 4,
        "RepoInitialized": 1,
    }


MEMBERS: Final = ("inline_chunk_threshold_bytes", "compression", "manifest", "caching", "x")


def test_any_configuration_that_is_accepted_is_read_by_the_library(
    place: Place, opened: Api
) -> None:
    """The library opens the repository after any change of the configuration that is not 400."""
    scalars = st.none() | st.booleans() | st.integers(-1, 2**17) | st.text(max_size=3)
    names = st.sampled_from(["level", "algorithm", "splitting", "split_sizes", "y"])
    values = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
        max_leaves=4,
    )

    @settings(max_examples=30, deadline=None)
    @given(st.dictionaries(st.sampled_from(MEMBERS), values, max_size=2))
    def check(config: Any) -> None:
        answer = opened.send("PUT", "/config", {"config": config}, if_match="*")
        assert answer.status_code in (200, 400), answer.text
        place.open()

    check()


CONTAINER: Final[dict[str, Any]] = {
    "name": "lab",
    "url_prefix": "s3://lab/",
    "store": {
        "s3": {
            "region": "us-east-1",
            "anonymous": False,
            "allow_http": False,
            "force_path_style": False,
            "requester_pays": False,
            "checksum_algorithm": "crc64_nvme",
        }
    },
}


def sized(dimension: Any, arrays: Any = "any_array") -> Any:
    """Return the splitting of *arrays* along *dimension*."""
    return {"split_sizes": [[arrays, [{"condition": dimension, "num_chunks": 3}]]]}


def contained(prefix: str | None, store: Any) -> Any:
    """Return a configuration of one virtual chunk container."""
    return {"virtual_chunk_containers": {"x": {"url_prefix": prefix, "store": store}}}


def test_configuration_is_that_of_the_next_open_of_the_library(bucket: tuple[Path, Api]) -> None:
    """The library opens a repository with the configuration that was set, and others stay."""
    place = new_place(bucket[0])
    place.create(max_concurrent_requests=7)
    opened = Api(bucket[1].client, place.folder.name)
    config = opened.tell("/config")["config"]
    assert config["max_concurrent_requests"] == 7
    stores = {
        "s3://lab/": CONTAINER["store"],
        "s3://other/a/": {"s3_compatible": CONTAINER["store"]["s3"]},
        "tigris://lab/": {"tigris": CONTAINER["store"]["s3"]},
        "gs://lab/": {"gcs": {"a": "b"}},
        "az://lab/": {"azure": {"a": "b"}},
        "https://lab/": {"http": {"a": "b"}},
        "file:///data/": {"local_file_system": "/data"},
    }
    containers = {
        prefix: CONTAINER | {"url_prefix": prefix, "store": store}
        for prefix, store in stores.items()
    }
    wanted = config | {
        "inline_chunk_threshold_bytes": 12,
        "num_updates_per_repo_info_file": 3,
        "compression": {"level": 5, "algorithm": "zstd"},
        "virtual_chunk_containers": containers,
        "manifest": {"splitting": sized("Any")},
    }
    replace(opened, "/config", {"config": wanted})
    found = place.open().config
    assert found.inline_chunk_threshold_bytes == 12
    assert found.num_updates_per_repo_info_file == 3
    assert found.max_concurrent_requests == 7
    assert found.compression is not None
    assert found.compression.level == 5
    assert sorted(found.virtual_chunk_containers or ()) == sorted(containers)
    assert "ConfigChanged" in str(next(iter(place.open().ops_log())).kind)
    client = Client(opened, place)
    client.commit(put_group("/"))
    refused = opened.send("PUT", "/config", {"config": {}}, if_match="*")
    assert refused.status_code == 400
    assert "max_concurrent_requests" in refused.json()["detail"]


def test_members_of_other_forms_are_read_and_sent_back(bucket: tuple[Path, Api]) -> None:
    """What the library wrote in a form that the service does not write can be sent back."""
    place = new_place(bucket[0])
    config = icechunk.RepositoryConfig()
    store = icechunk.http_store({"a": "b"}, headers={"c": "d"})
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer("https://lab/", store))
    config.manifest = icechunk.ManifestConfig(
        splitting=icechunk.ManifestSplittingConfig.from_dict(
            {
                icechunk.ManifestSplitCondition.name_matches("[a-z&&[^b]]"): {
                    icechunk.ManifestSplitDimCondition.Any(): 10
                }
            }
        )
    )
    icechunk.Repository.create(place.storage, config=config)
    opened = Api(bucket[1].client, place.folder.name)
    stored = opened.tell("/config")["config"]
    containers = stored["virtual_chunk_containers"] | {"s3://lab/": CONTAINER}
    replace(opened, "/config", {"config": stored | {"virtual_chunk_containers": containers}})
    assert sorted(place.open().config.virtual_chunk_containers or ()) == sorted(containers)

    odd = containers["https://lab/"]["store"] | {"gcs": {}}
    containers["https://lab/"] |= {"store": odd}
    body = {"config": stored | {"virtual_chunk_containers": containers}}
    assert opened.send("PUT", "/config", body, if_match="*").status_code == 400


def test_configuration_of_many_containers_is_replaced(place: Place, opened: Api) -> None:
    """A configuration that is read, of up to 1 MiB, can be replaced."""
    prefixes = [f"s3://lab/{'x' * 200}{number}/" for number in range(400)]
    containers = {each: CONTAINER | {"name": None, "url_prefix": each} for each in prefixes}
    replace(opened, "/config", {"config": {"virtual_chunk_containers": containers}})
    assert len(place.open().config.virtual_chunk_containers or ()) == 400


def test_repository_gets_back_the_defaults_of_the_library(place: Place, opened: Api) -> None:
    """A repository without a configuration of its own has an empty one, and may again."""
    assert opened.tell("/config") == {"config": {}}
    replace(opened, "/config", {"config": {"inline_chunk_threshold_bytes": 9}})
    assert place.open().config.inline_chunk_threshold_bytes == 9
    replace(opened, "/config", {"config": {}})
    assert place.open().config.inline_chunk_threshold_bytes in (None, 512)


@pytest.mark.parametrize(
    "config",
    [
        {"inline_chunk_threshold_bytes": 2**16},
        {"inline_chunk_threshold_bytes": "7"},
        {"num_updates_per_repo_info_file": -1},
        {"compression": {"level": 23}},
        {"compression": {"algorithm": "gzip"}},
        {"compression": []},
        {"unknown": 1},
        {"caching": {"num_chunk_refs": 1}},
        {"manifest": {"preload": {"max_total_refs": 1}}},
        {"manifest": {"splitting": {"split_sizes": [["some", []]]}}},
        {"manifest": {"splitting": sized({"DimensionName": "("})}},
        {"manifest": {"splitting": sized("Any", {"and": [{"path_matches": {"regex": "["}}]})}},
        {"virtual_chunk_containers": 1},
        {"virtual_chunk_containers": {"x": None}},
        contained("s3://x/", {}),
        contained("s3://x/", {"s3": None}),
        contained("s3://x/", {"s3": {}}),
        contained("http://x/", {"http": {"a": 1}}),
        contained(None, {"http": {}}),
        contained("http://x/a", {"http": {}}),
        contained("s3://x/", {"http": {}}),
        contained("s3:///", {"s3": CONTAINER["store"]["s3"]}),
        contained("file:///", {"local_file_system": "/"}),
    ],
)
def test_configuration_that_the_library_may_not_read_is_refused(
    unchanged: tuple[Place, Api], config: Any
) -> None:
    """A configuration of other types, or of members that only the library sets, is 400."""
    place, opened = unchanged
    before = opened.answer("/config").headers["etag"]
    assert opened.send("PUT", "/config", {"config": config}, if_match="*").status_code == 400
    assert opened.answer("/config").headers["etag"] == before
    place.open()
