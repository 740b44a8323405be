"""``GET /{dataset}/…/`` for browsers: groups, arrays, repositories, and the keys in a folder."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, cast
from urllib.parse import quote, urlencode

from shardgate.auth.access import NOBODY, Caller, ServedDataset, may_write
from shardgate.concurrency import run_in_thread
from shardgate.errors import ShardgateError, StorageUnusableError, UnknownRepositoryError
from shardgate.formats.icechunk.keys import sharded_key
from shardgate.formats.listing import Name
from shardgate.icechunk.repository import Ancestor, open_repository, read_history
from shardgate.model import SHARDED, VirtualKey, join_path
from shardgate.read.resolver import Resolver
from shardgate.server.address import Address, address_reached_by
from shardgate.server.request import Request, quote_key, quote_segment
from shardgate.server.responses import Responder
from shardgate.settings import LoginSettings
from shardgate.survey.arrays import ArrayView
from shardgate.survey.inspect import (
    LOOK_S,
    CollectionSummary,
    FolderOverview,
    StoredSize,
    measure,
    summarize,
)
from shardgate.web import snippets
from shardgate.web.looks import AT, read_indices
from shardgate.web.nodes import NodeView, read_node
from shardgate.web.rendering import PageTemplate, visible
from shardgate.web.sections import Choice, Indices, UndrawableError, choices_of
from shardgate.web.viewer import signing_viewer_of, viewer_folder, viewer_of
from shardgate.web.viewer_state import is_viewable

_MOST_ROWS: Final = 100
_MOST_SNAPSHOTS: Final = 20
_MOST_NAMES: Final = 1000  # keys that a page lists
_MOST_LETTERS: Final = 20_000  # letters of the attributes that are shown
_log = logging.getLogger(__name__)
_EMPTY: Final = FolderOverview((), (), is_all=True)


@dataclass(slots=True)
class _FolderContents:
    """Parts of a page that were read in time."""

    node: NodeView | None = None
    overview: FolderOverview = _EMPTY
    history: Sequence[Ancestor] = ()
    stored: StoredSize | None = None
    reasons: list[str] = field(default_factory=list)
    """Failures, each of which leaves out a part of the page."""

    async def add(self, part: Awaitable[None], within_s: float | None = LOOK_S) -> None:
        """Await a part of the page, and note its failure."""
        try:
            async with asyncio.timeout(within_s):
                await part
        except TimeoutError:
            self.reasons.append(f"the store took longer than {LOOK_S:g} s")
        except ShardgateError as error:
            self.reasons.append(str(error))
        except Exception:  # noqa: BLE001 - a part must not take the page along
            _log.exception("a part of a page cannot be read")
            self.reasons.append("a fault of this service")

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was found."""
        overview = self.overview
        return not (self.node or overview.collections or overview.repositories or self.history)

    @property
    def array(self) -> CollectionSummary | None:
        """The array that the folder is."""
        only = self.overview.collections[0] if len(self.overview.collections) == 1 else None
        return only if only is not None and not only.path and only.found.format else None


class DatasetPages:
    """Shows the folders of datasets."""

    def __init__(self, resolver: Resolver, login: LoginSettings) -> None:
        self._resolver = resolver
        self._login = login
        self._page = PageTemplate("dataset.html")

    async def send(self, responder: Responder, dataset: ServedDataset, folder: VirtualKey) -> bool:
        """Send the page of *folder*, empty or with a final slash; false if nothing is found there.

        A store that cannot list may still have a node there. *dataset* may be that of a session,
        whose keys are shorter than that of the request.
        """
        names: Sequence[Name] = ()
        failure = None
        try:
            names = await self._resolver.first_names(dataset, folder, _MOST_NAMES + 1)
        except StorageUnusableError as error:
            failure = error
        body = await self._render(responder.request, dataset, folder, names, failure)
        if body is not None:
            await responder.send(HTTPStatus.OK, self._page.headers_of(body), body)
        elif failure is not None:
            raise failure
        return body is not None

    async def _render(
        self,
        request: Request,
        dataset: ServedDataset,
        folder: VirtualKey,
        names: Sequence[Name],
        failure: StorageUnusableError | None,
    ) -> bytes | None:
        """Return the page of *folder*, which holds *names* or, because of a *failure*, unknown
        ones; `None` if nothing is found there.
        """
        at = read_indices(request.query.decode("latin-1"))
        found = await self._look(dataset, folder)
        if folder and not names and found.is_empty:
            return None
        address = address_reached_by(request)
        key = request.key or ""
        root = f"{address.base}/{quote_key(request.name)}"
        url = f"{root}/{quote_key(key)}".rstrip("/")
        sharded_url = f"{root}/{quote_key(sharded_key(key))}".rstrip("/")
        api = f"api/datasets/{quote(request.name, safe='')}"
        if failure is not None:
            found.reasons.append(str(failure))
        reasons = dict.fromkeys(filter(None, found.reasons))
        is_beginning = not (folder or names or reasons) and found.is_empty
        # Where the store cannot list, arrays of Zarr v2 are known from consolidated metadata alone.
        has_consolidated = not names or any(name == ".zmetadata" for name, _ in names)
        is_own = key == folder  # of a session there are neither links nor pictures
        pictures = _list_pictures(found.node if is_own else None, key.rstrip("/"), at)
        is_linked = is_own and self._has_viewer(address, dataset, found.node)
        path = quote(key.rstrip("/"), safe="")
        return await self._page.render(
            url=url,
            home="../" * (key.count("/") + 1),
            has_api=address.token is None,
            api=api,
            crumbs=_crumbs(request.name, key),
            node=found.node,
            array=found.array and found.array.found,
            stored=found.stored,
            is_all=found.overview.is_all,
            reasons=reasons,
            repositories=found.overview.repositories,
            history=found.history,
            is_at_ref=key.rstrip("/").rpartition("/")[2].startswith("@"),
            attributes=await run_in_thread(_attributes, found.node),
            snippets=_snippets(url, sharded_url, found, has_consolidated=has_consolidated),
            viewer=f"{api}/viewer?path={path}" if is_linked else None,
            creation=_creation(address.base, dataset, request) if is_beginning else {},
            **pictures,
            **_list_members(found, folder, names),
        )

    def _has_viewer(self, address: Address, dataset: ServedDataset, node: NodeView | None) -> bool:
        """Return whether a viewer that can be reached shows *node*."""
        if node is None or not is_viewable(node):
            return False
        signing = signing_viewer_of(address, dataset, self._login.viewers)
        own = viewer_of(address, is_installed=viewer_folder() is not None)
        return (signing or own) is not None

    async def _look(self, dataset: ServedDataset, folder: VirtualKey) -> _FolderContents:
        """Read the parts of a page; one that fails, or takes too long, is left out."""
        found = _FolderContents()
        resolver = self._resolver

        async def node() -> None:
            # What is stored has no page of its own, as in a raw view.
            containers = dataset.containers
            is_stored = containers.is_sharded or f"/{SHARDED}" in f"/{folder}"
            if containers.formats and not is_stored:
                found.node = await read_node(resolver, dataset, folder.rstrip("/"))

        async def overview() -> None:
            found.overview = await summarize(resolver, dataset, folder, most=_MOST_ROWS)
            found.reasons.append(found.overview.reason)
            await found.add(stored())

        async def stored() -> None:
            if found.array is not None:
                found.stored = await measure(resolver.root(dataset), found.array)

        async def history() -> None:
            found.history = await _read_history(resolver, dataset, folder)

        async with asyncio.TaskGroup() as group:
            group.create_task(found.add(node()))
            group.create_task(found.add(history()))
            group.create_task(found.add(overview(), within_s=None))
        return found


def _list_members(
    found: _FolderContents, folder: VirtualKey, names: Sequence[Name]
) -> Mapping[str, Any]:
    """Return the arrays below *folder*, and those of its *names* that nothing else links to."""
    overview = found.overview
    listed = [each for each in overview.collections if each is not found.array]
    # Arrays of one axis or none, such as coordinates, come last.
    listed.sort(key=lambda each: each.found.shape is not None and len(each.found.shape) <= 1)
    rows = [(each, _link_to(each, folder)) for each in listed]
    links = {link for _, link in rows}
    for repository in overview.repositories:
        links |= {f"./{quote_key(join_path(repository.path, tip.ref))}/" for tip in repository.tips}
    shown = names[:_MOST_NAMES]
    return {
        "rows": rows,
        "names": [each for each in shown if f"./{quote_segment(each.name)}" not in links],
        "has_more_names": len(names) > _MOST_NAMES,
    }


def _list_pictures(node: NodeView | None, path: str, at: Indices) -> Mapping[str, Any]:
    """Return the plane of *node* that pictures show, and the axes along which others lie.

    Raises: `BadParameterError` for a position *at* an axis that is unknown or shorter.
    """
    choices: Sequence[Choice] = ()
    plane = ""
    if node is not None and node.array.axes and not node.array.has_unequal_chunks:
        with suppress(UndrawableError):
            choices = choices_of(node, at)
            positions = [(f"{AT}{name}", index) for name, index in at.items()]
            plane = urlencode([("path", path), *positions])
    can_draw = node is not None and not node.array.why_not_pictured
    return {
        "plane": plane,
        # Names with characters that no page can have are left out.
        "sliders": [each for each in choices if each.size > 1 and each.name.isprintable()],
        "has_preview": can_draw and viewer_folder() is not None,
    }


def _link_to(collection: CollectionSummary, folder: str) -> str:
    """Return the page of an array, or of the container of another collection, from *folder*."""
    key = collection.container if collection.node is None else collection.node
    return f"./{quote_key(f'{key}/'.removeprefix(folder))}" if key else "./"


async def _read_history(
    resolver: Resolver, dataset: ServedDataset, folder: VirtualKey
) -> Sequence[Ancestor]:
    """Return the newest snapshots of a repository, or of a ref of it, if *folder* is either."""
    path = folder.rstrip("/")
    ref = ""
    if path.rpartition("/")[2].startswith("@") and not folder.endswith(SHARDED):
        path, _, ref = path.rpartition("/")
    elif (await resolver.find_container(dataset, folder)).rest:
        return ()
    with suppress(UnknownRepositoryError):
        opened = await open_repository(resolver.root(dataset), path)
        return (await read_history(opened, ref, None, _MOST_SNAPSHOTS)).items
    return ()


def _creation(base: str, dataset: ServedDataset, request: Request) -> Mapping[str, str]:
    """Return requests that begin an empty *dataset*; none if the caller may not write there."""
    caller = cast("Caller | None", request.caller) or NOBODY
    if request.segment is not None or not may_write(caller, dataset):
        return {}
    return snippets.creation_snippets(base, dataset.name)


def _crumbs(dataset: str, folder: str) -> list[tuple[str, str]]:
    """Return names and relative links of the folders above, the start page first."""
    parts = ["Datasets", dataset, *folder.split("/")[:-1]]
    return [(part, "../" * (len(parts) - at) or "./") for at, part in enumerate(parts, start=1)]


def _attributes(node: NodeView | None) -> str:
    """Return the user's attributes of a Zarr node, or the ``info`` of a precomputed one."""
    if node is None:
        return ""
    has_attributes = node.kind in ("array", "group", "image")
    shown = node.document.get("attributes") if has_attributes else node.document
    if not shown:
        return ""
    text = ""
    # Indenting all of deeply nested JSON would take a thousand times its bytes, and a call a level.
    for piece in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(shown):
        text += piece
        if len(text) > _MOST_LETTERS:
            text = text[:_MOST_LETTERS].removesuffix("\n") + "\n…"
            break
    return "\n".join(visible(line, _MOST_LETTERS) for line in text.splitlines())


def _snippets(
    url: str, sharded_url: str, found: _FolderContents, *, has_consolidated: bool
) -> Mapping[str, str]:
    """Return code that reads the node at *url*, by client; libraries read shards, as a whole array
    takes fewer requests so.
    """
    node = found.node
    if node is None:
        return {}
    code = {}
    arrays = [each.found for each in found.overview.collections if each.found.kind == "array"]
    sharded = [each for each in arrays if each.shard_shape or each.sharding]
    # Few libraries read shards of a Zarr array that differ in size.
    is_read = all(each.shard_shape for each in sharded) or node.kind == "volume"
    read_url = sharded_url if sharded and is_read else url
    if node.kind == "array":
        view = ArrayView("", "zarr", "array") if found.array is None else found.array.found
        code = snippets.array_snippets(read_url, view)
    elif node.kind in ("group", "image"):
        members = {
            each.path: each.found
            for each in found.overview.collections
            if each.found.format and each.path and "/" not in each.path
        }
        is_consolidated = "consolidated_metadata" in node.document or has_consolidated
        code = snippets.group_snippets(read_url, members, is_consolidated=is_consolidated)
    elif node.kind == "volume":
        code = snippets.volume_snippets(read_url)
    return code | snippets.curl(f"{url}/{node.document_name}")
