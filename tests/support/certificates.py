"""Keys and certificates made by openssl, for a server, its client and an untrusted client."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc


def make_certificates(folder: Path) -> None:
    """Make two authorities, `ca` and `other`, and the pairs NAME.key and NAME.pem that they sign."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for authority, names in (("ca", ("server", "client")), ("other", ("stranger",))):
        openssl("req", "-x509", *key, "-keyout", f"{authority}.key", "-out", f"{authority}.pem", "-subj", "/CN=ca")
        for name in names:
            openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            signing = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2")
            openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-extfile", "names", "-out", f"{name}.pem")


def credentials(folder: Path, name: str | None) -> grpc.ChannelCredentials:
    """Return credentials that trust the server's authority, with NAME's certificate unless it is None."""
    pair = () if name is None else ((folder / f"{name}.key").read_bytes(), (folder / f"{name}.pem").read_bytes())
    return grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), *pair)
