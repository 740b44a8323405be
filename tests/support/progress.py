"""Plugin of pytest for `make test`: first the expected duration, then a line of progress.

A run on a terminal rewrites one line; elsewhere a line is printed every half a minute. Failures
are named at once.
"""

import hashlib
import shutil
import time
from collections.abc import Sequence
from typing import Final

import pytest

DOCUMENTED_S: Final = 360
"""Duration of all tests on two quiet cores, as CONTRIBUTING says."""
PROGRAMS: Final = (
    "7zz", "aws", "chromium", "curl", "docker-compose", "jq", "nginx", "node", "promtool",
    "rclone", "restic", "varnishd", "zip",
)  # fmt: skip
"""Programs whose tests skip themselves where they are missing."""
_TERMINAL_S: Final = 0.5
_FILE_S: Final = 30.0


def pytest_configure(config: pytest.Config) -> None:
    """Report progress in the process that starts the workers, or runs all by itself."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config), "progress")


class Progress:
    """Progress of a run, and its duration, which the cache of pytest keeps for the next one."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cache = getattr(config, "cache", None)  # not with -p no:cacheprovider
        arguments = " ".join(map(str, config.invocation_params.args))
        self._key = f"seconds/{hashlib.sha256(arguments.encode()).hexdigest()[:16]}"
        self._count = 0
        self._done: set[str] = set()
        self._running: dict[str, str] = {}
        self._started = time.monotonic()
        self._printed = self._started

    def pytest_report_header(self) -> Sequence[str]:
        """Return the expected duration, and the programs whose tests are skipped."""
        last = None if self._cache is None else self._cache.get(self._key, None)
        header = [
            f"duration: {_spell(DOCUMENTED_S)} for all tests on two quiet cores"
            if last is None
            else f"duration: {_spell(last)} when these tests were run last"
        ]
        if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
            header.append(f"tests of these programs are skipped: {', '.join(missing)}")
        return header

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Take the number of tests from a worker."""
        self._count = len(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take the number of tests where there are no workers."""
        self._count = self._count or len(session.items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Take note of a running test."""
        self._running[nodeid] = nodeid.partition("::")[0]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Print progress, if the last line is old enough."""
        self._running.pop(nodeid, None)
        self._done.add(nodeid)
        every_s = _TERMINAL_S if self._terminal.hasmarkup else _FILE_S
        if time.monotonic() - self._printed >= every_s:
            self._printed = time.monotonic()
            self._print()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Name a failure at once."""
        if report.failed:
            self._terminal.write_line(f"\rFAILED {report.nodeid} ({report.when})", red=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no letter for a test."""
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            return "passed", "", "PASSED"
        if report.skipped and not hasattr(report, "wasxfail"):
            return "skipped", "", "SKIPPED"
        return ("failed" if report.when == "call" else "error", "", "") if report.failed else None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Keep the duration of a run that went through."""
        if exitstatus == pytest.ExitCode.OK and self._cache is not None:
            self._cache.set(self._key, time.monotonic() - self._started)

    @property
    def _terminal(self) -> pytest.TerminalReporter:
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        assert isinstance(reporter, pytest.TerminalReporter)
        return reporter

    def _print(self) -> None:
        share = len(self._done) / max(self._count, 1)
        files = ", ".join(sorted(set(self._running.values()))) or "between two tests"
        passed = _spell(time.monotonic() - self._started)
        line = f"{share:4.0%}  {passed}  {files}"
        if self._terminal.hasmarkup:
            self._terminal.rewrite(line, erase=True)
        else:
            self._terminal.write_line(line)


def _spell(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s"
