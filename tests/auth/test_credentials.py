"""Tokens of every kind, over HTTP: accepted if they are right, refused if they are not.

They are built with the standard library and `cryptography` alone.
"""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final, NamedTuple

import httpx
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding

from tests.support.auth import browsing, people
from tests.support.auth.browsing import CALLBACK, HTML, SECRET
from tests.support.auth.issuing import AUDIENCE, Key, make_key, spell, spell_bytes
from tests.support.auth.people import TOKENS
from tests.support.auth.provider import CLIENT_ID, Provider
from tests.support.serving import serving

NESTED: Final = spell_bytes(b"[" * 11_000)
"""Part of a token that is nested as deep as its length allows."""
LONGEST_NBYTES: Final = 16 * 1024
CLAIM: Final = "marmalade"
"""A claim of wrong tokens, which no error may contain."""
VERIFIER: Final = "v" * 43
CHALLENGE: Final = spell_bytes(hashlib.sha256(VERIFIER.encode()).digest())
RIGHTS: Final = {"sub": "lab:ada", "sid": "a-session", "rules": ["lab:lab"]}
LINKED: Final = {"sub": "ana", "jti": "an-id", "datasets": ["private"]}

type Members = Mapping[str, object]
type Use = Callable[[str], httpx.Response]


def changed(old: Members, new: Members | None) -> Members:
    """Return *old* with the members of *new*, of which `None` removes one."""
    new = new or {}
    return {name: value for name, value in {**old, **new}.items() if new.get(name, 0) is not None}


class Credential(NamedTuple):
    """A valid token, from which others are built, and its use."""

    header: Members
    claims: Members
    key: bytes | Key
    use: Use

    def spell(
        self,
        claims: Members | None = None,
        header: Members | None = None,
        key: bytes | Key | None = None,
        digest: str = "sha256",
    ) -> str:
        """Sign the token, or one with changes."""
        said = f"{spell(changed(self.header, header))}.{spell(changed(self.claims, claims))}"
        key = self.key if key is None else key
        if isinstance(key, bytes):
            signature = hmac.digest(key, said.encode(), digest)
        else:
            private: Any = key.private_key
            signature = private.sign(said.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{said}.{spell_bytes(signature)}"

    def replace(self, at: int, part: str) -> str:
        """Replace a part of the signed token."""
        parts = self.spell().split(".")
        return ".".join([*parts[:at], part, *parts[at + 1 :]])


type Build = Callable[[Credential], str]
"""Builds a wrong token from a right one."""


class Lab:
    """A service where people sign in at a provider, and requests with tokens of each kind."""

    def __init__(self, provider: Provider, url: str) -> None:
        self.provider = provider
        self.opened: dict[str, Credential] = {}
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
        self.client = httpx.Client(base_url=url, cookies=no_cookies, timeout=60)

    def read(self, token: str) -> httpx.Response:
        """Read a private key with a bearer token."""
        return self.client.get("/private/text.txt", headers={"authorization": f"Bearer {token}"})

    def show(self, cookie: str, kind: str = "session", path: str = "/private/") -> httpx.Response:
        """Open a page with a cookie."""
        sent = f"shardgate-{kind}-{self.client.base_url.port}={cookie}"
        return self.client.get(path, headers={"cookie": sent, **HTML})

    def redeem(self, code: str) -> httpx.Response:
        """Exchange the code of a command."""
        return self.client.post("/login/token", json={"code": code, "verifier": VERIFIER})

    def finish_on_device(self, code: str) -> httpx.Response:
        """Exchange the code of a device."""
        return self.client.post("/login/device/token", json={"device_code": code})

    def begin(self) -> tuple[Members, Use]:
        """Return the claims of an attempt to sign in, and what ends it by their cookie."""
        state = secrets.token_urlsafe()
        claims = {"for": "shardgate-viewer", "opener": None, "prompt": "", "verifier": VERIFIER}
        claims |= {"state": state, "nonce": "a-nonce"}
        asked = {"client_id": CLIENT_ID, "redirect_uri": f"{self.client.base_url}{CALLBACK}"}
        asked |= {"state": state, "code_challenge": CHALLENGE, "code_challenge_method": "S256"}
        back = self.provider.authorize({**asked, "nonce": "a-nonce"})
        return claims, lambda cookie: self.show(cookie, f"attempt-{state[:8]}", back)

    def begin_on_device(self) -> tuple[Members, Use]:
        """Return the claims of a sign-in on another device, and what ends it by their code."""
        return {"device_code": self.provider.add_device()}, self.finish_on_device


class Kind(NamedTuple):
    """A kind of tokens that the service signs."""

    name: str
    purpose_before: str
    """Purpose of its key in the version before."""
    status: int
    """Of a request with a wrong one."""
    begin: Callable[[Lab], tuple[Members, Use]]
    """Returns the claims of a token, and its use."""

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """The keys of its tokens in this version and the one before."""
        return key_for(f"key of tokens: {self.name}"), key_for(self.purpose_before)

    def open(self, lab: Lab) -> Credential:
        """Return a new token."""
        header = {"alg": "HS256", "typ": f"{self.name}+jwt"}
        claims, use = self.begin(lab)
        claims = {**claims, "iss": "shardgate", "exp": int(time.time()) + 600}
        audience = {} if "jti" in claims else {"aud": f"{lab.provider.url} {CLIENT_ID}"}
        return Credential(header, {**claims, **audience}, self.keys[0], use)


def key_for(purpose: str, secret: str = SECRET) -> bytes:
    """Derive a key."""
    return hmac.digest(secret.encode(), f"shardgate: {purpose}".encode(), "sha256")


OWN: Final = {
    "link": Kind("shardgate", "minted tokens", 401, lambda lab: (LINKED, lab.read)),
    "viewer": Kind("shardgate-viewer", "signing in: viewer", 401, lambda lab: (RIGHTS, lab.read)),
    "session": Kind(
        "shardgate-session", "signing in: session", 401, lambda lab: (RIGHTS, lab.show)
    ),
    "attempt": Kind("shardgate-attempt", "signing in: attempt", 403, Lab.begin),
    "code": Kind(
        "shardgate-code",
        "signing in: code",
        403,
        lambda lab: ({**RIGHTS, "challenge": CHALLENGE}, lab.redeem),
    ),
    "device": Kind("shardgate-device", "signing in: device", 403, Lab.begin_on_device),
}
"""Kinds of tokens that the service signs."""


def open_new(lab: Lab, kind: str) -> Credential:
    """Return a new token of a *kind*."""
    if kind in OWN:
        return OWN[kind].open(lab)
    provider = lab.provider
    header = {"alg": "RS256", "kid": "first"}
    if kind == "access":
        claims = provider.claims_for({"client_id": AUDIENCE})
        return Credential(header, claims, make_key("first"), lab.read)
    begun = OWN["attempt" if kind == "ID" else "device"].open(lab)
    claims = provider.claims_for({"client_id": CLIENT_ID, **begun.claims})

    def use(token: str) -> httpx.Response:
        provider.id_token = token
        return begun.use(begun.spell())

    return Credential(header, claims, make_key("first"), use)


ISSUED: Final = ("access", "ID", "ID of a device")
"""Kinds of tokens that an issuer signs."""
VERIFIED: Final = ("access", "ID of a device")
"""Two of them: ID tokens of browsers and devices take one way."""
KINDS: Final = (*OWN, *ISSUED)
BEARERS: Final = frozenset({"link", "viewer", "access", "configured"})
"""Kinds that are accepted in each other's place."""


@pytest.fixture(scope="module")
def served(running: Provider, tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    """Serve datasets to people who sign in at a provider with several keys, and to Ana."""
    running.keys += [make_key("spare"), make_key("p256", "P-256"), make_key("short", "short RSA")]
    settings = browsing.settings(running, tmp_path_factory.mktemp("lab"))
    private = settings.datasets["private"].model_copy(update={"read": ("lab:lab", "ana")})
    callers = {"ana": people.caller(TOKENS["ana"])}
    datasets = {**settings.datasets, "private": private}
    update = {"callers": callers, "datasets": datasets}
    with serving(settings.model_copy(update=update)) as url, (lab := Lab(running, url)).client:
        yield lab


@pytest.fixture
def lab(provider: Provider, served: Lab) -> Lab:
    """Return the service, whose provider follows the specifications."""
    assert served.provider is provider
    return served


def open_known(lab: Lab, kind: str) -> Credential:
    """Return a token of a *kind* whose place refusals do not spend, but for that of ID tokens."""
    if kind not in lab.opened or kind == "ID":
        lab.opened[kind] = open_new(lab, kind)
    return lab.opened[kind]


def refusal(kind: str, use: Use, token: str) -> str:
    """Return the text of the answer to *token*, which must refuse it and not repeat it."""
    refused = use(token)
    assert refused.status_code in ({OWN[kind].status} if kind in OWN else {401, 403})
    assert not any(len(part) > 20 and part in refused.text for part in token.split("."))
    assert CLAIM not in refused.text
    return refused.text


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("kind", OWN)
def test_token_of_the_version_before_is_accepted(lab: Lab, kind: str, version: int) -> None:
    """A token with the key of this version or the one before is accepted until it expires."""
    valid = open_new(lab, kind)
    key = OWN[kind].keys[version]
    refusal(kind, valid.use, valid.spell({"exp": int(time.time()) - 1}, key=key))

    assert valid.use(valid.spell(key=key)).status_code == 200


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in ISSUED),
        ("ID", {"aud": [CLIENT_ID]}),
        ("ID", {"aud": [CLIENT_ID, "another"], "azp": CLIENT_ID}),
    ],
)
def test_token_of_an_issuer_is_accepted(lab: Lab, kind: str, changes: Members) -> None:
    """A token of the issuer is accepted if it is for this service alone, or issued to it."""
    valid = open_new(lab, kind)

    assert valid.use(valid.spell(changes)).status_code == 200


def foreign(valid: Credential) -> bytes | Key:
    """Return a key of the same type that somebody else has."""
    foreign_secret = "the secret of somebody else, as long"
    is_own = isinstance(valid.key, bytes)
    return key_for("key of tokens: shardgate", foreign_secret) if is_own else make_key("strange")


def flip(token: str) -> str:
    """Change a letter of the signature."""
    at = token.rindex(".") + 9
    return token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :]


HS: Final = {"alg": "HS256"}
DEFECTS: Final[Mapping[str, Build]] = {
    "expired": lambda valid: valid.spell({"exp": int(time.time()) - 61}),
    "endless": lambda valid: valid.spell({"exp": None}),
    "not valid yet": lambda valid: valid.spell({"nbf": int(time.time()) + 90}),
    "of the future": lambda valid: valid.spell({"iat": int(time.time()) + 90}),
    "of another issuer": lambda valid: valid.spell({"iss": "https://evil.example"}),
    "for another issuer": lambda valid: valid.spell({"aud": f"https://evil.example {CLIENT_ID}"}),
    "for another client": lambda valid: valid.spell({"aud": f"{valid.claims['iss']} other"}),
    "of another key": lambda valid: valid.spell(key=foreign(valid)),
    "of the empty key": lambda valid: valid.spell(header=HS, key=b""),
    "of the secret itself": lambda valid: valid.spell(header=HS, key=SECRET.encode()),
    "of other claims": lambda valid: valid.replace(1, spell({**valid.claims, "a": 5})),
    "of another header": lambda valid: valid.replace(0, spell({**valid.header, "a": 5})),
    "of other bits": lambda valid: flip(valid.spell()),
    "not signed": lambda valid: valid.replace(2, ""),
    "of another algorithm": lambda valid: valid.spell(header={"alg": "HS512"}, digest="sha512"),
    "of no algorithm": lambda valid: valid.spell(header={"alg": None}),
    "of the algorithm none": lambda valid: f"{spell({'alg': 'none'})}.{spell(valid.claims)}.",
    "of the algorithm None": lambda valid: valid.replace(0, spell({**valid.header, "alg": "None"})),
    "of an odd algorithm": lambda valid: valid.spell(header={"alg": ["HS256", "RS256"]}),
    "cut": lambda valid: valid.spell()[:-2],
    "cut at a dot": lambda valid: valid.spell().rpartition(".")[0],
    "with a fourth part": lambda valid: f"{valid.spell()}.x",
    "of no claims": lambda valid: valid.replace(1, ""),
    "of a list": lambda valid: valid.replace(1, spell([])),
    "of a nested header": lambda valid: valid.replace(0, NESTED),
    "of nested claims": lambda valid: valid.replace(1, NESTED),
    **{repr(text): lambda _, text=text: text for text in ("..", "a.b.c", "a")},  # type: ignore[misc]
}
"""Whatever makes a token of any kind wrong."""


WHOLE: Final = ("viewer", "access")
"""Kinds that are tried with each defect: the others are verified in the same two ways."""
USUAL: Final = ("expired", "of another key", "of other claims", "of the algorithm none", "cut")
"""Defects that each kind is tried with."""


@pytest.mark.parametrize(
    ("kind", "defect"),
    [
        pytest.param(
            kind, defect, marks=() if defect in USUAL or kind in WHOLE else pytest.mark.soak
        )
        for kind in KINDS
        for defect in DEFECTS
    ],
)
def test_token_with_a_defect_is_refused(lab: Lab, kind: str, defect: str) -> None:
    """A token of any kind that has expired, is forged, damaged or for others is refused."""
    valid = open_known(lab, kind)

    refusal(kind, valid.use, DEFECTS[defect](valid))


@pytest.mark.parametrize(
    ("kind", "other"), [(kind, other) for kind in OWN for other in OWN if kind != other]
)
def test_key_of_another_kind_is_refused(lab: Lab, kind: str, other: str) -> None:
    """A token that is signed with the key of another kind is refused, whatever type it names."""
    valid = open_known(lab, kind)
    for key in OWN[other].keys:
        refusal(kind, valid.use, valid.spell(key=key))


@pytest.mark.parametrize(
    ("kind", "other"),
    [(kind, other) for kind in KINDS for other in (*KINDS, "configured") if kind != other],
)
def test_token_in_the_place_of_another_kind_is_refused(lab: Lab, kind: str, other: str) -> None:
    """A token of one kind is refused in the place of another, but for bearer tokens."""
    use = open_known(lab, kind).use
    placed = TOKENS["ana"] if other == "configured" else open_known(lab, other).spell()
    if {kind, other} <= BEARERS:
        assert use(placed).status_code == 200
    else:
        refusal(kind, use, placed)


@pytest.mark.parametrize(
    ("kind", "status"),
    [("link", 401), ("viewer", 401), ("access", 401), ("code", 400), ("device", 400)],
)
def test_token_that_is_too_long_is_refused(lab: Lab, kind: str, status: int) -> None:
    """A token that is signed as it must be, but longer than 16 KiB, is refused."""
    valid = open_known(lab, kind)

    assert valid.use(valid.spell({"a": "b" * LONGEST_NBYTES})).status_code == status


def by(signer: str, kind: str = "RSA", **header: object) -> Build:
    """Return what signs with a key, which the *header* need not name."""
    return lambda valid: valid.spell(header=header, key=make_key(signer, kind))


def lead_to_strange_key(valid: Credential) -> str:
    """Sign with a key that the header brings along, and says where to find."""
    jwk = make_key("strange").as_dict(private=False)
    url = f"{valid.claims['iss']}/theirs"
    return by("strange", kid="strange", jwk=jwk, jku=url, x5u=url)(valid)


def sign_with_public_key(valid: Credential, *, as_jwk: bool) -> str:
    """Sign symmetrically with what everybody knows."""
    key = make_key("first")
    jwk = json.dumps(key.as_dict(private=False)).encode()
    return valid.spell(header=HS, key=jwk if as_jwk else key.as_pem(private=False))


def claiming(name: str, value: object) -> Build:
    """Return what signs with another value of a claim."""
    return lambda valid: valid.spell({"secret": CLAIM, name: value})


WRONG: Final[Sequence[tuple[str, Build]]] = [
    *(("algorithm", partial(sign_with_public_key, as_jwk=as_jwk)) for as_jwk in (False, True)),
    ("is not signed by its issuer", by("strange")),
    ("does not have", by("strange", kid="strange")),
    ("does not have", lead_to_strange_key),
    ("does not have", by("first", kid=None)),
    ("does not have", by("first", kid="p256")),
    ("malformed", by("short", "short RSA", kid="short")),
    *(
        ("type", by("first", typ=typ))
        for typ in ("logout+jwt", "shardgate-attempt+jwt", "secevent+jwt", "", 7)
    ),
    ("expired", claiming("exp", 1)),
    *(("not valid yet", claiming(name, 2**40)) for name in ("nbf", "iat")),
    *((f"no {name}", claiming(name, None)) for name in ("exp", "aud", "sub")),
    ("malformed", claiming("exp", float("inf"))),
    ("malformed", claiming("exp", "soon")),
    ("malformed", claiming("exp", [])),
    ("malformed", claiming("exp", {})),
    ("malformed", claiming("sub", 7)),
    ("another audience", claiming("aud", "other")),
    ("another audience", claiming("aud", ["a", "shardgate.b"])),
    ("another audience", claiming("aud", {AUDIENCE: True, CLIENT_ID: True})),
    *(("cannot be a name", claiming("sub", odd)) for odd in ("", "ada\nroot", "a" * 256)),
]
"""Reasons for refusing tokens of issuers, and what builds tokens that are refused for them."""


@pytest.mark.parametrize(("reason", "build"), WRONG)
@pytest.mark.parametrize("kind", VERIFIED)
def test_wrong_token_of_an_issuer_is_refused(
    lab: Lab, kind: str, reason: str, build: Build
) -> None:
    """A wrong signature, time, audience or subject is refused; no key that it names is read."""
    valid = open_known(lab, kind)

    assert reason in refusal(kind, valid.use, build(valid))
    assert not any(path == "/theirs" for _, path, _ in lab.provider.seen)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nonce": "another"}, "belongs to another sign-in"),
        ({"aud": [CLIENT_ID, "another"]}, "issued to another service"),
        ({"azp": "another"}, "issued to another service"),
        ({"aud": [CLIENT_ID, "another"], "azp": "another"}, "issued to another service"),
    ],
)
@pytest.mark.parametrize("kind", ["ID", "ID of a device"])
def test_id_token_for_another_sign_in_is_refused(
    lab: Lab, kind: str, changes: Members, reason: str
) -> None:
    """An ID token for another sign-in or service signs nobody in."""
    valid = open_known(lab, kind)

    assert reason in refusal(kind, valid.use, valid.spell(changes))
