"""Three replicas behind nginx, before SeaweedFS; and what Helm makes of the chart."""

from collections.abc import Generator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.balancer import Balancer, balancing
from tests.deploy.charts import EVERYTHING, Chart, Rendered
from tests.deploy.containers import write_containers
from tests.deploy.programs import helm, need
from tests.gateways import Environ, Gateway, forked, of_dataset
from tests.labs import Lab
from tests.seaweedfs import SeaweedFS

TOKEN: Final = "c2VjcmV0LXRva2Vu"
"""Of who may read what is private."""


@pytest.fixture(scope="session", autouse=True)
def _nginx() -> None:
    """Need the program."""
    need("nginx")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, seaweedfs: SeaweedFS) -> Lab:
    """Write what is served."""
    folder = tmp_path_factory.mktemp("deployed")
    write_containers(folder)
    seaweedfs.upload_folder(folder, folder.name)
    return Lab(folder, seaweedfs)


@pytest.fixture(scope="module")
def environ(lab: Lab) -> Environ:
    """Configure all replicas alike, with a private dataset beside ``data``."""
    digest = sha256(TOKEN.encode()).hexdigest()
    return of_dataset(lab.url, lab.seaweedfs) | {
        "SHARDGATE_DATASETS__PRIVATE__URL": lab.url,
        "SHARDGATE_SERVER__TRUSTED_PROXIES": '["127.0.0.0/8"]',
        "SHARDGATE_DATASETS__PRIVATE__READ": '["viewer"]',
        "SHARDGATE_CALLERS__VIEWER__TOKEN_SHA256": f'["{digest}"]',
    }


@pytest.fixture(scope="module")
def replicas(environ: Environ) -> Generator[list[Gateway]]:
    """Start three."""
    with ExitStack() as stack:
        yield [stack.enter_context(forked(environ)) for _ in range(3)]


@pytest.fixture(scope="module")
def balancer(
    tmp_path_factory: pytest.TempPathFactory, replicas: list[Gateway]
) -> Generator[Balancer]:
    """Start nginx before them."""
    folder: Path = tmp_path_factory.mktemp("nginx")
    with balancing(folder, [replica.url for replica in replicas]) as running:
        yield running


@pytest.fixture(scope="module")
def chart(request: pytest.FixtureRequest) -> Chart:
    """Find Helm."""
    return Chart(helm(request))


@pytest.fixture(scope="module")
def plain(chart: Chart) -> Rendered:
    """Render with the default values."""
    return chart.render()


@pytest.fixture(scope="module")
def everything(chart: Chart) -> Rendered:
    """Render with everything on."""
    return chart.render(EVERYTHING)


@pytest.fixture(scope="module")
def direct(chart: Chart) -> Rendered:
    """Render with nginx that speaks TLS itself."""
    return chart.render(**{"balancer.tls.secretName": "certificate", "ipv6": True})


@pytest.fixture(params=["plain", "everything", "direct"])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """Render with each."""
    found: Rendered = request.getfixturevalue(request.param)
    return found
