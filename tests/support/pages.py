"""Pages of the service, parsed strictly as HTML."""

import re
from dataclasses import dataclass
from html import unescape
from typing import Any, cast
from xml.etree.ElementTree import Element  # a tree that html5lib made, no XML from elsewhere

import html5lib
import httpx


@dataclass(frozen=True)
class Page:
    """A response with its parsed page, or a part of it."""

    answer: httpx.Response
    tree: Element

    def all(self, path: str) -> list[Element]:
        """Return the elements at *path*."""
        return self.tree.findall(f".//{path}")

    def row(self, name: str) -> "Page":
        """Return the line of a dataset on the start page."""
        (found,) = self.all(f"tr[@data-name='{name}']")
        return Page(self.answer, found)

    def texts(self, path: str) -> list[str]:
        """Return the texts of elements."""
        return [" ".join("".join(each.itertext()).split()) for each in self.all(path)]

    def links(self, path: str = "") -> list[str]:
        """Return the targets of links."""
        return [each.attrib["href"] for each in self.all(f"{path}//a".lstrip("/"))]

    def properties(self) -> dict[str, str]:
        """Return the properties in the card of a node, by their names."""
        return dict(zip(self.texts("dt"), self.texts("dd"), strict=True))

    def snippets(self) -> dict[str, str]:
        """Return the code of snippets by their titles."""
        return {
            "".join(each.find("summary").itertext()): "".join(code.itertext())  # type: ignore[union-attr]  # each has one
            for each in self.all("details")
            if (code := each.find(".//code")) is not None
        }


def main_links(text: str) -> list[str]:
    """Return where the links of a page lead, between its header and its footer."""
    main = text.partition("<main")[2].partition("</main>")[0]
    return [unescape(each) for each in re.findall('<a [^>]*href="([^"]*)"', main)]


def open_page(client: httpx.Client, path: str = "/") -> Page:
    """Request the page at *path* as a browser does, and parse it; invalid HTML raises."""
    answer = client.get(path, headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert answer.status_code == 200, answer.text
    return Page(answer, parse(answer.text))


def parse(text: str) -> Element:
    """Parse a page."""
    parser: Any = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    return cast("Element", parser.parse(text))
