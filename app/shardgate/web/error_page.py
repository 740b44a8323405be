"""What errors say: a page with a way on to a browser that opens one, else a problem document."""

from http import HTTPStatus
from typing import Final, cast
from urllib.parse import quote

from shardgate.server.address import address_reached_by
from shardgate.server.problems import RETRIED, Failure, problem, status_headers
from shardgate.server.request import Headers, Request, Response, quote_segment
from shardgate.server.responses import NO_STORE
from shardgate.settings import LoginSettings
from shardgate.web.rendering import PageTemplate, visible

_VARY: Final = (b"vary", b"Accept")


class ErrorPages:
    """Says errors to clients."""

    def __init__(self, login: LoginSettings) -> None:
        self._has_login = login.issuer is not None
        self._page = PageTemplate("refused.html")

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
            return Response(document.status, [*headers, _VARY], document.body)
        status = failure.status
        address = address_reached_by(request)
        way = label = ""
        if status in RETRIED:
            label = "Try again"
        elif self._has_login and request.segment is None and _may_help(request, status):
            page = "/" if request.name == "login" else request.raw_path.decode("latin-1")
            way = f"{address.root_path}/login?page={quote(page, safe='')}"
            label = "Sign in"
        elif status is HTTPStatus.NOT_FOUND and _is_of_dataset(request, failure):
            way = f"{request.base_path}/{quote_segment(request.name)}/"
            label = f"Show {visible(request.name, 40)}"
        body = await self._page.render(
            home=f"{address.root_path}/",
            title=status.phrase,
            reason=failure.detail,
            way=way,
            label=label,
        )
        headers = [(b"content-type", b"text/html; charset=utf-8"), NO_STORE, _VARY]
        for name, value in self._page.headers:
            # Of no origin: a sign-in for a viewer cannot begin in a page of the service itself.
            is_sandboxed = request.name == "login" and name == b"content-security-policy"
            headers.append((name, value + b"; sandbox allow-scripts" if is_sandboxed else value))
        length = (b"content-length", b"%d" % len(body))
        return Response(status, [*headers, length, *status_headers(status)], body)


def _may_help(request: Request, status: HTTPStatus) -> bool:
    """Return whether a sign-in may help: under another host name it cannot begin."""
    is_login = request.name == "login" and status is not HTTPStatus.MISDIRECTED_REQUEST
    return is_login or status is HTTPStatus.UNAUTHORIZED


def _is_of_dataset(request: Request, failure: Failure) -> bool:
    """Return whether the dataset exists: an unknown one is an error of its own."""
    return bool(request.key) and not request.needs_asgi and failure.error is None
