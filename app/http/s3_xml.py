"""XML that clients send: read element by element, without a tree, and without a DTD."""

from typing import Protocol
from xml.parsers import expat

from app.errors import BadBodyError

type Path = tuple[str, ...]


class Hearer(Protocol):
    """Hears of elements by their path, and may raise."""

    def begin(self, path: Path) -> None:
        """Hear that an element begins."""
        ...

    def end(self, path: Path, text: str) -> None:
        """Hear that an element ends, and what text was in it."""
        ...


def read_xml(body: bytes, hearer: Hearer) -> None:
    """Tell *hearer* what is in *body*; a DTD is refused when it begins.

    Raises: `BadBodyError`, and what *hearer* raises.
    """
    reader = _Reader(hearer)
    parser = expat.ParserCreate("utf-8", namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = reader.refuse
    parser.StartElementHandler = reader.begin
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.read
    try:
        parser.Parse(body, True)  # noqa: FBT003  it takes no keyword
    except expat.ExpatError as error:
        raise BadBodyError(f"the body is no XML: {error}") from None


class _Reader:
    def __init__(self, hearer: Hearer) -> None:
        self._hearer = hearer
        self._path: Path = ()
        self._texts: list[str] = []

    def refuse(self, *_: object) -> None:
        raise BadBodyError("the body has a document type, which is not read")

    def begin(self, name: str, _: object) -> None:
        self._path = (*self._path, name.rpartition(" ")[2])
        self._texts.append("")
        self._hearer.begin(self._path)

    def read(self, text: str) -> None:
        self._texts[-1] += text

    def end(self, _: str) -> None:
        self._hearer.end(self._path, self._texts.pop())
        self._path = self._path[:-1]
