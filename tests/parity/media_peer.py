"""What the comparisons of models that read images, videos and sounds have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm import LLM, SamplingParams

NUM_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)


class MediaPeer(ABC):
    """A model in transformers."""

    torch: Any
    model: Any

    @abstractmethod
    def inputs(self, prompt: Any) -> dict[str, Any]:
        """Return the model's arguments for a prompt, its placeholders repeated."""

    def logits(self, prompt: Any) -> Any:
        """Return the logits after each token of a prompt, float32[T, V]."""
        with self.torch.no_grad():
            return self.model(**self.inputs(prompt)).logits[0].numpy()

    def greedy(self, prompt: Any) -> list[int]:
        given = self.inputs(prompt)
        options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
        found = self.model.generate(**given, **options, eos_token_id=None, pad_token_id=0)
        return found[0, given["input_ids"].shape[1] :].tolist()


def check_outputs(llm: LLM, cases: Sequence[tuple[MediaPeer, Any]], lora_request: Any = None) -> None:
    """Compare a batch of prompts with their peers: greedy tokens, and all log-probabilities of the first token.

    `lora_request`: the adapter of each prompt.
    """
    prompts, own = [prompt for _, prompt in cases], {"lora_request": lora_request, "use_tqdm": False}
    outputs = llm.generate(prompts, GREEDY, **own)
    assert [[*output.outputs[0].token_ids] for output in outputs] == [peer.greedy(prompt) for peer, prompt in cases]
    scored = llm.generate(prompts, SCORED, **own)
    for (peer, prompt), output in zip(cases, scored, strict=True):
        logprobs: Any = output.outputs[0].logprobs
        found = np.array([logprobs[0][token].logprob for token in range(llm.engine.model.vocab_size)])
        logits = peer.logits(prompt)[-1].astype(np.float64)
        np.testing.assert_allclose(found, logits - np.logaddexp.reduce(logits), atol=1e-4)
