"""nginx with the configuration in `deploy/` and a path that the service is below."""

from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx
import pytest

from shardgate.settings import CallerSettings, DatasetSettings, ServerSettings, Settings
from tests.support.deploy.balancer import Balancer, Recorder, balancing, cached, recording
from tests.support.files import write_files
from tests.support.formats.zarr.building import build
from tests.support.serving import serving

PREFIX: Final = "/arrays"
_PUBLIC: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nCache-Control: public, max-age=3600\r\n\r\nhello"
)
CHUNKS: Final = {"c/0/0": b"0123456789", "c/0/1": b"another"}


@pytest.fixture(scope="module", params=[False, True], ids=["direct", "with the cache"])
def nginx(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[Balancer, Recorder]]:
    """Start nginx with a prefix before a replica that records requests."""
    folder: Path = tmp_path_factory.mktemp("nginx")
    with (
        recording(Recorder()) as replica,
        balancing(folder, [replica.url], cached=request.param, prefix=PREFIX) as nginx,
    ):
        yield nginx, replica


@pytest.mark.parametrize("target", [f"{PREFIX}/em/c/%2F0?x=1", "/em/c/0", PREFIX, "/arraysX/c/0"])
def test_target_is_forwarded_with_its_prefix(nginx: tuple[Balancer, Recorder], target: str) -> None:
    """A target reaches the replica byte for byte, with the prefix told in a header."""
    balancer, replica = nginx
    replica.received.clear()
    replica.asked.clear()
    assert balancer.send("GET", target, {"x-forwarded-prefix": "/forged"}).status == 200

    for request in (*replica.received, *replica.asked):
        assert request.headers["x-forwarded-prefix"] == PREFIX
    assert [each.target for each in replica.received] == [target]
    assert [each.target for each in replica.asked] == [f"/_shard{target.partition('?')[0]}"]


@pytest.mark.parametrize("before", ["", PREFIX])
@pytest.mark.parametrize("path", ["/metrics", "/readyz", "/_shard/em/c", "/~x/_shard/em/c"])
def test_operator_paths_are_hidden_below_the_prefix_too(
    nginx: tuple[Balancer, Recorder], before: str, path: str
) -> None:
    """Paths for operators get 404 from nginx, with the prefix and without it."""
    balancer, replica = nginx
    replica.received.clear()

    assert balancer.send("GET", before + path, {}).status == 404
    assert replica.received == []


def test_sign_in_below_the_prefix_is_named_without_a_replica(tmp_path: Path) -> None:
    """When no replica answers, viewers get the URL below the prefix to sign in at."""
    with (
        recording(Recorder(answers=False)) as replica,
        balancing(tmp_path, [replica.url], prefix=PREFIX) as balancer,
        balancer.client() as client,
    ):
        answers = [client.get(path) for path in ("/auth_info", f"{PREFIX}/auth_info")]

    assert [each.status_code for each in answers] == [503, 503]
    expected = f"{balancer.url}{PREFIX}/login"
    assert [each.json()["login_url"] for each in answers] == [expected, expected]


def test_cache_keeps_keys_below_the_prefix_only(tmp_path: Path) -> None:
    """The cache keeps answers to keys, and none of the routes of the service below the prefix."""
    kept = {f"{PREFIX}/em/c/0", "/em/c/0"}
    others = {"/api/x", "/login/x", "/viewer/x", "/docs/x", "/~token/em/c", "/em/@session.1/c"}
    paths = kept | others | {PREFIX + each for each in others}
    with (
        recording(Recorder()) as replica,
        balancing(tmp_path, [replica.url], cached=True, prefix=PREFIX) as nginx,
        nginx.client() as client,
    ):
        replica.response = _PUBLIC
        found = {path: [cached(client.get(path)) for _ in range(2)] for path in paths}

    assert {path for path, words in found.items() if "hit" in words} == kept


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Run two gateways below a prefix behind nginx, and open a client."""
    folder: Path = tmp_path_factory.mktemp("site")
    write_files(build(CHUNKS), folder / "em")
    settings = Settings(
        server=ServerSettings(root_path=PREFIX, trusted_proxies=("127.0.0.0/8",)),
        callers={"lab": CallerSettings(token_sha256=("0" * 64,))},
        datasets={
            "em": DatasetSettings(url=str(folder / "em")),
            "private": DatasetSettings(url=str(folder / "em"), read=("lab",)),
        },
    )
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(settings)) for _ in range(2)]
        nginx = stack.enter_context(balancing(folder, urls, prefix=PREFIX))
        yield stack.enter_context(nginx.client())


def test_gateways_behind_nginx_lead_below_the_prefix(site: httpx.Client) -> None:
    """Gateways behind nginx answer below the prefix and without it, and links lead below it."""
    page = site.get(f"{PREFIX}/em/", headers={"accept": "text/html"})
    listed = site.get(f"{PREFIX}/api/datasets").json()["datasets"]

    assert site.get(f"{PREFIX}/em/c/0/0").content == CHUNKS["c/0/0"]
    assert site.get("/em/c/0/1").content == CHUNKS["c/0/1"]
    assert f"{site.base_url}{PREFIX}/em/zarr.json" in page.text
    assert listed[0]["path"] == f"{PREFIX}/em/"
    assert site.get("/healthz").is_success
