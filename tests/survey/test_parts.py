"""Parts of `verify` and of `inspect --references`, put together, are the whole."""

import fcntl
import json
import os
import select
import signal
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from shardgate.configuration import RootOptions
from shardgate.datasets import with_root
from shardgate.errors import StorageUnavailableError
from shardgate.formats.surveying import Damage, Report
from shardgate.model import ObjectRef
from shardgate.storage.memory import MemoryStore
from shardgate.survey.key_part import ALL_KEYS, KeyPart
from shardgate.survey.reference_set import find_references
from shardgate.survey.verify import verify
from tests.support.commands import Running, run
from tests.support.files import write_files
from tests.support.formats.case import Case
from tests.support.formats.cases import CASES
from tests.support.formats.icechunk.case import CASES as ICECHUNK
from tests.support.formats.neuroglancer_precomputed.case import CASES as PRECOMPUTED
from tests.support.formats.zarr.building import array_metadata, sharding
from tests.support.formats.zarr.case import CASES as ZARR
from tests.support.processes import environ
from tests.support.read.stores import WatchedStore
from tests.support.survey.verifying import root_of

ZARR_CASE: Final = ZARR[0]
THREE: Final = (ZARR_CASE, PRECOMPUTED[0], ICECHUNK[0])
PARTS: Final = [KeyPart(number, 8) for number in range(8)]
PIPE_NBYTES: Final = 4096
"""The least size of a pipe."""


def put_together(reports: list[Report]) -> dict[str, Any]:
    """Add up the reports of parts."""
    whole = Report(reads_chunks=reports[0].reads_chunks)
    for report in reports:
        whole.add(report, "")
    return comparable(whole)


def comparable(report: Report) -> dict[str, Any]:
    """Return the members of a report, with damages in their order."""
    damages = sorted(map(str, report.damages))
    return asdict(report) | {"damages": damages}


async def report_of(path: Path, part: KeyPart = ALL_KEYS) -> Report:
    """Verify a part of a local root, whose references may lead to the folder around it."""
    options = RootOptions([path.parent.as_uri()])
    return await with_root(str(path), partial(verify, chunks=True, part=part), options)


def damaged_objects(cases: Iterable[Case]) -> dict[str, bytes]:
    """Return containers below one root, of which every second object is cut."""
    objects: dict[str, bytes] = {}
    for case in cases:
        built = case.build(case.chunks)
        names = [name for name in built if not case.is_metadata(name)]
        built |= {name: built[name][:-1] for name in names[::2]}
        objects |= {f"{case.name}/{name}": data for name, data in built.items()}
    return objects


async def test_parts_of_every_format_are_the_whole_report() -> None:
    """Reports of all parts of damaged containers of all formats add up to that of the whole."""
    root = root_of(damaged_objects(CASES) | {"broken/zarr.json": b"{"})
    whole = await verify(root, chunks=True)
    parts = [await verify(root, chunks=True, part=part) for part in PARTS]

    assert put_together(parts) == comparable(whole)
    assert len(whole.damages) > len(CASES)
    assert all(part.shards < whole.shards and part.damages for part in parts)


@pytest.mark.parametrize("case", THREE, ids=str)
async def test_each_shard_is_read_by_one_part(case: Case) -> None:
    """Each part reads the shards of its own keys only."""
    store = WatchedStore()
    objects = case.build(case.chunks)
    shards = {name for name in objects if not case.is_metadata(name)}
    readers: Counter[str] = Counter()
    for part in PARTS:
        store.calls.clear()
        await verify(root_of(objects, store), chunks=True, part=part)
        names = {call.ref.key for call in store.calls}
        assert {name for name in shards & names if not part.holds(name)} == set()
        readers.update(shards & names)

    assert readers == dict.fromkeys(shards, 1)


def write_references_to_missing(folder: Path) -> Path:
    """Write a set whose arrays refer to a short source, and to an absent one, also as a whole, and
    for their metadata, or to what is not allowed.
    """
    write_files({"sources/short": bytes(20)}, folder)
    absent, short = ((folder / "sources" / name).as_uri() for name in ("absent", "short"))
    refs: dict[str, Any] = {}
    for name in "abcdefgh":
        for key, data in ZARR_CASE.build(ZARR_CASE.chunks).items():
            source = short if name in "aceg" else absent
            refs[f"{name}/{key}"] = [source, 0, len(data)]
            if ZARR_CASE.is_metadata(key):
                refs[f"{name}/{key}"] = data.decode()
        refs[f"{name}/other"] = [absent]
        refs[f"unknown/{name}/zarr.json"] = [absent, 0, 100]
    refs["refused/zarr.json"] = ["s3://elsewhere/zarr.json"]
    (folder / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    return folder / "refs.json"


async def test_missing_source_is_reported_by_one_part(tmp_path: Path) -> None:
    """A source that many shards of a set miss is the damage of one part."""
    set_of_references = write_references_to_missing(tmp_path)
    whole = await report_of(set_of_references)

    reports = [await report_of(set_of_references, part) for part in PARTS]
    assert put_together(reports) == comparable(whole)
    assert (len(whole.damages), whole.shards > 8) == (2, True)


class Refusing(MemoryStore):
    """A store that fails for a moment whenever a manifest is read."""

    async def get(self, ref: ObjectRef, *asked: Any, **more: Any) -> Any:
        """Read an object."""
        if "manifests/" in ref.key:
            raise StorageUnavailableError(ref, "try again")
        return await super().get(ref, *asked, **more)


async def test_part_that_cannot_find_its_shards_says_so() -> None:
    """A manifest that could not be read is a damage of each part that needed it."""
    root = root_of(ICECHUNK[0].build(ICECHUNK[0].chunks), Refusing())
    found = [await verify(root, chunks=False, part=part) for part in PARTS]

    damages = {str(report.damages) for report in found}
    assert len(damages) == 1
    assert "try again" in damages.pop()


async def references_of(folder: Path, part: KeyPart = ALL_KEYS) -> list[tuple[str, Any]]:
    """Return the references of a part of a local root."""

    async def find(root: Any) -> list[tuple[str, Any]]:
        return [each async for each in find_references(root, "", part)]

    return await with_root(str(folder), find, RootOptions([folder.as_uri()]))


async def test_references_of_parts_are_all_references(tmp_path: Path) -> None:
    """Each reference of any format is in the set of one part, with all others of its shard."""
    for case in CASES:
        if "gzip" not in case.name and case.name != "skeletons":
            write_files(case.build(case.chunks), tmp_path / case.name)
    whole = await references_of(tmp_path)
    parts = [await references_of(tmp_path, part) for part in PARTS]

    assert sorted(str(each) for part in parts for each in part) == sorted(map(str, whole))
    assert all(parts)
    for part, found in zip(PARTS, parts, strict=True):
        objects = {place[0] for key, place in found if key.startswith(f"{ZARR_CASE.name}/c/")}
        assert all(part.holds(url.removeprefix(f"file://{tmp_path}/")) for url in objects)


def write_much_damage(folder: Path) -> None:
    """Write damaged containers of three formats; the line of each part fills a pipe."""
    objects = damaged_objects(THREE)
    objects["many/zarr.json"] = json.dumps(array_metadata([2400], [4], [sharding([1])])).encode()
    write_files(objects | {f"many/c/{n}": b"no shard" for n in range(600)}, folder)


def killed_while_it_writes(*arguments: str) -> str:
    """Run a command whose output fills a pipe, kill it then, and return what it had written."""
    read, write = os.pipe()
    with os.fdopen(read) as out, tempfile.TemporaryFile("w+") as err:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_NBYTES)
        with closing(Running(arguments, environ(), write, err)) as command:
            os.close(write)
            assert select.select([out], [], [], 180)[0]
            code, _ = command.end(signal.SIGKILL)
        assert code == -signal.SIGKILL
        return out.read()


async def test_killed_part_that_is_run_again_changes_nothing(tmp_path: Path) -> None:
    """A part that is killed writes no whole line; run again, its line completes the report."""
    write_much_damage(tmp_path)
    command = ("verify", "--chunks", str(tmp_path), "--json", "--part", "3/8")
    broken_off = killed_while_it_writes(*command)

    again = run(*command)

    assert again.stdout.startswith(broken_off)
    assert ("\n" in broken_off, again.stdout.count("\n"), again.returncode) == (False, 1, 1)
    members = json.loads(again.stdout)
    assert members.pop("part") == "3/8"
    members["damages"] = [Damage(**each) for each in members["damages"]]
    reports = [await report_of(tmp_path, part) for part in PARTS if part.number != 3]
    whole = await report_of(tmp_path)
    assert put_together([*reports, Report(**members)]) == comparable(whole)
    assert len(whole.damages) > 600


async def test_killed_part_of_references_is_replaced(tmp_path: Path) -> None:
    """What a killed part has left of its file is not in the file of the part that is run again."""
    write_files(ZARR_CASE.build(ZARR_CASE.chunks), tmp_path / "em.zarr")
    (tmp_path / ".refs.json.partial").write_text('{"version": 1, "refs": {\n"c/9"')
    options = ("--references", "--output", str(tmp_path / "refs.json"), "--part", "0/2")

    assert run("inspect", str(tmp_path / "em.zarr"), *options).returncode == 0
    written = json.loads((tmp_path / "refs.json").read_text())["refs"]
    assert written == dict(await references_of(tmp_path / "em.zarr", KeyPart(0, 2)))
