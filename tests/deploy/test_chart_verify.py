"""The Job of the Helm chart that verifies a dataset in parts."""

import re
from pathlib import Path

import pytest

from tests.support.deploy.programs import EVERYTHING, ROOT, VERIFY, Chart, helm

URL = "s3://bucket/em.zarr"


@pytest.fixture(scope="module")
def chart(request: pytest.FixtureRequest) -> Chart:
    """Return the chart with its Helm."""
    return Chart(helm(request))


def test_job_is_off_by_default(chart: Chart) -> None:
    """By default no Job is rendered."""
    assert VERIFY not in chart.render().resources


def test_each_index_of_the_documented_job_verifies_one_part(chart: Chart, tmp_path: Path) -> None:
    """Each index of the Job in `docs/running.md` verifies the part of its number."""
    page = (ROOT / "docs/running.md").read_text("utf-8")
    (values,) = re.findall(r"```yaml\n(# values.yaml.*?)```", page, re.DOTALL)
    (tmp_path / "values.yaml").write_text(values)
    rendered = chart.render(tmp_path / "values.yaml")
    spec = rendered.resources[VERIFY]["spec"]

    assert (spec["completionMode"], spec["completions"]) == ("Indexed", 256)
    assert spec["parallelism"] == 32
    assert rendered.container(VERIFY[1])["args"] == [
        "verify", "--json", "--part=$(JOB_COMPLETION_INDEX)/256", "--chunks", URL,
    ]  # fmt: skip


def test_found_damage_ends_its_index_only(chart: Chart) -> None:
    """Exit code 1 fails the index without another try; the others go on, and errors are retried."""
    spec = chart.render(EVERYTHING).resources[VERIFY]["spec"]
    damage, disruption = spec["podFailurePolicy"]["rules"]

    assert (damage["action"], damage["onExitCodes"]["values"]) == ("FailIndex", [1])
    assert disruption["action"] == "Ignore"
    assert spec["backoffLimitPerIndex"] > 0
    assert "maxFailedIndexes" not in spec


@pytest.mark.parametrize(
    ("values", "reason"),
    [({}, "needs verify.url"), ({"verify.url": URL, "verify.parts": 100_001}, "schema")],
)
def test_job_without_url_or_of_too_many_parts_is_refused(
    chart: Chart, values: dict[str, object], reason: str
) -> None:
    """A Job without a URL, or of more parts than a Job has indexes, is refused with the reason."""
    with pytest.raises(ValueError, match=reason):
        chart.render(**{"verify.enabled": True}, **values)


def test_pods_of_the_job_reach_stores_and_are_not_reached(chart: Chart) -> None:
    """The NetworkPolicy of the Job's pods allows the egress of the values, and no ingress."""
    resources = chart.render(EVERYTHING).resources
    policy = resources["NetworkPolicy", "demo-shardgate-verify"]["spec"]
    labels = resources[VERIFY]["spec"]["template"]["metadata"]["labels"]

    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["egress"] == resources["NetworkPolicy", "demo-shardgate"]["spec"]["egress"]
    assert "ingress" not in policy
