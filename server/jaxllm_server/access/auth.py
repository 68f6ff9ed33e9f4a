"""Who may call: API keys, compared in constant time. Knows neither protocol: both hand in the Authorization header.

With no keys at all every call is open. What shows or ends the work of all (gRPC's control service; over HTTP /load,
/metrics, and what loads and unloads adapters) needs an admin key where there are any, and where there are several API
keys. An admin key also opens what an API key opens.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from jaxllm_server.shared.error_table import AdminRequiredError, AuthError

_ADMIN = "admin-"  # begins the names of admin keys


class Keys:
    """The keys of one server, kept as digests."""

    def __init__(self, api_keys: Sequence[str] = (), admin_keys: Sequence[str] = ()) -> None:
        self._has_api = bool(api_keys)
        self._has_admins = bool(admin_keys) or len(api_keys) > 1
        self._known = [(f"key-{number}", _digest(key)) for number, key in enumerate(api_keys)]
        self._known += [(f"{_ADMIN}{number}", _digest(key)) for number, key in enumerate(admin_keys)]

    def check(self, header: str | None, admin: bool = False) -> str | None:
        """Let a call pass or say why not; `header` is its Authorization, "Bearer KEY", None where there is none.

        Returns a name for the key that reveals nothing of it ("key-0"); None if no key is needed.

        Raises:
            AuthError: no key or an unknown one, where one is needed.
            AdminRequiredError: a known key that does not open an `admin` call.
        """
        if not self._has_api and not (admin and self._has_admins):
            return None
        if header is None:
            raise AuthError("This server needs an API key: send the header 'Authorization: Bearer KEY'.", True)
        scheme, _, key = header.partition(" ")
        digest = _digest(key.strip(" "))
        # Every key is compared, and digests have one length, so the time reveals neither which nor how much matched
        # (vLLM CVE-2025-59425).
        names = [name for name, known in self._known if hmac.compare_digest(digest, known)]
        if scheme.lower() != "bearer" or not names:
            raise AuthError("The API key is not known here.", False)
        if admin and self._has_admins and not names[-1].startswith(_ADMIN):
            raise AdminRequiredError("This needs an admin key; see --admin-api-key.")
        return names[-1]


def only_header(values: Sequence[str]) -> str | None:
    """Return a call's Authorization header; None where it has none. AuthError for several: which one would count?"""
    if len(values) > 1:
        raise AuthError("There may be only one API key, in an Authorization or an x-api-key header.", False)
    return values[0] if values else None


def _digest(key: str) -> bytes:
    # A header that is not UTF-8 is decoded with surrogates, which must not raise here; no real key encodes to them.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
