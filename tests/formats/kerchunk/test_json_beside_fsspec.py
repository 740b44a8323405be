"""Reference sets in JSON of many kinds, key by key beside the file system of fsspec."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.support.formats.kerchunk.beside import (
    DATA,
    NEGATIVE,
    NOTHING,
    PART,
    REFUSED,
    SOURCE,
    Instead,
    Outcome,
    assert_found,
    located,
    part_of,
    write_sources,
)

TEMPLATES: Final = {
    **dict.fromkeys(("u", "as", "None", "my-u", "a b", "a|b", "é"), SOURCE),
    "d": "ROOT/sources",
    "f": "{{c}}",
    "p": "ROOT/sources/{{n}}.bin",
}


class Case(NamedTuple):
    """A set, and what is found by its keys; see `assert_found`."""

    document: Any
    by_fsspec: Mapping[str, Outcome]
    instead: Instead = NOTHING
    jinja: bool = False


def _first(refs: Mapping[str, Any], **members: Any) -> dict[str, Any]:
    return {"version": 1, "refs": refs, **members}


def _with_templates(**urls: str) -> dict[str, Any]:
    return _first({key: part_of(url) for key, url in urls.items()}, templates=TEMPLATES)


def _evaluated(url: str, found: Outcome, why: str) -> Case:
    """Return the set with a reference to *url*, which the service refuses for a reason."""
    instead = {"a": (REFUSED, why)} if why else {}
    return Case(_with_templates(a=url), {"a": found}, instead, jinja=True)


PATTERN: Final = {
    "key": "k{{i}}",
    "url": "{{u}}",
    "offset": "{{i * 2}}",
    "length": "2",
    "dimensions": {"i": {"stop": 3}},
}


def _generated(
    found: Mapping[str, Outcome],
    change: Mapping[str, Any] | None = None,
    *others: Any,
    instead: Instead = NOTHING,
) -> Case:
    gen = [PATTERN | dict(change or {}), *others]
    document = _first({"k9": "text"}, templates=TEMPLATES, gen=gen)
    return Case(document, found, instead, jinja=True)


OF_SET: Final = "one invalid member fails its own key, and not the set"
OF_KEY: Final = "a key that no request can have is left out"
HOLE: Final = "without the unknown name it would be another URL"
UNBOUNDED: Final = "it is not bounded, or no expression of the documented subset"
BY_SPEC: Final = "the specification knows integers only"

EVALUATED: Final[dict[tuple[Outcome, str], Sequence[str]]] = {
    (PART, ""): (
        "{{ u }}",
        "{{\tu\n}}",
        "{{(u)}}",
        "{{u}}{{''}}",
        f"{{{{'{SOURCE}'}}}}",
        "{{d}}/{{'a'\n'.bin'}}",
        "{{f(c=u)}}",
        "{{f(c=f(c=u))}}",
        "{{f(c=u, x=1)}}",
        "{{f(\nc=u,)}}",
        f'{{{{f(c="{SOURCE}")}}}}',
        f"{{{{f(c='{SOURCE}')}}}}",
    ),
    (DATA[9:12], ""): (
        "{{p(n='%03d' % 7)}}",
        "{{d}}/{{'%03d' % (3 + 2 * 2)}}.bin",
        "{{d}}/00{{ 14 // 2 }}.bin",
        "{{d}}/00{{ 17 % 10 }}.bin",
        "{{d}}/00{{ -7 // 2 + 11 }}.bin",
        "{{d}}/00{{ +7 }}.bin",
        "{{d}}/00{{ 1 +\n 6 }}.bin",
        "{{d}}/00{{0x7}}.bin",
        "{{d}}/{{'%03d.bin' % 7}}",
        "{{d}}/{{'part-%03d' % 7}}.bin",
        "{{p(n='00%d' % 7)}}",
    ),
    (PART, HOLE): ("{{u}}{{no}}", "{{u}}{{f()}}"),
    (PART, UNBOUNDED): (
        "{{u|string}}",
        "{{'%s' % u}}",
        "{{d + '/a.bin'}}",
        "{{d ~ '/a.bin'}}",
        "{{- u -}}",
        "{% if true %}{{u}}{% endif %}",
        "{# x #}{{u}}",
        "{{u[0:]}}",
        "{{u}}\n",
        "{{d}}/{{'{}.bin'.format('a')}}",
        "{{'a' * 0}}{{u}}",
        "{{u}}{{2 ** 9 if 0 else ''}}",
    ),
    (REFUSED, ""): (
        "{{f}}",
        "{{f(c='{{u}}')}}",
        "{{f('x')}}",
        "{{7 / 7}}",
        "{{1 // 0}}",
        "{{",
        "{{}}",
        "{{u # text\n}}",
        "{{1)+(1}}",
        "{{no(x=1)}}",
    ),
}
"""URLs that templates spell, by what fsspec finds and why the service refuses it."""

CASES: Final[dict[str, Case]] = {
    "an empty set": Case({}, {"a": None}),
    "an empty set of version 1": Case(_first({}), {"a": None}),
    "version 1 without refs": Case({"version": 1}, {"a": None}),
    "a version spelled as a float": Case(_first({"a": "b"}, version=1.0), {"a": b"b"}),
    "an unknown version": Case({"version": 2, "refs": {}}, {"a": REFUSED}),
    "a set in a set": Case(
        {"refs": {"a": "b"}},
        {"refs": b'{"a": "b"}'},
        {"refs": (REFUSED, "refs without a version are a damaged set of version 1")},
    ),
    "refs that are null": Case({"version": 1, "refs": None}, {"a": REFUSED}),
    "keys with names of members": Case(
        {"gen": "x", "templates": "y", "refs": "z"}, {"gen": b"x", "templates": b"y", "refs": b"z"}
    ),
    "text": Case(
        {"a": "text", "b": "", "c": "é{{u}}"}, {"a": b"text", "b": b"", "c": "é{{u}}".encode()}
    ),
    "base64": Case(
        {
            "a": "base64:AAEC",
            "b": "base64:",
            "c": "base64:AA E=\n",
            "d": "base64:AAE",
            "e": "base64:é",
        },
        {"a": b"\0\1\2", "b": b"", "c": b"\0\1", "d": REFUSED, "e": b""},
    ),
    "base64 in version 1": Case(_first({"a": "base64:AAEC"}), {"a": b"\0\1\2"}),
    "objects": Case(
        {"a": {"x": 1.5, "é/": [None]}, "b": {}},
        {"a": b'{"x": 1.5, "\\u00e9/": [null]}', "b": b"{}"},
    ),
    "objects in version 1": Case(_first({"a": {"x": "{{u}}"}}), {"a": b'{"x": "{{u}}"}'}),
    "parts": Case(
        {"a": part_of(), "b": part_of(offset=0, length=0), "c": part_of(offset=250, length=6)},
        {"a": PART, "b": b"", "c": DATA[250:]},
    ),
    "whole objects": Case({"a": [SOURCE], "b": ["s3://bucket/x"]}, {"a": DATA, "b": DATA}),
    "objects in a bucket": Case(
        {
            key: part_of(f"s3://{key}")
            for key in ("bucket/x", "bucket/é y%20", "bucket/no", "other/x")
        },
        {"bucket/x": PART, "bucket/é y%20": PART, "bucket/no": REFUSED, "other/x": REFUSED},
    ),
    "spellings of a path": Case(
        {
            "a": part_of(f"file://{SOURCE}"),
            "b": part_of(f"file:{SOURCE}"),
            "c": part_of(f"local://{SOURCE}"),
            "d": part_of(f"local:{SOURCE}"),
            "e": part_of(f"/{SOURCE}"),
            "f": part_of("//ROOT///sources//a.bin"),
            "g": part_of("ROOT/../sets/sources/./a.bin"),
            "h": part_of("file://ROOT/sources/../sources/a.bin"),
            "i": part_of("ROOT/sources/é b%20.bin"),
        },
        dict.fromkeys("abcdefghi", PART),
    ),
    "paths that lead out": Case(
        {"a": part_of("ROOT/../outside.bin"), "b": part_of("ROOT/sources/a.bin/")},
        {"a": PART, "b": PART},
        {
            "a": (REFUSED, "only allowed prefixes are read"),
            "b": (REFUSED, "the slash at the end names a folder"),
        },
    ),
    "relative paths": Case(
        {"a": part_of("a.bin"), "b": part_of("./sources/a.bin"), "c": part_of("")},
        dict.fromkeys("abc", REFUSED),
    ),
    "a scheme in capitals": Case(
        {"a": part_of(f"FILE://{SOURCE}")},
        {"a": REFUSED},
        {"a": (PART, "RFC 3986 ignores their case")},
    ),
    "sources that are absent or short": Case(
        {"a": ["ROOT/no"], "b": part_of("ROOT/no"), "c": part_of(offset=300)},
        {"a": REFUSED, "b": REFUSED, "c": b""},
        {"c": (REFUSED, "a chunk of no bytes would be damage of another kind")},
    ),
    "numbers of other types": Case(
        {"a": part_of(offset=2.0, length=3.0), "b": [SOURCE, None, None]},
        {"a": REFUSED, "b": REFUSED},
        {"a": (PART, "writers spell integers so"), "b": (DATA, "writers spell whole objects so")},
    ),
    "numbers that are no integers": Case(
        {"a": part_of(offset="2"), "b": part_of(offset=2.5), "c": part_of(length=None)},
        dict.fromkeys("abc", REFUSED),
    ),
    "negative numbers": Case(
        {"a": part_of(offset=-3, length=2), "b": part_of(length=-3)},
        {"a": DATA[253:255], "b": DATA[2:255]},
        {"a": (REFUSED, NEGATIVE), "b": (REFUSED, NEGATIVE)},
    ),
    "invalid members beside good ones": Case(
        {
            "a": "text",
            "b": None,
            "c": 1,
            "d": [],
            "e": [SOURCE, 1],
            "f": part_of(None),
            "g": [[SOURCE]],
            "h": [SOURCE, 1, 2, 3],
            "i": True,
        },
        {"a": b"text"} | dict.fromkeys("bdefgh", REFUSED) | dict.fromkeys("ci", b"\1"),
        dict.fromkeys("ci", (REFUSED, "no kind of reference, which fsspec takes for a byte")),
    ),
    "invalid members beside templates": Case(
        _first(
            {"a": "text", "b": None, "c": part_of("{{u}}"), "d": part_of("{{no}}")},
            templates=TEMPLATES,
        ),
        dict.fromkeys("abcd", REFUSED),
        {"a": (b"text", OF_SET), "c": (PART, OF_SET)},
    ),
    "keys of all kinds": Case(
        dict.fromkeys(("/".join("d" * 500), "é/中/😀", "a b", "a%20b", "a?b#c"), "x"),
        dict.fromkeys(("/".join("d" * 500), "é/中/😀", "a b", "a%20b", "a?b#c"), b"x"),
    ),
    "keys that no request has": Case(
        dict.fromkeys(("/a", "a//b", "a/../b", ".", "a\\b", "a\tb"), "x"),
        dict.fromkeys(("/a", "a//b", "a/../b", ".", "a\\b", "a\tb"), b"x"),
        dict.fromkeys(("/a", "a//b", "a/../b", ".", "a\\b", "a\tb"), (None, OF_KEY)),
    ),
    "a key with a slash at its end": Case({"a/": "x"}, {"a/": None, "a": None}),
    "templates that are replaced": Case(
        _with_templates(
            a="{{u}}",
            b="{{d}}/a.bin",
            c="{{as}}",
            d="{{None}}",
            e="{{my-u}}",
            f="{{a b}}",
            g="{{a|b}}",
            h="{{é}}",
            i=SOURCE,
        ),
        dict.fromkeys("abcdefghi", PART),
    ),
    "a whole object by a template": Case(
        _first({"a": ["{{u}}"], "b": "{{u}}"}, templates=TEMPLATES), {"a": DATA, "b": b"{{u}}"}
    ),
    "a template that is a number": Case(
        _first({"a": part_of("{{0}}")}, templates={"0": SOURCE}),
        {"a": REFUSED},
        {"a": (PART, "a name may be any text")},
    ),
    "braces without templates": Case(_first({"a": ["ROOT/{{u}}"]}), {"a": REFUSED}),
    "templates that are null": Case(
        _first({"a": "b"}, templates=None), {"a": REFUSED}, {"a": (b"b", "null is no templates")}
    ),
    "a template that is no text": Case(
        _first({"a": part_of("{{u}}")}, templates={"u": SOURCE, "v": None}),
        {"a": REFUSED},
        {"a": (PART, OF_SET)},
    ),
    "gen that is null": Case(_first({"a": "b"}, gen=None), {"a": b"b"}),
    **{
        f"evaluated {url!r}": _evaluated(url, *found)
        for found, urls in EVALUATED.items()
        for url in urls
    },
    "generated by a range": _generated(
        {"k0": DATA[0:2], "k2": DATA[4:6], "k3": None, "k9": b"text"}
    ),
    "generated by a range backwards": _generated(
        {"k9": DATA[18:20], "k6": DATA[12:14], "k0": None},
        {"dimensions": {"i": {"start": 9, "stop": 0, "step": -3}}},
    ),
    "generated by a list": _generated(
        {"k7": DATA[14:16], "k4": DATA[8:10], "k5": None}, {"dimensions": {"i": [7, 4]}}
    ),
    "generated by an empty list": _generated({"k0": None}, {"dimensions": {"i": []}}),
    "generated by a product": _generated(
        {"a/0.1/x": DATA[4:6], "a/1.0/x": DATA[8:10], "a/2.0/x": None},
        {
            "key": "a/{{i}}.{{j}}/x",
            "offset": "{{ (i * 2 + j) * 4 }}",
            "dimensions": {"i": {"stop": 2}, "j": [0, 1]},
        },
    ),
    "generated by calls": _generated(
        {"k8": DATA[8:10]},
        {
            "key": "k{{ i + 1 }}",
            "url": "{{p(n='%03d' % i)}}",
            "offset": "{{ i // 4 }}",
            "dimensions": {"i": [7]},
        },
    ),
    "generated over other keys": _generated({"k9": DATA[18:20]}, {"dimensions": {"i": [9]}}),
    "generated twice": _generated({"k1": DATA[7:9]}, {}, PATTERN | {"offset": " 7 "}),
    "generated without templates": Case(
        _first({}, gen=[PATTERN | {"url": SOURCE}]), {"k1": DATA[2:4]}, jinja=True
    ),
    "generated whole objects": Case(
        _first(
            {}, gen=[{"key": "{{i}}", "url": "ROOT/sources/00{{i}}.bin", "dimensions": {"i": [7]}}]
        ),
        {"7": DATA[7:]},
        jinja=True,
    ),
    "generated with a number as length": _generated(
        {"k1": REFUSED}, {"length": 2}, instead={"k1": (DATA[2:4], "JSON has numbers")}
    ),
    "generated with a sign": _generated(
        {"k1": DATA[1:3]}, {"offset": "+1"}, instead={"k1": (REFUSED, "digits are expected")}
    ),
    "generated without an offset": _generated(
        {"k1": REFUSED, "k9": REFUSED}, {"offset": "{{no}}"}, instead={"k9": (b"text", OF_SET)}
    ),
    "generated beside an invalid pattern": _generated(
        {"k1": REFUSED, "k9": REFUSED, "x": REFUSED},
        {},
        {"key": 3},
        instead={"k1": (DATA[2:4], OF_SET), "k9": (b"text", OF_SET)},
    ),
    "generated from texts": _generated(
        {"ka": DATA[0:2]},
        {"offset": "0", "dimensions": {"i": ["a"]}},
        instead={"ka": (REFUSED, BY_SPEC)},
    ),
    "generated from no dimensions": _generated(
        {"k": DATA[0:2]},
        {"key": "k", "offset": "0", "dimensions": {}},
        instead={"k": (REFUSED, "the specification requires one")},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write sources, and return the folder of sets that refer to them."""
    return write_sources(tmp_path_factory.mktemp("beside"))


@pytest.mark.parametrize("name", CASES)
async def test_set_in_json_is_read_as_by_fsspec(folder: Path, name: str) -> None:
    """Each key of a set in JSON has the bytes that fsspec reads, but for the listed differences."""
    case = CASES[name]
    path = folder / "refs.json"
    path.write_text(json.dumps(located(case.document, folder)))

    await assert_found(path, case.by_fsspec, case.instead, jinja=case.jinja)
