"""What Helm makes of the chart is what Kubernetes, nginx and the service take."""

import json
import re
import subprocess
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import kubernetes_validate
import numpy as np
import pytest
import trustme
import yaml
import zarr

from shardgate.configuration import load
from shardgate.server import STOP_S
from tests.deploy.balancer import Balancer, command
from tests.deploy.naming import Names, naming
from tests.deploy.programs import (
    BALANCER,
    CHART,
    EVERYTHING,
    GATEWAY,
    KUBERNETES,
    NGINX_VERSION,
    ROOT,
    Chart,
    Rendered,
    helm,
    new_nginx,
)
from tests.support.gateways import forked, of_dataset
from tests.support.processes import free_ports, listening

README = (CHART / "README.md").read_text("utf-8")
HOSTS = "SHARDGATE_SERVER__HOSTS"
RESOLVER = "kube-dns.kube-system.svc"


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


@pytest.mark.parametrize("values", [(), (f"--values={EVERYTHING}",)], ids=["plain", "everything"])
def test_helm_finds_no_fault(chart: Chart, values: tuple[str, ...]) -> None:
    """Its linter passes, with warnings as errors."""
    done = chart.run("lint", "--strict", str(CHART), *values)

    assert done.returncode == 0, done.stdout


def test_its_image_is_of_this_version() -> None:
    """The tag that is taken where the values name none is the version of the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_every_field(rendered: Rendered, version: str) -> None:
    """Each resource of its own fits the schema, which allows no other members."""
    for (kind, _), resource in rendered.resources.items():
        if kind != "ServiceMonitor":
            kubernetes_validate.validate(resource, version, strict=True)


def test_everything_is_there(everything: Rendered) -> None:
    """Each kind that is switched on is made; an upgrade sets back no autoscaler's decision."""
    kinds = {kind for kind, _ in everything.resources}

    assert kinds == {
        "ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Ingress", "NetworkPolicy",
        "Pod", "PodDisruptionBudget", "Service", "ServiceAccount", "ServiceMonitor",
    }  # fmt: skip
    assert "replicas" not in everything.resources[GATEWAY]["spec"]


def test_the_service_takes_its_configuration(everything: Rendered, tmp_path: Path) -> None:
    """What the values say comes out as a file that it reads, with secrets from the environment."""
    path = tmp_path / "shardgate.toml"
    path.write_text(everything.resources["ConfigMap", GATEWAY[1]]["data"]["shardgate.toml"])

    settings = load(path, {"SHARDGATE_CALLERS__LAB__SECRET_ACCESS_KEY": "secret"})

    assert settings.tokens.longest_s == 3600
    assert settings.datasets["em"].read == ("lab",)


def test_the_example_of_the_readme_works(chart: Chart, tmp_path: Path) -> None:
    """Who copies it gets what it says."""
    (example,) = re.findall(r"```yaml\n(# values.yaml\n.*?)```", README, re.DOTALL)
    (tmp_path / "values.yaml").write_text(example)
    resources = chart.render(tmp_path / "values.yaml").resources

    assert resources["Ingress", "demo-shardgate"]["spec"]["rules"][0]["host"] == "chunks.example"
    read = tomllib.loads(resources["ConfigMap", "demo-shardgate"]["data"]["shardgate.toml"])
    assert read["datasets"]["em"]["url"] == "s3://bucket/em.zarr"


@pytest.mark.parametrize(
    ("ingress", "named"),
    [
        ({"enabled": True, "hosts": ["chunks.example"]}, {"chunks.example"}),
        ({"enabled": True, "hosts": ["*.example"]}, {"*"}),
        ({"enabled": False, "hosts": ["chunks.example"]}, set()),
    ],
)
def test_gateways_know_their_names(
    chart: Chart, ingress: Mapping[str, Any], named: set[str]
) -> None:
    """Those of the values, of the Ingress, and of the Service within the cluster."""
    pods = chart.render(hosts=["lab.example"], ingress=ingress).pods()
    (gateway,) = pods[GATEWAY[1]]["containers"]
    environ = {each["name"]: each["value"] for each in gateway["env"]}
    service = {f"demo-shardgate{each}" for each in ("", ".lab", ".lab.svc")}

    hosts = load(None, {HOSTS: environ[HOSTS]}).server.hosts

    assert set(hosts) == {"lab.example", *named, *service, "demo-shardgate.lab.svc.cluster.local"}


def test_images_are_of_the_version_that_is_tested(plain: Rendered, everything: Rendered) -> None:
    """A digest takes the place of the tag, for the test as well."""
    (nginx,) = plain.pods()[BALANCER[1]]["containers"]
    assert nginx["image"] == f"nginx:{NGINX_VERSION}"
    for name in (GATEWAY[1], "demo-shardgate-test"):
        (container,) = everything.pods()[name]["containers"]
        assert container["image"].startswith("example.test/shardgate@sha256:0123456789abcdef")
        assert container["imagePullPolicy"] == "Always"


def test_pods_go_where_they_may(everything: Rendered) -> None:
    """The test too."""
    for pod in everything.pods().values():
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert pod["tolerations"] == [{"key": "chunks", "operator": "Exists"}]


def test_gateways_see_volumes(everything: Rendered) -> None:
    """With the group and user that the files have, beside their configuration."""
    pod = everything.pods()[GATEWAY[1]]
    (gateway,) = pod["containers"]

    assert [each["name"] for each in pod["volumes"]] == ["config", "data"]
    assert [each["mountPath"] for each in gateway["volumeMounts"]] == ["/etc/shardgate", "/data"]
    assert pod["securityContext"] == {
        "fsGroup": 2000,
        "runAsUser": 1000,
        "runAsGroup": 65532,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_secrets_come_from_secrets(everything: Rendered) -> None:
    """Their keys are variables of the gateway, and of nothing else."""
    sources = {
        name: [each.get("envFrom") for each in pod["containers"]]
        for name, pod in everything.pods().items()
    }

    assert sources.pop(GATEWAY[1]) == [[{"secretRef": {"name": "shardgate"}}]]
    assert {json.dumps(each) for each in sources.values()} == {"[null]"}


def test_no_pod_may_more_than_it_has_to(rendered: Rendered) -> None:
    """All fit the restricted standard of Kubernetes, and have read-only root file systems.

    None gets variables such as SHARDGATE_PORT of a Service, which would stop its start.
    """
    for pod in rendered.pods().values():
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_answers_under_way_are_finished(rendered: Rendered) -> None:
    """A gateway is killed only after its balancer forgot it, and its own time to stop is over."""
    pod = rendered.pods()[GATEWAY[1]]
    (gateway,) = pod["containers"]
    forgetting_s = gateway["lifecycle"]["preStop"]["sleep"]["seconds"]

    assert pod["terminationGracePeriodSeconds"] > forgetting_s + STOP_S


def test_replica_ends_after_the_new_one_is_known(rendered: Rendered) -> None:
    """In a rolling update the balancer has learnt of a new replica before an old one ends."""
    deployment = rendered.resources[GATEWAY]["spec"]

    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert deployment["minReadySeconds"] >= DNS_S


def test_a_store_that_is_down_takes_no_replica_out(rendered: Rendered) -> None:
    """No probe asks for the state of stores."""
    (gateway,) = rendered.pods()[GATEWAY[1]]["containers"]
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")

    assert [gateway[kind]["httpGet"]["path"] for kind in kinds] == ["/healthz"] * 3


@pytest.mark.parametrize(
    ("owner", "value"),
    [(GATEWAY, {"config": "[cache]\n"}), (BALANCER, {"balancer.clusterDomain": "other"})],
    ids=["gateway", "balancer"],
)
def test_a_changed_configuration_starts_pods_anew(
    chart: Chart, plain: Rendered, owner: tuple[str, str], value: dict[str, str]
) -> None:
    """The template of the pods carries its checksum, and nothing that changes by itself."""

    def template(rendered: Rendered) -> object:
        return rendered.resources[owner]["spec"]["template"]

    assert template(chart.render()) == template(plain)
    assert template(chart.render(**value)) != template(plain)


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 3},
        {"replicas": "three"},
        {"balancer": {"tls": {"secret": "x"}}},
        {"autoscaling.requestsInFlight": 0},
        {"ingress.hosts": [{"host": "a"}]},
        {"image.digest": "0123"},
    ],
    ids=json.dumps,
)
def test_a_wrong_value_is_refused(chart: Chart, wrong: dict[str, object]) -> None:
    """One that is misspelled, or of another type, renders nothing."""
    with pytest.raises(ValueError, match="schema"):
        chart.render(**wrong)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas is larger"),
        ({"ingress.enabled": True, "balancer.tls.secretName": "x"}, "an Ingress speaks plain HTTP"),
    ],
    ids=json.dumps,
)
def test_values_that_do_not_go_together_are_refused(
    chart: Chart, values: dict[str, object], reason: str
) -> None:
    """With what to do about it."""
    with pytest.raises(ValueError, match=reason):
        chart.render(**values)


def test_nginx_takes_the_files_of_the_chart(
    request: pytest.FixtureRequest, rendered: Rendered, tmp_path: Path
) -> None:
    """It has nothing to say against them."""
    authority = trustme.CA()
    certificate = authority.issue_cert("chunks.example.test")
    certificate.private_key_pem.write_to_path(tmp_path / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    files = rendered.resources["ConfigMap", BALANCER[1]]["data"]
    for name, text in files.items():
        here = text.replace("/certificates", str(tmp_path)).replace(RESOLVER, "127.0.0.1")
        (tmp_path / name).write_text(here)
    command = [new_nginx(request), "-t", "-p", str(tmp_path), "-e", "stderr"]

    done = subprocess.run(
        [*command, "-c", f"{tmp_path}/nginx.conf"],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "[warn]" not in done.stderr


@pytest.mark.parametrize(
    ("hosts", "rendered_hosts"), [([], [None]), (["*.a.test", "b.test"], ["*.a.test", "b.test"])]
)
def test_an_ingress_leads_to_nginx(
    chart: Chart, hosts: list[str], rendered_hosts: list[str | None]
) -> None:
    """From each host, or from all where none is named, to a port of the Service."""
    resources = chart.render(**{"ingress.enabled": True, "ingress.hosts": hosts}).resources
    ingress, service = (resources[kind, "demo-shardgate"] for kind in ("Ingress", "Service"))
    kubernetes_validate.validate(ingress, KUBERNETES[-1], strict=True)
    rules = ingress["spec"]["rules"]

    assert [rule.get("host") for rule in rules] == rendered_hosts
    for rule in rules:
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"]["port"]["name"] == service["spec"]["ports"][0]["name"]


def test_selectors_find_the_pods_they_mean(everything: Rendered) -> None:
    """Each of them fits the labels of one Deployment."""
    resources = everything.resources
    labels = {name: resources["Deployment", name]["spec"]["template"]["metadata"]["labels"]
              for kind, name in resources if kind == "Deployment"}  # fmt: skip
    meant = {
        ("Service", "demo-shardgate"): BALANCER[1],
        ("Service", "demo-shardgate-replicas"): GATEWAY[1],
        ("PodDisruptionBudget", "demo-shardgate-gateway"): GATEWAY[1],
        ("PodDisruptionBudget", "demo-shardgate-balancer"): BALANCER[1],
        ("NetworkPolicy", "demo-shardgate"): GATEWAY[1],
        ("NetworkPolicy", "demo-shardgate-balancer"): BALANCER[1],
    }
    for resource, owner in meant.items():
        spec = resources[resource]["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        selector = selector.get("matchLabels", selector)
        assert [name for name, own in labels.items() if selector.items() <= own.items()] == [owner]


def test_a_service_monitor_finds_the_replicas(everything: Rendered) -> None:
    """It selects the headless Service, and a port that this has."""
    monitor = everything.resources["ServiceMonitor", "demo-shardgate"]["spec"]
    service = everything.resources["Service", "demo-shardgate-replicas"]

    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["authorization"] == {"credentials": {"name": "shardgate", "key": "metrics"}}


def test_the_balancer_may_reach_what_it_asks(everything: Rendered) -> None:
    """Gateways at the port they listen on, and name servers."""
    to_gateways, to_names = everything.resources["NetworkPolicy", "demo-shardgate-balancer"][
        "spec"
    ]["egress"]
    (gateway,) = everything.pods()[GATEWAY[1]]["containers"]
    labels = everything.resources[GATEWAY]["spec"]["template"]["metadata"]["labels"]

    assert to_gateways["to"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert to_gateways["ports"] == [{"port": gateway["ports"][0]["containerPort"]}]
    assert {(each["port"], each["protocol"]) for each in to_names["ports"]} == {
        (port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")
    }


@pytest.mark.parametrize("clients", [[], [{"ipBlock": {"cidr": "10.0.0.0/8"}}]])
def test_who_reaches_the_balancer_can_be_told(chart: Chart, clients: list[object]) -> None:
    """Everybody, if nobody is named."""
    policy = chart.render(**{"networkPolicy.clients": clients}).resources[
        "NetworkPolicy", "demo-shardgate-balancer"
    ]
    (rule,) = policy["spec"]["ingress"]

    assert rule.get("from", []) == clients


def test_all_listen_on_ipv6_where_they_are_told(plain: Rendered, direct: Rendered) -> None:
    """Beside IPv4."""
    expected = ((plain, ["8080"], None), (direct, ["8443", "[::]:8443"], "::"))
    for rendered, listens, host in expected:
        site = rendered.resources["ConfigMap", BALANCER[1]]["data"]["site.conf"]
        (gateway,) = rendered.pods()[GATEWAY[1]]["containers"]
        variables = {each["name"]: each["value"] for each in gateway["env"]}
        assert re.findall(r"listen (\S+)", site) == listens
        assert variables.get("SHARDGATE_SERVER__HOST") == host


SERVICE: Final = "demo-shardgate-replicas.lab.svc.cluster.local"
REPLICAS: Final = 3
DNS_S: Final = 6
"""Seconds for which names of Services are known to CoreDNS and nginx."""
SHARDS: Final = 24
CHUNKS: Final = 4
"""Of each shard."""
LONGEST_S: Final = 20.0


class Balanced(NamedTuple):
    """nginx, and the names that it asks for."""

    names: Names
    nginx: Balancer
    client: httpx.Client

    def read(self) -> dict[int, set[str]]:
        """Read every chunk, and tell where those of each shard came from."""
        before = self.nginx.logged_so_far()
        for chunk in range(SHARDS * CHUNKS):
            assert self.client.get(f"/data/c/{chunk}").content == bytes([chunk])
        replicas = defaultdict(set)
        for line in self.nginx.logged(before, at_least=SHARDS * CHUNKS):
            replicas[int(line["path"].rpartition("/")[2]) // CHUNKS].add(line["replica"])
        return dict(replicas)


@pytest.fixture
def balanced(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Balanced]:
    """Run three gateways, a name server that knows them, and nginx as the chart has it."""
    made = zarr.create_array(
        tmp_path / "data", shape=(SHARDS * CHUNKS,), shards=(CHUNKS,), chunks=(1,), dtype="u1",
        compressors=None, fill_value=255,
    )  # fmt: skip
    made[:] = np.arange(SHARDS * CHUNKS, dtype="u1")
    with ExitStack() as stack:
        environ = of_dataset(str(tmp_path / "data"))
        gateways = [stack.enter_context(forked(environ)) for _ in range(REPLICAS)]
        ports = [int(gateway.url.rpartition(":")[2]) for gateway in gateways]
        names = Names(SERVICE, {f"10-0-0-{n}": port for n, port in enumerate(ports)})
        resolver = stack.enter_context(naming(names))
        (port,) = free_ports(1)
        files = Chart(helm(request)).render(**{"balancer.resolver": resolver})
        for name, text in files.resources["ConfigMap", "demo-shardgate-balancer"]["data"].items():
            here = text.replace("listen 8080", f"listen 127.0.0.1:{port}")
            (tmp_path / name).write_text(here)
        started = listening(command(new_nginx(request), tmp_path), port, tmp_path / "output")
        nginx = Balancer(tmp_path, port, stack.enter_context(started))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))
        deadline = time.monotonic() + LONGEST_S
        while not client.get("/data/zarr.json").is_success:  # it has not found the gateways yet
            assert time.monotonic() < deadline, nginx.output
            time.sleep(0.05)
        yield Balanced(names, nginx, client)


def test_replicas_are_found_and_forgotten(balanced: Balanced) -> None:
    """Each shard has one of them, and only those of one that goes get another."""
    before = balanced.read()
    assert {len(replicas) for replicas in before.values()} == {1}
    assert len(set.union(*before.values())) == REPLICAS

    gone, port = next(iter(balanced.names.pods.items()))
    balanced.names.pods = {k: v for k, v in balanced.names.pods.items() if k != gone}
    deadline = time.monotonic() + LONGEST_S
    while f"127.0.0.1:{port}" in set.union(*(after := balanced.read()).values()):
        assert time.monotonic() < deadline

    assert {shard for shard in before if before[shard] != after[shard]} == {
        shard for shard in before if before[shard] == {f"127.0.0.1:{port}"}
    }
