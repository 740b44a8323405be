"""nginx as a proxy that serves the gateway below a path of its host."""

import getpass
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.lacking import need
from tests.support.processes import free_ports, listening

PREFIX: Final = "/arrays"
_CONFIGURATION: Final = """
{user}
worker_processes 1;
pid {folder}/pid;
error_log stderr error;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    map $request_uri $below {{
        "~^{prefix}(?<path>/[^?]*)" $path;
        default /;
    }}
    server {{
        listen 127.0.0.1:{port}{tls};
        {locations}
    }}
}}
"""
_DOCUMENT: Final = (Path(__file__).parents[2] / "docs/running.md").read_text("utf-8")
_GATEWAY: Final = "http://127.0.0.1:8000"
_TOLD: Final = f"proxy_set_header X-Forwarded-Prefix {PREFIX};"


def locations(*, is_stripped: bool, is_told: bool) -> str:
    """Return the documented part of a configuration, which tells the prefix by a header or not.

    Where the prefix is stripped, the rest of the path arrives as it was sent.
    """
    text: str
    (text,) = re.findall(r"```nginx\n(.*?)```", _DOCUMENT, re.DOTALL)
    if not is_told:
        text = text.replace(_TOLD, 'proxy_set_header X-Forwarded-Prefix "";')
    if is_stripped:
        below = f"{_GATEWAY}$below$is_args$args;"
        for path in (f"= {PREFIX}", f"{PREFIX}/"):
            kept = f"location {path} {{ proxy_pass {_GATEWAY};"
            assert kept in text
            text = text.replace(kept, f"location {path} {{ proxy_pass {below}")
    return text


@contextmanager
def proxying(
    folder: Path, gateway: str, text: str, certificate: Path | None = None
) -> Generator[str]:
    """Run nginx with the locations *text* before the *gateway*, and yield its URL.

    With a *certificate*, a file that holds its key as well, nginx speaks TLS.
    """
    (port,) = free_ports(1)
    tls = "" if certificate is None else " ssl"
    if certificate is not None:
        text += f"ssl_certificate {certificate}; ssl_certificate_key {certificate};"
    file = folder / "proxy.conf"
    file.write_text(
        _CONFIGURATION.format(
            user=f"user {getpass.getuser()};" if os.geteuid() == 0 else "",
            folder=folder,
            prefix=PREFIX,
            port=port,
            tls=tls,
            locations=text.replace(_GATEWAY, gateway),
        )
    )
    run = [need("nginx"), "-p", str(folder), "-e", "stderr", "-c", str(file), "-g", "daemon off;"]
    with listening(run, port, folder / "output"):
        yield f"http{'' if certificate is None else 's'}://127.0.0.1:{port}"
