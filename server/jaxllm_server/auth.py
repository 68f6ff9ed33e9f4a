"""Who may call: API keys, compared in constant time. Knows neither protocol: both hand in the Authorization header.

With no keys at all every call is open. With admin keys the control service needs one of them; an admin key opens
everything else too.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from jaxllm_server.errors import AdminRequiredError, AuthError


class Keys:
    """The keys of one server, kept as digests."""

    def __init__(self, api_keys: Sequence[str] = (), admin_keys: Sequence[str] = ()) -> None:
        self._api = tuple(_digest(key) for key in api_keys)
        self._admin = tuple(_digest(key) for key in admin_keys)

    def check(self, header: str | None, admin: bool = False) -> None:
        """Let a call pass or say why not; `header` is its Authorization, "Bearer KEY", None where there is none.

        Raises:
            AuthError: no key or an unknown one, where one is needed.
            AdminRequiredError: a known key that does not open an `admin` call.
        """
        if not self._admin and not self._api:
            return
        if not self._api and not admin:
            return
        if header is None:
            raise AuthError("This server needs an API key: send the header 'Authorization: Bearer KEY'.", True)
        scheme, _, key = header.partition(" ")
        digest = _digest(key.strip(" "))
        # Every key is compared, and digests have one length, so the time tells neither which nor how much matched
        # (vLLM CVE-2025-59425).
        is_api = sum(hmac.compare_digest(digest, known) for known in self._api) > 0
        is_admin = sum(hmac.compare_digest(digest, known) for known in self._admin) > 0
        if scheme.lower() != "bearer" or not (is_api or is_admin):
            raise AuthError("The API key is not known here.", False)
        if admin and self._admin and not is_admin:
            raise AdminRequiredError("This call needs an admin key.")


def _digest(key: str) -> bytes:
    # A header that is not UTF-8 is decoded with surrogates, which must not raise here; no real key encodes to them.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
