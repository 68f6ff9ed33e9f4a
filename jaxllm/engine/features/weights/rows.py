"""The state of sleep, pause and weight updates, and the weight version of each token."""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import pairwise
from typing import NamedTuple

from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Core, Feature
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.errors import FeatureDisabledError, UserError
from jaxllm.outputs import RequestOutput
from jaxllm.runner.residence import TAGS, WEIGHTS
from jaxllm.runner.weight_update import WeightUpdate

FIRST_VERSION = "0"
PAUSED = "the engine is paused; call resume."
ASLEEP = "the engine sleeps; call wake_up."
UPDATING = "the weights are being updated; call finish_weight_update."
ABSENT = "the engine has no whole set of weights; send all of them with update_weights."


class Since(NamedTuple):
    """The version of the tokens from these output positions on, one per sequence."""

    starts: tuple[int, ...]
    version: str


class WeightStates(Feature):
    """The state of an engine that may pause, but not sleep or change its weights."""

    name = "weights"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.is_paused = False
        self.asleep: Set[str] = frozenset()  # tags; replaced, as other threads read it
        self.update: WeightUpdate | None = None
        self.version = FIRST_VERSION
        self._num_updates = 0

    def why_held(self) -> str | None:
        """Return why no step may run; None: one may."""
        if self.asleep:
            return ASLEEP
        if self.update is not None:
            return UPDATING
        if self.is_paused:
            return PAUSED
        return ABSENT if self.is_switched_on and not self.core.runner.has_weights else None

    @property
    def is_switched_on(self) -> bool:
        return self.core.config.enable_sleep_mode

    def check_switched_on(self) -> None:
        if not self.is_switched_on:
            raise FeatureDisabledError("start the engine with enable_sleep_mode.", "enable_sleep_mode")

    def note_version(self, version: str | None) -> None:
        """Begin a version of later tokens, by default the number of updates."""
        self._num_updates += 1
        self.version = str(self._num_updates) if version is None else version
        self.asleep -= {WEIGHTS}
        for group in self.core.outputs.groups.values():
            marks: list[Since] = group.states[self.name]
            marks.append(Since(tuple(own.num_tokens for own in group.sequences), self.version))


class WeightVersions(WeightStates):
    """The state of an engine with changing weights: outputs have versions."""

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        group.states[self.name] = [Since((0,) * accepted.num_sequences, self.version)]

    def show(self, group: SequenceGroup, output: RequestOutput) -> None:
        marks: list[Since] = group.states[self.name]
        for completion in output.outputs:
            own = group.sequences[completion.index]
            first = own.num_tokens - len(completion.token_ids)
            bounds = [*(mark.starts[completion.index] for mark in marks), own.num_tokens]
            runs = zip(marks, pairwise(max(first, min(bound, own.num_tokens)) for bound in bounds), strict=True)
            completion.weight_versions = [(mark.version, end - start) for mark, (start, end) in runs if end > start]


def check_tags(tags: Iterable[str] | None) -> frozenset[str]:
    if isinstance(tags, str):
        tags = (tags,)
    found = frozenset(TAGS if tags is None else tags)
    if not found <= set(TAGS):
        unknown = min(map(str, found - set(TAGS)))
        raise UserError(f"tags are {' and '.join(TAGS)}, got {unknown!r:.80}.", "tags")
    return found


def check_version(version: str | None) -> None:
    is_text = isinstance(version, str) and 0 < len(version) <= 128 and version.isprintable()
    if version is not None and not is_text:
        raise UserError("weight_version must be 1 to 128 printable characters.", "weight_version")
