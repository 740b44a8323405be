"""Plugin of pytest that records the seconds of each test and the lines that it runs.

A context of the coverage is the id of a test; a fixture of wider scope has that of its module,
folder or class, or none. Processes that a test starts inherit its context with `environ()`.
"""

import json
import os
import resource
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import coverage
import pytest

from tests.power.inherited import CONTEXT

PARTS: Final = "POWER_PARTS"
"""Names the folder for the files of all processes."""
BARE: Final = "POWER_BARE"
"""Asks for seconds alone."""


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin before the package is imported, in each process that runs tests."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker or not early_config.known_args_namespace.numprocesses:
        early_config.pluginmanager.register(_Recorder(Path(os.environ[PARTS])))


class _Recorder:
    def __init__(self, parts: Path) -> None:
        self._parts = parts
        self._tests: dict[str, tuple[float, float, str]] = {}
        self._outcome = ""
        self._coverage: coverage.Coverage | None = None
        if BARE not in os.environ:
            options = parts / "coverage.ini"
            self._coverage = coverage.Coverage(config_file=str(options), messages=False)
            self._coverage.set_option("run:plugins", [])
            self._coverage.start()
            os.environ["COVERAGE_PROCESS_START"] = str(options)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool | None, object]:
        self._outcome = "passed"
        wall_s = time.monotonic()
        processor_s = _processor_s()
        with self._in_context(item.nodeid):
            done = yield
        seconds = (time.monotonic() - wall_s, _processor_s() - processor_s)
        self._tests[item.nodeid] = (*seconds, self._outcome)
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        with self._in_context(request.node.nodeid):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed and self._outcome != "failed":
            self._outcome = report.outcome

    def pytest_sessionfinish(self) -> None:
        # Not as late as when unconfigured: a worker is killed ten seconds after its last test.
        if self._coverage is not None:
            self._coverage.stop()
            self._coverage.save()
        name = f"tests.{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json"
        (self._parts / name).write_text(json.dumps(self._tests))

    @contextmanager
    def _in_context(self, context: str) -> Generator[None]:
        if self._coverage is None:
            yield
            return
        outer = os.environ.get(CONTEXT, "")
        self._coverage.switch_context(context)
        os.environ[CONTEXT] = context
        try:
            yield
        finally:
            self._coverage.switch_context(outer)
            os.environ[CONTEXT] = outer


def _processor_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
