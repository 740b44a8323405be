"""Plugin of coverage for processes that tests start: their context is that of the environment."""

import os
from types import FrameType
from typing import Final

from coverage.plugin import CoveragePlugin
from coverage.plugin_support import Plugins

CONTEXT: Final = "POWER_CONTEXT"


class _Inherited(CoveragePlugin):
    def dynamic_context(self, frame: FrameType) -> str | None:
        return os.environ.get(CONTEXT)


def coverage_init(plugins: Plugins, options: object) -> None:
    """Register the plugin, as coverage asks for."""
    plugins.add_dynamic_context(_Inherited())
