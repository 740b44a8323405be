"""Measure what tests cover and kill that no others do.

Not seen: lines of processes that are killed or get an environment without that of the tests, and
processor time of commands, which another process forks. What a command's process did before it was
forked counts for the test that ran the first command.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Final

from tests.power.killing import Killing, Result
from tests.power.measured import Measured
from tests.power.measuring import measure
from tests.power.mutating import Mutant, draw
from tests.power.reporting import report
from tests.support.processes import ROOT

APP: Final = ROOT / "app"


def main() -> int:
    """Run the command that was asked for."""
    options = _parse()
    home: Path = options.home.resolve()
    match options.command:
        case "measure":
            return measure(options.tests, home, workers=options.workers, bare=options.bare)
        case "mutants":
            _kill(home, options)
        case _:
            files = options.results or home.glob("*-results.jsonl")
            results = [result for file in files for result in _read(file)]
            measured = Measured.load(APP, home / "measured.json")
            report(measured, results, options.folder)
    return 0


def _kill(home: Path, options: argparse.Namespace) -> None:
    measured = Measured.load(APP, home / "measured.json")
    drawn = options.drawn or home / f"mutants-{options.seed}-{options.count}.json"
    if not drawn.exists():
        mutants = _draw(measured, options.seed, options.count)
        drawn.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1))
    wanted = {Mutant(**mutant) for mutant in json.loads(drawn.read_bytes())}
    file = home / f"{drawn.stem}-results.jsonl"
    left = wanted - {result.mutant for result in _read(file)}
    killing = Killing(measured, home, each_file=options.each_file, limit_s=options.limit)
    with file.open("a") as results:
        for result in killing.run(sorted(left, key=lambda mutant: mutant.key), options.workers):
            print(json.dumps(asdict(result)), file=results, flush=True)
            print(result.outcome, result.mutant, *result.by)
    for outcome, count in Counter(result.outcome for result in _read(file)).items():
        print(f"{outcome}: {count} of {len(wanted)}")


def _draw(measured: Measured, seed: int, count: int) -> list[Mutant]:
    files = sorted(APP.rglob("*.py"))
    sources = {file.relative_to(APP).as_posix(): file.read_text() for file in files}
    return draw(sources, lambda site: bool(measured.runs(site)), seed=seed, count=count)


def _read(file: Path) -> list[Result]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [
        Result(**{**data, "mutant": Mutant(**data["mutant"])}) for data in map(json.loads, lines)
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.power", description=__doc__)
    parser.add_argument("--home", type=Path, default=ROOT / "build/power", help="where figures are")
    parser.add_argument("--workers", type=int, default=2, help="at once; default: %(default)s")
    commands = parser.add_subparsers(dest="command", required=True)
    part = commands.add_parser("measure", help="run tests and record their seconds and branches")
    part.add_argument("tests", nargs="*", default=["tests"], help="default: all")
    part.add_argument("--bare", action="store_true", help="seconds alone, which coverage inflates")
    part = commands.add_parser("mutants", help="run tests on mutants; goes on where it was ended")
    part.add_argument("--seed", type=int, default=1)
    part.add_argument("--count", type=int, default=300)
    part.add_argument("--drawn", type=Path, help="a file of mutants drawn before")
    part.add_argument("--each-file", action="store_true", help="find all files that kill a mutant")
    part.add_argument("--limit", type=float, default=inf, help="seconds of tests for one mutant")
    part = commands.add_parser("report", help="print a table")
    part.add_argument("folder", nargs="?", help="print its files; default: all folders")
    part.add_argument("--results", type=Path, nargs="*", help="files; default: all")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
