"""Draw random outputs from the masks of a constraint, without a model."""

import random

import numpy as np

from jaxllm.errors import UserError
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_output.grammars import Grammar, Grammars
from jaxllm.structured_outputs_params import StructuredOutputsParams
from jaxllm.text import detokenizer
from jaxllm.text.tokenizer import Tokenizer

_CLOSING = ('"', "}", "]", ",", ":")


def bits(row: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


class Drawing:
    """Draw outputs with the unigram weights of a random model that favours the end-of-sequence token."""

    def __init__(self, tokenizer: Tokenizer, eos: int, seed: int = 0) -> None:
        self.tokenizer, self.eos = tokenizer, eos
        self.vocab_size = tokenizer.vocab_size
        self.grammars = Grammars(tokenizer, self.vocab_size, [eos])
        weights = np.random.default_rng(seed).lognormal(0, 2, self.vocab_size)
        for token in tokenizer.ids:
            if tokenizer.token_text(token).startswith(_CLOSING):
                weights[token] *= 50
        weights[eos] = weights.sum()
        self.weights = weights
        self.mask = np.zeros((1, -(-self.vocab_size // 32)), np.int32)
        self.prompt = tokenizer.encode("Say it")

    def compile(self, **asked: object) -> Grammar | None:
        """Return the grammar; None if it is refused with a proper message."""
        try:
            return self.grammars.compile(StructuredOutputsParams(**asked))  # type: ignore[arg-type]
        except UserError as error:
            assert len(str(error)) > 20 and "\n" not in str(error)
            return None

    def text(self, grammar: Grammar, seed: int, most: int = 150) -> str | None:
        """Return an output that ended by itself; None if it did not end within `most` tokens."""
        draw = random.Random(seed)
        constraint = grammar.begin()
        ids: list[int] = []
        for _ in range(most):
            forced = constraint.forced()
            self.grammars.fill([(constraint, 0)], self.mask)
            allowed = bits(self.mask[0])
            if not len(allowed):
                assert constraint.error  # a dead end must set an error
                return None
            assert not forced or allowed.tolist() == forced[:1]
            token = draw.choices(allowed.tolist(), self.weights[allowed].tolist())[0]
            constraint.consume(token)
            assert constraint.error is None, constraint.error
            if token == self.eos:
                return self.read(ids)
            ids.append(token)
        return None

    def read(self, ids: list[int]) -> str:
        """Return an output's text as streamed after a prompt."""
        state = detokenizer.begin(self.tokenizer, self.prompt, SamplingParams())
        state, text = detokenizer.advance(state, self.tokenizer, ids)
        return text + detokenizer.finish(state, self.tokenizer)
