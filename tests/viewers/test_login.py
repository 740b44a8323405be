"""Neuroglancer, as its public page has it, signs people in at an OpenID provider."""

import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

import httpx
import icechunk
import pytest
import trustme
from playwright.sync_api import Browser, BrowserContext, Error, Page, Route, ViewportSize
from pydantic import SecretStr
from zarr.storage import LocalStore

from shardgate.auth.access import Datasets
from shardgate.auth.logins import VIEWER, LoginTokens
from shardgate.auth.token_records import TokenRecords
from shardgate.model import ObjectRef
from shardgate.settings import (
    DatasetSettings,
    IssuerSettings,
    LoginSettings,
    ServerSettings,
    Settings,
    TokenSettings,
)
from shardgate.storage.memory import MemoryStore
from tests.support.deploy.balancer import balancing
from tests.support.lacking import lack
from tests.support.processes import environ, free_ports, wait_until
from tests.support.proxies import PREFIX, locations, proxying
from tests.support.serving import serving
from tests.support.viewers.stripes import SECTIONS, VALUES, state, write
from tests.support.viewers.viewing import RESTORE, paging, picture_when_still, read_values

_BUNDLER: Final = Path(__file__).parents[1] / "clients/js/neuroglancer.mjs"
_SIZE: Final = ViewportSize(width=800, height=600)
_SECRET: Final = SecretStr("the secret that signs the tokens of this service")
_LOGIN: Final = "text=Request login."
_LONGEST_MS: Final = 60_000
_REPLACE_TOKEN: Final = """token => {
    const [name] = Object.keys(localStorage).filter(name => name.startsWith("auth_token_v2_"));
    const stored = JSON.parse(localStorage.getItem(name));
    localStorage.setItem(name, JSON.stringify({...stored, accessToken: token}));
}"""
_HOLD_OPEN: Final = "window.close = () => { window.wouldClose = true; }"
"""For windows that would close themselves, a second later, while a test looks at them."""
_LISTENER: Final = """<!doctype html><meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<script>
window.heard = [];
window.addEventListener("message", event => heard.push(event.data));
</script><button onclick="window.popup = window.open(LOGIN, 'its name')">open</button>
<button onclick="document.body.append(Object.assign(document.createElement('iframe'),
    {src: LOGIN}))">frame</button>"""


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Bundle and serve Neuroglancer, at an origin that may sign people in."""
    folder = tmp_path_factory.mktemp("neuroglancer")
    node = shutil.which("node")
    if node is None or not (_BUNDLER.parent / "node_modules/neuroglancer").exists():
        lack("Neuroglancer is not installed: npm install --prefix tests/clients/js")
    subprocess.run([node, _BUNDLER, folder], check=True)
    with paging(folder) as url:
        yield url


@pytest.fixture(scope="module")
def provider() -> Generator[str]:
    """Run a provider where Ada of the lab and Eve, who is in no group, sign in by a click."""
    [port] = free_ports(1)
    users = ('{"sub": "ada", "groups": ["lab"]}', '{"sub": "eve"}')
    arguments = [argument for user in users for argument in ("--user-claims", user)]
    command = [sys.executable, "-m", "oidc_provider_mock", "--host", "127.0.0.1", "--port"]
    # It takes plain http under the name localhost only, which the browser does not resolve.
    variables = environ(AUTHLIB_INSECURE_TRANSPORT="1")
    with subprocess.Popen(
        [*command, str(port), *arguments],
        env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(partial(_answers, url))
            yield url
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/jwks").is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def settings(viewer: str, provider: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Write an array that the lab may read, and the same into a repository."""
    folder = tmp_path_factory.mktemp("private")
    write(LocalStore(folder), VALUES)
    place = str(tmp_path_factory.mktemp("repository"))
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(place))
    session = repository.writable_session("main")
    write(session.store, VALUES)
    session.commit("stripes")
    return Settings(
        issuers={"sso": IssuerSettings(url=provider, audience="shardgate")},
        login=LoginSettings(
            issuer="sso", client_id="a", client_secret=SecretStr("b"), viewers=(viewer,)
        ),
        tokens=TokenSettings(secret=_SECRET),
        datasets={
            "private": DatasetSettings(url=str(folder), read=("sso:lab",)),
            "repository": DatasetSettings(url=place, read=("sso:lab",)),
        },
    )


@pytest.fixture(scope="module")
def service(
    settings: Settings, authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory
) -> Generator[str]:
    """Serve it over TLS, with a certificate of its own."""
    file = tmp_path_factory.mktemp("tls") / "service.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(file))
    with serving(settings, certificate=file) as url:
        yield url


def sites(usual: str, soak: Sequence[str]) -> pytest.MarkDecorator:
    """Let a test run at the *usual* site, and in soak runs at others too."""
    others = [pytest.param(each, marks=pytest.mark.soak) for each in soak]
    return pytest.mark.parametrize("site", [usual, *others], indirect=True)


@pytest.fixture(scope="module")
def site(
    request: pytest.FixtureRequest,
    settings: Settings,
    authority: trustme.CA,
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[str]:
    """Serve it over TLS at the root, or below a path that nginx strips and tells of, or keeps."""
    if request.param == "root":
        yield request.getfixturevalue("service")
        return
    is_stripped = request.param == "stripped"
    told = ServerSettings(trusted_proxies=("127.0.0.0/8",))
    server = told if is_stripped else ServerSettings(root_path=PREFIX)
    folder = tmp_path_factory.mktemp("proxy")
    file = folder / "proxy.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(file))
    text = locations(is_stripped=is_stripped, is_told=is_stripped)
    with (
        serving(settings.model_copy(update={"server": server})) as gateway,
        proxying(folder, gateway, text, certificate=file) as nginx,
    ):
        yield nginx + PREFIX


@pytest.fixture
def context(browser: Browser) -> Generator[BrowserContext]:
    """Open an empty profile that takes the certificate."""
    with browser.new_context(viewport=_SIZE, ignore_https_errors=True) as context:
        context.set_default_timeout(_LONGEST_MS)
        yield context


def open_viewer(
    context: BrowserContext, viewer: str, service: str, path: str = "private/sharded"
) -> Page:
    """Open the private array at *path* in the viewer."""
    page = context.new_page()
    page.goto(viewer)
    page.wait_for_function("window.viewer")
    page.evaluate(RESTORE, state(f"middleauth+{service}/{path}"))
    return page


def sign_in(page: Page, name: str) -> Page:
    """Ask for the window, and sign in there as *name*; return the window."""
    with page.expect_popup() as opened:
        page.click(_LOGIN)
    window = opened.value
    window.click(f"[aria-label='Authorize as {name}']")
    return window


def demand_closed(window: Page) -> None:
    """Wait until the window has closed itself, or the viewer has closed it."""
    if not window.is_closed():
        window.wait_for_event("close")


def demand_picture(page: Page) -> None:
    """Check that the viewer shows the stored values."""
    picture_when_still(page, 1)

    assert read_values(page, "data", SECTIONS) == VALUES[tuple(SECTIONS.T)].tolist()


def test_person_signs_in_once_and_after_the_token_has_expired(
    context: BrowserContext, settings: Settings, viewer: str, service: str
) -> None:
    """Somebody signs in by a window, needs none at the next visit, and one for an old token."""
    page = open_viewer(context, viewer, service)
    window = sign_in(page, "ada")
    demand_picture(page)
    demand_closed(window)
    page.close()

    again = open_viewer(context, viewer, service, "repository/@branch.main/sharded")
    demand_picture(again)
    assert len(context.pages) == 1

    records = TokenRecords(MemoryStore(), ObjectRef("memory://tokens", ""))
    past = LoginTokens(settings, Datasets({}), records, lambda: time.time() - 86_400).sign(
        VIEWER, {"sub": "sso:ada", "rules": ["sso:lab"]}, 3600
    )
    again.evaluate(_REPLACE_TOKEN, past)
    again.close()
    later = open_viewer(context, viewer, service)
    sign_in(later, "ada")
    demand_picture(later)


def test_person_without_rights_signs_in_as_another(
    context: BrowserContext, viewer: str, service: str
) -> None:
    """Who may read nothing reads so in the window, and gets a token there as another only."""
    page = open_viewer(context, viewer, service)
    with context.expect_event(
        "response", lambda response: "/login/callback" in response.url
    ) as answered:
        window = sign_in(page, "eve")

    assert answered.value.status == HTTPStatus.FORBIDDEN
    window.wait_for_selector("text=sso:eve has signed in, but may read no dataset here")
    assert page.evaluate("Object.keys(localStorage).filter(name => name.includes('auth'))") == []
    assert page.is_visible("text=Retry")

    window.click("text=Sign in as somebody else")
    window.click("[aria-label='Authorize as ada']")
    demand_picture(page)
    demand_closed(window)


def test_command_gets_its_token_from_the_browser(
    context: BrowserContext, service: str, ca_file: str, tmp_path: Path
) -> None:
    """Somebody signs in for `shardgate login`, allows it, and the command prints its header."""
    command = [sys.executable, "-m", "shardgate", "login", service]
    variables = environ(BROWSER="true %s", SSL_CERT_FILE=ca_file, XDG_CONFIG_HOME=str(tmp_path))
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()
        page = context.new_page()
        page.goto(process.stderr.readline().strip())
        page.click("[aria-label='Authorize as ada']")
        page.click("text=Allow it")
        page.wait_for_selector("text=You are signed in.")
        header, _ = process.communicate(timeout=60)

    assert header.startswith("Authorization: Bearer ")
    assert page.url.startswith("http://127.0.0.1:")


def test_person_signs_in_once_a_replica_is_back(
    context: BrowserContext, viewer: str, settings: Settings, tmp_path: Path
) -> None:
    """While no replica runs, the window says so and loads again; a later visit needs no window."""
    [port] = free_ports(1)
    with balancing(tmp_path, [f"http://127.0.0.1:{port}"]) as nginx:
        url = f"https://127.0.0.1:{nginx.port}"
        page = open_viewer(context, viewer, url)
        with page.expect_popup() as opened:
            page.click(_LOGIN)
        opened.value.wait_for_selector("text=no replica answered")
        with serving(settings) as replica:
            nginx.send_to([replica])
            opened.value.click("[aria-label='Authorize as ada']")
            demand_picture(page)
        page.close()

        with context.expect_event("response", lambda got: "/private/" in got.url) as answered:
            again = open_viewer(context, viewer, url)
        assert answered.value.status == HTTPStatus.SERVICE_UNAVAILABLE
        with serving(settings) as replica:
            nginx.send_to([replica])
            demand_picture(again)
        assert len(context.pages) == 1


def test_signing_out_ends_pages_and_viewers(
    context: BrowserContext, viewer: str, service: str
) -> None:
    """Somebody who signs out at the start page is asked to sign in by pages and the viewer."""
    seen = open_viewer(context, viewer, service)
    demand_closed(sign_in(seen, "ada"))
    seen.close()
    page = context.new_page()
    page.goto(service)
    page.wait_for_selector("text=private")
    page.click("text=Sign out")
    page.wait_for_selector("text=Sign in")
    assert page.is_hidden("text=private")

    open_viewer(context, viewer, service).wait_for_selector(_LOGIN)


@sites("kept", soak=["root", "stripped"])
def test_person_makes_and_revokes_a_link(context: BrowserContext, site: str) -> None:
    """Somebody makes and revokes a link, and signs out, all below the path of the service."""
    page = context.new_page()
    page.goto(f"{site}/private/")
    page.click("text=Sign in")
    page.click("[aria-label='Authorize as ada']")
    page.wait_for_url(f"{site}/private/")
    page.goto(site)
    page.click("text=Links")
    page.click("text=Make a link")
    link = page.wait_for_selector("#made code:not(:empty)")
    assert link is not None
    url = f"{link.text_content()}sharded/zarr.json"
    before = httpx.get(url, verify=False)  # noqa: S501 - its own certificate
    page.reload()
    page.click("role=button[name='Revoke']")
    page.wait_for_selector("text=There are none.")
    after = httpx.get(url, verify=False)  # noqa: S501

    assert url.startswith(f"{site}/~")
    assert (before.status_code, after.status_code) == (200, 401)
    page.click("text=all datasets")
    page.click("text=Sign out")
    page.wait_for_selector("text=Sign in")
    assert page.url.startswith(site)
    assert page.is_hidden("text=private")


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_window_without_a_viewer_says_so(
    context: BrowserContext, viewer: str, service: str, provider: str, *, is_cut_off: bool
) -> None:
    """A window that no viewer has opened, or that the issuer cuts off from it, says so."""

    def cut_off(route: Route) -> None:
        response = route.fetch()
        headers = response.headers | {"cross-origin-opener-policy": "same-origin"}
        route.fulfill(response=response, headers=headers)

    if is_cut_off:
        context.route(f"{provider}/oauth2/authorize?*", cut_off)
        page = open_viewer(context, viewer, service)
        with page.expect_popup() as opened:
            page.click(_LOGIN)
        window = opened.value
    else:
        window = context.new_page()
        window.goto(f"{service}/login/api/v1/authorize")
    window.click("[aria-label='Authorize as ada']")

    window.wait_for_selector("text=But no viewer can be reached from this window")


@pytest.fixture
def listener(service: str, tmp_path: Path) -> Generator[str]:
    """Serve a page of an origin that is not listed; it hides where it comes from."""
    page = _LISTENER.replace("LOGIN", repr(f"{service}/login/api/v1/authorize"))
    (tmp_path / "index.html").write_text(page)
    with paging(tmp_path) as url:
        yield url


def test_unlisted_page_gets_no_token(context: BrowserContext, listener: str) -> None:
    """A page of another origin opens the window, and hears and sees nothing of the token."""
    context.add_init_script(_HOLD_OPEN)
    page = context.new_page()
    page.goto(listener)
    with page.expect_popup() as opened:
        page.click("text=open")
    window = opened.value
    window.click("[aria-label='Authorize as ada']")
    window.wait_for_selector("text=sso:ada has signed in")
    wait_until(lambda: window.evaluate("Boolean(window.wouldClose)"))

    assert page.evaluate("heard") == []
    assert page.evaluate("window.name") == ""


def test_unlisted_page_that_names_itself_is_refused(
    context: BrowserContext, listener: str, service: str
) -> None:
    """A page of another origin that the browser names does not even reach the provider."""
    page = context.new_page()
    page.goto(listener)
    page.evaluate("document.querySelector('meta[name=referrer]').content = 'origin'")
    with page.expect_popup() as opened:
        page.click("text=open")

    opened.value.wait_for_selector(f"text=login.viewers does not name {listener}")
    assert opened.value.url.startswith(service)


def test_own_page_cannot_look_into_the_window(
    context: BrowserContext, service: str, tmp_path: Path
) -> None:
    """A page of the service that opens the window by way of another site cannot read the token."""
    refresh = f'<meta http-equiv="refresh" content="0; url={service}/login/api/v1/authorize">'
    (tmp_path / "index.html").write_text(f'<meta name="referrer" content="no-referrer">{refresh}')
    context.add_init_script(_HOLD_OPEN)
    with paging(tmp_path) as other:
        page = context.new_page()
        page.goto(service)
        with page.expect_popup() as opened:
            page.evaluate("url => { window.popup = window.open(url); }", other)
        opened.value.click("[aria-label='Authorize as ada']")
        opened.value.wait_for_selector("text=sso:ada has signed in")

        with pytest.raises(Error, match="SecurityError"):
            page.evaluate("popup.document.body.innerHTML")


def test_frame_of_a_page_is_refused(context: BrowserContext, listener: str) -> None:
    """A frame is refused before it reaches the provider, and shows nothing."""
    page = context.new_page()
    page.goto(listener)
    with page.expect_response(lambda response: "/login/" in response.url) as answered:
        page.click("text=frame")

    assert answered.value.status == HTTPStatus.FORBIDDEN
    assert page.evaluate("heard") == []


@sites("stripped", soak=["root", "kept"])
def test_link_of_a_private_array_lets_sign_in(
    context: BrowserContext, viewer: str, site: str
) -> None:
    """Somebody who is signed in at the pages opens the array, and the viewer signs in as well."""
    page = context.new_page()
    page.goto(f"{site}/login")
    page.click("[aria-label='Authorize as ada']")
    page.click("text=private")
    page.wait_for_selector("role=heading[name='Arrays']")
    page.goto(f"{site}/api/datasets/private/viewer?path=sharded")
    assert page.url.startswith(f"{viewer}/#!")
    page.wait_for_function("window.viewer")
    sign_in(page, "ada")
    picture_when_still(page, 1)


@sites("kept", soak=["stripped"])
def test_page_of_the_api_loads_below_a_prefix(context: BrowserContext, site: str) -> None:
    """The page of the API loads its files, sends requests below the prefix, and logs no errors."""
    page = context.new_page()
    failed: list[str] = []
    page.on("response", lambda each: failed.append(each.url) if not each.ok else None)
    page.on("console", lambda said: failed.append(said.text) if said.type == "error" else None)
    page.goto(f"{site}/docs")
    page.click("[data-path='/api/datasets'] >> nth=0")
    page.click("text=Try it out")
    with page.expect_response(f"{site}/api/datasets") as answered:
        page.click("text=Execute")

    assert answered.value.ok
    assert failed == []
