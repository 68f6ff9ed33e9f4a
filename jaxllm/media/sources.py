"""Read media of messages: data URLs, and, where the operator allows it, URLs of domains and local files.

Thread-safe; reading may take seconds.
"""

from __future__ import annotations

import base64
import binascii
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from jaxllm.errors import UserError
from jaxllm.media.films import MOST_BYTES as MOST_VIDEO_BYTES
from jaxllm.media.films import MOST_FRAMES, is_recording
from jaxllm.media.image_part import VIDEO_APIS
from jaxllm.media.images import MOST_BYTES, decode
from jaxllm.media.sound_files import MOST_BYTES as MOST_SOUND_BYTES

if TYPE_CHECKING:
    from PIL.Image import Image

FETCH_SECONDS = 10.0
PIECE = 1 << 16  # bytes
MOST_HEAD = 256  # characters of a data: URL before its content
_ANIMATED = frozenset(("image/gif", "image/webp", "image/png", "image/apng"))


class Format(NamedTuple):
    """A kind of files."""

    nouns: str
    one: str
    head: str  # of a data: URL
    known: str
    most: int  # bytes


IMAGES = Format("images", "an image", "image/", "PNG, JPEG, WebP, GIF or BMP", MOST_BYTES)
SOUNDS = Format("sounds", "a sound", "audio/", "WAV, FLAC, OGG or MP3", MOST_SOUND_BYTES)
VIDEOS = Format("videos", "a video", "video/", "MP4, WebM, Matroska or AVI", MOST_VIDEO_BYTES)


class Sources:
    """Reads files by URL."""

    def __init__(self, domains: Sequence[str] = (), folder: str | None = None) -> None:
        """`domains`: hosts from which URLs are fetched; `folder`: of local files that may be read."""
        self._domains = frozenset(domain.lower() for domain in domains)
        self._folder = None if not folder else Path(folder).expanduser().resolve()

    def read(self, url: Any, name: str) -> Image:
        """Return the image of a URL; raise UserError, naming `name`, if it is refused or invalid."""
        if isinstance(url, str) and url[:11].lower() == "data:video/":
            raise _is_video(name)
        return read_image(self.read_file(url, name, IMAGES), name)

    def read_file(self, url: Any, name: str, kind: Format) -> bytes:
        """Return the file of a URL, at most a byte more than allowed; raise UserError if it is refused."""
        if not isinstance(url, str):
            raise UserError(f"{name} must be a text, not {type(url).__name__}.", "messages")
        if url[:5].lower() == "data:":
            return _from_data(url, name, kind)
        parts = _split(url, name)
        if parts.scheme == "file":
            return self._from_file(unquote(parts.path), name, kind.most)
        if parts.scheme in ("http", "https") and (parts.hostname or "").lower() in self._domains:
            return self._fetched(url, name, kind.most)
        shown = parts.hostname if parts.scheme in ("http", "https") else parts.scheme
        raise UserError(
            f"{name}: {shown or 'a URL without a scheme'!r:.80} is not an allowed source of {kind.nouns}; send a data: "
            "URL, or start with allowed_media_domains or allowed_local_media_path.",
            "messages",
        )

    def read_video(self, url: Any, name: str) -> bytes | list[bytes]:
        """Return the content of a video's URL, or the frames of data:video/jpeg; errors as in `read`."""
        if isinstance(url, str) and url[:5].lower() == "data:":
            return _video_data(url, name)
        return self.read_file(url, name, VIDEOS)

    def _from_file(self, path: str, name: str, most: int) -> bytes:
        refused = UserError(f"{name} is not a file that may be read (allowed_local_media_path).", "messages")
        if self._folder is None or "\0" in path:
            raise refused
        try:
            real = Path(path).resolve()
            if not real.is_relative_to(self._folder) or not real.is_file():
                raise refused
            with real.open("rb") as file:
                return file.read(most + 1)
        except (OSError, RuntimeError):
            raise refused from None

    def _fetched(self, url: str, name: str, most: int) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Redirects(self._domains))
        try:
            end = time.monotonic() + FETCH_SECONDS
            with opener.open(url, timeout=FETCH_SECONDS) as answer:
                pieces, size = [], 0
                while size <= most and (piece := answer.read1(PIECE)):
                    if time.monotonic() > end:
                        raise TimeoutError(f"it takes more than {FETCH_SECONDS:g} s")
                    pieces.append(piece)
                    size += len(piece)
                return b"".join(pieces)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise UserError(f"{name} could not be fetched: {reason!s:.200}.", "messages") from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to allowed domains only."""

    def __init__(self, domains: frozenset[str]) -> None:
        self._domains = domains

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        parts = urlsplit(newurl)
        if parts.scheme not in ("http", "https") or (parts.hostname or "").lower() not in self._domains:
            raise urllib.error.URLError("it redirects to a domain that is not allowed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def read_image(data: bytes, name: str) -> Image:
    """Return a file's image; raise UserError, naming `name`, if it is invalid or a video."""
    if is_recording(data):
        raise _is_video(name)
    return decode(data, name)


def _is_video(name: str) -> UserError:
    return UserError(f"{name} is a video, not an image; {VIDEO_APIS}.", "messages")


def _split(url: str, name: str) -> Any:
    try:
        parts = urlsplit(url)
        _ = parts.hostname
        return parts
    except ValueError:
        raise UserError(f"{name} is not a URL.", "messages") from None


def _from_data(url: str, name: str, kind: Format) -> bytes:
    begin = url.find(",", 0, MOST_HEAD) + 1
    head = url[len("data:") : max(begin - 1, 0)].lower()
    if not begin or not head.startswith(kind.head) or not head.endswith(";base64"):
        raise UserError(f"{name} must be data:{kind.head}…;base64,… of a {kind.known}.", "messages")
    return from_base64(url[begin:], name, kind)


def _video_data(url: str, name: str) -> bytes | list[bytes]:
    begin = url.find(",", 0, MOST_HEAD) + 1
    head = url[len("data:") : max(begin - 1, 0)].lower()
    kind = head.removesuffix(";base64")
    if not begin or kind == head or not (kind.startswith("video/") or kind in _ANIMATED):
        raise UserError(
            f"{name} must be data:video/…;base64,… of a video, data:video/jpeg;base64,… of JPEGs with commas between, "
            "or data:image/… of an animated GIF, WebP or PNG.",
            "messages",
        )
    if kind != "video/jpeg":
        return from_base64(url[begin:], name, VIDEOS)
    if url.count(",", begin) >= MOST_FRAMES:
        raise UserError(f"{name} has more than {MOST_FRAMES} frames; send fewer.", "messages")
    return [from_base64(each, name, VIDEOS) for each in url[begin:].split(",")]


def from_base64(text: str, name: str, kind: Format) -> bytes:
    if len(text) * 3 // 4 > kind.most + 2:
        raise UserError(f"{name} is too large: {kind.one} may have {kind.most} bytes. Send a smaller one.", "messages")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UserError(f"{name} has invalid base64.", "messages") from None
