"""Runs of the tests on copies of the checkout with one mutant each."""

import json
import os
import shutil
import signal
import subprocess
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from itertools import accumulate, chain
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import pytest

from tests.power.measured import Measured
from tests.power.measuring import PYTEST, tests_environ
from tests.power.mutating import Mutant, Site, locate
from tests.power.selecting import CHOSEN, FAILED
from tests.support.processes import ROOT

_LEFT_OUT: Final = shutil.ignore_patterns(
    ".git", ".venv*", ".uv", ".*_cache", ".hypothesis", "__pycache__", "build", "node_modules"
)
_LINKED: Final = (".venv", "tests/clients/js/node_modules")
_FIRST_S: Final = 10.0
"""Seconds of the quickest tests, which run before the modules of all others are imported."""
_TIMES: Final = 5
_MORE_S: Final = 30.0
"""A test may take so many times what was measured, and so many seconds more."""
_NO_FAILURE: Final = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
_START_S: Final = 120.0
"""Time for imports on a busy machine."""


@dataclass(frozen=True)
class Result:
    """Outcome of a mutant: killed, survived, uncovered (no test runs it), or gone from the text."""

    mutant: Mutant
    outcome: str
    by: list[str]
    """First failing test: of all, or of each file if all files have run."""
    is_whole: bool
    """Says that all tests that run the line have run, or each file up to its first failure."""


class Killing:
    """Runs of *measured* tests on mutants, in copies of the checkout below *home*.

    With *each_file*, a failure ends only its file; *limit_s* bounds the seconds of the tests that
    run on one mutant.
    """

    def __init__(
        self, measured: Measured, home: Path, root: Path = ROOT,
        *, each_file: bool = False, limit_s: float = inf,
    ) -> None:  # fmt: skip
        self._measured = measured
        self._home = home
        self._root = root
        self._each_file = each_file
        self._limit_s = limit_s
        self._slots: SimpleQueue[Path] = SimpleQueue()
        self._fails_anyway: dict[str, bool] = {}

    def run(self, mutants: Iterable[Mutant], parallel: int) -> Iterator[Result]:
        """Run the tests of each mutant, several mutants at once."""
        sites = locate(mutants, self._root / "app")
        for number in range(parallel):
            self._slots.put(_copy(self._root, self._home / f"slot-{number}"))
        with ThreadPoolExecutor(parallel) as pool:
            tries = [pool.submit(self._try, mutant, sites.get(mutant)) for mutant in mutants]
            try:
                for done in as_completed(tries):
                    yield done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _try(self, mutant: Mutant, site: Site | None) -> Result:
        if site is None:
            return Result(mutant, "gone", [], is_whole=True)
        tests = self._measured.runs(site)
        if not tests:
            return Result(mutant, "uncovered", [], is_whole=True)
        chosen = self._choose(tests, mutant)
        by: list[str] = []
        slot = self._slots.get()
        try:
            for batch in self._split(chosen):
                if not by or self._each_file:
                    by += self._failures(slot, batch, site)
        finally:
            self._slots.put(slot)
        is_whole = len(chosen) == len(tests) and (self._each_file or not by)
        return Result(mutant, "killed" if by else "survived", by, is_whole)

    def _seconds(self, tests: Iterable[str]) -> float:
        return sum(self._measured.tests[test].wall_s for test in tests)

    def _choose(self, tests: Iterable[str], mutant: Mutant) -> list[str]:
        """Take the tests of the mutant's module, then the quickest tests of each file by turns, up
        to the limit.
        """
        package, _, module = mutant.path.removeprefix("shardgate/").rpartition("/")
        own = f"{Path('tests', package)}/test_{module}"
        turns: Counter[str] = Counter()
        order: list[tuple[bool, int, float, str]] = []
        for test in sorted(tests, key=lambda test: self._measured.tests[test].wall_s):
            file = _file(test)
            order.append((file != own, turns[file], self._measured.tests[test].wall_s, test))
            turns[file] += 1
        quickest = [test for *_, test in sorted(order)]
        sums = accumulate(self._measured.tests[test].wall_s for test in quickest)
        count = sum(total <= self._limit_s for total in sums)
        return quickest[: max(1, count)]

    def _split(self, tests: Iterable[str]) -> Iterator[list[str]]:
        """Sort quick files first, and split off those that need not wait for all imports."""
        files: dict[str, list[str]] = defaultdict(list)
        for test in tests:
            files[_file(test)].append(test)
        own = sorted(files.values(), key=self._seconds)
        sums = accumulate(map(self._seconds, own))
        count = max(1, sum(total <= _FIRST_S for total in sums))
        for batch in (own[:count], own[count:]):
            if batch:
                yield list(chain.from_iterable(batch))

    def _failures(self, slot: Path, tests: list[str], site: Site) -> list[str]:
        """Return the tests that fail with the mutant and pass without."""
        failed: list[str] = []
        while tests and not failed:
            with _changed(slot / "app" / site.mutant.path, site):
                found = self._pytest(slot, tests)
            failed = [test for test in found if not self._fails_without(slot, test)]
            if len(failed) == len(found):
                break
            tests = [test for test in tests if test not in found]
        return failed

    def _fails_without(self, slot: Path, test: str) -> bool:
        if test in self._measured.tests and test not in self._fails_anyway:
            self._fails_anyway[test] = bool(self._pytest(slot, [test]))
        return self._fails_anyway.get(test, False)

    def _pytest(self, slot: Path, tests: Iterable[str]) -> list[str]:
        limits = {test: _TIMES * self._measured.tests[test].wall_s + _MORE_S for test in tests}
        build = slot / "build"
        (build / "chosen.json").write_text(json.dumps(limits))
        (build / "failed.jsonl").write_text("")
        told = tests_environ(
            slot,
            HYPOTHESIS_STORAGE_DIRECTORY=str(build / "hypothesis"),
            **{CHOSEN: str(build / "chosen.json"), FAILED: str(build / "failed.jsonl")},
        )
        ends = [] if self._each_file else ["-x"]
        command = [*PYTEST, "-n", "0", "-p", "tests.power.selecting", *ends]
        command += dict.fromkeys(map(_file, limits))
        code = _run(command, slot, told, _START_S + _TIMES * self._seconds(limits))
        shutil.rmtree(build / "hypothesis", ignore_errors=True)
        found = [json.loads(line) for line in (build / "failed.jsonl").read_text().splitlines()]
        return found or ([] if code in _NO_FAILURE else [f"exit code {code}"])


def _run(command: Sequence[str], folder: Path, told: dict[str, str], limit_s: float) -> int:
    with (folder / "build/output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=told, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            with suppress(ProcessLookupError):  # services that a broken test has left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _file(test: str) -> str:
    return test.partition("::")[0]


def _copy(root: Path, slot: Path) -> Path:
    """Copy what tests may read, so that a mutant is seen by no other process."""
    shutil.rmtree(slot, ignore_errors=True)
    shutil.copytree(root, slot, symlinks=True, ignore=_LEFT_OUT)
    (slot / "build").mkdir()
    for name in _LINKED:
        if (root / name).exists():
            (slot / name).symlink_to((root / name).resolve())
    return slot


@contextmanager
def _changed(file: Path, site: Site) -> Generator[None]:
    """Apply the change for the duration of the block."""
    source = file.read_text()
    compiled = Path(cache_from_source(str(file)))
    file.write_text(site.apply(source))
    compiled.unlink(missing_ok=True)  # its date may be that of the other text
    try:
        yield
    finally:
        file.write_text(source)
        compiled.unlink(missing_ok=True)
