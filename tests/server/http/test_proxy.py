"""A real nginx in front of the server, configured as in docs/serving.md."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest

from jaxllm.errors import UserError
from jaxllm_server.http.forwarded import Proxies
from jaxllm_server.shared.options import ServerOptions
from tests.support.failures import eventually
from tests.support.fake_serving import FakeServing, http_server
from tests.support.paths import ROOT

LINES = re.search(r"```nginx\n(.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL)[1]
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
HOST = "llm.example.com"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    if NGINX is None:
        pytest.skip("nginx is not installed")
    (flags,) = re.findall(r"jaxllm serve (.*)", LINES)
    words = flags.split()
    assert words[::2] == ["--allowed-hosts", "--forwarded-allow-ips"]
    serving, folder = FakeServing(), tmp_path_factory.mktemp("nginx")
    with http_server(serving, ServerOptions(allowed_hosts=(words[1],), forwarded_allow_ips=(words[3],))) as port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            own = free.getsockname()[1]
        lines = LINES.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("listen 80", f"listen {own}")
        assert str(port) in lines and str(own) in lines
        paths = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi"))
        user = "user root;" if os.getuid() == 0 else ""  # of the workers, which write into the folder
        head = f"{user} pid {folder}/pid; daemon off; error_log {folder}/log; events {{}}"
        config = folder / "nginx.conf"
        config.write_text(f"{head} http {{ access_log off; {paths} scgi_temp_path {folder}/scgi; {lines} }}")
        process = subprocess.Popen([NGINX, "-c", str(config), "-p", str(folder)], stderr=subprocess.DEVNULL)
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", own)) == 0:
                        break
                time.sleep(0.02)
            with httpx.Client(base_url=f"http://127.0.0.1:{own}", headers={"host": HOST}) as http:
                yield SimpleNamespace(http=http, serving=serving, port=own)
        finally:
            process.terminate()
            process.wait(10)


def test_a_stream_comes_as_it_is_made_and_a_client_that_goes_is_noticed(site: SimpleNamespace) -> None:
    site.serving.delay = 0.1
    try:
        with site.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            times = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
        assert len(times) == len(site.serving.script) and times[-1] - times[0] > 0.5
        with site.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            next(answer.iter_lines())
        eventually(lambda: site.serving.num_live == 0 and site.serving.num_closed_early == 1)
    finally:
        site.serving.delay = 0.0


def test_the_proxy_bounds_bodies_and_times_as_the_server_does(site: SimpleNamespace) -> None:
    options = ServerOptions()
    assert f"client_max_body_size {options.max_body_bytes >> 20}m;" in LINES
    assert f"proxy_read_timeout {options.request_timeout:.0f}s;" in LINES
    for size, status in ((options.max_body_bytes - 100, 200), (options.max_body_bytes + 100, 413)):
        assert site.http.post("/v1/completions", json={"prompt": "a" * size}).status_code == status


def test_who_a_client_is(site: SimpleNamespace) -> None:
    def asker(source: str, **headers: str) -> str:
        with httpx.Client(transport=httpx.HTTPTransport(local_address=source), headers={"host": HOST}) as http:
            assert http.post(
                f"http://{source}:{site.port}/v1/completions", json={"prompt": "a"}, headers=headers
            ).is_success
        return site.serving.askers[-1]

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            own = probe.getsockname()[0]
        except OSError:
            own = "127.0.0.2"
    expected = "loopback" if own.startswith("127.") else own
    assert asker(own) == expected
    assert asker(own, **{"x-forwarded-for": "8.8.8.8"}) == expected, "what a client claims is not believed"


def test_names_of_hosts(site: SimpleNamespace) -> None:
    assert site.http.get("/v1/models").is_success
    assert site.http.get("/v1/models", headers={"origin": f"http://{HOST}"}).is_success, "a page of this very host"
    other = {"host": "other.example"}
    assert site.http.get("/v1/models", headers=other).status_code == 421
    assert site.http.get("/health", headers=other).status_code == 200


def test_addresses_behind_proxies() -> None:
    near, far = Proxies(["10.0.0.0/8", "::1"]), Proxies(["*"])
    for peer, forwarded, client in (
        ("10.0.0.1", [], "10.0.0.1"),
        ("8.8.4.4", ["1.1.1.1"], "8.8.4.4"),  # not one of the configured proxies
        ("10.0.0.1", ["1.1.1.1"], "1.1.1.1"),
        ("10.0.0.1", ["9.9.9.9, 1.1.1.1", "10.2.3.4"], "1.1.1.1"),
        ("::1", ["2001:db8::1"], "2001:db8::1"),
        ("10.0.0.1", ["1.1.1.1, nonsense"], "10.0.0.1"),
        ("10.0.0.1", ["1.1.1.1:99"], "1.1.1.1"),
        ("10.0.0.1", ["[2001:db8::1]:99"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["1.1.1.1"], "1.1.1.1"),  # from a dual-stack socket
        ("10.0.0.1", [""], "10.0.0.1"),
        ("", ["1.1.1.1"], ""),  # a Unix socket
    ):
        assert near.client_of(peer, forwarded) == client
    assert far.client_of("", ["1.1.1.1"]) == "1.1.1.1"
    assert far.client_of("10.0.0.1", ["6.6.6.6, 1.1.1.1"]) == "1.1.1.1", "the peer's word, and not its client's"
    assert near.client_of("10.0.0.1", ["1.1.1.1" + ", 10.0.0.1" * 10_000]) == "10.0.0.1"
    with pytest.raises(UserError, match="forwarded_allow_ips"):
        Proxies(["my-proxy"])
