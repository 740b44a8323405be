"""What the Dockerfile says, instruction by instruction."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]


class Stage(NamedTuple):
    """From one FROM to the next."""

    base: str
    name: str
    instructions: Sequence[tuple[str, str]]

    def values(self, keyword: str) -> list[str]:
        """Give what follows each *keyword*."""
        return [value for word, value in self.instructions if word == keyword]

    def command(self, keyword: str) -> list[str]:
        """Give the arguments of the last *keyword*, which has to be in the exec form, or none."""
        *_, given = ["[]", *self.values(keyword)]
        arguments: list[str] = json.loads(given[given.index("[") :])
        return arguments


def stages() -> list[Stage]:
    """Read them in their order."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)
    found: list[Stage] = []
    for line in filter(None, text.replace("\\\n", "").splitlines()):
        keyword, value = line.split(maxsplit=1)
        if keyword == "FROM":
            base, _, name = value.partition(" AS ")
            found.append(Stage(base, name, []))
        else:
            found[-1] = found[-1]._replace(
                instructions=[*found[-1].instructions, (keyword, value.strip())]
            )
    return found


def image() -> Stage:
    """Give the last stage, which becomes the image."""
    return stages()[-1]
