"""Roots of the command line."""

from shardgate.configuration import load
from shardgate.roots import RootOptions


def test_options_reach_every_root_and_prefix() -> None:
    """`--anonymous` applies to every bucket and allowed prefix, and not to folders."""
    options = RootOptions(("s3://b/p", "/v"), anonymous=True)
    settings = load(None, {}, options.tables({"bucket": "s3://x", "folder": "/y"}))

    assert settings.stores["anonymous"].anonymous
    assert {name: each.store for name, each in settings.datasets.items()} == {
        "bucket": "anonymous",
        "folder": None,
    }
    for dataset in settings.datasets.values():
        prefixes = [(prefix.url, prefix.store) for prefix in dataset.virtual_chunk_prefixes]
        assert prefixes == [("s3://b/p", "anonymous"), ("file:///v", None)]
