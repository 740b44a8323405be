"""``shardgate gc`` and ``shardgate expire``, run as a person runs them."""

import json
from pathlib import Path

import pytest
from rich.console import Group

from app.present_upkeep import collected
from app.resolve.icechunk.collecting import GcReport
from app.resolve.icechunk.sweeping import Swept, Tally
from tests.collecting import age, files_of
from tests.commands import run
from tests.formats.icechunk.histories import History, Step, info_of


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a repository, with files that nothing leads to, all of them old."""
    history = History(tmp_path_factory.mktemp("upkeep") / "repository")
    history.take([Step("commit", "main", number) for number in (1, 3, 5)])
    history.take([Step("reset", "main", 2), Step("commit", "main", 7)])
    age(history.folder)
    return history.folder


def test_expire_then_gc_then_verify(repository: Path) -> None:
    """Each tells first what it would do; afterwards nothing is damaged or left over."""
    url = str(repository)
    listed = len(list(info_of(repository).snapshots()))
    names = files_of(repository)

    told = run("expire", url, "--older-than", "0s", "--json")
    assert told.returncode == 0, told.stderr
    report = json.loads(told.stdout)
    assert report["executed"] is False
    assert len(list(info_of(repository).snapshots())) == listed
    done = run("expire", url, "--older-than", "0s", "--execute")
    assert all(each in done.stdout for each in report["snapshots"])
    assert len(list(info_of(repository).snapshots())) == listed - len(report["snapshots"])

    told = run("gc", url, "--json")
    assert files_of(repository) == names
    done = run("gc", url, "--execute")
    assert done.returncode == 0, done.stderr
    count = sum(each["removed"]["count"] for each in json.loads(told.stdout)["folders"].values())
    assert count == len(names) - len(files_of(repository)) > 0
    assert "snapshots" in done.stdout
    verified = run("verify", url, "--chunks")
    assert verified.returncode == 0, verified.stdout
    assert "0 unreferenced files" in verified.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("gc", "URL", "--older-than", "soon"),
        ("gc", "URL", "--older-than", "2999-01-01T00:00:00Z"),
        ("gc", "URL/chunks"),
        ("gc",),
        ("expire", "URL"),
        ("expire", "URL", "--older-than", "3"),
        ("expire", "URL", "--delete-expired", "--older-than", "3d"),
    ],
)
def test_a_wrong_argument_is_one_line(repository: Path, arguments: tuple[str, ...]) -> None:
    """And exit code 2."""
    done = run(*(each.replace("URL", str(repository)) for each in arguments))

    assert done.returncode == 2
    assert done.stderr.startswith("shardgate: error: ")
    assert len(done.stderr.splitlines()) == 1


def test_damage_is_exit_code_1(tmp_path: Path) -> None:
    """Nobody knows then what is needed."""
    history = History(tmp_path / "repository")
    next((history.folder / "manifests").iterdir()).write_bytes(b"")

    done = run("gc", str(history.folder), "--execute")

    assert done.returncode == 1
    assert "manifests/" in done.stderr


def test_what_could_not_be_removed_is_told_to_people() -> None:
    """And what was not looked at after that."""
    swept = Swept(Tally(1, 2), Tally(3, 4), 5, "s3://b/[x]: denied", is_complete=False)
    report = GcReport(
        executed=True,
        older_than="then",
        oldest_session="a session",
        folders={"snapshots": swept},
        skipped=["chunks"],
    )

    drawn = collected(report)
    assert isinstance(drawn, Group)
    told = "\n".join(each for each in drawn.renderables if isinstance(each, str))

    assert "5 could not be removed" in told
    assert "s3://b/\\[x]: denied" in told
    assert "because of the open session a session" in told
    assert "chunks: not looked at" in told
