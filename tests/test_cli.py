"""The command, run as a person runs it."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app import demo
from app.cli import main

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-c", "from app.cli import main; main()"]
START_S = 60


def environ(**more: str) -> dict[str, str]:
    """Give an environment in which nothing else is configured."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDGATE_", "AWS_"))}
    return kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", **more}


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environ(**more),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


@contextmanager
def running(*arguments: str, lines: int = 1) -> Generator[tuple[subprocess.Popen[str], list[str]]]:
    """Run the command, and give it with its first *lines* once they are printed."""
    with subprocess.Popen(
        [*COMMAND, *arguments],
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, [process.stdout.readline().strip() for _ in range(lines)]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def get(url: str) -> bytes:
    """Read the body of *url*."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - of our own server
        return bytes(answer.read())


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the examples once."""
    folder = tmp_path_factory.mktemp("examples")
    demo.write(folder)
    return folder


def test_help_names_the_commands() -> None:
    """Without arguments the command explains itself."""
    shown = run()

    assert shown.returncode == 0
    assert all(name in shown.stdout for name in ("serve", "demo", "inspect", "verify"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "there is no dataset to serve"),
        (["serve", "/nowhere.toml"], "/nowhere.toml: No such file or directory"),
        (["serve", "a/x.zarr", "s3://b/x"], "two datasets are called x: write NAME=s3://b/x"),
        (["serve", "api=/tmp"], "datasets.api: is not a name for a dataset"),
        (["serve", "http://host:80"], "datasets.host:80: is not a name for a dataset"),
        (["serve", "a=ftp://x/y"], "datasets.a.url: begins with none of"),
        (["serve", "--port", "65536", "a=/tmp"], "server.port: "),
        (["serve", "--port", "x", "a=/tmp"], "Invalid value for '--port'"),
        (["serve", "--prot", "1", "a=/tmp"], "No such option: --prot"),
        (["serve", "--host", "no such host", "a=/tmp"], "cannot listen on no such host:8000: "),
        (["serve", "--strict", "a=/no/where"], "datasets.a.url: file:///no/where"),
        (["inspect", "/no/where"], "file:///no/where"),
        (["verify", "/no/where"], "file:///no/where"),
        (["serv"], "No such command 'serv'"),
    ],
)
def test_a_wrong_start_is_one_line_and_exit_code_2(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No traceback: the line names what is wrong."""
    monkeypatch.setattr(sys, "argv", ["shardgate", *arguments])

    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()

    assert ended.value.code == 2
    assert err.startswith(f"shardgate: error: {said}")
    assert err.count("\n") == 1
    assert not out


def test_a_wrong_variable_stops_the_start() -> None:
    """The environment is checked like the file."""
    failed = run("serve", "/tmp", SHARDGATE_SERVER__PROT="1")

    assert failed.returncode == 2
    assert failed.stderr.startswith("shardgate: error: SHARDGATE_SERVER__PROT: is no setting")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_it_is_told_to_stop(examples: Path, workers: int, number: int) -> None:
    """Each dataset has a line with its URL, which answers; a signal ends all processes well."""
    arguments = ("serve", "--port", "0", "--workers", str(workers), str(examples / "image.zarr"))
    with running(*arguments, f"all={examples}", lines=2) as (process, lines):
        urls = [line.split()[0] for line in lines]
        bodies = {get(f"{urls[0]}s0/c/2/3/4"), get(f"{urls[1]}image.zarr/s0/c/2/3/4")}
        # As a terminal does, the signal goes to the whole group where it is Ctrl+C.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        code = process.wait(START_S)
        assert process.stderr is not None
        said = process.stderr.read()

    assert [url.rpartition(":")[2].partition("/")[2] for url in urls] == ["image/", "all/"]
    assert [line.split()[-1] for line in lines] == [
        (examples / "image.zarr").as_uri(),
        examples.as_uri(),
    ]
    assert len(bodies) == 1
    assert (code, said) == (0, "")


def test_a_taken_port_is_one_line(examples: Path) -> None:
    """The second service on a port says so and ends."""
    with running("serve", "--port", "0", str(examples)) as (_, lines):
        found = re.search(r":(\d+)/", lines[0])
        assert found is not None
        failed = run("serve", "--port", found[1], str(examples))

    assert failed.returncode == 2
    assert failed.stderr.startswith(f"shardgate: error: cannot listen on 127.0.0.1:{found[1]}: ")


def test_a_configuration_file_is_served(examples: Path, tmp_path: Path) -> None:
    """Options of the command line win over the file."""
    config = tmp_path / "shardgate.toml"
    config.write_text(f'[server]\nport = 1\n[datasets.em]\nurl = "{examples}/image.zarr"\n')

    with running("serve", str(config), "--port", "0") as (_, lines):
        assert json.loads(get(lines[0].split()[0] + "zarr.json"))["node_type"] == "group"


def test_the_demo_prints_lines_that_work_verbatim(tmp_path: Path) -> None:
    """What is printed can be copied into a shell."""
    with running("demo", "--port", "0", "--dir", str(tmp_path / "data"), lines=11) as (_, lines):
        assert [line.startswith("http://") for line in lines[:3]] == [True] * 3
        curl = next(line for line in lines if line.startswith("curl "))
        python = next(line for line in lines if "import zarr" in line)
        answers = [
            subprocess.run(  # noqa: S602 - a shell is what the line is for
                line, shell=True, capture_output=True, text=True, timeout=60, check=True
            )
            for line in (curl, python)
        ]

    assert answers[0].stdout.startswith("HTTP/1.1 200 OK")
    values = [int(number) for number in re.findall(r"\d+", answers[1].stdout)]
    assert len(values) == 8
    assert max(values) > 0


def test_the_demo_writes_once(tmp_path: Path) -> None:
    """A second start leaves the files as they are, and they are small."""
    demo.write(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    demo.write(tmp_path)

    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert sum(path.stat().st_size for path in before) < 20 * 1024**2
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.zarr" for name in demo.EXAMPLES}


def test_inspect_lists_arrays_with_their_shards(examples: Path) -> None:
    """The JSON says what the metadata says; the table names every array."""
    document = json.loads(run("inspect", str(examples), "--json").stdout)
    arrays = {array["path"]: array for array in document["arrays"]}
    table = run("inspect", str(examples)).stdout

    assert all(path in table for path in arrays)
    assert sorted(arrays) == [
        "image.zarr/s0",
        "image.zarr/s1",
        "image.zarr/s2",
        "index-at-start.zarr/a",
        "nested.zarr/a",
    ]
    assert arrays["image.zarr/s0"] == {
        "path": "image.zarr/s0",
        "shape": [160, 256, 256],
        "data_type": "uint8",
        "dimension_names": ["z", "y", "x"],
        "inner_chunk_shape": [32, 32, 32],
        "codecs": ["bytes", "zstd"],
        "shard_shape": [128, 128, 128],
        "chunks_per_shard": [4, 4, 4],
        "index_location": ["end"],
        "why_sharded": "",
    }
    assert arrays["index-at-start.zarr/a"]["index_location"] == ["start"]
    assert arrays["nested.zarr/a"]["index_location"] == ["end", "end"]


def test_inspect_finds_a_chunk_where_the_index_says(examples: Path) -> None:
    """Object and byte range are those in the shard's own index, decoded here by `struct`."""
    shard = examples / "image.zarr/s0/c/0/0/0"
    entry = 1 * 16 + 2 * 4 + 3
    index = shard.read_bytes()[-(64 * 16 + 4) :]
    offset, nbytes = struct.unpack_from("<QQ", index, entry * 16)

    found = json.loads(run("inspect", str(examples), "image.zarr/s0/c/1/2/3", "--json").stdout)
    by_shard = run("inspect", str(examples), "image.zarr/s0/c/0/0/0", "--shard", "--json")

    assert (found["state"], found["object"]) == ("stored", shard.as_uri())
    assert (found["start"], found["stop"]) == (offset, offset + nbytes)
    assert found["shard"] == json.loads(by_shard.stdout)
    assert found["shard"]["entries"] == 64
    assert found["shard"]["nbytes"] == shard.stat().st_size
    assert "[" in run("inspect", str(examples), "image.zarr/s0/c/1/2/3").stdout


def test_verify_finds_nothing_wrong_with_the_examples(examples: Path) -> None:
    """Sound data is exit code 0."""
    verified = run("verify", str(examples), "--chunks", "--json")
    report: dict[str, Any] = json.loads(verified.stdout)

    assert verified.returncode == 0
    assert report["damages"] == []
    assert (report["arrays"], report["shards"]) == (
        5,
        sum(1 for path in examples.rglob("c/*/*/*") if path.is_file()),
    )


def test_verify_names_object_and_key_of_damage(tmp_path: Path) -> None:
    """Damage is exit code 1, and a line that says where."""
    demo.write(tmp_path)
    shard = tmp_path / "image.zarr/s0/c/0/0/0"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)

    verified = run("verify", str(tmp_path))

    assert verified.returncode == 1
    assert verified.stdout.splitlines()[-1] == (
        f"damaged: {shard.as_uri()}: image.zarr/s0/c/0/0/0: "
        "the checksum of the shard index does not match"
    )
    assert "Traceback" not in verified.stderr
