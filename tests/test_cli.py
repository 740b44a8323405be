"""The command `shardgate`, run in processes of its own."""

import gzip
import json
import os
import re
import signal
import struct
import subprocess
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.commands import run, running
from tests.support.files import write_files
from tests.support.formats.neuroglancer_precomputed import case as precomputed
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.support.formats.zarr import draft as transformer
from tests.support.formats.zarr.building import array_metadata, sharding
from tests.support.formats.zip.archives import Entry, archive
from tests.support.processes import environ
from tests.support.storage.faulty import FaultyServer
from tests.support.zipped import zipped

HEAVY = {
    *("aiobotocore", "asyncio", "botocore", "fastapi", "httpx", "jinja2", "numpy", "orjson"),
    *("prometheus_client", "re2", "rich", "starlette", "uvicorn"),
}
"""Modules that only some commands need, and that take long to import."""


def get(url: str) -> bytes:
    """Read the body of *url*."""
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - of our own server
        return bytes(answer.read())


@pytest.fixture(scope="module")
def examples(demo_paths: dict[str, Path]) -> Path:
    """Return the folder of the examples, to be read only."""
    return demo_paths["image"].parent


COMMANDS = ("serve", "demo", "inspect", "verify", "login")


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_every_command_shows_help_and_version(command: tuple[str, ...]) -> None:
    """Each command takes `--version`, and `-h` for `--help`; none prints the commands."""
    shown = run(*command, "-h")

    assert shown.stdout.startswith("Usage: shardgate")
    assert shown.stdout == run(*command, "--help").stdout
    assert run(*command, "--version").stdout == f"shardgate {version('shardgate')}\n"
    if not command:
        alone = run()
        assert (alone.returncode, alone.stdout) == (0, shown.stdout)
        assert all(name in shown.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (("--help",), {"pydantic"}),
        (("--version",), {"pydantic"}),
        (("serve", "--help"), set()),
        (("serve", "--prot", "1"), set()),
        (("serv",), set()),
    ],
)
def test_help_version_and_usage_errors_import_little(
    arguments: tuple[str, ...], more: set[str]
) -> None:
    """Help, version and errors of usage import no module that only a command needs."""
    command = [sys.executable, "-X", "importtime", "-m", "shardgate", *arguments]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, check=False)
    timed = re.findall(r"^import time:.*\| +(\w+)", done.stderr, re.MULTILINE)

    assert "typer" in timed
    assert {*HEAVY, *more}.isdisjoint(timed)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "there is no dataset to serve"),
        (["serve", "/nowhere.toml"], "/nowhere.toml: No such file or directory"),
        (["serve", "a.toml", "/tmp"], "a.toml: a configuration file goes without roots beside it"),
        (["serve", "a/x.zarr", "s3://b/x"], "two datasets are called x: write NAME=s3://b/x"),
        (["serve", "api=/tmp"], "datasets.api: is not a name for a dataset"),
        (["serve", "http://host:80"], "datasets.host:80: is not a name for a dataset"),
        (["serve", "a/b=/tmp"], "datasets.a/b: is not a name for a dataset; write a-b=/tmp"),
        (
            ["serve", "my data.zarr"],
            "datasets.my data: is not a name for a dataset; write my-data='my data.zarr'",
        ),
        (["serve", "a=ftp://x/y"], "datasets.a.url: begins with none of"),
        (["serve", "--port", "x", "a=/tmp"], "Invalid value for '--port'"),
        (["serve", "--prot", "1", "a=/tmp"], "No such option: --prot"),
        (["serve", "--host", "no such host", "a=/tmp"], "cannot listen on no such host:8000: "),
        (["serve", "--host", "a..b", "a=/tmp"], "cannot listen on a..b:8000: "),
        (["serve", "--strict", "a=/no/where"], "datasets.a.url: file:///no/where"),
        (["serve", "--writable", "a.toml"], "--writable cannot be combined"),
        (["serve", "--anonymous", "a.toml"], "--anonymous cannot be combined"),
        (["serve", "--allow-virtual", "s3://b", "a.toml"], "--allow-virtual cannot be combined"),
        (["serve", "--allow-virtual", "ftp://b/c", "a=/tmp"], "datasets.a.virtual_chunk_prefixes"),
        (["inspect", "/no/where"], "file:///no/where"),
        (["verify", "/no/where"], "file:///no/where"),
        (["verify", "--part", "8/8", "/"], "--part 8/8: expected K/N with K from 0 to N - 1"),
        (["inspect", "--part", "0/8", "/"], "--part of `inspect` needs --references"),
        (["login", "ftp://a"], "ftp://a is not the https:// URL of a server"),
        (["login", "http://a.example"], "http://a.example is not the https:// URL of a server"),
        (["login", "http://127.0.0.1:1"], "http://127.0.0.1:1/auth_info: "),
        (["login", "https://a..b"], "https://a..b/auth_info: "),
        (["serv"], "No such command 'serv'"),
    ],
)
def test_invalid_start_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    """An invalid option, dataset or file ends with exit code 2 and one line that names it."""
    failed = run(*arguments)

    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith(f"shardgate: error: {said}")
    assert failed.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGTERM, 1),
        (signal.SIGINT, 1),
        (signal.SIGINT, 2),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.soak),
    ],
)
def test_service_runs_until_a_signal(examples: Path, workers: int, number: int) -> None:
    """`serve` prints a line with the URL of each dataset, and ends with exit code 0 by a signal."""
    arguments = ("serve", "--port", "0", "--workers", str(workers), str(examples / "image.zarr"))
    with running(*arguments, f"all={examples}", lines=2) as (process, lines):
        urls = [line.split()[0] for line in lines]
        bodies = {get(f"{urls[0]}s0/c/2/3/4"), get(f"{urls[1]}image.zarr/s0/c/2/3/4")}
        code, said = process.end(number)

    assert [url.rpartition(":")[2].partition("/")[2] for url in urls] == ["image/", "all/"]
    roots = [(examples / "image.zarr").as_uri(), examples.as_uri()]
    assert [line.split()[-1] for line in lines] == roots
    assert len(bodies) == 1
    assert (code, said) == (0, "")


@pytest.mark.parametrize("option", [(), ("--anonymous",)])
def test_anonymous_roots_need_no_credentials(faulty: FaultyServer, option: tuple[str, ...]) -> None:
    """A bucket is read unsigned with `--anonymous`; without it the error names the option."""
    faulty.put("bucket", "notes.txt", b"data")
    told = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    told |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": faulty.url}
    done = run("inspect", "s3://bucket", "notes.txt", "--json", *option, **told)

    if option:
        assert done.returncode == 0
        assert json.loads(done.stdout)["object"].endswith("://bucket/notes.txt")
        assert not any("Authorization" in seen.headers or seen.query for seen in faulty.seen)
    else:
        assert done.returncode == 2
        assert "s3://bucket" in done.stderr
        assert "--anonymous" in done.stderr
        assert not faulty.seen


OF_AWS = "the configuration of AWS"
NO_ENDPOINT = "AWS_ENDPOINT_URL, or endpoint_url of the profile, is no URL of a server"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("AWS_ENDPOINT_URL", "lab", f"s3://b/x: {NO_ENDPOINT}"),
        ("AWS_ENDPOINT_URL", "http://[::1", f"s3://b/x: {NO_ENDPOINT}"),
        ("AWS_ENDPOINT_URL", "http://me:hunter2@a b", f"s3://b/x: {NO_ENDPOINT}"),
        ("AWS_DEFAULT_REGION", "a b", "s3://b/x: Provided region_name 'a b' doesn't match"),
        ("AWS_CONFIG_FILE", __file__, f"{OF_AWS}: Unable to parse config file: {__file__}"),
        ("AWS_PROFILE", "none", f"{OF_AWS}: The config profile (none) could not be found"),
    ],
)
def test_wrong_variable_of_aws_is_named(variable: str, value: str, said: str) -> None:
    """A variable of AWS that cannot be used ends with exit code 2 and one line that names it."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    done = run("inspect", "s3://b/x", **keys | {variable: value})

    assert done.returncode == 2
    assert done.stderr.startswith(f"shardgate: error: {said}")
    assert done.stderr.count("\n") == 1
    assert "hunter2" not in done.stderr


def test_missing_root_is_made_if_it_is_writable(tmp_path: Path) -> None:
    """A missing root on the command line is created with `--writable`."""
    root = tmp_path / "new folder" / "lab"
    with running("serve", "--port", "0", "--writable", str(root)) as (process, lines):
        base = lines[0].split()[0].removesuffix("lab/")
        made = httpx.post(f"{base}api/datasets", json={"name": "lab"})
        _, warned = process.end()

    assert made.status_code == 201
    assert root.exists()
    assert warned == ""


@pytest.mark.parametrize(
    ("options", "name"), [((), "lab"), (("--writable",), "lab.zip"), ((), "lab.parq")]
)
def test_missing_root_on_the_command_line_is_an_error(
    tmp_path: Path, options: tuple[str, ...], name: str
) -> None:
    """A missing root on the command line that `--writable` does not make ends with exit code 2."""
    root = tmp_path / name
    failed = run("serve", "--port", "0", *options, f"lab={root}", str(tmp_path))

    assert (failed.returncode, failed.stdout) == (2, "")
    expected = f"shardgate: error: datasets.lab.url: {root.as_uri()} does not exist\n"
    assert failed.stderr == expected
    assert not root.exists()


def test_missing_root_of_a_file_is_a_warning(tmp_path: Path) -> None:
    """A missing root in a configuration file is served, with a warning."""
    root = tmp_path / "lab"
    config = tmp_path / "shardgate.toml"
    config.write_text(f'[datasets.lab]\nurl = "{root}"\n')
    with running("serve", "--port", "0", str(config)) as (process, lines):
        answer = httpx.get(f"{lines[0].split()[0]}zarr.json")
        _, warned = process.end()

    assert answer.status_code == 503
    assert f"warning: datasets.lab.url: {root.as_uri()} does not exist" in warned


def test_port_in_use_is_an_error(examples: Path) -> None:
    """A port in use ends with exit code 2 and one line that names it and `--port`."""
    with running("serve", "--port", "0", str(examples)) as (_, lines):
        found = re.search(r":(\d+)/", lines[0])
        assert found is not None
        failed = run("serve", "--port", found[1], str(examples))

    assert failed.returncode == 2
    assert failed.stderr.startswith(f"shardgate: error: cannot listen on 127.0.0.1:{found[1]}: ")
    assert "--port" in failed.stderr


def test_configuration_file_is_served_with_a_warning(examples: Path, tmp_path: Path) -> None:
    """A configuration file is served; options of the command line override it.

    The log has one warning of a private dataset that lies in a public one.
    """
    config = tmp_path / "shardgate.toml"
    config.write_text(
        f'[server]\nport = 1\n[callers.ana]\ntoken_sha256 = ["{"0" * 64}"]\n'
        f'[datasets.all]\nurl = "{examples}"\n'
        f'[datasets.em]\nurl = "{examples}/image.zarr"\nread = ["ana"]\n'
    )
    arguments = ("serve", str(config), "--port", "0", "--workers", "2")
    with running(*arguments, lines=2) as (process, lines):
        assert json.loads(get(f"{lines[0].split()[0]}image.zarr/zarr.json"))["node_type"] == "group"
        (line,) = process.end()[1].splitlines()

    assert "WARNING" in line
    assert "datasets.em: " in line


SCALES = ("20_20_40", "40_40_80", "80_80_160")
SYNAPSES = ("by_id", "rel_postsynaptic", "rel_presynaptic", "spatial0")


def test_inspect_lists_arrays_with_their_shards(examples: Path) -> None:
    """`inspect --json` describes each array with its shards, and the table names every array."""
    document = json.loads(run("inspect", str(examples), "--json").stdout)
    arrays = {array["path"]: array for array in document["arrays"]}
    table = run("inspect", str(examples)).stdout

    assert all(path in table for path in arrays)
    assert sorted(arrays) == [
        *(f"cells.precomputed/{scale}" for scale in SCALES),
        *(f"cells.precomputed/em/{scale}" for scale in SCALES),
        *("cells.precomputed/mesh", "cells.precomputed/skeletons"),
        *(f"cells.precomputed/synapses/{part}" for part in SYNAPSES),
        *("film.zarr/s0", "film.zarr/s1", "history.icechunk/s0", "history.icechunk/s1"),
        *("image.zarr/s0", "image.zarr/s1", "image.zarr/s2", "nested.zarr/a"),
    ]
    assert arrays["image.zarr/s0"] == {
        "path": "image.zarr/s0",
        "format": "zarr",
        "kind": "array",
        "shape": [160, 256, 256],
        "data_type": "uint8",
        "dimension_names": ["z", "y", "x"],
        "inner_chunk_shape": [32, 32, 32],
        "codecs": ["bytes", "zstd"],
        "shard_shape": [128, 128, 128],
        "chunks_per_shard": [4, 4, 4],
        "index_location": ["end"],
        "sharding": None,
        "why_sharded": "",
    }
    assert arrays["nested.zarr/a"]["index_location"] == ["start", "end"]
    cells = arrays["cells.precomputed/80_80_160"]
    about = (cells["format"], cells["kind"], cells["shape"])
    assert about == ("precomputed", "array", [64, 64, 40])
    assert cells["sharding"] == (
        "identity, preshift 3, minishard 1, shard 2 bits, index gzip, data gzip"
    )
    assert cells["sharding"] in table


def test_inspect_lists_each_sharded_collection(tmp_path: Path) -> None:
    """`inspect` prints a line for each sharded collection; damage of one hides no other.

    With damage, of a repository too, it ends with exit code 1.
    """
    write_files(precomputed.build_annotations({}, sharding=RAW_SHARDING), tmp_path / "spots")
    write_files(precomputed.build_meshes({}, sharding=RAW_SHARDING), tmp_path / "meshes")
    write_files(transformer.build({}, path="/foo/bar"), tmp_path / "draft")
    write_files({"meta/root/bad.array.json": b"{"}, tmp_path / "draft")

    write_files({"lab/repo": "ICE🧊CHUNK".encode()}, tmp_path)

    found = run("inspect", str(tmp_path))
    rows = [" ".join(line.split()) for line in found.stdout.splitlines()[3:] if line.strip()]

    spread = "identity, preshift 1, minishard 1, shard 1 bits, index raw, data raw"
    bad = (tmp_path / "draft/meta/root/bad.array.json").as_uri()
    assert found.returncode == 1
    assert rows[0].startswith(f"draft damaged: {bad}: no JSON: ")
    assert re.match(r"lab damaged: file://\S+/repo: ", rows.pop(2))
    assert rows[1:] == [
        "draft/foo/bar zarr array 5 7 u1 2x2 4x4 2x2 end gzip/1.0",
        f"meshes precomputed meshes {spread}",
        f"spots/by_id precomputed annotations {spread}",
        f"spots/by_segment precomputed annotations {spread}",
        f"spots/spatial0 precomputed annotations {spread}",
        f"spots/spatial1 precomputed annotations {spread}",
    ]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_text_of_metadata_cannot_control_the_terminal(tmp_path: Path, command: str) -> None:
    """Control characters, and halves of characters, that metadata have are printed escaped."""
    hostile = array_metadata([4], [4], [sharding([2], index_location="\x1b[2J\ud800")])
    write_files({"a/zarr.json": json.dumps(hostile).encode()}, tmp_path)

    found = run(command, str(tmp_path))
    assert found.returncode == 0
    assert r"neither start nor end: \x1b[2J\ud800" in found.stdout
    assert "\x1b" not in found.stdout


def test_inspect_locates_a_chunk(examples: Path) -> None:
    """`inspect` of a chunk prints the object and byte range of its minishard index."""
    shard = examples / "cells.precomputed/40_40_80/0.shard"
    data = shard.read_bytes()
    start, stop = struct.unpack_from("<QQ", data, 16)
    rows = np.frombuffer(gzip.decompress(data[32 + start : 32 + stop]), "<u8").reshape(3, -1)
    ids, nbytes = rows[0].cumsum(), rows[2]
    begins = 32 + (rows[1] + rows[2]).cumsum() - nbytes
    (at,) = np.flatnonzero(ids == 0b1010)  # 2 of x, 1 of y
    key = "cells.precomputed/40_40_80/64-96_32-64_0-32"

    found = json.loads(run("inspect", str(examples), key, "--json").stdout)
    by_shard = run("inspect", shard.parent.parent.as_uri(), "40_40_80/0.shard", "--shard", "--json")

    assert (found["state"], found["object"]) == ("stored", shard.as_uri())
    assert (found["start"], found["stop"]) == (begins[at], begins[at] + nbytes[at])
    assert found["shard"] == json.loads(by_shard.stdout)
    assert (found["shard"]["nbytes"], found["shard"]["gaps"]) == (len(data), 0)
    lines = run("inspect", str(examples), key).stdout.splitlines()
    assert [" ".join(line.split()) for line in lines[:3]] == [
        f"key {key}", "state stored", f"object {shard.as_uri()}",
    ]  # fmt: skip


def test_verify_of_sound_data_is_exit_code_0(examples: Path) -> None:
    """`verify` of the examples finds no damage, counts all shards and ends with exit code 0."""
    verified = run("verify", str(examples), "--chunks", "--json")
    report: dict[str, Any] = json.loads(verified.stdout)

    assert verified.returncode == 0
    assert report["damages"] == []
    shards = [*examples.rglob("c/*/*/*"), *examples.rglob("*.shard")]
    shards += [*examples.rglob("film.zarr/s?/c/*/*/*/*/*")]
    in_repository = 5  # of main
    found = sum(path.is_file() for path in shards) + in_repository
    assert (report["arrays"], report["shards"]) == (20, found)
    assert report["counts"]["manifests"] > 0


def test_verify_names_damage_of_every_format(tmp_path: Path) -> None:
    """`verify` prints a line for each damage of every format, and ends with exit code 1."""
    cells = precomputed.build({"s0/-1-2_5-8_0-1": b"123456789"})
    draft = transformer.build({"data/root/c0/0": zipped(b"four")})
    meshes = precomputed.build_meshes({"1": b"flesh"}, sharding=RAW_SHARDING)
    skeletons = precomputed.build_skeletons({"1": b"bones"}, sharding=precomputed.GZIP_DATA)
    sound = {"cells": cells, "draft": draft, "meshes": meshes, "skeletons": skeletons}
    for name, objects in sound.items():
        write_files(objects, tmp_path / name)
    assert run("verify", "--chunks", str(tmp_path)).returncode == 0
    manifest, larger = (precomputed.encode_manifest([[2], [nbytes]]) for nbytes in (3, 4))
    bones = zipped(b"bones")
    damaged = {
        "cells/s0/0.shard": cells["s0/0.shard"][:-1],
        "draft/data/root/c0/0": draft["data/root/c0/0"][4:],
        "meshes/0.shard": meshes["0.shard"].replace(manifest, larger),
        "skeletons/0.shard": skeletons["0.shard"].replace(bones, bytes(len(bones))),
    }
    write_files(damaged, tmp_path)

    verified = run("verify", "--chunks", str(tmp_path))

    assert verified.returncode == 1
    assert "Traceback" not in verified.stderr
    first, *lines, last = verified.stdout.splitlines()
    assert first == "4 collections, 4 shards, 2 inner chunks of 125 bytes: 4 damaged"
    assert last == "checked the indexes of 4 shards and 2 chunks"
    shown = [line.removeprefix(f"damaged: {tmp_path.as_uri()}/") for line in lines]
    assert [re.sub(r"(no gzip): .*", r"\1", line) for line in shown] == [
        "cells/s0/0.shard: cells/s0/0.shard: minishard index 0 at [12, 36) ends past 35 bytes",
        f"{'draft/data/root/c0/0: ' * 2}inner chunk 0 at [0, 24) overlaps the shard index",
        "meshes/0.shard: meshes/1.index: its fragments have 6 bytes, and there are 5 before it",
        "skeletons/0.shard: skeletons/1: no gzip",
    ]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_folder_without_a_container_is_exit_code_1(tmp_path: Path, command: str) -> None:
    """A folder without a container is an error that names the markers that were looked for."""
    write_files({"a/b/c": b"x", "a/notes.json": b"{}"}, tmp_path)
    shown, told = run(command, str(tmp_path)), run(command, str(tmp_path), "--json")

    markers = "zarr.json, info, repo, refs/branch.main/ref.json, *.zip, *.ozx, .zarray"
    where = f"no container found: looked there and in all folders below for {markers}"
    assert (shown.returncode, told.returncode) == (1, 1)
    assert shown.stderr == f"shardgate: error: {tmp_path.as_uri()}/: {where}\n"
    assert not shown.stdout
    assert json.loads(told.stdout)["arrays"] in ([], 0)


NO_COLLECTIONS = "no arrays or other collections in the containers found\n"
NO_DAMAGE = (
    "0 collections, 0 shards, 0 inner chunks of 0 bytes: none damaged\n"
    "2 references\nchecked the indexes of 0 shards\n"
)


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("name", "data", "verified"),
    [
        ("zarr.json", b'{"zarr_format":3,"node_type":"group"}', NO_COLLECTIONS),
        ("info", b'{"@type":"neuroglancer_segment_properties"}', NO_COLLECTIONS),
        ("a.zip", archive(Entry(b".zgroup", b"{}")), NO_COLLECTIONS),
        ("refs.json", b'{".zgroup": "{}"}', NO_DAMAGE),  # references are verified
    ],
    ids=["group", "segment properties", "archive", "reference set"],
)
def test_container_without_collections_is_reported(
    tmp_path: Path, command: str, name: str, data: bytes, verified: str
) -> None:
    """A container that has no collections is reported as such, not as free of damage."""
    write_files({name: data}, tmp_path)
    shown = run(command, str(tmp_path / name if name in ("a.zip", "refs.json") else tmp_path))

    said = verified if command == "verify" else NO_COLLECTIONS
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, said, "")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_web_server_without_a_container_is_exit_code_1(tmp_path: Path, command: str) -> None:
    """The error for a web server without a container says that it cannot be listed."""
    with running("serve", "--port", "0", str(tmp_path)) as (_, lines):
        shown = run(command, lines[0].split()[0])

    assert shown.returncode == 1
    assert "looked there and not in folders below (an HTTP server cannot be listed)" in shown.stderr


@pytest.mark.parametrize("key", ["image.zarr/s0/c/9/9/9", "image.zarr/s9/zarr.json", "nowhere/x"])
def test_inspect_of_an_absent_key_is_exit_code_1(examples: Path, key: str) -> None:
    """`inspect` of an absent key prints its state, and ends with exit code 1."""
    shown = run("inspect", str(examples), key)

    assert shown.returncode == 1
    assert re.search(r"state +absent", shown.stdout)
    assert shown.stderr.startswith(f"shardgate: error: {key}: ")
    assert ("looked in the folders above for zarr.json" in shown.stderr) is (key == "nowhere/x")


def test_written_references_are_served_and_inspected(examples: Path, tmp_path: Path) -> None:
    """`inspect --references` writes each key with its object and range: to a file, or here.

    `serve` and `inspect` take the file as a root, and follow it below --allow-virtual.
    """
    root = str(examples / "image.zarr")
    output = tmp_path / "refs.json"
    written = run("inspect", root, "--references", "--output", str(output))
    below = run("inspect", str(examples), "image.zarr/s2", "--references")
    key = "s2/c/1/1/1"
    place = json.loads(output.read_text())["refs"][key]
    options = ("--allow-virtual", examples.as_uri())
    shown = json.loads(run("inspect", str(output), key, *options, "--json").stdout)
    with running("serve", "--port", "0", str(output), *options) as (_, lines):
        chunk = get(f"{lines[0].split()[0]}{key}")

    assert (written.returncode, written.stdout, below.returncode) == (0, "", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["refs.json"]
    source, start, nbytes = place
    assert (source, start > 0, nbytes > 0) == (f"file://{root}/s2/c/0/0/0", True, True)
    assert json.loads(below.stdout)["refs"]["c/1/1/1"] == place
    assert [shown["object"], shown["start"], shown["stop"] - shown["start"]] == place
    assert (examples / "image.zarr/s2/c/0/0/0").read_bytes()[start : start + nbytes] == chunk


@pytest.mark.parametrize(
    ("root", "code", "reason"),
    [
        ("cells.precomputed", 2, "its bytes are stored with gzip, which a reference cannot say"),
        ("image.zarr/s0/c", 1, "no container found"),
    ],
)
def test_incomplete_references_are_not_written(
    examples: Path, tmp_path: Path, root: str, code: int, reason: str
) -> None:
    """`inspect --references` of nothing, or of what has none, ends with an error and no file."""
    written = run(
        "inspect", str(examples / root), "--references", "--output", str(tmp_path / "refs.json")
    )

    assert (written.returncode, written.stdout) == (code, "")
    assert reason in written.stderr
    assert not list(tmp_path.iterdir())


def test_output_that_cannot_be_written_is_one_line(examples: Path, tmp_path: Path) -> None:
    """`--output` in a folder that does not exist ends with one line that names it."""
    output = tmp_path / "missing" / "refs.json"
    written = run("inspect", str(examples / "nested.zarr"), "--references", "--output", str(output))

    assert (written.returncode, written.stdout) == (2, "")
    assert written.stderr.startswith("shardgate: error: [Errno 2] No such file or directory: ")
    assert written.stderr.count("\n") == 1
    assert str(output.parent) in written.stderr


def test_count_of_one_is_singular(tmp_path: Path) -> None:
    """The report of `verify` has singular nouns for counts of one."""
    write_files(precomputed.build({"s0/-1-2_5-8_0-1": b"123456789"}), tmp_path)
    indexes, chunks = (
        run("verify", str(tmp_path), *options).stdout.splitlines() for options in ((), ["--chunks"])
    )

    assert indexes[0] == "1 collection, 1 shard, 1 inner chunk of 9 bytes: none damaged"
    assert indexes[-1] == "checked the indexes of 1 shard"
    assert chunks[-1] == "checked the indexes of 1 shard and 1 chunk"
