"""API keys, for both protocols.

Without keys all calls are open. Calls that concern all clients' work (gRPC's control service; HTTP /load, /metrics,
loading adapters) need an admin key if any, or several API keys, are configured. Admin keys are also API keys.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from jaxllm_server.shared.error_table import AdminRequiredError, AuthError

_ADMIN = "admin-"


class Keys:
    """A server's keys, as digests."""

    def __init__(self, api_keys: Sequence[str] = (), admin_keys: Sequence[str] = ()) -> None:
        self._has_api = bool(api_keys)
        self._has_admins = bool(admin_keys) or len(api_keys) > 1
        self._known = [(f"key-{number}", _digest(key)) for number, key in enumerate(api_keys)]
        self._known += [(f"{_ADMIN}{number}", _digest(key)) for number, key in enumerate(admin_keys)]

    def check(self, header: str | None, admin: bool = False) -> str | None:
        """Check an Authorization header; return the key's name ("key-0") if one is needed.

        Raises AuthError for a missing or unknown key, AdminRequiredError without admin rights.
        """
        if not self._has_api and not (admin and self._has_admins):
            return None
        if header is None:
            raise AuthError("This server needs an API key: send the header 'Authorization: Bearer KEY'.", True)
        scheme, _, key = header.partition(" ")
        digest = _digest(key.strip(" "))
        # All digests are compared, so timing reveals nothing (vLLM CVE-2025-59425).
        names = [name for name, known in self._known if hmac.compare_digest(digest, known)]
        if scheme.lower() != "bearer" or not names:
            raise AuthError("Unknown API key.", False)
        if admin and self._has_admins and not names[-1].startswith(_ADMIN):
            raise AdminRequiredError("This needs an admin key; see --admin-api-key.")
        return names[-1]


def only_header(values: Sequence[str]) -> str | None:
    if len(values) > 1:
        raise AuthError("Send only one API key, in an Authorization or an x-api-key header.", False)
    return values[0] if values else None


def _digest(key: str) -> bytes:
    # Surrogates from invalid UTF-8 must not raise.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
