"""What each format's folder gives the conformance suite."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A container that code independent of the app has written."""

    name: str
    build: Callable[[Mapping[str, bytes]], dict[str, bytes]]
    """From chunks by virtual key to objects by key; what is not given is empty."""
    chunks: Mapping[str, bytes]
    """Chunks to write, more than one in some shard."""
    absent: tuple[str, ...]
    """Virtual keys that name nothing in the written container."""
    checksummed: bool
    """Whether any changed bit of an index is noticed."""

    def __str__(self) -> str:
        return self.name
