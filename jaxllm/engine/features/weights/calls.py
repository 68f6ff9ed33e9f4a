"""Engine calls that pause, sleep, wake and update weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

from jaxllm.engine.features.feature import Features
from jaxllm.engine.features.weights.rows import WeightStates, check_tags, check_version
from jaxllm.engine.life_cycle import PauseMode
from jaxllm.errors import UnavailableError, UserError
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.runner.model_runner import Runner
from jaxllm.runner.residence import KV_CACHE, WEIGHTS
from jaxllm.runner.weight_update import WeightUpdate

Weights = str | PathLike[str] | Mapping[str, Any]  # a folder of safetensors, or arrays by name
BACKENDS = ("safetensors", "arrays")
MODES = ("abort", "wait", "keep")


class WeightCalls(ABC):
    """Pause, sleep and weight updates of an engine; while held, it queues requests and computes none.

    An update keeps the tokens of requests, and recomputes them before the next is sampled, so that no cache has values
    of two versions.
    """

    features: Features
    runner: Runner
    held: str | None

    @abstractmethod
    def recompute(self) -> None:
        """Clear all caches; running requests return to the queue with their tokens."""

    @property
    @abstractmethod
    def unfinished(self) -> Collection[str]:
        """The ids of requests, for `abort_requests`."""

    @abstractmethod
    def abort_requests(self, requests: Sequence[tuple[str, FinishReason]]) -> list[RequestOutput]: ...

    @abstractmethod
    def has_unfinished_requests(self) -> bool: ...

    @abstractmethod
    def step(self) -> list[RequestOutput]: ...

    @property
    def weights(self) -> WeightStates:
        return cast("WeightStates", self.features.by_name[WeightStates.name])

    @property
    def is_paused(self) -> bool:
        return self.weights.is_paused

    def pause(self, mode: PauseMode = "abort") -> list[RequestOutput]:
        """Compute nothing until `resume`; requests are aborted, run to their end ("wait"), or suspended ("keep").

        Returns the outputs of requests that ended or, with "wait", made tokens.
        """
        if mode not in MODES:
            raise UserError(f"mode must be abort, wait or keep, got {mode!r:.80}.", "mode")
        outputs: list[RequestOutput] = []
        if mode == "abort":
            outputs = self.abort_requests([(name, "abort") for name in self.unfinished])
        while mode == "wait" and self.has_unfinished_requests():
            outputs += self.step()
        self.weights.is_paused = True
        self._hold()
        return outputs

    def resume(self) -> None:
        """Continue after `pause`; raise UserError if the engine sleeps."""
        if self.weights.asleep:
            raise UserError("the engine sleeps: wake_up resumes it.")
        self.weights.is_paused = False
        self._hold()

    def sleep(
        self, level: int = 1, tags: Iterable[str] | None = None, *, mode: PauseMode = "abort"
    ) -> list[RequestOutput]:
        """Pause (level 0), and free the memory of `tags`: level 1 moves weights to the host, level 2 drops them.

        `tags` are "weights" and "kv_cache", by default both. Returns as `pause`.
        """
        own, chosen = self.weights, self.check_sleep(level, tags)
        outputs = self.pause(mode)
        if level:
            self.recompute()
            self.runner.sleep(chosen, level)
            own.asleep |= chosen
        self._hold()
        return outputs

    def check_sleep(self, level: int, tags: Iterable[str] | None) -> frozenset[str]:
        """Return the tags; raise UserError if `sleep` would."""
        self.weights.check_switched_on()
        if isinstance(level, bool) or level not in (0, 1, 2):
            raise UserError(f"level must be 0, 1 or 2, got {level!r:.80}.", "level")
        if self.weights.update is not None:
            raise UserError("a weight update is open: call finish_weight_update first.", "level")
        return check_tags(tags)

    def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """Bring the `tags` back, by default all; resume if all are awake, and return whether steps may run.

        Dropped weights are read again; arrays must come by `update_weights`.
        """
        own, chosen = self.weights, check_tags(tags)
        own.check_switched_on()
        waking = chosen & own.asleep
        if KV_CACHE in waking:
            self.runner.renew()
            own.asleep -= {KV_CACHE}
        if WEIGHTS in waking:
            self.runner.wake_weights()
            own.asleep -= {WEIGHTS}
        if not own.asleep:
            own.is_paused = False
        self._hold()
        return self.held is None

    def is_sleeping(self) -> bool:
        return bool(self.weights.asleep)

    def init_weight_transfer_engine(self, backend: str = "safetensors") -> None:
        """Check that updates can come from `backend`: a folder of safetensors, or arrays of this process."""
        self.weights.check_switched_on()
        if backend not in BACKENDS:
            message = f"weights come from {' or '.join(BACKENDS)}; the backend {backend!r:.80} is not supported."
            raise UserError(message, "backend")

    def start_weight_update(self) -> None:
        """Hold the engine for an update in pieces, until `finish_weight_update`."""
        own = self.weights
        own.check_switched_on()
        if own.update is not None:
            raise UserError("a weight update is open already: call finish_weight_update first.", "weights")
        own.update = self.runner.begin_update()
        self._hold()

    def check_piece(self, shapes: Mapping[str, Any]) -> None:
        """Raise UserError if no update in pieces is open, or `update_weights` would refuse arrays of these shapes.

        `shapes`: objects with `shape` and `dtype`, by name.
        """
        self.weights.check_switched_on()
        self._open_update().check(shapes)

    def update_weights(self, weights: Weights, *, weight_version: str | None = None) -> str:
        """Replace weights by those of a folder, or by NumPy or JAX arrays with the checkpoint's names; return the
        version in use.

        After `start_weight_update` this is a piece of an update; otherwise all weights must be given. Arrays are
        copied. Raises UserError, changing nothing, for an unknown name, a wrong shape or type, or a missing tensor.
        """
        own = self.weights
        own.check_switched_on()
        check_version(weight_version)
        is_piece = own.update is not None
        if is_piece and weight_version is not None:
            raise UserError("finish_weight_update takes the version of an update in pieces.", "weight_version")
        update = self.runner.begin_update() if own.update is None else own.update
        try:
            if isinstance(weights, str | PathLike):
                update.read(Path(weights))
            else:
                tensors = update.check(weights)
                if not is_piece:
                    _check_none(update.missing(tensors))
                update.write(tensors)
            if not is_piece:
                self.runner.end_update(update)
                self._begin_version(weight_version)
        finally:
            self._hold()
        return own.version

    def finish_weight_update(self, weight_version: str | None = None) -> str:
        """End an update in pieces and return its version, by default the number of updates.

        Raises UserError if tensors are missing; if some were replaced, the engine then stays held.
        """
        own = self.weights
        own.check_switched_on()
        check_version(weight_version)
        update = self._open_update()
        missing = update.missing()
        if missing and not update.has_begun:
            own.update = None
            self._hold()
        _check_none(missing)
        self.runner.end_update(update)
        own.update = None
        self._begin_version(weight_version)
        self._hold()
        return own.version

    def get_weight_version(self) -> str:
        return self.weights.version

    def check_runs(self) -> None:
        """Raise UnavailableError if no step may run."""
        if self.held is not None:
            raise UnavailableError(self.held)

    def _open_update(self) -> WeightUpdate:
        if self.weights.update is None:
            raise UserError("no weight update is open: call start_weight_update first.", "weights")
        return self.weights.update

    def _begin_version(self, version: str | None) -> None:
        self.recompute()
        self.weights.note_version(version)

    def _hold(self) -> None:
        self.held = self.weights.why_held()


def _check_none(missing: list[str]) -> None:
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(f"the update lacks tensor {missing[0]}{more}; send every tensor of the model.", "weights")
