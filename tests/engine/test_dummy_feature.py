"""A feature defined in a test runs in an unchanged engine: it dictates the tokens of an output.

Its request type is a subclass of `SamplingParams` with token ids. The feature biases the logits of each step towards
the next of these ids, through the extras of the row's slot. It uses every method of `Feature`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from jaxllm import LLMEngine, SamplingParams, UserError
from jaxllm.config import config_of
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.feature import Core, Feature, Masks, Yielded, both
from jaxllm.engine.loader import load_parts
from jaxllm.engine.sequence import Sequence as Output
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.metrics import Metrics
from jaxllm.outputs import RequestOutput
from jaxllm.runner.results import StepOutput
from jaxllm.runner.step_input import StepInput
from jaxllm.scheduler.state import Events, Plan, State
from tests.support.paths import STORIES
from tests.support.sizes import SLOTS

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
WORDS = [300, 40, 41, 300, 77, 401]


@dataclass(frozen=True, kw_only=True)
class Dictated(SamplingParams):
    """Parameters with the first tokens of the output."""

    words: tuple[int, ...] = ()


class Dictation(Feature):
    """Bias each step of a row towards the next of its token ids, which are the state of a request."""

    name = "dictation"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.words: dict[int, tuple[int, ...]] = {}  # by slot
        self.calls: set[str] = set()
        self.said: dict[str, int] = {}  # by request
        self.fails = False

    def thread_of(self, options: Mapping[str, Any]) -> bytes | None:
        self.calls.add("thread_of")
        return None

    def claim(self, accepted: Accepted) -> None:
        self.calls.add("claim")
        if isinstance(accepted.asked, Dictated):
            # A bias of 0 selects the step's widest variant, which applies biases.
            accepted.params = replace(accepted.asked, logit_bias={0: 0.0, 1: 0.0}, logprobs=0)

    def accept(self, accepted: Accepted) -> None:
        if isinstance(accepted.asked, Dictated):
            if max(accepted.asked.words) >= accepted.language.model.vocab_size:
                raise UserError("words must be tokens of the model.", "words")
            accepted.states[self.name] = accepted.asked.words
        self.calls.add("accept")

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        self.calls.add("begin")
        if self.name in accepted.states:
            group.states[self.name] = accepted.states[self.name]
            self.said[group.internal_id] = 0

    def schedule(self, own: Output, fields: dict[str, Any]) -> None:
        self.calls.add("schedule")
        fields["may_draft"] = self.name not in own.group.states

    def needs(self, accepted: Accepted) -> None:
        self.calls.add("needs")

    def added(self, accepted: Accepted, group: SequenceGroup) -> None:
        self.calls.add("added")

    def place(self, slot: int, own: Output) -> None:
        self.calls.add("place")
        self.words[slot] = own.group.states.get(self.name, ())

    def inputs(self, step: StepInput) -> None:
        self.calls.add("inputs")
        plan, core = step.plan, self.core
        rows = zip(plan.slots.tolist(), (plan.starts + plan.lengths).tolist(), strict=True)
        for slot, end in rows:
            words, num_prompt = self.words[slot], len(core.batch.owner(slot).group.prompt_token_ids)
            if words:
                said = end - num_prompt
                bias = {words[said]: 100.0, 1: 0.0} if 0 <= said < len(words) else {0: 0.0, 1: 0.0}
                packed = core.runner.extras.pack(replace(GREEDY, logit_bias=bias), ())
                assert packed is not None
                step.extras.append((slot, packed))

    def withholds(self, group: SequenceGroup) -> bool:
        self.calls.add("withholds")
        return False

    def masks(self, plan: Plan) -> Masks | None:
        self.calls.add("masks")
        return None

    def read(self, plan: Plan, result: StepOutput, yielded: Yielded) -> None:
        self.calls.add("read")

    def take_in(self, plan: Plan, result: StepOutput, events: Events) -> Sequence[SequenceGroup]:
        self.calls.add("take_in")
        if self.fails:
            raise RuntimeError("a feature that fails")
        for sequence_id in events.ids.tolist():
            key = self.core.outputs.sequences[sequence_id].group.internal_id
            if key in self.said:
                self.said[key] += 1
        return ()

    def show(self, group: SequenceGroup, output: RequestOutput) -> None:
        self.calls.add("show")
        if self.name in group.states:
            output.outputs[0].stop_reason = f"{self.said[group.internal_id]} tokens"

    def forget(self, group: SequenceGroup) -> None:
        self.calls.add("forget")
        self.said.pop(group.internal_id, None)

    def load(self, state: State) -> Mapping[str, Any]:
        self.calls.add("load")
        return {"deferred": len(self.said)}

    def close(self) -> None:
        self.calls.add("close")


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def bits_of(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little").astype(np.bool_)


def test_masks_of_several_features_allow_what_each_allows() -> None:
    rng, allowed, masks = np.random.default_rng(0), np.ones((5, 64), np.bool_), []
    for _ in range(3):
        words, is_masked = rng.integers(-(2**31), 2**31, (5, 2)).astype(np.int32), rng.random(5) < 0.5
        allowed &= bits_of(words) | ~is_masked[:, None]
        masks.append(Masks(words, is_masked, []))
    found = both(masks)
    assert (found.is_masked == np.any([each.is_masked for each in masks], axis=0)).all()
    assert (bits_of(found.words) == allowed)[found.is_masked].all()


def test_a_feature_of_a_test_runs_without_a_change_of_the_product() -> None:
    config = config_of(str(STORIES), {**SLOTS, "precompile": "covering"})
    parts, made = load_parts(config, False, Metrics()), []

    def make(core: Core) -> Feature:
        made.append(Dictation(core))
        return made[0]

    engine = LLMEngine(config, parts=replace(parts, features={**parts.features, "dictation": make}))
    try:
        engine.add_request("plain", "Once upon a time", GREEDY)
        alone = run(engine)["plain"].outputs[0].token_ids
        dictated = Dictated(temperature=0.0, max_tokens=8, ignore_eos=True, words=tuple(WORDS))
        engine.add_request("told", "Once upon a time", dictated)
        engine.add_request("plain", "Once upon a time", GREEDY)
        engine.add_request("held", "Once", replace(GREEDY, structured_outputs={"regex": "[a-z]{9}"}))
        assert engine.load().deferred == 1
        outputs = run(engine)
        assert outputs["told"].outputs[0].token_ids[: len(WORDS)] == WORDS
        assert outputs["told"].outputs[0].stop_reason == "8 tokens"
        assert outputs["plain"].outputs[0].token_ids == alone, "its neighbour is not told"
        made[0].fails = True
        engine.add_request("told", "Once upon a time", dictated)
        engine.add_request("plain", "Once upon a time", GREEDY)
        outputs = run(engine)
        assert outputs["told"].outputs[0].finish_reason == "error", "its own request ends"
        assert outputs["plain"].outputs[0].token_ids == alone, "and no other"
        with pytest.raises(UserError, match="words must be tokens of the model"):
            engine.add_request("bad", "Once", replace(dictated, words=(10**6,)))
    finally:
        engine.close()
    (feature,) = made
    hooks = {name for name, value in vars(Feature).items() if callable(value) and not name.startswith("_")}
    assert feature.calls == hooks - {"thread_of"} and not feature.said, "that one is called by `AsyncLLM`"
