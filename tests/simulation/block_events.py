"""A subscriber of the prefix cache's events, as a router of several engines is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.errors import EngineDeadError
from jaxllm.scheduler.state import AllBlocksCleared, BlockRemoved, BlockStored
from tests.simulation.adapters import digest_of
from tests.simulation.device import Violation
from tests.simulation.media import PLACEHOLDER


def root_of(salt: bytes, adapter: bytes = b"") -> bytes:
    """Return the root digest of a request with this salt and this digest of its adapter."""
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in (salt, adapter))).digest()


class Follower:
    """Derives the content of the prefix cache from its events, and checks each event.

    `ids` has the ids of all requests so far, which are the salts of private caches; `contents` has the contents of
    adapters by number; errors are appended to `failures`.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        setting: Mapping[str, Any],
        ids: Collection[int],
        contents: Mapping[int, int],
        failures: list[BaseException],
    ) -> None:
        self._llm = llm
        self._setting = setting
        self._ids = ids
        self._contents = contents
        self._failures = failures
        self.stored: set[bytes] = set()  # digests of blocks that can be hit

    async def run(self) -> None:
        """Read batches of events until the engine ends; check that no batch is missing."""
        number = 0
        try:
            async for batch in self._llm.kv_events():
                if batch.sequence != number:
                    raise Violation("a batch of the prefix cache's events is lost")
                number += 1
                self._note(batch.events)
        except EngineDeadError:
            pass
        except Exception as error:
            self._failures.append(error)

    def _note(self, events: Sequence[Any]) -> None:
        """Check and apply events."""
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.stored.clear()
                case BlockStored():
                    if event.digest in self.stored or len(event.tokens) != self._setting["block_size"]:
                        raise Violation("a block is told to be stored twice, or in part")
                    tokens = np.array(event.tokens, "<i4").tobytes()
                    adapter = digest_of(self._contents[event.adapter]) if event.adapter else b""
                    roots = [root_of(salt, adapter) for salt in (b"", b"one", b"two")]
                    parents = roots if event.parent is None else [event.parent]
                    if event.parent is None and not self._setting["prefix_caching"]:
                        parents = [root_of(f"{number}".encode()) for number in range(max(self._ids) + 1)]
                    has_image = PLACEHOLDER in event.tokens  # then the digest depends on it
                    if not has_image and all(sha256(each + tokens).digest() != event.digest for each in parents):
                        raise Violation("a block is told to hold other tokens")
                    self.stored.add(event.digest)
                case BlockRemoved():
                    self.stored.remove(event.digest)
