"""Templates and generated references: the subset that is evaluated, and its bounds."""

import re
from contextlib import suppress
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.kerchunk.templates import MOST_GENERATED, Generated, Templates, generate
from shardgate.formats.reading import DecodeError

TEXTS = {"u": "s3://bucket/a", "f": "{{c}}-{{n}}", "twice": "{{c}}{{c}}"}


def _render(text: str, texts: Any = TEXTS) -> str:
    return Templates(texts).render(text)


def _generate(*patterns: Any, texts: Any = TEXTS) -> list[Generated]:
    return list(generate(list(patterns), Templates(texts)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/b", "s3://bucket/b"),
        ("{{u}}", "s3://bucket/a"),
        ("{{ u }}/x{{u}}", "s3://bucket/a/xs3://bucket/a"),
        ("{{f(c='text', n=3)}}", "text-3"),
        ("{{twice(c=twice(c='a'))}}", "aaaa"),
        ("x{{(1 + 2) * 1000 - 7 // 2 % 2}}", "x2999"),
        ("{{ -5 }}", "-5"),
        ("{{'%04d' % 12}}", "0012"),
        ("""{{ f(c="}}'", n='{{u}}') }}""", "}}'-{{u}}"),
    ],
)
def test_template_is_rendered_as_by_jinja(text: str, expected: str) -> None:
    """Variables, calls with named arguments, arithmetic and padding give their texts."""
    assert _render(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(9) %}x{% endfor %}",
        "{# comment #}{% set a = 1 %}",
        "{{u.__class__}}",
        "{{u['x']}}",
        "{{u|upper}}",
        "{{-5}}",
        "{{ u -}}",
        "{{'\\n'}}",
        "{{range(9)}}",
        "{{lipsum()}}",
        "{{f('positional')}}",
        "{{f(**u)}}",
        "{{2 ** 99}}",
        "{{'a' * 9}}",
        "{{'%9999999d' % 1}}",
        "{{'%s' % u}}",
        "{{1 / 3}}",
        "{{u ~ u}}",
        "{{[1, 2]}}",
        "{{1 if 2 else 3}}",
        "{{unknown}}",
        "{{f}}",
        "{{f(c=1)}}",
        "{{1 // 0}}",
        "{{9223372036854775807 * 9}}",
        "{{",
        "{{" + "(" * 2000 + "1" + ")" * 2000 + "}}",
        "{{u}}" + "x" * 5000,
    ],
)
def test_other_template_is_refused(text: str) -> None:
    """Statements, attributes, filters, functions, and anything unbounded are refused."""
    with pytest.raises(DecodeError):
        _render(text)


def test_nested_calls_cannot_grow_without_bound() -> None:
    """A text that doubles with each call is refused once it is too long."""
    text = "{{" + "twice(c=" * 40 + "'x'" + ")" * 40 + "}}"

    with pytest.raises(DecodeError, match="more than 4096 letters"):
        _render(text)


@pytest.mark.parametrize("texts", [[], {"u": 1}, {"u": "x" * 5000}])
def test_templates_are_short_texts_by_name(texts: Any) -> None:
    """Templates that are no object of short texts are refused."""
    with pytest.raises(DecodeError, match="templates"):
        Templates(texts)


@given(st.text(alphabet="{}%#ui+-*/()'\"= 19", max_size=30))
def test_any_template_is_text_or_refused(text: str) -> None:
    """Any text is rendered or refused, and nothing else is raised."""
    with suppress(DecodeError):
        assert isinstance(_render("{{" + text + "}}"), str)


PATTERN = {
    "key": "k/{{i}}.{{j}}",
    "url": "s3://b/{{'%03d' % j}}.nc",
    "offset": "{{(i + 1) * 1000}}",
    "length": "10",
    "dimensions": {"i": {"stop": 5, "start": 1, "step": 2}, "j": [4, 7]},
}


def test_pattern_generates_the_product_of_its_dimensions() -> None:
    """Ranges and lists of integers are combined as fsspec combines them."""
    document = {"version": 1, "gen": [PATTERN]}
    peer = fsspec.filesystem("reference", fo=document, simple_templates=False, fs={"s3": None})

    found = {key: [url, *(part or ())] for key, url, part in _generate(PATTERN)}

    assert found == peer.references
    assert found["k/3.7"] == ["s3://b/007.nc", 4000, 10]


def test_pattern_without_offset_generates_whole_objects() -> None:
    """A pattern without offset and length refers to whole objects."""
    pattern = {"key": "{{i}}", "url": "{{u}}_{{i}}", "dimensions": {"i": {"stop": 1}}}

    assert _generate(pattern) == [Generated("0", "s3://bucket/a_0", None)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dimensions": {"i": {"stop": MOST_GENERATED + 1}, "j": [1]}}, "more than 100000"),
        ({"dimensions": {"i": {"stop": 2**61}, "j": {"stop": 2**61}}}, "more than 100000"),
        ({"dimensions": {"i": {"stop": 2**70}, "j": [1]}}, "expected an integer"),
        ({"dimensions": {"i": {"stop": 5, "step": 0}, "j": [1]}}, "expected a dimension"),
        ({"dimensions": {"i": {"stop": True}, "j": [1]}}, "expected an integer"),
        ({"dimensions": {"i": ["x"], "j": [1]}}, "expected an integer"),
        ({"dimensions": {}}, "expected key, url and dimensions"),
        ({"key": 3}, "expected key, url and dimensions"),
        ({"length": "{{i - 9}}"}, "expected an offset or a length"),
        ({"length": "٣"}, "expected an offset or a length"),
        ({"length": None}, "expected an offset or a length"),
        ({"url": "{{k}}"}, "'k' is undefined"),
    ],
)
def test_other_pattern_is_refused(change: Any, reason: str) -> None:
    """A pattern of too many references, or without proper dimensions and numbers, is refused."""
    with pytest.raises(DecodeError, match=re.escape(reason)):
        _generate(PATTERN | change)


def test_patterns_share_one_bound() -> None:
    """Several patterns together may not generate more than one of them."""
    pattern = {"key": "{{i}}", "url": "s3://b/x", "dimensions": {"i": {"stop": MOST_GENERATED}}}
    found = generate([pattern, pattern], Templates({}))

    with pytest.raises(DecodeError, match="more than"):
        for _ in found:
            pass


def test_offset_without_length_is_refused() -> None:
    """A pattern with an offset but no length is refused."""
    pattern = {name: value for name, value in PATTERN.items() if name != "length"}

    with pytest.raises(DecodeError, match="both offset and length"):
        _generate(pattern)
