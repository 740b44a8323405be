"""Repositories that a request is to change."""

from collections.abc import Awaitable, Callable

from fastapi import Request

from app.http.auth.access import Datasets
from app.http.paths import check_key
from app.http.repositories import RepositoryPath
from app.resolve.icechunk.repositories import OpenedRepository, open_repository
from app.resolve.resolver import Resolver

type OpenWritable = Callable[..., Awaitable[OpenedRepository]]


def opens_writable(datasets: Datasets, resolver: Resolver) -> OpenWritable:
    """Make the dependency of routes that opens the repository they mean."""

    async def open_writable(
        request: Request, dataset: str, path: RepositoryPath = ""
    ) -> OpenedRepository:
        root = resolver.root(datasets.find_writable(dataset, request.scope["caller"]))
        return await open_repository(root, check_key(path.rstrip("/")))

    return open_writable
