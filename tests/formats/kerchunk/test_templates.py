"""Templates and generated references: expressions that are not evaluated, and bounds.

The sets beside fsspec have what is evaluated.
"""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.kerchunk.templates import (
    MOST_STEPS,
    Failed,
    Generated,
    Templates,
    generate,
)
from shardgate.formats.reading import DecodeError, StepBudget, StepsError

TEXTS = {"u": "s3://bucket/a", "f": "{{c}}-{{n}}", "twice": "{{c}}{{c}}"}


def _render(text: str, texts: Any = TEXTS) -> str:
    return Templates(texts, StepBudget(MOST_STEPS)).render(text)


def _generate(*patterns: Any, texts: Any = TEXTS) -> list[Generated | Failed]:
    return list(generate(list(patterns), Templates(texts, StepBudget(MOST_STEPS))))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x{{(1 + 2) * 1000 - 7 // 2 % 2}}", "x2999"),
        ("""{{ f(c="}}'", n='{{u}}') }}""", "}}'-{{u}}"),
        ("{{2 * -3 + (8 - 2 - 1)}}", "-1"),
        ("{{" + "1 + " * 900 + "1}}", "901"),
        ("{{ " + "-" * 1000 + "1}}", "1"),
    ],
)
def test_template_is_rendered_as_by_jinja(text: str, expected: str) -> None:
    """Arithmetic, long expressions, and braces in texts give their results."""
    assert _render(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{{f(c=f)}}",
        "{{f(c='a', n=twice)}}",
        "{{1, 2}}",
        "{{u.__class__}}",
        "{{u['x']}}",
        "{{-5}}",
        "{{'\\n'}}",
        "{{range(9)}}",
        "{{lipsum()}}",
        "{{f(**u)}}",
        "{{'%9999999d' % 1}}",
        "{{[1, 2]}}",
        "{{f(c=1)}}",
        "{{9223372036854775807 * 9}}",
        "{{0x" + "f" * 4000 + "}}",
        "{{'\ud800'}}",
        "{{" + "(" * 2000 + "1" + ")" * 2000 + "}}",
        "{{missing-name}}",
        "{{u}}" + "x" * 5000,
    ],
)
def test_other_template_is_refused(text: str) -> None:
    """Attributes, functions, and anything unbounded are refused."""
    with pytest.raises(DecodeError):
        _render(text)


def test_expression_as_deep_as_a_template_may_be_is_rendered_or_refused() -> None:
    """A sign before a sign, 4,000 times, is a number or refused, as this Python parses it."""
    with suppress(DecodeError):
        assert _render("{{ " + "-" * 4000 + "1}}") == "1"


def test_nested_calls_cannot_grow_without_bound() -> None:
    """A text that doubles with each call is refused once it is too long."""
    text = "{{" + "twice(c=" * 40 + "'x'" + ")" * 40 + "}}"

    with pytest.raises(DecodeError, match="more than 4096 letters"):
        _render(text)


NAMES = [
    *("as", "if", "None", "True", "self", "range", "__class__", "lambda"),
    *("my-u", "a.b", "a b", "1", "1a", "%s", "f(x)", "é", "\u4e2d", "u|upper", "'", '"'),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["{{%s}}/x", "{{ %s }}/x", "{{\n%s\t}}/x"])
def test_name_of_a_template_may_be_any_text(name: str, text: str) -> None:
    """A template is used by its name, also where an expression would mean something else."""
    assert _render(text.replace("%s", name), {name: "s3://b/{y}"}) == "s3://b/{y}/x"


@pytest.mark.parametrize("name", [name for name in NAMES if name.isidentifier()])
def test_keyword_of_python_is_a_name_in_an_expression(name: str) -> None:
    """Templates and their arguments are called by keywords of Python as by other names."""
    template = f"{{{{{name}}}}}!"

    assert _render(f"{{{{{name}({name}='x')}}}}", {name: template}) == "x!"


@pytest.mark.parametrize("text", [1, None, ["s3://b"], "x" * 5000])
def test_template_that_is_no_short_text_fails_its_users(text: Any) -> None:
    """A template of another type, or too long, is undefined, and others can be used."""
    texts = {"bad": text, "u": "s3://b"}

    assert _render("{{u}}", texts) == "s3://b"
    with pytest.raises(DecodeError, match="'bad' is undefined, or no text"):
        _render("{{bad}}", texts)


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dimensions": {"i": {"stop": 2**70}, "j": [1]}}, "expected an integer"),
        ({"dimensions": {"i": {"stop": 5, "step": 0}, "j": [1]}}, "expected a dimension"),
        ({"dimensions": {"i": {"stop": True}, "j": [1]}}, "expected an integer"),
        ({"dimensions": {"i": ["x"], "j": [1]}}, "expected an integer"),
        ({"dimensions": {}}, "expected key, url and dimensions"),
        ({"key": 3}, "expected key, url and dimensions"),
        ({"key": "{{k}}"}, "'k' is undefined"),
    ],
)
def test_pattern_with_unknown_keys_fails_alone(change: Any, reason: str) -> None:
    """A pattern whose keys cannot be told fails with a reason, and other patterns do not."""
    failed, *others = _generate(PATTERN | change, PATTERN)

    assert isinstance(failed, Failed)
    assert failed.key is None
    assert reason in failed.reason
    assert others == _generate(PATTERN)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"length": "{{i - 9}}"}, "expected an offset or a length"),
        ({"length": "٣"}, "expected an offset or a length"),
        ({"length": None}, "expected an offset or a length"),
        ({"url": "{{k}}"}, "'k' is undefined"),
    ],
)
def test_generated_reference_fails_by_its_key(change: Any, reason: str) -> None:
    """A reference whose place cannot be evaluated fails by its key."""
    failed = _generate(PATTERN | change)

    assert all(isinstance(each, Failed) and reason in each.reason for each in failed)
    assert {each.key for each in failed} == {f"k/{i}.{j}" for i in (1, 3) for j in (4, 7)}


def test_offset_without_length_fails() -> None:
    """References of a pattern with an offset but no length fail."""
    pattern = {name: value for name, value in PATTERN.items() if name != "length"}

    assert {type(each) for each in _generate(pattern)} == {Failed}


LONG = "{{" + "i + " * 400 + "1}}"


@pytest.mark.parametrize(
    "change",
    [
        {"dimensions": {"i": {"stop": 2**61}, "j": {"stop": 2**61}}},
        {"dimensions": {"i": {"stop": 10**6}, "j": [1]}},
        {"dimensions": {str(number): [1] for number in range(2000)} | {"i": {"stop": 5000}}},
    ],
)
def test_pattern_of_too_many_references_is_refused_at_once(change: Any) -> None:
    """The steps of all references are counted before the first one is generated."""
    with pytest.raises(StepsError):
        next(generate([PATTERN | change], Templates({}, StepBudget(MOST_STEPS))))


def test_pattern_without_references_makes_no_list_of_a_long_dimension() -> None:
    """A dimension of 2^40 integers takes no memory beside an empty one."""
    assert _generate(PATTERN | {"dimensions": {"i": [], "j": {"stop": 2**40}}}) == []


@pytest.mark.parametrize("member", ["key", "url", "offset", "length"])
def test_evaluations_of_a_long_expression_are_counted(member: str) -> None:
    """A pattern with a long expression may generate a thousandth of those with a short one."""
    short = PATTERN | {"key": "{{i}}", "dimensions": {"i": {"stop": 30}, "j": [1]}}

    assert len(list(generate([short], Templates({}, StepBudget(MOST_STEPS // 1000))))) == 30
    with pytest.raises(StepsError):
        list(generate([short | {member: LONG}], Templates({}, StepBudget(MOST_STEPS // 1000))))


@pytest.mark.parametrize(
    "pattern",
    [
        PATTERN | {"url": "{{'" + "x" * 4000 + "'}}"},
        PATTERN | {"url": "{{u}}" + "x" * 4000},
        PATTERN | {"url": "{{twice(c=twice(c=twice(c='%s')))}}" % ("x" * 400)},
    ],
)
def test_letters_of_results_are_counted(pattern: Any) -> None:
    """Results, which take memory, are steps like the expressions that they come from."""
    with pytest.raises(StepsError):
        list(generate([pattern], Templates(TEXTS, StepBudget(40_000))))


def test_patterns_share_their_steps() -> None:
    """Several patterns together may not take more steps than one of them."""
    pattern = {"key": "{{i}}", "url": "s3://b/x", "dimensions": {"i": {"stop": 20}}}
    steps = StepBudget(6000)

    assert len(list(generate([pattern], Templates({}, steps)))) == 20
    with pytest.raises(StepsError):
        list(generate([pattern], Templates({}, steps)))


def test_usual_pattern_may_generate_a_hundred_thousand_references() -> None:
    """The steps of a set are enough for 100,000 references of the usual kind."""
    pattern = PATTERN | {
        "key": "temperature/{{i}}.{{j}}",
        "url": "s3://some-bucket/some/folder/{{'%03d' % j}}.nc",
        "dimensions": {"i": {"stop": 100}, "j": {"stop": 10}},
    }

    assert len(list(generate([pattern], Templates({}, StepBudget(MOST_STEPS // 100))))) == 1000
