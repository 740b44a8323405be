"""Repositories that a request is to change."""

from collections.abc import Awaitable, Callable, Mapping

from app.errors import ReadOnlyError, UnknownDatasetError
from app.http.repositories import RepositoryPath
from app.http.target import check_key
from app.resolve.icechunk.repositories import OpenedRepository, open_repository
from app.resolve.resolver import Dataset, Resolver

type OpenWritable = Callable[..., Awaitable[OpenedRepository]]


def find_writable(datasets: Mapping[str, Dataset], name: str) -> Dataset:
    """Find the dataset *name*.

    Raises: `UnknownDatasetError`, `ReadOnlyError`.
    """
    if (dataset := datasets.get(name)) is None:
        raise UnknownDatasetError(f"there is no dataset {name}")
    if not dataset.is_writable:
        raise ReadOnlyError(f"{name} is not writable")
    return dataset


def opens_writable(datasets: Mapping[str, Dataset], resolver: Resolver) -> OpenWritable:
    """Make the dependency of routes that opens the repository they mean."""

    async def open_writable(dataset: str, path: RepositoryPath = "") -> OpenedRepository:
        root = resolver.root(find_writable(datasets, dataset))
        return await open_repository(root, check_key(path.rstrip("/")))

    return open_writable
