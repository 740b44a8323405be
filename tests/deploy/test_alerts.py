"""The alerts and the dashboard of the chart, checked by Prometheus' own tool."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from shardgate.observability.metrics import Metrics
from tests.support.deploy.programs import CHART
from tests.support.lacking import need

ALERTS: Final = CHART / "files/alerts.yml"
DASHBOARD: Final = CHART / "files/dashboard.json"

SUFFIXES: Final = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
FINE: Final = {
    'up{job="shardgate", instance="a"}': "1x90",
    'shardgate_requests_total{dataset="em", outcome="hit"}': "0+6000x90",
    'shardgate_requests_total{dataset="em", outcome="failed"}': "0+6x90",
    'shardgate_request_seconds_bucket{method="GET", outcome="answered", le="0.5"}': "0+600x90",
    'shardgate_request_seconds_bucket{method="GET", outcome="answered", le="+Inf"}': "0+600x90",
    'shardgate_upstream_seconds_count{store="s3", kind="chunk"}': "0+600x90",
    'shardgate_upstream_errors_total{store="s3", error="StorageThrottledError"}': "0+6x90",
    'shardgate_upstream_errors_total{store="s3", error="VersionChangedError"}': "0+60x90",
    'shardgate_in_flight_bytes{use="bodies", instance="a"}': "10x90",
    'shardgate_in_flight_max_bytes{use="bodies", instance="a"}': "100x90",
    'shardgate_cache_evictions_total{cache="index", instance="a"}': "0+600x90",
    'shardgate_cache_lookups_total{cache="index", result="hit", instance="a"}': "0+900x90",
    'shardgate_cache_lookups_total{cache="index", result="miss", instance="a"}': "0+100x90",
    "shardgate_swaps_lost_total": "0+60x90",
    "shardgate_rewrite_changes_count": "0+600x90",
    'shardgate_commits_total{outcome="conflict"}': "0+1x90",
    'shardgate_commits_total{outcome="made"}': "0+6x90",
    'shardgate_connections{instance="a"}': "100x90",
    'process_open_fds{instance="a"}': "100x90",
    'process_max_fds{instance="a"}': "1000x90",
    'process_start_time_seconds{instance="a"}': "1x90",
    'shardgate_audit_lost_lines_total{instance="a"}': "0x90",
}
TROUBLE: Final = FINE | {
    'up{job="shardgate", instance="a"}': "0x90",
    'shardgate_requests_total{dataset="em", outcome="failed"}': "0+600x90",
    'shardgate_request_seconds_bucket{method="GET", outcome="answered", le="0.5"}': "0+1x90",
    'shardgate_request_seconds_bucket{method="GET", outcome="answered", le="2.5"}': "0+600x90",
    'shardgate_upstream_errors_total{store="s3", error="StorageThrottledError"}': "0+60x90",
    'shardgate_upstream_errors_total{store="s3", error="StorageDeniedError"}': "0+1x90",
    'shardgate_in_flight_bytes{use="bodies", instance="a"}': "99x90",
    'shardgate_cache_lookups_total{cache="index", result="miss", instance="a"}': "0+500x90",
    "shardgate_swaps_lost_total": "0+900x90",
    'shardgate_commits_total{outcome="conflict"}': "0+9x90",
    'process_open_fds{instance="a"}': "900x90",
    'process_start_time_seconds{instance="a"}': "1+1x90",
    'shardgate_audit_lost_lines_total{instance="a"}': "0+1x90",
}
ABSENT: Final = {'up{job="another", instance="a"}': "1x90"}


def rules() -> list[dict[str, Any]]:
    """Return all alerting rules."""
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard that have queries."""
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries() -> Iterator[str]:
    """Yield all queries of alerts and panels, with variables filled in."""
    yield from (rule["expr"] for rule in rules())
    for panel in panels():
        for target in panel["targets"]:
            yield re.sub(r'"\$\w+"', '".*"', target["expr"].replace("$__rate_interval", "5m"))


@pytest.fixture(scope="module")
def promtool() -> str:
    """Return the path of promtool."""
    return need("promtool")


def _check(promtool: str, *arguments: str, given: str | None = None) -> None:
    done = subprocess.run(
        [promtool, *arguments], input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_queried_metrics_are_exposed() -> None:
    """Every metric that an alert or a panel queries is exposed by the service."""
    exposed = {
        f"{metric.name}{suffix}"
        for metric in Metrics(["em"]).collect()
        for suffix in SUFFIXES.get(metric.type, [])
    }
    asked = {
        name
        for query in queries()
        for name in re.findall(r"\b(?:shardgate|process)_\w+", re.sub(r'"[^"]*"', "", query))
    }

    assert len(asked) > 20
    assert asked <= exposed


def test_every_exposed_metric_is_queried() -> None:
    """Every metric of the service but one is part of an alert or a panel."""
    shown = " ".join(queries())
    ours = {each.name for each in Metrics([]).collect() if each.name.startswith("shardgate_")}

    assert {name for name in ours if name not in shown} <= {"shardgate_writes"}


def test_every_alert_has_severity_summary_and_description() -> None:
    """Every alert has a known severity, a summary, and a description of over 80 characters."""
    for rule in rules():
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"]) > 80


def test_panels_have_distinct_ids_titles_and_positions() -> None:
    """No two panels of the dashboard share an id, a title or a position."""
    shown = panels()
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in shown}

    assert len({panel["id"] for panel in shown}) == len(shown)
    assert len({panel["title"] for panel in shown}) == len(shown)
    assert len(places) == len(shown)


def test_every_query_is_valid_promql(promtool: str, tmp_path: Path) -> None:
    """Prometheus parses every query of the alerts and the dashboard."""
    recorded = [
        {"record": f"query:{number}", "expr": query} for number, query in enumerate(queries())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))

    _check(promtool, "check", "rules", str(path))


@pytest.mark.parametrize(
    ("series", "firing"),
    [(FINE, []), (TROUBLE, [rule["alert"] for rule in rules()]), (ABSENT, ["ShardgateDown"])],
    ids=["fine", "trouble", "absent"],
)
def test_alerts_fire_in_trouble_only(
    promtool: str, tmp_path: Path, series: dict[str, str], firing: list[str]
) -> None:
    """All alerts fire on series of a failing service, and none on those of a healthy one."""
    labels = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)]
    expected = {
        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "80m",
        "exp_samples": labels,
    }
    played = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [expected],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [played]}))

    _check(promtool, "test", "rules", str(path))


def test_exposition_passes_the_linter_of_prometheus(promtool: str) -> None:
    """Prometheus' linter has no complaint about the service's own metrics."""
    text = Metrics(["em"]).exposition().decode()
    ours = re.findall(r"^(?:# (?:HELP|TYPE) )?shardgate_.*\n", text, re.MULTILINE)

    _check(promtool, "check", "metrics", given="".join(ours))
