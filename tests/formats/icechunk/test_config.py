"""`shardgate.formats.icechunk.config`: virtual containers, and settings for writing."""

from pathlib import Path
from typing import Any

import icechunk
import pytest

from shardgate.formats.documents import Json
from shardgate.formats.icechunk.config import (
    WHOLE,
    Config,
    VirtualContainer,
    decode_config,
    parse_splitting,
    read_config,
    read_yaml_config,
)
from shardgate.formats.icechunk.flexbuffers import encode_flexbuffer
from shardgate.formats.icechunk.repo_info import RepoInfoDecoder
from shardgate.formats.reading import DecodeError

YAML = """
inline_chunk_threshold_bytes: 12
compression: null
virtual_chunk_containers:
  lab:
    name: lab
    url_prefix: s3://lab/
    store: !s3_compatible
      region: us-east-1
      secret: 1
  'file:///data/':
    name: null
    url_prefix: file:///data/
    store: !local_file_system /data
  m:
    url_prefix: memory://
    store: in_memory
"""
CONTAINERS = (
    VirtualContainer("lab", "s3://lab/"),
    VirtualContainer(None, "file:///data/"),
    VirtualContainer(None, "memory://"),
)


def _with(containers: Any) -> dict[str, Any]:
    return {"virtual_chunk_containers": containers}


def test_containers_are_decoded_with_name_and_prefix() -> None:
    """Containers are decoded with name and prefix from YAML and FlexBuffers."""
    s3 = {"name": "lab", "url_prefix": "s3://lab/", "store": {"s3": {"anonymous": True}}}
    lab = VirtualContainer("lab", "s3://lab/")

    assert read_yaml_config(YAML.encode()).containers == CONTAINERS
    assert decode_config(_with({"s3://lab/": s3})).containers == (lab,)


def test_empty_configuration_has_defaults() -> None:
    """An empty configuration, or one without containers, has the defaults."""
    for config in (None, {}, {"x": 1}, _with(None), _with({})):
        assert decode_config(config) == Config()
    for text in ("", "# nothing", "~", "virtual_chunk_containers:"):
        assert read_yaml_config(text.encode()) == Config()


S3 = {"url_prefix": "s3://lab/", "store": {"s3": {}}}


@pytest.mark.parametrize(
    "text",
    ["[", "a: b: c", "\x00", "a\n---\nb", "&a [*a]", "a: &a {b: c}\nd: *a",
     "a: &a {b: c}\nd: {<<: *a}", "[" * 5000, "? [a]\n: b", '"\\UFFFFFFFF"',
     'virtual_chunk_containers: {a: {url_prefix: "\\ud800", store: s3}}'],
)  # fmt: skip
def test_invalid_or_large_yaml_is_refused(text: str) -> None:
    """YAML with errors, aliases or deep nesting, or above the limit, raises DecodeError."""
    with pytest.raises(DecodeError, match="YAML"):
        read_yaml_config(text.encode())
    with pytest.raises(DecodeError, match="more than 65536 bytes"):
        read_yaml_config(text.encode().ljust((1 << 16) + 1))


def test_errors_of_a_configuration_contain_no_secrets() -> None:
    """Errors of a configuration contain no credentials of its URLs."""
    container = {"url_prefix": "https://me:secret@lab/", "name": 1}
    with pytest.raises(DecodeError) as error:
        decode_config({"virtual_chunk_containers": {"lab": container}})
    assert "secret" not in str(error.value)
    with pytest.raises(DecodeError, match="invalid YAML: mapping values") as error:
        read_yaml_config(b"a: 1\nb: 'https://me:secret@lab/': :\n")
    assert "secret" not in str(error.value)


def test_settings_for_writing_agree_with_the_library(tmp_path: Path) -> None:
    """Settings for writing are those that the library stores, or its defaults."""
    splitting = icechunk.ManifestSplittingConfig.from_dict(
        {icechunk.ManifestSplitCondition.AnyArray(): {icechunk.ManifestSplitDimCondition.Any(): 10}}
    )
    config = icechunk.RepositoryConfig(
        inline_chunk_threshold_bytes=0,
        num_updates_per_repo_info_file=7,
        compression=icechunk.CompressionConfig(level=9),
        manifest=icechunk.ManifestConfig(splitting=splitting),
    )
    found = []
    for number, each in enumerate((None, config)):
        folder = tmp_path / f"{number}"
        icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)), config=each)
        found.append(RepoInfoDecoder(2**20)((folder / "repo").read_bytes()).config)

    assert found[0] == Config((), 512, 3, 1000, None)
    assert isinstance(found[1], Config)
    assert found[1].inline_chunk_threshold_bytes == 0
    assert found[1].num_updates_per_repo_info_file == 7
    assert found[1].compression_level == found[1].repo_compression_level == 9
    sizes = [{"condition": "Any", "num_chunks": 10}]
    assert found[1].splitting == {"split_sizes": [["any_array", sizes]]}


@pytest.mark.parametrize(
    "document",
    [1, [], _with([S3]), _with({"a": 1}), _with({"a": {}}), _with({"a": S3 | {"name": 1}}),
     _with({"a": S3 | {"url_prefix": None}}), {"inline_chunk_threshold_bytes": -1},
     {"inline_chunk_threshold_bytes": True}, {"num_updates_per_repo_info_file": "7"},
     {"compression": {"level": 1.5}}, {"compression": 3}, {"manifest": []}],
)  # fmt: skip
def test_invalid_container_or_setting_is_refused(document: Json) -> None:
    """A configuration with an invalid container or setting for writing raises DecodeError."""
    with pytest.raises(DecodeError):
        read_config(encode_flexbuffer(document))


def test_absent_splitting_does_not_split() -> None:
    """One manifest has all chunks if no splitting is configured, or there are no rules."""
    assert parse_splitting(None).splits("/a", None, 2) == (WHOLE, WHOLE)
    assert parse_splitting({"split_sizes": None}).splits("/a", ["x"], 1) == (WHOLE,)
    with pytest.raises(DecodeError, match="splitting is not an object"):
        parse_splitting([])


def _sized(condition: Json, count: Json, arrays: Json = "any_array") -> list[Json]:
    """Return one rule of splitting."""
    return [[arrays, [{"condition": condition, "num_chunks": count}]]]


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({}, "not a list of lists"),
        (["any_array"], "not a pair"),
        ([["some_array", []]], "unknown condition"),
        ([["any_array", {}]], "not a list of lists"),
        ([["any_array", [{"condition": "Any"}]]], "no num_chunks"),
        (_sized("Some", 1), "unknown dimension"),
        *((_sized("Any", count), "expected an integer of")
          for count in (True, 0, -1, 2**32, 1.0, None)),
        *((_sized({"Axis": axis}, 1), "expected an integer of") for axis in (True, -1, "0", None)),
    ],
)  # fmt: skip
def test_invalid_rule_of_splitting_is_refused(rules: Json, reason: str) -> None:
    """A rule with an unknown condition, or a size or axis out of bounds, raises DecodeError."""
    with pytest.raises(DecodeError, match=reason):
        parse_splitting({"split_sizes": rules})


def test_deeply_nested_condition_of_splitting_is_refused() -> None:
    """A condition of splitting may have as many levels as the limit, and no more."""

    def nested(levels: int) -> Json:
        condition: Json = "any_array"
        for _ in range(levels):
            condition = {"and": [condition]}
        return {"split_sizes": _sized("Any", 1, condition)}

    parse_splitting(nested(16))
    with pytest.raises(DecodeError, match="more than 16 levels"):
        parse_splitting(nested(17))
