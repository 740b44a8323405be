"""`shardgate.server.instrumentation`: outcomes and labels."""

import random
from typing import get_args

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shardgate.main import create_app
from shardgate.observability.metrics import Outcome, outcome_of
from shardgate.settings import DatasetSettings, LimitSettings, Settings
from shardgate.storage.wrappers import Method


@pytest.mark.parametrize(
    ("outcome", "statuses"),
    [
        ("answered", {200, 206, 307}),
        ("not_modified", {304}),
        ("absent", {404}),
        ("refused", {403, 416, 501}),
        ("failed", {424, 503}),
    ],
)
def test_status_determines_the_outcome(outcome: str, statuses: set[int]) -> None:
    """The outcome of a complete response follows its status; 501 is refused, and not failed."""
    assert {outcome_of(status) for status in statuses} == {outcome}


async def test_labels_are_bounded() -> None:
    """Random paths, methods and headers add no label values; unknown methods are `other`."""
    chance = random.Random(5)
    app = create_app(Settings(datasets={"em": DatasetSettings(url="memory://bucket")}))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for _ in range(500):
            method = chance.choice(["GET", "HEAD", "PUT", "DELETE", "POST", f"X{chance.random()}"])
            name = chance.choice(["em", "%65m", f"d{chance.random()}", "api", "~t/em", "api/x"])
            key = f"{chance.random()}" * chance.randrange(3)
            headers = {"x-request-id": str(chance.random())}
            await client.request(method, f"/{name}/{key}?{chance.random()}", headers=headers)
        text = (await client.get("/metrics")).text

    values: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
    assert values["dataset"] == {"", "em"}
    assert values["outcome"] <= {*get_args(Outcome.__value__), "made", "conflict"}
    assert values["kind"] <= {"metadata", "object", "repo", "ref"}
    assert values["store"] == {"memory"}
    methods = {"GET", "HEAD", "PUT", "DELETE", "POST", "other", *get_args(Method.__value__)}
    assert values["method"] <= methods
    assert "error" not in values


async def test_memory_is_bounded_by_two_budgets() -> None:
    """A service has a budget for bodies in flight, and one of two repository files for decoding."""
    limits = LimitSettings(in_flight_bytes=1000, repository_file_bytes=300)
    datasets = {"em": DatasetSettings(url="memory://bucket", writable=True)}
    transport = httpx.ASGITransport(create_app(Settings(datasets=datasets, limits=limits)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        text = (await client.get("/metrics")).text

    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["shardgate_in_flight_max_bytes"].samples
    found = {sample.labels["use"]: sample.value for sample in samples}
    assert found == {"bodies": 1000, "decoding": 600}
