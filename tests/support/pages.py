"""The start page, taken apart as browsers do, which forgive nothing here."""

from dataclasses import dataclass
from typing import Any, cast
from xml.etree.ElementTree import Element  # a tree that html5lib made, no XML from elsewhere

import html5lib
import httpx


@dataclass(frozen=True)
class Page:
    """An answer to a browser."""

    answer: httpx.Response
    tree: Element

    def all(self, path: str) -> list[Element]:
        """Find elements."""
        return self.tree.findall(f".//{path}")

    def card(self, name: str) -> "Page":
        """Give the part of a dataset."""
        (found,) = self.all(f"article[@aria-labelledby='dataset-{name}']")
        return Page(self.answer, found)

    def texts(self, path: str) -> list[str]:
        """Give the text in elements."""
        return [" ".join("".join(each.itertext()).split()) for each in self.all(path)]

    def links(self, path: str = "") -> list[str]:
        """Give where links lead."""
        return [each.attrib["href"] for each in self.all(f"{path}//a".lstrip("/"))]

    def snippets(self) -> dict[str, str]:
        """Give the code of snippets by their titles."""
        return {
            "".join(each.find("summary").itertext()): "".join(each.find("pre/code").itertext())  # type: ignore[union-attr]  # each has both
            for each in self.all("details")
        }


def open_page(client: httpx.Client) -> Page:
    """Ask for the page as a browser does; what HTML does not allow in it raises."""
    answer = client.get("/", headers={"accept": "text/html"})
    assert answer.status_code == 200, answer.text
    return Page(answer, parse(answer.text))


def parse(text: str) -> Element:
    """Parse a page."""
    parser: Any = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    return cast("Element", parser.parse(text))
