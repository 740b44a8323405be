"""The README and `docs/`, and the programs in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "deploy").rglob("README.md")),
]
DOCUMENTS = "\n".join(page.read_text("utf-8") for page in PAGES)


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of *language*."""
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENTS, re.DOTALL)


def program(page: str, containing: str) -> str:
    """Return the Python block of *page* that contains a text."""
    text = (ROOT / page).read_text("utf-8")
    (found,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if containing in b]
    return str(found)
