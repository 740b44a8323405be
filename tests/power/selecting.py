"""Plugin of pytest that runs chosen tests in order, with a limit of time for each."""

import json
import os
import resource
import signal
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Final

import pytest

CHOSEN: Final = "POWER_CHOSEN"
"""Names a file with the seconds that each chosen test may take."""
FAILED: Final = "POWER_FAILED"
"""Names a file that gets a line for each failure."""
_MEMORY: Final = 8 << 30


def pytest_configure(config: pytest.Config) -> None:
    """Read what is chosen, and bound the memory, as a mutant may lack the bound of the package."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    chosen = json.loads(Path(os.environ[CHOSEN]).read_bytes())
    config.pluginmanager.register(_Selecting(chosen, Path(os.environ[FAILED])))


class _Selecting:
    def __init__(self, chosen: dict[str, float], failed: Path) -> None:
        self._chosen = chosen
        self._failed = failed
        self._files: set[str] = set()
        """Files with a failure, whose other tests add nothing."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        turns = {test: turn for turn, test in enumerate(self._chosen)}
        items[:] = [item for item in items if item.nodeid in turns]
        items.sort(key=lambda item: turns[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        signal.signal(signal.SIGALRM, _give_up)
        signal.setitimer(signal.ITIMER_REAL, self._chosen[item.nodeid])
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.nodeid.partition("::")[0] in self._files:
            pytest.skip("its file has failed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        file = report.nodeid.partition("::")[0]
        if report.failed and file not in self._files:
            self._files.add(file)
            with self._failed.open("a") as failed:
                failed.write(json.dumps(report.nodeid) + "\n")


def _give_up(number: int, frame: FrameType | None) -> None:
    pytest.fail("the test takes too long")
