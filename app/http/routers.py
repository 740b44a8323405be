"""What the routers of the control plane have in common."""

import json
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from app.http.described import OTHERWISE


class Json(JSONResponse):
    """JSON in ASCII: names in metadata may have characters that UTF-8 has not."""

    def render(self, content: Any) -> bytes:
        """Write *content*."""
        return json.dumps(content, separators=(",", ":")).encode()


def new_router(prefix: str, tag: str) -> APIRouter:
    """Make a router whose routes an application takes as they are.

    To include the router would be to read the signature of each route a second time.
    """
    return APIRouter(
        prefix=prefix, tags=[tag], responses=dict(OTHERWISE), default_response_class=Json
    )
