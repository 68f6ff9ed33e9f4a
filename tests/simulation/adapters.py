"""Adapters of a simulated engine: folders that hold a number, which is also their weights, and naive places.

The store (`engine/features/adapters/store.py`) and the weights' places on the device are production code, except for
the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.checkpoints.lora_files import LoraFiles
from jaxllm.engine.features.adapters.store import Adapter, Adapters
from jaxllm.engine.features.feature import Core
from jaxllm.errors import UserError
from jaxllm.lora_request import LoRARequest
from jaxllm.runner.resident_adapters import ResidentAdapters
from tests.simulation.device import Violation

if TYPE_CHECKING:
    from tests.simulation.reference import Entry
    from tests.simulation.world import World

FOLDERS = {f"adapter-{index}": Path(f"/nowhere/{index}") for index in range(10)}
BROKEN_FOLDER = 0  # its files cannot be read


class Folders:
    """The folders of adapters; a number replaces the files of each."""

    def __init__(self, num_adapters: int) -> None:
        self._history = {index: [index] for index in range(1, num_adapters + 1)}  # contents, the newest last
        self._least = dict.fromkeys(self._history, 0)  # index of the oldest content that requests may get
        self._num_contents = num_adapters
        self.contents: dict[int, int] = {}  # by the engine's numbers of adapters

    def read(self, folder: Path) -> LoraFiles:
        """Read a folder for the engine."""
        index = int(folder.name)
        if index == BROKEN_FOLDER:
            raise UserError("there is no adapter_config.json", "lora_request")
        content = self._history[index][-1]
        return LoraFiles(rank=1, digest=digest_of(content), weights=(content,))  # type: ignore[arg-type]

    def change(self, index: int) -> None:
        """Replace the files of a folder; requests that have read the old ones keep them."""
        self._num_contents += 1
        self._history[index].append(self._num_contents)

    def forget(self, index: int) -> None:
        """Expect the newest files from now on: the engine has removed the adapter, and must read its folder again."""
        self._least[index] = len(self._history[index]) - 1

    def note(self, asked: int, adapter: Adapter | None) -> tuple[int, int]:
        """Check the adapter that a request for a folder (0: without one) got; return its number and content."""
        if adapter is None:
            if asked:
                raise Violation("a request has lost its adapter")
            return 0, 0
        (content,) = adapter.weights
        if not asked or content not in self._history[asked][self._least[asked] :]:
            raise Violation("a request got an adapter that it did not ask for, or one that was forgotten")
        if self.contents.setdefault(adapter.number, content) != content or not adapter.number:
            raise Violation("a number of an adapter was given again")
        return adapter.number, content


def digest_of(content: int) -> bytes:
    """Return the digest of an adapter's files."""
    return f"files {content}".encode()


def request_of(index: int) -> LoRARequest:
    return LoRARequest(f"name-{index}", index + 1, f"adapter-{index}")


def make_store(world: World, core: Core) -> Adapters:
    """Return the production store over a world's folders.

    In production the garbage collector decides how long an adapter that the store has dropped can be found. Here only
    adapters that the store keeps can be found, or, in some worlds, all.
    """
    store = Adapters(core.config, core.language, world.folders.read)
    alive: Any = {} if world.setting["seed"] % 3 == 0 else OnlyKept(store)
    store._alive = alive
    return store


class OnlyKept(dict[LoRARequest, Adapter]):
    """The adapters that can be found: only those that the store keeps."""

    def __init__(self, store: Adapters) -> None:
        super().__init__()
        self._store = store

    def get(self, request: LoRARequest, default: Any = None) -> Any:
        return self._store._kept.get(request, default)

    def __setitem__(self, request: LoRARequest, adapter: Adapter) -> None:
        """Do nothing: the store has the adapter in `_kept`."""


class Held(ResidentAdapters):
    """The adapters on the device; a fault may make a transfer fail."""

    def __init__(self, before_put: Callable[[], None]) -> None:
        super().__init__(())
        self._before_put = before_put
        self.num_put = 0

    def _put(self, weights: Any) -> Any:
        self._before_put()
        self.num_put += 1
        return weights

    def _zeros(self) -> Any:
        return ()


class Places:
    """The resident adapters of the naive scheduler, computed from the running requests each time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._now = 0
        self._came: dict[int, int] = {}  # by resident adapter: when its use began
        self._left: dict[int, int] = {}  # by idle resident adapter: when its use ended
        self._claims: list[int] = []
        self._has_loaded = False
        self._were_in_use: list[int] = []
        self.num_drained = self.num_evicted = 0

    @property
    def in_use(self) -> list[int]:
        """The adapters of running requests, longest in use first."""
        return sorted((each for each in self._came if each not in self._left), key=lambda each: self._came[each])

    @property
    def residents(self) -> tuple[int, ...]:
        """All resident adapters, in the order of `State.adapters`."""
        idle = sorted(self._left, key=lambda each: (self._left[each], self._came[each]))
        return (*idle, *self.in_use)

    def settle(self, running: Iterable[Entry]) -> None:
        """Mark adapters without running requests as idle."""
        self._now += 1
        kept = {entry.adapter for entry in running}
        for adapter in self.in_use:
            if adapter not in kept:
                self._left[adapter] = self._now

    def clear(self) -> None:
        """Remove all residents: the device has lost its state."""
        self._came.clear()
        self._left.clear()

    def begin(self) -> None:
        """Start the admissions of a plan."""
        self._claims = []
        self._has_loaded = False
        self._were_in_use = self.in_use

    def admits(self, adapter: int) -> bool:
        """Whether a waiting request may have its adapter in this plan; if not, the adapter claims a place."""
        in_use = self.in_use
        num_free = self._most - len(in_use) - len(self._claims)  # negative: that number of used ones must drain
        if not adapter:
            return True
        if adapter in in_use:
            half = max(1, self._most // 2)
            is_drained = adapter in self._were_in_use[:half] and in_use.index(adapter) < -num_free
            self.num_drained += is_drained
            return not is_drained
        if adapter in self._claims:
            return False
        if num_free > 0 and (adapter in self._left or not self._has_loaded):
            return True
        self._claims.append(adapter)
        return False

    def enter(self, adapter: int) -> None:
        """Make the adapter of an admitted request resident and used."""
        if not adapter or adapter in self.in_use:
            return
        if adapter not in self._left:
            self._has_loaded = True
            if len(self._came) == self._most:
                gone = self.residents[0]
                del self._came[gone], self._left[gone]
                self.num_evicted += 1
        self._now += 1
        self._left.pop(adapter, None)
        self._came[adapter] = self._now
