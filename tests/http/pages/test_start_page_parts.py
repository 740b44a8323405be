"""`shardgate.http.pages.start_page` and `dataset_cards`: their parts, without a server."""

import ast
import asyncio
import html
import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from fastapi import Request
from hypothesis import example, given
from hypothesis import strategies as st

from shardgate.formats.surveying import Description
from shardgate.http.auth.access import NOBODY, Datasets, ServedDataset
from shardgate.http.pages.links import PUBLIC_VIEWER, VIEWER
from shardgate.http.pages.start_page import (
    Address,
    OverviewCache,
    StartPage,
    address_of,
    format_shape,
    make_snippets,
    visible,
)
from shardgate.http.paths import quote_key
from shardgate.model import ObjectRef
from shardgate.settings import PUBLIC
from shardgate.storage.memory import MemoryStore
from shardgate.survey.inspect import CollectionSummary, GroupSummary
from tests.read.stores import Clock, WatchedStore
from tests.support.pages import parse
from tests.support.resolving import ROOT, reading
from tests.survey.test_inspect import ARRAY, filled


def request(
    token: str | None = None, *, query: bytes = b"", root_path: str = "", **headers: str
) -> Request:
    """Ask for the page, with a token in the path or without."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "server": ("10.0.0.7", 8000),
        "path": "/",
        "query_string": query,
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ],
        "root_path": root_path,
        "caller": NOBODY,
        "token": token,
    }
    return Request(scope)


def address(token: str | None = None, *, has_viewer: bool = True, **headers: str) -> Address:
    """Return the address of a request with *headers*."""
    return address_of(request(token, query=b"", **headers), has_viewer=has_viewer)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "lab.example:8000"}, "http://lab.example:8000"),
        ({"host": "[::1]:80"}, "http://[::1]:80"),
        ({"host": "lab.example", "x_forwarded_proto": "https"}, "https://lab.example"),
        ({"host": "lab.example", "x_forwarded_proto": "javascript"}, "http://lab.example"),
        *(
            ({"host": host}, "http://10.0.0.7:8000")
            for host in ('x"><script>', "lab.example/path", "user@lab.example")
        ),
        ({}, "http://10.0.0.7:8000"),
    ],
)
def test_base(headers: dict[str, Any], expected: str) -> None:
    """Snippets name the host as the browser does, if that is one, and what lies below a token.

    The viewer, which needs none, is not below it.
    """
    below = address("ab%2Fc", **headers)

    assert address(**headers).base == expected
    assert (below.base, below.viewer) == (f"{expected}/~ab%2Fc", f"../{VIEWER}")


@pytest.mark.parametrize(
    ("host", "proto", "expected"),
    [
        ("lab.example", "https", PUBLIC_VIEWER),
        ("localhost:8000", "http", PUBLIC_VIEWER),
        ("127.0.0.1:8000", "http", PUBLIC_VIEWER),
        ("lab.example", "http", None),
        ("127.0.0.1.example", "http", None),
    ],
)
def test_without_a_viewer_of_our_own(host: str, proto: str, expected: str | None) -> None:
    """The public page may read from ``https``, and from the machine that it is shown on."""
    assert address(has_viewer=False, host=host, x_forwarded_proto=proto).viewer == expected


async def test_what_was_seen_is_kept_for_a_while() -> None:
    """Views of the page cost no reads until then, and a crowd costs as much as one."""
    clock, store, crowded = Clock(), *(filled(WatchedStore(), a=ARRAY) for _ in range(2))
    opened, crowd = reading(store, ttl_s=0), reading(crowded, ttl_s=0)
    glances = OverviewCache(opened.resolver, clock=clock)
    first = await glances.read_all([opened.dataset])
    reads = len(store.calls)
    many = OverviewCache(crowd.resolver)
    await asyncio.gather(*(many.read_all([crowd.dataset]) for _ in range(20)))
    assert crowded.calls == store.calls

    assert await glances.read_all([opened.dataset]) == first
    assert len(store.calls) == reads
    clock.now += 30
    assert await glances.read_all([opened.dataset]) == first
    assert len(store.calls) > reads


async def test_datasets_are_looked_at_together() -> None:
    """Many that hang hold the page up as long as one."""
    store = filled(WatchedStore(), a=ARRAY)
    store.gate.clear()
    opened = reading(store)
    many = [replace(opened.dataset, name=f"d{n}", root=ROOT.join(str(n))) for n in range(50)]

    async with asyncio.timeout(20):
        seen = await OverviewCache(opened.resolver, within_s=0.5).read_all(many)

    assert {each.reason for each in seen} == {"the store took longer than 0.5 s"}


async def test_a_fault_of_ours_stays_with_its_dataset(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the others are shown."""
    store = filled(WatchedStore(), a=ARRAY)
    opened = reading(store)
    odd = replace(opened.dataset, name="odd", root=ObjectRef("memory://other", "odd"))
    store.failure = ZeroDivisionError("of ours")

    with caplog.at_level(logging.ERROR, logger="shardgate"):
        broken, sound = await OverviewCache(opened.resolver).read_all([odd, opened.dataset])

    assert broken.reason == "a fault of this service"
    assert [each.path for each in sound.collections] == ["a"]
    assert "odd" in caplog.text


async def show(
    *names: str,
    asked: Request | None = None,
    has_viewer: bool = True,
    hidden: str = "",
    watchers: Collection[str] = (PUBLIC,),
) -> tuple[str, list[str]]:
    """Give the page of datasets with these *names*, and its links."""
    opened = reading(filled(MemoryStore(), a=ARRAY))
    plain = opened.dataset
    datasets = {
        name: ServedDataset(name, plain.root, plain.containers, plain.format) for name in names
    }
    if hidden:
        datasets[hidden] = replace(datasets[hidden], readers=frozenset({"somebody"}))
    page = StartPage(
        Datasets(datasets, watchers),
        OverviewCache(opened.resolver),
        has_viewer=has_viewer,
    )
    text = bytes((await page(asked or request(host="lab.example"))).body).decode()
    return text, [link.attrib["href"] for link in parse(text).iter("a")]


async def test_metrics_are_for_who_may_watch() -> None:
    """Others get no link there; who may see nothing is told so."""
    _, links = await show("em")
    _, fewer = await show("em", watchers=())
    assert set(links) - set(fewer) == {"./metrics"}
    text, _ = await show()
    assert "There is no dataset that you may see." in text


async def test_a_token_goes_along() -> None:
    """Links are relative to it, and what is copied from the page has it in its URLs."""
    text, links = await show("em", asked=request("abc", host="lab.example"))

    assert "curl -sS 'http://lab.example/~abc/em/a/zarr.json'" in html.unescape(text)
    assert {"./em/", "./em/a/zarr.json"} < set(links)
    (viewer,) = (link for link in links if "viewer" in link)
    assert viewer.startswith("../viewer/v/page/#!")
    assert "http://lab.example/~abc/em/a/" in viewer


async def test_of_very_many_datasets_the_first_are_shown() -> None:
    """And how many there are besides."""
    text, _ = await show(*(f"d{number:03}" for number in range(103)))

    assert text.count("<article") == 100
    assert "And 3 more" in text


async def test_where_the_public_viewer_can_read() -> None:
    """The links lead there; where no viewer can read, the page says why there are none."""
    text, links = await show("em", asked=request(host="localhost:8000"), has_viewer=False)
    assert "shardgate[viewer]" not in text
    assert [link for link in links if link.startswith("https://neuroglancer-demo.appspot.com/#!")]

    text, links = await show("em", has_viewer=False)
    assert "shardgate[viewer]" in text
    assert not [link for link in links if "#!" in link]


LEVEL = Description("s0", "zarr", "array", (4, 6), "uint8", ("y", "x"), (2, 3))
GROUP = GroupSummary("", is_consolidated=True)
S0 = CollectionSummary("s0", "s0", "s0", GROUP, LEVEL)
URL = "http://host/em"
DAMAGED = Description("a", "", "damaged", why_sharded="it is torn")


def level(name: str, **more: Any) -> CollectionSummary:
    """Make an array in the group of `S0`."""
    return CollectionSummary(name, name, name, GROUP, replace(LEVEL, **more))


UNNAMED = replace(LEVEL, dimension_names=None)
WAYS = ["curl", "zarr-python", "TensorStore"]


def test_levels_of_other_sizes_are_left_out() -> None:
    """Only what goes together is opened."""
    code = make_snippets(URL, (S0, level("s1", shape=(2, 3)), level("mask")))["xarray"]

    assert 'xarray.open_zarr("http://host/em", consolidated=True, drop_variables=["s1"])' in code


@pytest.mark.parametrize(
    ("seen", "titles"),
    [
        ([level("s0", dimension_names=None)], WAYS),
        ([level("s0", dimension_names=("y", None))], WAYS),
        ([level("s0", dimension_names=("x", "x"))], WAYS),
        ([CollectionSummary("", "", "", None, LEVEL)], WAYS),
        ([S0, level("other", dimension_names=None)], WAYS),
        (
            [S0, CollectionSummary("g/a", "g/a", "g/a", GroupSummary("g"), UNNAMED)],
            [*WAYS[:2], "xarray", WAYS[2]],
        ),
        ([CollectionSummary("a", "a", None, None, DAMAGED)], []),
    ],
)
def test_xarray_needs_names_and_a_group(seen: list[CollectionSummary], titles: list[str]) -> None:
    """One array without names for its dimensions spoils its group; what is damaged has no way."""
    assert list(make_snippets(URL, seen)) == titles


def test_a_name_cannot_leave_its_quotes() -> None:
    """Whatever an array is called, the code is what it seems to be, in one line of ASCII."""
    name = "\"'); import os;\n\u202e`$(id)`"
    hostile = replace(S0, path=name, container=name, node=name)
    python = make_snippets(URL, [hostile, level(f"{name}2", shape=(9, 9)), S0])
    curl = python.pop("curl")

    assert len(curl.splitlines()) == 1
    assert curl.isascii()
    for title, code in python.items():
        assert code.isascii()
        assert len(ast.parse(code).body) == (4 if title == "TensorStore" else 3)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([S0], "s0/zarr.json"),
        ([CollectionSummary("a", "a", None, None, DAMAGED), S0], "s0/zarr.json"),
        ([replace(S0, path="", container="", node="")], "zarr.json"),
        ([replace(S0, node="@branch.main/s0")], "@branch.main/s0/zarr.json"),
        ([CollectionSummary("draft/a", "draft", None, None, LEVEL)], "draft/zarr.json"),
    ],
)
def test_curl_reads_the_document(seen: list[CollectionSummary], expected: str) -> None:
    """It describes the first sound collection, or its container."""
    assert make_snippets(URL, seen)["curl"] == f"curl -sS {URL}/{expected}"


TIMES = " \N{MULTIPLICATION SIGN} "


@given(st.text(st.characters(), max_size=300))
@example("plain é🧊 שלום")
def test_text_is_visible_and_can_be_sent(text: str) -> None:
    """Nothing turns lines around, ends them, or has no bytes; letters of all scripts stay."""
    shown = visible(text)

    assert shown.isprintable()
    assert shown.encode().decode() == shown
    assert shown == text or not text.isprintable() or len(text) > 200
    for odd in ("\n", "\u202e", "\ud800", "\x1b"):
        assert visible(f"a{odd}b") == "a" + odd.encode("unicode_escape").decode() + "b"
    assert visible("a" * 201) == "a" * 200 + "…"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_shape(None), ""),
        (format_shape(()), "scalar"),
        (format_shape((0,)), "0"),
        (format_shape((3, 2)), f"3{TIMES}2"),
        (format_shape((1,) * 13), TIMES.join(["1"] * 12 + ["…"])),
        (quote_key("@branch.a%2Fb/x y/100%/#"), "@branch.a%2Fb/x%20y/100%25/%23"),
    ],
)
def test_numbers_and_paths(shown: str, expected: str) -> None:
    """Long shapes are cut.

    The names of refs in a path keep what is encoded in them; the rest is encoded once.
    """
    assert shown == expected
