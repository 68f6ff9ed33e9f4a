"""`Feature`: hooks of the engine for options beyond plain sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.input_batch import InputBatch
from jaxllm.engine.language import Language
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.sequence import Sequence as Output
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.metrics import Metrics
from jaxllm.outputs import RequestOutput
from jaxllm.runner.model_runner import Runner
from jaxllm.runner.results import StepOutput
from jaxllm.runner.step_input import StepInput
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm.scheduler.state import Events, Plan, State


@dataclass(frozen=True, kw_only=True)
class Core:
    """The parts of an engine that features use."""

    config: EngineConfig
    language: Language
    runner: Runner
    scheduler: RecordedScheduler
    outputs: OutputProcessor
    batch: InputBatch
    metrics: Metrics
    clock: Callable[[], float]


class Masks(NamedTuple):
    """The tokens that rows of a held step may sample. R rows, W words of 32 tokens."""

    words: np.ndarray  # int32[R, W]: a bit for each token
    is_masked: np.ndarray  # bool[R]: rows with a mask; or int8[R], their kinds in runner/timestamps.py
    stuck: list[tuple[Output, str]]  # cannot continue, with a reason; zeros in `words`


@dataclass(slots=True)
class Yielded:
    """The tokens of a step, for `RecordedScheduler.commit`."""

    tokens: np.ndarray  # int32[R]; int32[R, W] with `counts`
    counts: np.ndarray | None = None  # int32[R]; None: one each


class Feature:
    """One feature of an engine, which calls the overridden hooks.

    `thread_of`, `claim`, `accept` and `needs` may run in any thread; the others run on the engine's.
    """

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()  # of requests
    takes: ClassVar[tuple[type, ...]] = ()
    sends: ClassVar[tuple[type, ...]] = ()  # plain data types of requests and `ModelInfo`, for `fleet.wire`

    def __init__(self, core: Core) -> None:
        self.core = core

    def thread_of(self, options: Mapping[str, Any]) -> bytes | None:
        """Return `language` for `EngineClient.off_loop`; None: validate such requests on the calling thread."""

    def claim(self, accepted: Accepted) -> None:
        """Set the language, parameters or token ids of a request before it is tokenized."""

    def accept(self, accepted: Accepted) -> None:
        """Validate and prepare a tokenized request; may raise UserError."""

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        """Create a request's state."""

    def schedule(self, sequence: Output, fields: dict[str, Any]) -> None:
        """Change the fields of a sequence's `scheduler.state.Request` before it is created."""

    def needs(self, accepted: Accepted) -> Future[Any] | None:
        """Return what a request waits for before it is queued, the same in each call."""

    def added(self, accepted: Accepted, group: SequenceGroup) -> None:
        """Handle a queued request, whose `needs` have ended or were cancelled; errors do not affect it."""

    def place(self, slot: int, sequence: Output) -> None:
        """Handle a sequence's slot."""

    def inputs(self, step: StepInput) -> None:
        """Add inputs to a step."""

    def masks(self, plan: Plan) -> Masks | None:
        """Return the masks of a held step; all earlier steps are committed."""

    def read(self, plan: Plan, result: StepOutput, yielded: Yielded) -> None:
        """Read a step's result before the commit; may change its tokens."""

    def take_in(self, plan: Plan, result: StepOutput, events: Events) -> Sequence[SequenceGroup]:
        """Process a committed step; return the requests that ended."""
        return ()

    def withholds(self, group: SequenceGroup) -> bool:
        """Return whether outputs of an unfinished request must wait."""
        return False

    def show(self, group: SequenceGroup, output: RequestOutput) -> None:
        """Add to an output before it is returned."""

    def forget(self, group: SequenceGroup) -> None:
        """Free a finished request's state."""

    def load(self, state: State) -> Mapping[str, Any]:
        """Return fields of `metrics.Load`."""
        return {}

    def close(self) -> None:
        """Stop background work. Idempotent."""


class Features:
    """The features of one engine, by overridden hook."""

    def __init__(self, features: Sequence[Feature]) -> None:
        def hooks(name: str) -> tuple[Any, ...]:
            base = getattr(Feature, name)
            return tuple(getattr(feature, name) for feature in features if getattr(type(feature), name) is not base)

        self.by_name = {feature.name: feature for feature in features}
        self.options = {option for feature in features for option in feature.options}
        self.takes = tuple(kind for feature in features for kind in feature.takes)
        self.thread_of: tuple[Callable[[Mapping[str, Any]], bytes | None], ...] = hooks("thread_of")
        self.claim: tuple[Callable[[Accepted], None], ...] = hooks("claim")
        self.accept: tuple[Callable[[Accepted], None], ...] = hooks("accept")
        self.begin: tuple[Callable[[Accepted, SequenceGroup], None], ...] = hooks("begin")
        self.schedule: tuple[Callable[[Output, dict[str, Any]], None], ...] = hooks("schedule")
        self.needs: tuple[Callable[[Accepted], Future[Any] | None], ...] = hooks("needs")
        self.added: tuple[Callable[[Accepted, SequenceGroup], None], ...] = hooks("added")
        self.place: tuple[Callable[[int, Output], None], ...] = hooks("place")
        self.inputs: tuple[Callable[[StepInput], None], ...] = hooks("inputs")
        self.masks: tuple[Callable[[Plan], Masks | None], ...] = hooks("masks")
        self.read: tuple[Callable[[Plan, StepOutput, Yielded], None], ...] = hooks("read")
        self.taking_in = [feature for feature in features if type(feature).take_in is not Feature.take_in]
        self.withholds: tuple[Callable[[SequenceGroup], bool], ...] = hooks("withholds")
        self.show: tuple[Callable[[SequenceGroup, RequestOutput], None], ...] = hooks("show")
        self.forget: tuple[Callable[[SequenceGroup], None], ...] = hooks("forget")
        self.load: tuple[Callable[[State], Mapping[str, Any]], ...] = hooks("load")
        self.close: tuple[Callable[[], None], ...] = hooks("close")


def both(masks: Sequence[Masks]) -> Masks:
    """Return the intersection of one or more masks."""
    first, *others = masks
    for other in others:
        words = np.where(first.is_masked[:, None], first.words, -1) & np.where(
            other.is_masked[:, None], other.words, -1
        )
        first = Masks(words, first.is_masked | other.is_masked, [*first.stuck, *other.stuck])
    return first
