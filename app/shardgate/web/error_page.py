"""What errors say: a page with a way on to a browser that opens one, else a problem document."""

from http import HTTPStatus
from typing import cast
from urllib.parse import quote

from shardgate.server.address import address_reached_by
from shardgate.server.problems import RETRIED, Failure, problem, status_headers
from shardgate.server.request import Headers, Request, Response, quote_segment
from shardgate.settings import LoginSettings
from shardgate.web.rendering import VARY_BY_ACCEPT, PageTemplate, visible


class ErrorPages:
    """Says errors to clients."""

    def __init__(self, login: LoginSettings) -> None:
        self._has_login = login.issuer is not None
        self._page = PageTemplate("refused.html")
        self._login_page = PageTemplate("refused.html", is_sandboxed=True)

    async def explain(self, request: Request, failure: Failure) -> Response:
        """Return the response to *request* that explains *failure*."""
        if request.name == "auth_info":
            # Neuroglancer does not look at the status: from any JSON it takes `login_url`, and
            # opens it, or repeats its reads if it has a token of that URL.
            address = address_reached_by(request)
            root = address.root if address.is_trustworthy else f"https:{address.root[5:]}"
            members = {**failure.members, "login_url": f"{root}/login"}
            failure = failure._replace(members=members)
        if not request.fills_window:
            document = problem(failure)
            headers = cast("Headers", document.headers)
            return Response(document.status, [*headers, VARY_BY_ACCEPT], document.body)
        status = failure.status
        address = address_reached_by(request)
        label = ""
        way = ""  # the same page
        if status in RETRIED:
            label = "Try again"
        elif self._has_login and request.segment is None and _may_help(request, status):
            wanted = "/" if request.name == "login" else request.raw_path.decode("latin-1")
            way = f"{address.root_path}/login?page={quote(wanted, safe='')}"
            label = "Sign in"
        elif status is HTTPStatus.NOT_FOUND and _is_of_dataset(request, failure):
            way = f"{request.base_path}/{quote_segment(request.name)}/"
            label = f"Show {visible(request.name, 40)}"
        # A sign-in for a viewer cannot begin in a page of the service itself.
        page = self._login_page if request.name == "login" else self._page
        home = f"{address.root_path}/"
        body = await page.render(
            home=home, title=status.phrase, reason=failure.detail, way=way, label=label
        )
        return Response(status, [*page.headers_of(body), *status_headers(status)], body)


def _may_help(request: Request, status: HTTPStatus) -> bool:
    """Return whether a sign-in may help: under another host name it cannot begin."""
    is_login = request.name == "login" and status is not HTTPStatus.MISDIRECTED_REQUEST
    return is_login or status is HTTPStatus.UNAUTHORIZED


def _is_of_dataset(request: Request, failure: Failure) -> bool:
    """Return whether the dataset exists: an unknown one is an error of its own."""
    return bool(request.key) and not request.needs_asgi and failure.error is None
