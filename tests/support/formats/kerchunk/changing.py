"""Reference sets in JSON with wrong types, numbers, templates and generators."""

import copy
import json
import random
from typing import Any, Final

_NUMBERS: Final = [
    *(0, 1, -1, 2, 7, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400),
    *(0.0, 1.5, -1.0, 1e18, 1e300, float("nan"), float("inf"), True, False),
]
_OTHERS: Final[list[Any]] = [
    None,
    "",
    "x",
    "{{",
    "{{u}}",
    "{{i}}",
    "{% if",
    "base64:!",
    [],
    {},
    [[]],
    {"a": 1},
]
_EXPRESSIONS: Final = [
    *("{{i}}", "{{i * 2 ** 9}}", "{{i // 0}}", "{{'%d' % i}}", "{{u(i)}}", "{{f(c='x')}}"),
    *("{{i * 999999999999}}", "{{ -i }}", "{{'x' * 9999}}", "{{i.__class__}}", "{{j}}", "{{"),
]
_SET: Final = {
    "version": 1,
    "templates": {"u": "s3://bucket/one", "f": "s3://bucket/{{c}}"},
    "gen": [
        {
            "key": "a/{{i}}",
            "url": "{{u}}",
            "offset": "{{(i + 1) * 10}}",
            "length": "10",
            "dimensions": {"i": {"start": 0, "stop": 4, "step": 1}, "j": [0, 1]},
        }
    ],
    "refs": {
        ".zgroup": '{"zarr_format": 2}',
        "a/.zarray": {"shape": [4], "chunks": [1], "zarr_format": 2},
        "a/.zattrs": "{}",
        "b/0": ["{{u}}", 0, 10],
        "b/1": ["{{f(c='two')}}"],
        "b/2": "base64:AAAA",
        "b/3": ["s3://bucket/two", 5, 1],
    },
}


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return the members and items of *value*, at all depths: their containers and names."""
    found: list[tuple[Any, Any]] = []
    names = value if isinstance(value, dict) else range(len(value) * isinstance(value, list))
    for name in names:
        found.append((value, name))
        if isinstance(value[name], dict | list):
            found += _places(value[name])
    return found


def changed(chance: random.Random) -> bytes:
    """Return a set of version 0 or 1 with a few changed values, names and letters."""
    whole: Any = copy.deepcopy(_SET if chance.random() < 0.8 else _SET["refs"])
    for _ in range(chance.randint(1, 3)):
        places = _places(whole)
        if not places:
            break
        container, name = chance.choice(places)
        match chance.randrange(6):
            case 0 | 1:
                container[name] = chance.choice(_NUMBERS)
            case 2:
                container[name] = copy.deepcopy(chance.choice(_OTHERS))
            case 3:
                container[name] = chance.choice(_EXPRESSIONS)
            case 4:
                other, at = chance.choice(places)
                container[name] = copy.deepcopy(other[at])
            case 5 if isinstance(container, dict):
                container[chance.choice(["", "a//b", "../x", "é", ".zarray", "refs"])] = (
                    container.pop(name)
                )
    data = json.dumps(whole).encode()
    if chance.random() < 0.2:
        at = chance.randrange(len(data))
        data = data[:at] + chance.choice([b"", b"[", b"}", b'"', b"\xff", b"9"]) + data[at + 1 :]
    return data
