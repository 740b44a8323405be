"""Who reaches whom in what Helm makes of the chart."""

import re

import kubernetes_validate
import pytest

from tests.deploy.charts import BALANCER, GATEWAY, KUBERNETES, Chart, Rendered


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
