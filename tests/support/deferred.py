"""Packages that few tests use and that take long to import."""

from importlib import import_module
from typing import Any


class Deferred:
    """A module that is imported when an attribute of it is first used, not at collection."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Import the module, and return its *attribute*; pytest asks modules for special ones."""
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
