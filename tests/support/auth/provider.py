"""An OpenID provider that follows the specifications, and can be told to break them.

It signs everybody in at once, as a provider does that knows the browser. It shares no code with the
service: PKCE and tokens are made with the standard library and joserfc.
"""

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import parse_qs, unquote_plus, urlencode, urlsplit

from joserfc import jwt

from tests.support.auth.issuing import Key, make_key
from tests.support.storage.listening import Handler, Listener

CLIENT_ID: Final = "shardgate at/lab"
CLIENT_SECRET: Final = "s3cret:+/ of the client"
ACCESS_TOKEN: Final = "opens-userinfo"


class _Handler(Handler["Provider"]):
    def answer(self) -> None:
        """Answer one request."""
        target, provider = urlsplit(self.path), self.server.owner
        fields = {name: values[0] for name, values in parse_qs(target.query).items()}
        provider.seen.append((self.command, target.path, fields))
        match target.path:
            case "/.well-known/openid-configuration":
                self._send(200, provider.configuration())
            case "/jwks":
                self._send(200, {"keys": [key.as_dict(private=False) for key in provider.keys]})
            case "/authorize":
                self._redirect(provider.authorize(fields))
            case "/token" | "/device":
                form = {name: values[0] for name, values in parse_qs(self.body().decode()).items()}
                provider.forms.append(form)
                provider.cookies.append(self.headers.get("Cookie"))
                answer = provider.redeem if target.path == "/token" else provider.begin_on_device
                self._send(*answer(form, self.headers.get("Authorization")))
            case "/userinfo" if self.headers.get("Authorization") == f"Bearer {ACCESS_TOKEN}":
                self._send(*provider.userinfo)
            case _:
                self._send(404, {})

    def _redirect(self, location: str) -> None:
        self.send_response(302)
        self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, status: int, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Set-Cookie", f"person={secrets.token_hex()}; Path=/")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Provider:
    """Signs in ``ada``, a member of the group ``lab``."""

    def __init__(self) -> None:
        self._listener = Listener(_Handler, self)
        self.url = self._listener.url
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.forms: list[dict[str, str]] = []
        self.cookies: list[str | None] = []
        """Cookies of requests for tokens; each answer sets one."""
        self.keys: list[Key] = [make_key("first")]
        """Keys that are published; the first one signs."""
        self._codes: dict[str, dict[str, str]] = {}
        self.reset()

    def reset(self) -> None:
        """Follow the specifications again."""
        self.claims: dict[str, Any] = {}
        """Changes of the claims in ID tokens; `None` removes one."""
        self.extra: dict[str, Any] = {}
        """Changes of the configuration."""
        self.answer: dict[str, str | None] = {}
        """Changes of the parameters that browsers bring back."""
        self.id_token: str | None = None
        """ID token that is sent instead of the right one, and uses up no code of a device."""
        self.auth_method = "client_secret_basic"
        """How the client must send its secret, if it has one."""
        self.refusal: tuple[int, Any] | None = None
        """Answer to each request for tokens."""
        self.device: dict[str, Any] | None = {}
        """Changes of the answer to a device that begins a sign-in, of which `None` removes one;
        `None` in their place refuses it.
        """
        self.waiting: list[str] = []
        """Errors for a device before its person has signed in."""
        self.access_token: str | None = ACCESS_TOKEN
        self.userinfo: tuple[int, Any] = 200, {"sub": "ada"}
        """Answer of the userinfo endpoint."""

    @contextmanager
    def running(self) -> Generator["Provider"]:
        """Answer requests until the context ends."""
        with self._listener.running():
            yield self

    def configuration(self) -> dict[str, Any]:
        """Return the discovery document."""
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "userinfo_endpoint": f"{self.url}/userinfo",
            "jwks_uri": f"{self.url}/jwks",
            "device_authorization_endpoint": f"{self.url}/device",
            **self.extra,
        }

    def authorize(self, asked: dict[str, str]) -> str:
        """Return where the browser goes with a code."""
        code = secrets.token_urlsafe()
        self._codes[code] = asked
        brought = {"code": code, "state": asked["state"], **self.answer}
        sent = {name: value for name, value in brought.items() if value is not None}
        return f"{asked['redirect_uri']}?{urlencode(sent)}"

    def redeem(self, form: dict[str, str], authorization: str | None) -> tuple[int, object]:
        """Return the answer to a request for tokens; each code is good for one."""
        if self.refusal is not None:
            return self.refusal
        if not self._knows(form, authorization):
            return 401, {"error": "invalid_client"}
        if form.get("grant_type") == "urn:ietf:params:oauth:grant-type:device_code":
            return self._redeem_on_device(form)
        asked = self._codes.pop(form.get("code", ""), None)
        if asked is None or asked["redirect_uri"] != form.get("redirect_uri"):
            return 400, {"error": "invalid_grant"}
        # RFC 9700 §2.1.1: a verifier without a challenge is a downgrade.
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if asked.get("code_challenge_method") != "S256" or asked["code_challenge"] != challenge:
            return 400, {"error": "invalid_grant"}
        token = self._sign(asked)
        return 200, {"id_token": token, "access_token": self.access_token}

    def begin_on_device(
        self, form: dict[str, str], authorization: str | None
    ) -> tuple[int, object]:
        """Return the answer to a device that begins a sign-in (RFC 8628 §3.2)."""
        if self.refusal is not None:
            return self.refusal
        if not self._knows(form, authorization):
            return 401, {"error": "invalid_client"}
        if self.device is None:
            return 400, {"error": "unauthorized_client"}
        code = self.add_device()
        good = {"device_code": code, "user_code": "WDJB-MJHT", "expires_in": 60, "interval": 0}
        answer = {**good, "verification_uri": f"{self.url}/enter", **self.device}
        return 200, {name: value for name, value in answer.items() if value is not None}

    def add_device(self) -> str:
        """Return the code of a device whose person signs in at once."""
        code = secrets.token_urlsafe()
        self._codes[code] = {"client_id": CLIENT_ID}
        return code

    def _redeem_on_device(self, form: dict[str, str]) -> tuple[int, object]:
        if form.get("device_code") not in self._codes:
            return 400, {"error": "expired_token"}
        if self.waiting:
            return 400, {"error": self.waiting.pop(0)}
        token = self._sign(self._codes[form["device_code"]])
        if self.id_token is None:
            del self._codes[form["device_code"]]
        return 200, {"id_token": token, "access_token": self.access_token}

    def claims_for(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the claims of the ID token for the request that the browser brought."""
        now = int(time.time())
        good: dict[str, Any] = {}
        good |= {"iss": self.url, "aud": asked["client_id"], "sub": "ada", "groups": ["lab"]}
        good |= {"iat": now, "exp": now + 60, "nonce": asked.get("nonce")}
        return {name: value for name, value in {**good, **self.claims}.items() if value}

    def _sign(self, asked: Mapping[str, str]) -> str:
        if self.id_token is not None:
            return self.id_token
        key = self.keys[0]
        return jwt.encode({"alg": "RS256", "kid": key.kid}, self.claims_for(asked), key)

    def _knows(self, form: dict[str, str], authorization: str | None) -> bool:
        match self.auth_method:
            case "none":
                return authorization is None and form.get("client_id") == CLIENT_ID
            case "client_secret_post":
                sent = form.get("client_id"), form.get("client_secret")
                return authorization is None and sent == (CLIENT_ID, CLIENT_SECRET)
        basic = base64.b64decode((authorization or "").removeprefix("Basic ")).decode()
        client_id, _, secret = basic.partition(":")
        return (unquote_plus(client_id), unquote_plus(secret)) == (CLIENT_ID, CLIENT_SECRET)


@contextmanager
def providing() -> Generator[Provider]:
    """Run a provider on this machine."""
    with Provider().running() as provider:
        yield provider
