"""``GET /`` for browsers."""

from pathlib import Path
from typing import Final

from fastapi import Request, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app.http.credentials.access import Datasets
from app.http.pages import page_headers
from app.http.start.address import address_of
from app.http.start.cards import make_card
from app.http.start.figures import Watch, spell_figures
from app.http.start.glances import Glances

_TEMPLATES: Final = Path(__file__).parent.parent / "templates"
_PAGES: Final = Environment(
    loader=FileSystemLoader(_TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_MOST_DATASETS: Final = 100


class StartPage:
    """Shows who asks what of it they may see; it loads nothing else, and works without scripts.

    The figures are live where scripts run: asked with the query ``figures`` they come alone.
    """

    def __init__(
        self, datasets: Datasets, glances: Glances, watch: Watch, *, has_viewer: bool
    ) -> None:
        self._datasets = datasets
        self._glances = glances
        self._watch = watch
        self._has_viewer = has_viewer
        self._style = (_TEMPLATES / "start.css").read_text("utf-8")
        self._script = (_TEMPLATES / "start.js").read_text("utf-8")
        self._page = _PAGES.get_template("start.html")
        self._figures = _PAGES.get_template("figures.html")
        headers = page_headers(style=self._style, script=self._script)
        self._headers = {name.decode(): value.decode() for name, value in headers}

    async def __call__(self, request: Request) -> Response:
        """Answer a browser."""
        caller = request.scope["caller"]
        figures = spell_figures(self._watch()) if self._datasets.may_watch(caller) else []
        if "figures" in request.query_params:
            return self._answer(self._figures.render(figures=figures))
        known = sorted(self._datasets.seen_by(caller), key=lambda dataset: dataset.name)
        shown = known[:_MOST_DATASETS]
        address = address_of(request, has_viewer=self._has_viewer)
        glances = await self._glances.look_at(shown)
        content = self._page.render(
            cards=[
                make_card(dataset, seen, address, caller)
                for dataset, seen in zip(shown, glances, strict=True)
            ],
            more=len(known) - len(shown),
            has_viewer=address.viewer is not None,
            figures=figures,
            is_below_token="token" in request.scope,
            style=self._style,
            script=self._script,
        )
        return self._answer(content)

    def _answer(self, content: str) -> Response:
        return Response(content, media_type="text/html", headers=self._headers)
