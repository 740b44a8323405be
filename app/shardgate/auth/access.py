"""Callers, and which datasets they may read and write.

A dataset that the caller may not read is indistinguishable from one that does not exist. Both take
the same functions, so that the time of an answer does not tell them apart.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shardgate.errors import (
    ForbiddenError,
    ReadOnlyError,
    UnauthenticatedError,
    UnknownDatasetError,
)
from shardgate.read.containers import Dataset
from shardgate.settings import PUBLIC


@dataclass(frozen=True, slots=True)
class ServedDataset(Dataset):
    """A dataset with its rules of access and caching."""

    cache_control: bytes = b"no-store"
    """Of responses that can change."""
    is_writable: bool = False
    readers: frozenset[str] = frozenset({PUBLIC})
    """Grants of which a caller needs one to read."""
    writers: frozenset[str] = frozenset({PUBLIC})
    """Grants of which a caller needs one to write, if the dataset is writable."""
    admins: frozenset[str] = frozenset()
    """Grants of which a caller needs one to change the settings of a repository."""
    # A property would be one call more for each cached chunk.
    is_public: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_public", PUBLIC in self.readers)


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller whose credentials are valid."""

    name: str
    """The name in logs."""
    grants: frozenset[str]
    """Rules that the caller fulfils: `public`, the name of a caller, rules of an issuer."""


NOBODY: Final = Caller("", frozenset({PUBLIC}))  # caller without credentials


def configured_caller(name: str) -> Caller:
    """Return the caller that is called *name* in the configuration."""
    return Caller(name, frozenset({PUBLIC, name}))


class Identity(NamedTuple):
    """Caller that a token belongs to, for a time."""

    caller: Caller
    until_s: float
    """In seconds since 1970."""


def why_read_only(name: str) -> str:
    """Return why the dataset *name* takes no writes, and how it would."""
    setting = f"datasets.{name}.writable = true"
    return f"{name} is not writable; set {setting}, or serve its root with --writable"


class Datasets:
    """Datasets by name; *watchers* are the rules that let callers see metrics."""

    def __init__(
        self, datasets: Mapping[str, ServedDataset], watchers: Collection[str] | None = None
    ) -> None:
        self._datasets = datasets
        self.get: Callable[[str], ServedDataset | None] = datasets.get
        """Returns a dataset by its name, whoever the caller is."""
        is_all_public = all(
            dataset.is_public and (not dataset.is_writable or PUBLIC in dataset.writers)
            for dataset in datasets.values()
        )
        if watchers is None:
            watchers = (PUBLIC,) if is_all_public else ()
        self._watchers = frozenset(watchers)
        has_admins = any(dataset.admins - {PUBLIC} for dataset in datasets.values())
        self.is_all_public = is_all_public and PUBLIC in self._watchers and not has_admins
        """Whether credentials make no difference."""

    def __iter__(self) -> Iterator[ServedDataset]:
        """Iterate over all datasets, whoever the caller is."""
        return iter(self._datasets.values())

    def readable_by(self, caller: Caller) -> list[ServedDataset]:
        """Return the datasets that *caller* may read."""
        return [dataset for dataset in self if may_read(caller, dataset)]

    def find(self, name: str, caller: Caller) -> ServedDataset:
        """Return the dataset *name*, if *caller* may read it.

        Raises: `UnknownDatasetError`, or `UnauthenticatedError` where credentials might help: 404
        would be fill value to a reader that forgot them.
        """
        dataset = self._datasets.get(name)
        if may_read(caller, dataset) and dataset is not None:
            return dataset
        if caller is NOBODY and not self.is_all_public:
            raise UnauthenticatedError(f"{name} needs credentials, or there is no such dataset")
        raise UnknownDatasetError(f"there is no dataset {name}")

    def find_writable(self, name: str, caller: Caller) -> ServedDataset:
        """Return a dataset that *caller* may write to. Raises: `ReadOnlyError`, see `find`."""
        dataset = self.find(name, caller)
        if not dataset.is_writable:
            raise ReadOnlyError(why_read_only(name))
        demand_writing(caller, dataset)
        return dataset

    def find_administered(self, name: str, caller: Caller) -> ServedDataset:
        """Return a dataset of whose repositories *caller* may change the settings.

        Raises: `ReadOnlyError`, see `find`.
        """
        dataset = self.find(name, caller)
        if not dataset.is_writable:
            raise ReadOnlyError(why_read_only(name))
        _demand(caller, dataset.admins, f"change settings of {name}: datasets.{name}.admin")
        return dataset

    def may_watch(self, caller: Caller) -> bool:
        """Return whether *caller* may see metrics of all datasets."""
        return not self._watchers.isdisjoint(caller.grants)

    def demand_watching(self, caller: Caller) -> None:
        """Raise `UnauthenticatedError` or `ForbiddenError` unless `may_watch`."""
        _demand(caller, self._watchers, "see metrics of all datasets")


def may_read(caller: Caller, dataset: ServedDataset | None) -> bool:
    """Return whether *dataset* exists, and *caller* may read it."""
    return dataset is not None and not dataset.readers.isdisjoint(caller.grants)


def may_write(caller: Caller, dataset: ServedDataset) -> bool:
    """Return whether the rules of *dataset*, which *caller* may read, let them write as well."""
    return not dataset.writers.isdisjoint(caller.grants)


def demand_writing(caller: Caller, dataset: ServedDataset) -> None:
    """Check `may_write`. Raises: `UnauthenticatedError`, `ForbiddenError`."""
    _demand(caller, dataset.writers, f"write to {dataset.name}")


def _demand(caller: Caller, rules: frozenset[str], action: str) -> None:
    if rules.isdisjoint(caller.grants):
        if caller is NOBODY:
            raise UnauthenticatedError(f"credentials are needed to {action}")
        raise ForbiddenError(f"{caller.name} may not {action}")
