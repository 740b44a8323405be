"""Datasets of the configuration."""

from pathlib import Path
from typing import Final

import pytest

from shardgate.datasets import check_reachable, exposures, make_folders
from shardgate.errors import ConfigurationError
from shardgate.settings import Settings

CALLERS = {name: {"token_sha256": [digit * 64]} for name, digit in (("ana", "0"), ("bob", "1"))}


ONLY_ANA: Final[dict[str, object]] = {"read": ["ana"]}


def settings_of(**datasets: dict[str, object]) -> Settings:
    """Return the settings with *datasets* and two stores."""
    stores = {"one": {"endpoint_url": "http://127.0.0.1:1"}, "other": {"anonymous": True}}
    return Settings.model_validate({"callers": CALLERS, "stores": stores, "datasets": datasets})


@pytest.mark.parametrize(
    ("inner", "outer", "is_named"),
    [
        ({"url": "s3://b/a/c"} | ONLY_ANA, {"url": "s3://b/a"}, True),
        ({"url": "s3://b/a"} | ONLY_ANA, {"url": "s3://b/a"}, True),
        ({"url": "s3://b/a"} | ONLY_ANA, {"url": "s3://b", "read": ["ana", "bob"]}, True),
        ({"url": "s3://b/a"} | ONLY_ANA, {"url": "s3://b", "store": "other"}, True),
        ({"url": "/a/./b"} | ONLY_ANA, {"url": "file:///a"}, True),
        ({"url": "https://a.example/b%20c/d"} | ONLY_ANA, {"url": "https://a.example/b c"}, True),
        ({"url": "https://A.example:443/b"} | ONLY_ANA, {"url": "https://a.example"}, True),
        ({"url": "s3://b/a"}, {"url": "s3://b"}, False),
        ({"url": "s3://b/a", "read": ["ana", "bob"]}, {"url": "s3://b"} | ONLY_ANA, False),
        ({"url": "s3://b/ab"} | ONLY_ANA, {"url": "s3://b/a"}, False),
        ({"url": "s3://b"} | ONLY_ANA, {"url": "s3://b/a"}, False),
        ({"url": "s3://b/a", "store": "one"} | ONLY_ANA, {"url": "s3://b"}, False),
        ({"url": "gs://b/a"} | ONLY_ANA, {"url": "s3://b"}, False),
    ],
)
def test_dataset_within_a_more_public_one_is_named(
    inner: dict[str, object],
    outer: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_named: bool,
) -> None:
    """A dataset within one that more callers can read causes a warning with both names and URLs;
    other datasets cause none.
    """
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    settings = settings_of(inner=inner, outer=outer)
    warnings = list(exposures(settings))

    assert len(warnings) == is_named
    for warning in warnings:
        for name, dataset in settings.datasets.items():
            assert f"datasets.{name}" in warning
            assert dataset.url in warning


def test_folders_that_cannot_be_made_are_warned_of(tmp_path: Path) -> None:
    """The folders of a writable root and of the records of tokens are made, or warned of."""
    file = tmp_path / "file"
    file.touch()
    tables = [
        {
            "datasets": {"a": {"url": f"{below}/a", "writable": True}},
            "tokens": {"url": f"{below}/t"},
        }
        for below in (tmp_path / "folder", file)
    ]
    good, bad = map(Settings.model_validate, tables)

    assert make_folders(good) == []
    assert sorted(each.name for each in (tmp_path / "folder").iterdir()) == ["a", "t"]
    assert make_folders(bad) == [
        f"{setting}: {file.as_uri()}/{name} cannot be made: Not a directory"
        for setting, name in (("datasets.a.url", "a"), ("tokens.url", "t"))
    ]


async def test_unreachable_folder_of_tokens_is_named(tmp_path: Path) -> None:
    """An unreachable folder of the records of tokens is an error that names the setting."""
    folders = {name: tmp_path / name for name in ("data", "tokens")}
    settings = Settings.model_validate(
        {
            "datasets": {"a": {"url": str(folders["data"])}},
            "tokens": {"url": str(folders["tokens"])},
        }
    )
    folders["data"].mkdir()
    with pytest.raises(ConfigurationError, match=r"tokens\.url: .*/tokens.*: No such file"):
        await check_reachable(settings)

    folders["tokens"].mkdir()
    await check_reachable(settings)
