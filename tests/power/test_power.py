"""The tool that measures the power of tests."""

from pathlib import Path
from textwrap import dedent

import pytest

from tests.power.killing import Killing
from tests.power.measured import Measured, Recorded, needed, only
from tests.power.measuring import measure
from tests.power.mutating import Mutant, draw, find_sites, locate

PATH = "shardgate/sample.py"
SOURCE = dedent("""\
    LIMIT = 4


    def clip(value):
        if value < 0:
            return 0
        return min(value, LIMIT)


    def unseen():
        return 1
""")
TESTS = dedent("""\
    from shardgate.sample import clip


    def test_low():
        assert clip(-2) == 0


    def test_high():
        assert clip(9) == 4
""")


def _mutants(source: str = SOURCE, *, seed: int = 1) -> list[Mutant]:
    return draw({PATH: source}, lambda site: True, seed=seed, count=100)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a package with two tests."""
    root = tmp_path_factory.mktemp("sample")
    files = {"app/shardgate/__init__.py": "", f"app/{PATH}": SOURCE, "tests/test_sample.py": TESTS}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "pytest.ini").write_text("[pytest]\naddopts = -pno:schemathesis -pno:asyncio\n")
    return root


@pytest.fixture(scope="module")
def measured(root: Path) -> Measured:
    """Measure the package."""
    assert measure(["tests"], root / "build", root, workers=0) == 0
    return Measured.load(root / "app", root / "build/measured.json")


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("a <= b < c", ["(a < b < c)", "(a <= b <= c)"]),
        ("a and not b", ["(a or not b)", "(b)"]),
        ("a + 1", ["(a - 1)", "2"]),
        ("a[1:b]", [":b"]),
        ("x = True, 'text'", ["False", "''"]),
        ("x.y = z", ["pass"]),
        ("call(a)", ["pass"]),
        ("raise A(1 + 1)", ["pass"]),
        ("def f() -> 'text': return a", ["return None"]),
        ("a if b else c", ["(not (b))"]),
        ("'''Docstring.'''", []),
    ],
)
def test_statement_has_its_changes(source: str, changes: list[str]) -> None:
    """Each operator, value, condition and effect of a statement has a change."""
    assert set(changes) <= {site.mutant.after for site in find_sites(PATH, source)}


def test_draw_depends_on_the_seed_alone() -> None:
    """A seed draws the same mutants again, one a line, and another seed others."""
    assert _mutants() == _mutants()
    assert len({mutant.line for mutant in _mutants()}) == len(_mutants())
    assert any(_mutants() != _mutants(seed=seed) for seed in range(2, 9))


def test_mutant_is_found_where_its_line_has_moved(tmp_path: Path) -> None:
    """A mutant drawn before lines were added above is found in the new text."""
    file = tmp_path / PATH
    file.parent.mkdir()
    file.write_text("\n\n" + SOURCE)

    lines = {site.line - 2: mutant.line for mutant, site in locate(_mutants(), tmp_path).items()}

    assert lines == {number: SOURCE.splitlines()[number - 1].strip() for number in (1, 5, 6, 7, 11)}


def test_each_test_is_measured_with_its_lines_and_branches(measured: Measured) -> None:
    """A test has the lines and the branches that it alone has run."""
    low, high = "tests/test_sample.py::test_low", "tests/test_sample.py::test_high"
    own = only({test: measured.contexts[test] for test in (low, high)})
    names = {test: {n for n, i in measured.numbers.items() if own[test] >> i & 1} for test in own}

    assert names == {low: {f"{PATH}:6", f"{PATH}:5>6"}, high: {f"{PATH}:7", f"{PATH}:5>7"}}
    assert f"{PATH}:11" not in measured.numbers
    assert measured.tests[low].outcome == "passed"


def test_line_of_a_fixture_is_run_by_all_tests_of_its_scope(root: Path) -> None:
    """A line that a fixture of a file runs counts for its tests, and one of an import likewise."""
    numbers = {f"{PATH}:1": 0, f"{PATH}:6": 1}
    contexts = {"": 0b01, "tests/test_a.py": 0b10}
    tests = {f"tests/test_{name}": Recorded(1, 1, "passed") for name in ("a.py::x", "b.py::y")}
    measured = Measured(root / "app", numbers, contexts, tests)
    sites = {site.line: site for site in find_sites(PATH, SOURCE)}

    runs = {line: measured.runs(sites[line]) for line in (1, 6, 11)}

    assert runs == {1: {"tests/test_a.py::x"}, 6: {"tests/test_a.py::x"}, 11: set()}


def test_mutant_is_killed_by_the_test_that_asserts_its_outcome(
    measured: Measured, root: Path
) -> None:
    """A mutant on a line that runs dies if its effect is asserted; another one survives."""
    changes = {"LIMIT = 4": "5", "if value < 0:": "(value <= 0)"}
    mutants = [
        site.mutant
        for site in find_sites(PATH, SOURCE)
        if changes.get(site.mutant.line) == site.mutant.after
    ]
    results = {r.mutant.line: r for r in Killing(measured, root / "build", root).run(mutants, 2)}

    outcomes = {line: (result.outcome, result.by) for line, result in results.items()}

    assert outcomes == {
        "LIMIT = 4": ("killed", ["tests/test_sample.py::test_high"]),
        "if value < 0:": ("survived", []),
    }


def test_sets_without_own_elements_are_not_needed() -> None:
    """A set whose elements others have is left out."""
    assert sorted(needed({"a": 0b011, "b": 0b110, "c": 0b010})) == ["a", "b"]
