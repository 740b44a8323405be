"""Which datasets a caller may see, and write to.

One that they may not see is answered as one that does not exist.
"""

from collections.abc import Collection, Iterator, Mapping

from app.errors import ForbiddenError, ReadOnlyError, UnauthenticatedError, UnknownDatasetError
from app.http.credentials.caller import NOBODY, Caller
from app.resolve.resolver import Dataset
from app.setting_fields import PUBLIC


class Datasets:
    """What is served, by name."""

    def __init__(
        self, datasets: Mapping[str, Dataset], watchers: Collection[str] | None = None
    ) -> None:
        self._datasets = datasets
        is_all_public = all(map(_is_open, datasets.values()))
        everybody = (PUBLIC,) if is_all_public else ()
        self._watchers = frozenset(everybody if watchers is None else watchers)
        self.is_all_public = is_all_public and PUBLIC in self._watchers
        """Whether credentials make no difference."""

    def __iter__(self) -> Iterator[Dataset]:
        """Go through all of them, whoever asks."""
        return iter(self._datasets.values())

    def get(self, name: str) -> Dataset | None:
        """Give the dataset *name*, whoever asks."""
        return self._datasets.get(name)

    def seen_by(self, caller: Caller) -> list[Dataset]:
        """Give those that *caller* may read."""
        return [dataset for dataset in self if may_read(caller, dataset)]

    def find(self, name: str, caller: Caller) -> Dataset:
        """Give the dataset *name*, if *caller* may read it.

        Raises: `UnknownDatasetError`, or `UnauthenticatedError` where credentials might help:
        404 would be fill value to a reader that forgot them.
        """
        dataset = self._datasets.get(name)
        if dataset is not None and may_read(caller, dataset):
            return dataset
        if caller is NOBODY and not self.is_all_public:
            raise UnauthenticatedError(f"{name} takes credentials, or there is no such dataset")
        raise UnknownDatasetError(f"there is no dataset {name}")

    def find_writable(self, name: str, caller: Caller) -> Dataset:
        """Give the dataset *name*, if *caller* may write to it.

        Raises: what `find` raises, `ReadOnlyError`, and what `demand_writing` raises.
        """
        dataset = self.find(name, caller)
        if not dataset.is_writable:
            raise ReadOnlyError(f"{name} is not writable")
        demand_writing(caller, dataset)
        return dataset

    def may_watch(self, caller: Caller) -> bool:
        """Tell whether *caller* may know what is done with all datasets."""
        return not self._watchers.isdisjoint(caller.grants)

    def demand_watching(self, caller: Caller) -> None:
        """Return if *caller* may know what is done with all datasets.

        Raises: `UnauthenticatedError`, `ForbiddenError`.
        """
        _demand(caller, self._watchers, "see what others do")


def may_read(caller: Caller, dataset: Dataset) -> bool:
    """Tell whether *caller* may read."""
    return not dataset.readers.isdisjoint(caller.grants)


def may_write(caller: Caller, dataset: Dataset) -> bool:
    """Tell whether *caller*, who may see *dataset*, may write to it as well."""
    return not dataset.writers.isdisjoint(caller.grants)


def demand_writing(caller: Caller, dataset: Dataset) -> None:
    """Return if *caller*, who may see *dataset*, may write to it as well.

    Raises: `UnauthenticatedError`, `ForbiddenError`.
    """
    _demand(caller, dataset.writers, f"write to {dataset.name}")


def _is_open(dataset: Dataset) -> bool:
    return dataset.is_public and (not dataset.is_writable or PUBLIC in dataset.writers)


def _demand(caller: Caller, rules: frozenset[str], what: str) -> None:
    if rules.isdisjoint(caller.grants):
        if caller is NOBODY:
            raise UnauthenticatedError(f"to {what} takes credentials")
        raise ForbiddenError(f"{caller.name} may not {what}")
