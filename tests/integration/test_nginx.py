"""nginx in front of the router, as deploy/nginx.conf sets it up. Skipped where nginx, openssl or curl is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Cluster, free_port, held, wait_until

CONF = Path(__file__).parents[2] / "deploy/nginx.conf"
TOOLS = ("nginx", "openssl", "curl")
FRAME = """
daemon off; worker_processes 1; pid {here}/pid; error_log {here}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {here}/body; proxy_temp_path {here}/proxy; fastcgi_temp_path {here}/fastcgi;
    uwsgi_temp_path {here}/uwsgi; scgi_temp_path {here}/scgi;
    include {here}/baton.conf;
}}
"""
KEY = "sk-of-the-team"

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(
        any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)} on this machine"
    ),
]


@contextmanager
def nginx(cluster: Cluster, here: Path) -> Iterator[str]:
    """Run nginx in front of the cluster. Yield its URL."""
    port = free_port()
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
    subprocess.run(make.split(), cwd=here, check=True, capture_output=True)
    text = CONF.read_text(encoding="utf-8")
    for before, after in (
        ("127.0.0.1:8000", f"127.0.0.1:{cluster.http_port}"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("    listen [::]:443 ssl http2;\n", ""),
        ("/etc/ssl/baton.example.pem", f"{here}/cert.pem"),
        ("/etc/ssl/private/baton.example.key", f"{here}/key.pem"),
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (here / "baton.conf").write_text(text)
    (here / "nginx.conf").write_text(FRAME.format(here=here))
    process = subprocess.Popen(["nginx", "-p", str(here), "-c", str(here / "nginx.conf"), "-e", f"{here}/error.log"])
    try:
        wait_until(lambda: (here / "pid").exists() or process.poll() is not None, "nginx runs")
        assert process.poll() is None, (here / "error.log").read_text()
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(20) == 0


def curl(url: str, *more: str) -> list[str]:
    return ["curl", "-skN", "--max-time", "60", url, "-H", f"Authorization: Bearer {KEY}", *more]


def said(url: str, *more: str) -> tuple[int, str]:
    """Return the status and the body of an answer."""
    done = subprocess.run(curl(url, "-w", "\n%{http_code}", *more), capture_output=True, text=True, check=True)
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def posted(**body: object) -> list[str]:
    return ["-H", "Content-Type: application/json", "-d", json.dumps(body)]


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_streams_pass_as_they_are_sent_and_end_with_their_client(
    new_cluster: Callable[..., Cluster], tmp_path: Path, version: str
) -> None:
    (tmp_path / "keys").write_text(f"team {KEY} acme\n")
    cluster = new_cluster()
    cluster.api_key = KEY
    cluster.start(router_flags=["--api-keys", str(tmp_path / "keys"), "--trusted-proxy", "127.0.0.1/32"])
    model = cluster.model_name
    with nginx(cluster, tmp_path) as url:
        body = posted(model=model, prompt="once", max_tokens=500, n=8, ignore_eos=True, stream=True)
        with subprocess.Popen(curl(f"{url}/v1/completions", version, *body), stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            assert client.stdout.readline().startswith(b"data: {")
            assert held(cluster.ledger()), "the first token is here while the others are still computed"
            client.kill()
        wait_until(lambda: not held(cluster.ledger()), "the request ended with its client")
        assert cluster.get("/debug/requests?outcome=cancelled")[1]["requests"]

        status, page = said(f"{url}/", version, "-H", "Accept: text/html")
        assert status == 200 and "<html" in page
        status, snapshot = said(
            f"{url}/live?once=true", version, "-H", f"Origin: {url}", "-H", "Sec-Fetch-Site: same-origin"
        )
        assert status == 200 and json.loads(snapshot)
        assert said(f"{url}/live?once=true", version, "-H", "Origin: https://elsewhere.example")[0] == 403

        long = tmp_path / "long.json"
        long.write_text(json.dumps({"model": model, "prompt": "word " * 1_000_000, "max_tokens": 1}))
        status, answer = said(
            f"{url}/v1/completions", version, "-H", "Content-Type: application/json", "-d", f"@{long}"
        )
        assert status == 400 and json.loads(answer)["error"]["type"] == "invalid_request_error"
        assert not list((tmp_path / "body").rglob("*/*")), "no prompt on a disk"
        assert said(f"{url}/v1/models", version, "-H", "X-Tenant: other")[0] == 200
