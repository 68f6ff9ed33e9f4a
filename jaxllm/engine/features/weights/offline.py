"""`LLM`'s calls that pause, sleep, wake and update weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxllm import combinations
from jaxllm.engine.features.weights.calls import WeightCalls, Weights
from jaxllm.engine.life_cycle import PauseMode


class OfflineWeightCalls:
    """Methods of `LLM`, as those of `WeightCalls`."""

    engine: Any  # `SteppedEngine`

    @property
    def _own(self) -> WeightCalls:
        if not isinstance(self.engine, WeightCalls):
            raise combinations.refusal("enable_sleep_mode", combinations.FLEET)
        return self.engine

    def _check_runs(self) -> None:
        if isinstance(self.engine, WeightCalls):
            self.engine.check_runs()

    def pause(self, mode: PauseMode = "abort") -> None:
        """Refuse prompts until `resume`."""
        self._own.pause(mode)

    def resume(self) -> None:
        """Continue after `pause`."""
        self._own.resume()

    def sleep(self, level: int = 1, tags: Iterable[str] | None = None, *, mode: PauseMode = "abort") -> None:
        """Pause (level 0), and move the weights to the host (1) or drop them (2) with the KV cache.

        `tags` are "weights" and "kv_cache", by default both. Needs `enable_sleep_mode`.
        """
        self._own.sleep(level, tags, mode=mode)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring `tags` back, by default all; dropped weights are read from their folder, or await `update_weights`."""
        self._own.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Return whether weights or cache are asleep."""
        return self._own.is_sleeping()

    def init_weight_transfer_engine(self, backend: str = "safetensors") -> None:
        """Check that updates can come from `backend`."""
        self._own.init_weight_transfer_engine(backend)

    def start_weight_update(self) -> None:
        """Begin an update in pieces."""
        self._own.start_weight_update()

    def update_weights(self, weights: Weights, *, weight_version: str | None = None) -> str:
        """Replace all weights, or those of a piece of an update; see `WeightCalls.update_weights`."""
        return self._own.update_weights(weights, weight_version=weight_version)

    def finish_weight_update(self, weight_version: str | None = None) -> str:
        """End an update in pieces and return its version."""
        return self._own.finish_weight_update(weight_version)

    def get_weight_version(self) -> str:
        """Return the version of the weights: "0" at the start."""
        return self._own.get_weight_version()
