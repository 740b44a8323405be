"""The rendered Helm chart is valid for Kubernetes, nginx and the service."""

import json
import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import trustme
import yaml

from shardgate.configuration import load
from shardgate.processes import STOP_S
from tests.support.deploy.programs import (
    BALANCER,
    CHART,
    EVERYTHING,
    GATEWAY,
    KUBERNETES,
    NGINX_VERSION,
    VERIFY,
    Chart,
    Rendered,
    helm,
    new_nginx,
)

README = (CHART / "README.md").read_text("utf-8")
HOSTS = "SHARDGATE_SERVER__HOSTS"
TRUSTED = "SHARDGATE_SERVER__TRUSTED_PROXIES"
ROOT_PATH = "SHARDGATE_SERVER__ROOT_PATH"
RESOLVER = "kube-dns.kube-system.svc"
DNS_S: Final = 6
"""Seconds for which CoreDNS and nginx cache the addresses of a Service."""
CUSTOM: Final = {"HTTPRoute", "PrometheusRule", "ServiceMonitor"}
"""Kinds that are no part of Kubernetes itself."""


@pytest.fixture(scope="module")
def chart(request: pytest.FixtureRequest) -> Chart:
    """Return the chart with its Helm."""
    return Chart(helm(request))


@pytest.fixture(scope="module")
def plain(chart: Chart) -> Rendered:
    """Render with the default values."""
    return chart.render()


@pytest.fixture(scope="module")
def everything(chart: Chart) -> Rendered:
    """Render with every option enabled."""
    return chart.render(EVERYTHING)


@pytest.fixture(scope="module")
def direct(chart: Chart) -> Rendered:
    """Render with nginx that terminates TLS itself, and IPv6."""
    return chart.render(**{"balancer.tls.secretName": "certificate", "ipv6": True})


@pytest.fixture(params=["plain", "everything", "direct"])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """Return the chart rendered with each of the three sets of values."""
    found: Rendered = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("values", [(), (f"--values={EVERYTHING}",)], ids=["plain", "everything"])
def test_chart_passes_the_linter_of_helm(chart: Chart, values: tuple[str, ...]) -> None:
    """Helm's strict linter accepts the chart with default values and with every option enabled."""
    done = chart.run("lint", "--strict", str(CHART), *values)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", KUBERNETES)
def test_resources_are_valid_for_kubernetes(rendered: Rendered, version: str) -> None:
    """Every rendered resource of Kubernetes validates against its strict schema."""
    for (kind, _), resource in rendered.resources.items():
        if kind not in CUSTOM:
            kubernetes_validate.validate(resource, version, strict=True)


def test_every_enabled_resource_is_rendered(everything: Rendered) -> None:
    """All kinds of enabled resources are rendered; with autoscaling, replicas are not fixed."""
    kinds = {kind for kind, _ in everything.resources}

    assert kinds == {
        "ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Ingress", "Job", "NetworkPolicy",
        "Pod", "PodDisruptionBudget", "Service", "ServiceAccount", *CUSTOM,
    }  # fmt: skip
    for owner in GATEWAY, BALANCER:
        scaler = everything.resources["HorizontalPodAutoscaler", owner[1]]
        assert scaler["spec"]["scaleTargetRef"]["name"] == owner[1]
        assert "replicas" not in everything.resources[owner]["spec"]


def test_service_loads_the_rendered_configuration(everything: Rendered, tmp_path: Path) -> None:
    """The service loads the rendered configuration file, with secrets from the environment."""
    path = tmp_path / "shardgate.toml"
    path.write_text(everything.resources["ConfigMap", GATEWAY[1]]["data"]["shardgate.toml"])

    settings = load(path, {"SHARDGATE_CALLERS__LAB__SECRET_ACCESS_KEY": "secret"})

    assert settings.tokens.longest_s == 3600
    assert settings.datasets["em"].read == ("lab",)


def test_example_values_of_the_readme_render(chart: Chart, tmp_path: Path) -> None:
    """The example values in the chart's README render to its host and dataset."""
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
        ({"enabled": True, "hosts": None}, set()),
    ],
)
def test_gateway_gets_all_of_its_host_names(
    chart: Chart, ingress: Mapping[str, Any], named: set[str]
) -> None:
    """Gateways get the host names of the values, the Ingress and the Service."""
    environ = chart.render(hosts=["lab.example"], ingress=ingress).variables()
    service = {f"demo-shardgate{each}" for each in ("", ".lab", ".lab.svc")}

    hosts = load(None, {HOSTS: environ[HOSTS]}).server.hosts

    assert set(hosts) == {"lab.example", *named, *service, "demo-shardgate.lab.svc.cluster.local"}


def test_root_path_reaches_gateway_nginx_and_ingress(plain: Rendered, everything: Rendered) -> None:
    """The path of the service is set in gateways, nginx and the Ingress."""
    for rendered, file, path in (
        (plain, "site.conf", ""),
        (everything, "clients.conf", "/arrays"),
    ):
        environ = {ROOT_PATH: rendered.variables()[ROOT_PATH]}
        site = rendered.files()[file]
        assert load(None, environ).server.root_path == path
        assert f"set $prefix {path};" in site or not path
    (rule,) = everything.resources["Ingress", "demo-shardgate"]["spec"]["rules"]
    assert [each["path"] for each in rule["http"]["paths"]] == ["/arrays"]
    assert "proxy_set_header X-Forwarded-Prefix $prefix;" in site


def test_images_have_tested_version_or_digest(plain: Rendered, everything: Rendered) -> None:
    """The image of nginx has the tested version; a digest replaces the tag of our own image."""
    assert plain.container(BALANCER[1])["image"] == f"nginx:{NGINX_VERSION}"
    for name in (GATEWAY[1], "demo-shardgate-test"):
        container = everything.container(name)
        assert container["image"].startswith("example.test/shardgate@sha256:0123456789abcdef")
        assert container["imagePullPolicy"] == "Always"


def test_scheduling_values_apply_to_all_pods(everything: Rendered) -> None:
    """Pull secrets and what places pods on nodes apply to all pods."""
    for pod in everything.pods().values():
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert pod["tolerations"] == [{"key": "chunks", "operator": "Exists"}]
        assert pod["affinity"].keys() == {"nodeAffinity"}
        assert pod["priorityClassName"] == "important"


def test_labels_and_annotations_apply_to_their_pods(everything: Rendered) -> None:
    """Labels and annotations of the values apply to the pods of gateways, or to those of nginx."""
    for owner, label, name in (
        (GATEWAY, ("azure.workload.identity/use", "true"), "lab"),
        (BALANCER, ("example.test/tier", "edge"), "edge"),
    ):
        metadata = everything.resources[owner]["spec"]["template"]["metadata"]
        assert label in metadata["labels"].items()
        assert metadata["annotations"]["example.test/owner"] == name


def test_existing_service_account_takes_the_place_of_a_new_one(chart: Chart) -> None:
    """Gateways and `verify` use an existing ServiceAccount of the values; the chart makes none."""
    job = {"verify.enabled": True, "verify.url": "s3://bucket/em.zarr"}
    rendered = chart.render(**{"serviceAccount.name": "reader"}, **job)

    for name in (GATEWAY[1], VERIFY[1]):
        assert rendered.pods()[name]["serviceAccountName"] == "reader"
    assert "ServiceAccount" not in {kind for kind, _ in rendered.resources}


def test_gateway_mounts_volumes_of_the_values(everything: Rendered) -> None:
    """The gateway mounts the volumes of the values, with their group and user ids."""
    pod = everything.pods()[GATEWAY[1]]
    mounts = everything.container(GATEWAY[1])["volumeMounts"]

    assert [each["name"] for each in pod["volumes"]] == ["config", "data"]
    assert [each["mountPath"] for each in mounts] == ["/etc/shardgate", "/data"]
    assert pod["securityContext"] == {
        "fsGroup": 2000,
        "runAsUser": 1000,
        "runAsGroup": 65532,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_secret_becomes_environment_of_pods_that_read_stores(everything: Rendered) -> None:
    """Keys of the Secret become environment variables of gateways and `verify`, and of no other."""
    sources = {
        name: [each.get("envFrom") for each in pod["containers"]]
        for name, pod in everything.pods().items()
    }

    for name in (GATEWAY[1], VERIFY[1]):
        assert sources.pop(name) == [[{"secretRef": {"name": "shardgate"}}]]
    assert {json.dumps(each) for each in sources.values()} == {"[null]"}


def test_pods_meet_the_restricted_pod_security_standard(rendered: Rendered) -> None:
    """All pods meet Kubernetes' restricted standard and have read-only root file systems.

    Service links are off: a variable such as SHARDGATE_PORT would prevent the start.
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


def test_termination_grace_period_covers_the_stop_of_a_gateway(rendered: Rendered) -> None:
    """A gateway's grace period is longer than its preStop sleep plus its own time to stop."""
    stop = rendered.container(GATEWAY[1])["lifecycle"]["preStop"]
    grace_s = rendered.pods()[GATEWAY[1]]["terminationGracePeriodSeconds"]

    assert grace_s > stop["sleep"]["seconds"] + STOP_S


def test_replica_ends_after_the_new_one_is_known(rendered: Rendered) -> None:
    """A rolling update ends no replica before nginx resolves the new one."""
    deployment = rendered.resources[GATEWAY]["spec"]

    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert deployment["minReadySeconds"] >= DNS_S


def test_probes_do_not_depend_on_stores(rendered: Rendered) -> None:
    """All probes of a gateway request `/healthz`, which does not depend on stores."""
    gateway = rendered.container(GATEWAY[1])
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")

    assert [gateway[kind]["httpGet"]["path"] for kind in kinds] == ["/healthz"] * 3


@pytest.mark.parametrize(
    ("owner", "value"),
    [(GATEWAY, {"config": "[cache]\n"}), (BALANCER, {"balancer.clusterDomain": "other"})],
    ids=["gateway", "balancer"],
)
def test_changed_configuration_changes_the_pod_template(
    chart: Chart, plain: Rendered, owner: tuple[str, str], value: dict[str, str]
) -> None:
    """A changed configuration changes the pod template; rendering twice does not."""

    def template(rendered: Rendered) -> object:
        return rendered.resources[owner]["spec"]["template"]

    assert template(chart.render()) == template(plain)
    assert template(chart.render(**value)) != template(plain)


WRONG: Final = {
    "replica": 3,
    "replicas": "three",
    "balancer": {"tls": {"secret": "x"}},
    "autoscaling.requestsInFlight": 0,
    "ingress.hosts": [{"host": "a"}],
    "image.digest": "0123",
    "balancer.cache.size": "10Gi",
    "rootPath": "arrays",
    "balancer.networks": ["pods"],
    "balancer.resolver": "a b",
}
REFUSED: Final = (
    *("'replica' not allowed", "/replicas'", "'secret' not allowed", "requestsInFlight'"),
    *("/ingress/hosts/0'", "/image/digest'", "/balancer/cache/size'", "/rootPath'"),
    *("/balancer/networks/0'", "/balancer/resolver'"),
)


def test_each_wrong_value_is_refused(chart: Chart) -> None:
    """Misspelled values, and those of a wrong type, number or form, are refused by name."""
    with pytest.raises(ValueError, match="schema") as refused:
        chart.render(**WRONG)

    assert [each for each in REFUSED if each not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rootPath": "/a;b"}, "schema"),
        ({"rootPath": "/a/"}, "schema"),
        ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas is larger"),
        ({"balancer.autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas is larger"),
        ({"ingress.enabled": True, "balancer.tls.secretName": "x"}, "an Ingress speaks plain HTTP"),
        ({"httpRoute.enabled": True, "balancer.tls.secretName": "x"}, "Gateway speaks plain HTTP"),
        ({"httpRoute.enabled": True}, "parentRefs has to name a Gateway"),
        ({"serviceAccount": {"name": "a", "annotations": {"b": "c"}}}, "annotate the existing one"),
    ],
    ids=json.dumps,
)
def test_invalid_values_are_refused(chart: Chart, values: dict[str, object], reason: str) -> None:
    """A path that nginx would misread, or a contradiction, fails with its reason."""
    with pytest.raises(ValueError, match=reason):
        chart.render(**values)


def test_nginx_accepts_the_rendered_configuration(
    request: pytest.FixtureRequest, rendered: Rendered, tmp_path: Path
) -> None:
    """The rendered configuration passes nginx's own check without warnings."""
    authority = trustme.CA()
    certificate = authority.issue_cert("chunks.example.test")
    certificate.private_key_pem.write_to_path(tmp_path / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    for name, text in rendered.files().items():
        here = text.replace("/tmp/", f"{tmp_path}/").replace("/certificates", str(tmp_path))
        (tmp_path / name).write_text(here.replace(RESOLVER, "127.0.0.1"))
    (tmp_path / "resolver.conf").write_text("resolver 127.0.0.1;")
    command = [new_nginx(request), "-t", "-p", str(tmp_path), "-e", "stderr"]

    done = subprocess.run(
        [*command, "-c", f"{tmp_path}/nginx.conf"],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "[warn]" not in done.stderr


def test_cache_of_nginx_is_off_by_default(plain: Rendered) -> None:
    """By default nginx has no cache of answers, neither its configuration nor a volume."""
    volumes = plain.pods()[BALANCER[1]]["volumes"]

    assert plain.files().keys() == {"nginx.conf", "site.conf", "replicas.conf", "writers.conf"}
    assert [each["name"] for each in volumes] == ["config", "tmp"]


@pytest.mark.parametrize(
    ("volume", "mounted"),
    [
        ({}, {"emptyDir": {}}),
        ({"hostPath": {"path": "/data"}}, {"hostPath": {"path": "/data"}}),
    ],
)  # fmt: skip
def test_cache_of_nginx_has_its_size_and_volume(
    chart: Chart, volume: dict[str, object], mounted: dict[str, object]
) -> None:
    """The cache of nginx has the size of the values, and their volume where it keeps answers."""
    cache = {"enabled": True, "size": "7g", "volume": volume}
    rendered = chart.render(**{"balancer.cache": cache})
    files = rendered.files()
    mounts = rendered.container(BALANCER[1])["volumeMounts"]

    assert " max_size=7g " in files["cache.conf"]
    assert "listen 8080" in files["clients.conf"]
    assert {"name": "cache", "mountPath": "/tmp/cache"} in mounts
    assert {"name": "cache", **mounted} in rendered.pods()[BALANCER[1]]["volumes"]


@pytest.mark.parametrize(
    ("hosts", "rendered_hosts"), [([], [None]), (["*.a.test", "b.test"], ["*.a.test", "b.test"])]
)
def test_ingress_routes_its_hosts_to_the_service(
    chart: Chart, hosts: list[str], rendered_hosts: list[str | None]
) -> None:
    """The Ingress routes each host, or all if none is named, to a port of the Service."""
    resources = chart.render(**{"ingress.enabled": True, "ingress.hosts": hosts}).resources
    ingress, service = (resources[kind, "demo-shardgate"] for kind in ("Ingress", "Service"))
    kubernetes_validate.validate(ingress, KUBERNETES[-1], strict=True)
    rules = ingress["spec"]["rules"]

    assert [rule.get("host") for rule in rules] == rendered_hosts
    for rule in rules:
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"]["port"]["name"] == service["spec"]["ports"][0]["name"]


def test_each_selector_matches_one_deployment(everything: Rendered) -> None:
    """Each selector matches the pod labels of its own Deployment only."""
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


def test_service_monitor_selects_the_headless_service(everything: Rendered) -> None:
    """The ServiceMonitor selects the headless Service, one of its ports, and the token."""
    monitor = everything.resources["ServiceMonitor", "demo-shardgate"]["spec"]
    service = everything.resources["Service", "demo-shardgate-replicas"]

    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["authorization"] == {"credentials": {"name": "shardgate", "key": "metrics"}}


def test_alerts_and_dashboard_are_those_of_files(everything: Rendered) -> None:
    """The PrometheusRule has the alerts of `files/`, and a ConfigMap has the dashboard."""
    rule = everything.resources["PrometheusRule", "demo-shardgate"]
    dashboard = everything.resources["ConfigMap", "demo-shardgate-dashboard"]

    assert rule["spec"] == yaml.safe_load((CHART / "files/alerts.yml").read_text("utf-8"))
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    text = (CHART / "files/dashboard.json").read_text("utf-8")
    assert json.loads(dashboard["data"]["shardgate.json"]) == json.loads(text)
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_alerts_have_the_fields_of_a_prometheus_rule(everything: Rendered) -> None:
    """Each alert has the fields that the definition of PrometheusRule knows, with their types."""
    for group in everything.resources["PrometheusRule", "demo-shardgate"]["spec"]["groups"]:
        assert group["name"]
        for rule in group["rules"]:
            assert {"alert", "expr"} <= rule.keys()
            assert rule.keys() <= {"alert", "annotations", "expr", "for", "labels"}
            assert re.fullmatch(r"(\d+h)?(\d+m)?(\d+s)?", rule.get("for", ""))
            texts = [*rule["labels"].values(), *rule["annotations"].values(), rule["expr"]]
            assert {type(text) for text in texts} == {str}


def test_route_leads_to_the_service(everything: Rendered) -> None:
    """The HTTPRoute leads its hosts and path from a Gateway to the port of the Service."""
    spec = everything.resources["HTTPRoute", "demo-shardgate"]["spec"]
    (port,) = everything.resources["Service", "demo-shardgate"]["spec"]["ports"]

    assert spec == {
        "parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}],
        "hostnames": ["*.example.test"],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/arrays"}}],
                "backendRefs": [{"name": "demo-shardgate", "port": port["port"]}],
            }
        ],
    }
    assert "*" in json.loads(everything.variables()[HOSTS])


def test_networks_of_the_values_alone_are_trusted(everything: Rendered) -> None:
    """Gateways and nginx trust proxies in the networks of the values, and in no others."""
    environ = {TRUSTED: everything.variables()[TRUSTED]}
    site = everything.files()["clients.conf"]

    trusted = [str(each) for each in load(None, environ).server.trusted_proxies]
    assert trusted == ["10.20.0.0/16", "fd00:20::/32"]
    assert re.findall(r"set_real_ip_from (\S+);", site) == trusted


def test_network_policy_lets_the_balancer_reach_gateways_and_dns(everything: Rendered) -> None:
    """The NetworkPolicy lets the balancer reach gateways at their port, and DNS servers."""
    to_gateways, to_names = everything.resources["NetworkPolicy", "demo-shardgate-balancer"][
        "spec"
    ]["egress"]
    gateway = everything.container(GATEWAY[1])
    labels = everything.resources[GATEWAY]["spec"]["template"]["metadata"]["labels"]

    assert to_gateways["to"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert to_gateways["ports"] == [{"port": gateway["ports"][0]["containerPort"]}]
    assert {(each["port"], each["protocol"]) for each in to_names["ports"]} == {
        (port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")
    }


@pytest.mark.parametrize("clients", [[], [{"ipBlock": {"cidr": "10.0.0.0/8"}}]])
def test_network_policy_admits_clients_of_values(chart: Chart, clients: list[object]) -> None:
    """The NetworkPolicy admits the clients of the values to the balancer; by default, all."""
    policy = chart.render(**{"networkPolicy.clients": clients}).resources[
        "NetworkPolicy", "demo-shardgate-balancer"
    ]
    (rule,) = policy["spec"]["ingress"]

    assert rule.get("from", []) == clients


def test_ipv6_makes_nginx_and_gateways_listen_on_ipv6(plain: Rendered, direct: Rendered) -> None:
    """The value `ipv6` makes nginx listen on IPv6 too, and gateways on `::`."""
    expected = ((plain, ["8080"], None), (direct, ["8443", "[::]:8443"], "::"))
    for rendered, listens, host in expected:
        assert re.findall(r"listen (\S+)", rendered.files()["site.conf"]) == listens
        assert rendered.variables().get("SHARDGATE_SERVER__HOST") == host
