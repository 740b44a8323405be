"""Tables of what folders, files and tests add to others."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Final

from tests.power.killing import Result
from tests.power.measured import Measured, needed, only
from tests.support.processes import ROOT

_COLUMNS: Final = ("tests", "lines", "wall s", "CPU s", "branches", "own", "kills", "own kills")


def report(measured: Measured, results: Sequence[Result], folder: str | None) -> None:
    """Print a row for each folder of tests, or for each file of *folder* and what it can lose."""
    branches = measured.branches
    groups: dict[str, dict[str, int]] = defaultdict(dict)
    for context, bits in measured.contexts.items():
        if context:
            groups[_group(context, folder)][context] = bits & branches
    shares = {name: reduce(or_, contexts.values()) for name, contexts in groups.items()}
    own = only(shares)
    _print(("", *_COLUMNS))
    for name in sorted(groups):
        if folder is None or name.startswith(folder):
            tests = [test for key, test in measured.tests.items() if _group(key, folder) == name]
            seconds = (sum(test.wall_s for test in tests), sum(test.processor_s for test in tests))
            found = (shares[name].bit_count(), own[name].bit_count())
            kills = _count_kills(name, results, folder)
            _print((name, len(tests), _count_lines(name), *map(round, seconds), *found, *kills))
    for outcome, count in Counter(result.outcome for result in results).items():
        print(f"{count} mutants {outcome}")
    if folder is not None:
        _print_spare({name: groups[name] for name in sorted(groups) if name.startswith(folder)})


def _group(context: str, folder: str | None) -> str:
    """Return the file of a context below *folder*, and of others the folder or file in `tests`."""
    file = context.partition("::")[0]
    return file if folder and file.startswith(folder) else "/".join(file.split("/")[:2])


def _count_kills(name: str, results: Sequence[Result], folder: str | None) -> tuple[int, int | str]:
    """Count the mutants that a group kills, and that no other kills where all files have run."""
    killers = [{_group(test, folder) for test in result.by} for result in results]
    kills = sum(name in by for by in killers)
    if not any(result.is_whole and result.by for result in results):
        return kills, "?"
    whole = [by for by, result in zip(killers, results, strict=True) if result.is_whole]
    return kills, sum(by == {name} for by in whole)


def _count_lines(name: str) -> int:
    path = ROOT / name
    files = [path] if path.is_file() else path.rglob("*.py")
    return sum(len(file.read_text().splitlines()) for file in files)


def _print(row: Sequence[object]) -> None:
    name, *figures = row
    print(f"{name:<56}", *(f"{figure:>9}" for figure in figures))


def _print_spare(files: Mapping[str, Mapping[str, int]]) -> None:
    """Print the test functions without which their files run the same branches."""
    for file, contexts in files.items():
        cases = [context for context in contexts if "::" in context]
        kept = Counter(map(_function, needed(contexts)))
        spare = {
            name: count for name, count in Counter(map(_function, cases)).items() if not kept[name]
        }
        if spare:
            functions = len(set(map(_function, cases)))
            print(f"\n{file}: {len(spare)} of {functions} functions add no branch to their file's")
            for name, count in spare.items():
                print(f"  {name.partition('::')[2]}" + (f" ({count} cases)" if count > 1 else ""))


def _function(context: str) -> str:
    return context.partition("[")[0]
