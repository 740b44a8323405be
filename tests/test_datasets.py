"""Datasets of the configuration."""

from pathlib import Path

import pytest

from shardgate.datasets import check_reachable, exposures, make_folders
from shardgate.errors import ConfigurationError
from shardgate.settings import Settings

CALLERS = {name: {"token_sha256": [digit * 64]} for name, digit in (("ana", "0"), ("bob", "1"))}


def settings_of(**datasets: dict[str, object]) -> Settings:
    """Return the settings with *datasets* and two stores."""
    stores = {"one": {"endpoint_url": "http://127.0.0.1:1"}, "other": {"anonymous": True}}
    return Settings.model_validate({"callers": CALLERS, "stores": stores, "datasets": datasets})


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ({"url": "s3://b/a/c", "read": ["ana"]}, {"url": "s3://b/a"}),
        ({"url": "s3://b/a", "read": ["ana"]}, {"url": "s3://b/a"}),
        ({"url": "s3://b/a", "read": ["ana"]}, {"url": "s3://b", "read": ["ana", "bob"]}),
        ({"url": "s3://b/a", "read": ["ana"]}, {"url": "s3://b", "store": "other"}),
        ({"url": "/a/./b", "read": ["ana"]}, {"url": "file:///a"}),
        ({"url": "https://a.example/b%20c/d", "read": ["ana"]}, {"url": "https://a.example/b c"}),
        ({"url": "https://A.example:443/b", "read": ["ana"]}, {"url": "https://a.example"}),
    ],
)
def test_dataset_within_a_more_public_one_is_named(
    inner: dict[str, object], outer: dict[str, object]
) -> None:
    """The warning names both datasets and their URLs."""
    settings = settings_of(inner=inner, outer=outer)
    (warning,) = exposures(settings)

    for name, dataset in settings.datasets.items():
        assert f"datasets.{name}" in warning
        assert dataset.url in warning


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ({"url": "s3://b/a"}, {"url": "s3://b"}),
        ({"url": "s3://b/a", "read": ["ana", "bob"]}, {"url": "s3://b", "read": ["ana"]}),
        ({"url": "s3://b/ab", "read": ["ana"]}, {"url": "s3://b/a"}),
        ({"url": "s3://b", "read": ["ana"]}, {"url": "s3://b/a"}),
        ({"url": "s3://b/a", "read": ["ana"], "store": "one"}, {"url": "s3://b"}),
        ({"url": "gs://b/a", "read": ["ana"]}, {"url": "s3://b"}),
    ],
)
def test_datasets_that_expose_nothing_are_not_named(
    inner: dict[str, object], outer: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Datasets that lie apart, or that no more callers can read, cause no warning."""
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)

    assert list(exposures(settings_of(inner=inner, outer=outer))) == []


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
