"""A page whose name was pointed at the service afterwards, in Chromium (DNS rebinding)."""

from typing import Final

import httpx
from playwright.sync_api import Browser

from app.settings import DatasetSettings, ServerSettings, Settings
from tests.serving import serving
from tests.viewers.conftest import REBOUND

SETTINGS: Final = Settings(
    server=ServerSettings(cors_origins=("https://viewer.example",)),
    datasets={"any": DatasetSettings(url="memory://any", writable=True)},
)
ATTACK: Final = """async () => {
    const statuses = [];
    for (const method of ["PUT", "DELETE", "GET"])
        statuses.push((await fetch("/any/k", {method})).status);
    return statuses;
}"""


def test_a_rebound_page_writes_nothing(browser: Browser) -> None:
    """It has the origin of the service, as far as browsers know."""
    with serving(SETTINGS) as url, browser.new_context() as context:
        httpx.put(f"{url}/any/k", content=b"x")
        page = context.new_page()
        page.goto(url.replace("127.0.0.1", REBOUND) + "/healthz")

        assert page.evaluate(ATTACK) == [421, 421, 200]
        assert httpx.get(f"{url}/any/k").content == b"x"
