"""`Feature`: the protocol through which an engine calls all that a request may ask for besides plain sampling.

A feature is a module or folder next to this one; it keeps its state by request, sequence or slot. The engine loops
over the features that its configuration has (table.py) and names none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """The parts of an engine that features work with."""

    config: EngineConfig
    language: Language  # of requests without an adapter
    runner: Runner
    scheduler: RecordedScheduler
    outputs: OutputProcessor
    batch: InputBatch
    metrics: Metrics
    clock: Callable[[], float]


class Masks(NamedTuple):
    """The tokens that the rows of a held step may sample. Letters: R rows of the plan, W words of 32 tokens."""

    words: np.ndarray  # int32[R, W]: a bit for each token
    is_masked: np.ndarray  # bool[R]: the rows that `words` hold for
    stuck: list[tuple[Output, str]]  # sequences that cannot go on, and why; their words are zeros


@dataclass(slots=True)
class Yielded:
    """The tokens that a step yields, as `RecordedScheduler.commit` takes them."""

    tokens: np.ndarray  # int32[R], or int32[R, W] with `counts`
    counts: np.ndarray | None = None  # int32[R]: tokens of each row; None: one


class Feature:
    """One feature of an engine. Each method does nothing here; the engine calls those that a subclass defines.

    `thread_of`, `claim` and `accept` may be called by any thread, all others by the engine's.
    """

    name: ClassVar[str]  # of its state in `Accepted.states` and `SequenceGroup.states`
    options: ClassVar[tuple[str, ...]] = ()  # names of further arguments of a request
    takes: ClassVar[tuple[type, ...]] = ()  # types of parameters other than SamplingParams that a request may give

    def __init__(self, core: Core) -> None:
        self.core = core

    def thread_of(self, options: Mapping[str, Any]) -> bytes | None:
        """Return the `language` of `EngineClient.off_loop` for checking a request with these options."""

    def claim(self, accepted: Accepted) -> None:
        """Set the language, the parameters or the token ids of a request; called before its prompt is read."""

    def accept(self, accepted: Accepted) -> None:
        """Check a request whose prompt was read, and prepare it, as compiling a grammar. May raise UserError."""

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        """Make the state of a request; called when its sequences have been made."""

    def schedule(self, own: Output, fields: dict[str, Any]) -> None:
        """Change the fields of the `scheduler.state.Request` that a sequence is about to get."""

    def place(self, slot: int, own: Output) -> None:
        """Note that a sequence got a slot; the one that had it has ended, or waits again."""

    def inputs(self, step: StepInput) -> None:
        """Add the inputs of this feature to a step."""

    def masks(self, plan: Plan) -> Masks | None:
        """Return the masks of a held step, all steps before which have been committed."""

    def read(self, plan: Plan, result: StepOutput, yielded: Yielded) -> None:
        """Read a step's result before it is committed; change the tokens that it yields."""

    def take_in(self, plan: Plan, result: StepOutput, events: Events) -> Sequence[SequenceGroup]:
        """Take in a step that has just been committed; return the requests that have ended."""
        return ()

    def show(self, group: SequenceGroup, output: RequestOutput) -> None:
        """Add to an output that is about to be returned."""

    def forget(self, group: SequenceGroup) -> None:
        """Free the state of a request that has ended."""

    def load(self, state: State) -> Mapping[str, Any]:
        """Return fields of `metrics.Load`."""
        return {}

    def close(self) -> None:
        """Stop background work; closing twice does nothing."""


class Features:
    """The features of one engine: for each method of `Feature`, those that define it."""

    def __init__(self, features: Sequence[Feature]) -> None:
        def hooks(name: str) -> tuple[Any, ...]:
            base = getattr(Feature, name)
            return tuple(getattr(each, name) for each in features if getattr(type(each), name) is not base)

        self.by_name = {each.name: each for each in features}
        self.options = {option for each in features for option in each.options}
        self.takes = tuple(kind for each in features for kind in each.takes)
        self.thread_of: tuple[Callable[[Mapping[str, Any]], bytes | None], ...] = hooks("thread_of")
        self.claim: tuple[Callable[[Accepted], None], ...] = hooks("claim")
        self.accept: tuple[Callable[[Accepted], None], ...] = hooks("accept")
        self.begin: tuple[Callable[[Accepted, SequenceGroup], None], ...] = hooks("begin")
        self.schedule: tuple[Callable[[Output, dict[str, Any]], None], ...] = hooks("schedule")
        self.place: tuple[Callable[[int, Output], None], ...] = hooks("place")
        self.inputs: tuple[Callable[[StepInput], None], ...] = hooks("inputs")
        self.masks: tuple[Callable[[Plan], Masks | None], ...] = hooks("masks")
        self.read: tuple[Callable[[Plan, StepOutput, Yielded], None], ...] = hooks("read")
        self.taking_in = [each for each in features if type(each).take_in is not Feature.take_in]
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
