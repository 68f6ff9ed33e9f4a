"""The messages of KV transfer: requests as JSON, and frames of blocks."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import NamedTuple

MAGIC = b"jaxkv\x00\x00\x01"  # the last byte is the version
SERVICE = "jaxllm.kv.v1.KvTransfer"
PULL, RENEW, RELEASE = f"/{SERVICE}/Pull", f"/{SERVICE}/Renew", f"/{SERVICE}/Release"
# Magic, fingerprints, digest, group, bytes of both models' content; then a checksum of all other bytes.
_HEADER = struct.Struct("!8s32s32s32sIQQ")
_CHECKSUM = 32
FRAME_BYTES = _HEADER.size + _CHECKSUM  # besides the content
MOST_BLOCKS = 1 << 20
MOST_LEASES = 1 << 16
NO_DRAFTS = bytes(32)


class FrameError(ValueError):
    """A message that is damaged, or does not fit the engine."""


class Fingerprint(NamedTuple):
    """Identifies the meaning of blocks; 32 bytes each."""

    model: bytes  # format, weights, types and sizes
    drafts: bytes = NO_DRAFTS  # of the draft model


class Block(NamedTuple):
    """A block of a prompt."""

    group: int
    digest: bytes


@dataclass(frozen=True, kw_only=True)
class PullRequest:
    """A consumer's list of blocks."""

    lease: str
    model: str  # fingerprint, in hexadecimal
    blocks: Sequence[tuple[int, str]]  # group, and digest in hexadecimal

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> PullRequest:
        """Read a request; raise FrameError for anything that `pack` did not write."""
        try:
            given = json.loads(packed)
            blocks = [(int(group), bytes.fromhex(digest).hex()) for group, digest in given["blocks"]]
            made = cls(lease=str(given["lease"]), model=bytes.fromhex(given["model"]).hex(), blocks=blocks)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FrameError("the request is not a pull of this version") from error
        if len(blocks) > MOST_BLOCKS:
            raise FrameError(f"the request names more than {MOST_BLOCKS} blocks")
        return made


def pack_names(leases: Sequence[str]) -> bytes:
    return json.dumps(leases[:MOST_LEASES]).encode()


def unpack_names(packed: bytes) -> list[str]:
    """Read a heartbeat; raise FrameError for anything that `pack_names` did not write."""
    try:
        names = json.loads(packed)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or len(names) > MOST_LEASES or not all(isinstance(name, str) for name in names):
        raise FrameError("the request is not a heartbeat of this version")
    return names


def pack(fingerprint: Fingerprint, block: Block, content: bytes, num_own: int) -> bytes:
    """Return the frame of a block: `num_own` bytes of the model, the rest a draft model's."""
    header = _HEADER.pack(MAGIC, *fingerprint, block.digest, block.group, num_own, len(content) - num_own)
    checksum = sha256(header)
    checksum.update(content)
    return b"".join((header, checksum.digest(), content))


def unpack(frame: bytes, fingerprint: Fingerprint, sizes: Sequence[tuple[int, int]]) -> tuple[Block, memoryview, bool]:
    """Return a frame's block and content, and whether its draft content fits this engine.

    `sizes`: bytes of both models, by group. Raises FrameError for a damaged frame, or one of another model.
    """
    if len(frame) < FRAME_BYTES:
        raise FrameError("a frame is cut off")
    magic, model, drafts, digest, group, num_own, num_drafts = _HEADER.unpack_from(frame)
    view = memoryview(frame)
    checksum = sha256(view[: _HEADER.size])
    checksum.update(view[FRAME_BYTES:])
    if magic != MAGIC:
        raise FrameError("a frame has another format or version")
    if checksum.digest() != view[_HEADER.size : FRAME_BYTES]:
        raise FrameError("a frame is damaged")
    if model != fingerprint.model:
        raise FrameError("a frame is of another model, or of other settings of the cache")
    if group >= len(sizes) or num_own != sizes[group][0] or num_own + num_drafts != len(frame) - FRAME_BYTES:
        raise FrameError("a frame has another size")
    has_drafts = drafts == fingerprint.drafts and num_drafts == sizes[group][1]
    return Block(group, digest), view[FRAME_BYTES:], has_drafts
