"""The tokenizer of the embedded model, and its training text as rows of tokens with a weight for every token."""

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training import corpus

SPECIAL_TOKENS: tuple[str, ...] = (corpus.END_OF_TEXT, corpus.TURN_START, corpus.TURN_END)
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(3)


def train_tokenizer(seed: int, vocabulary: int, documents: int = 20_000) -> Tokenizer:
    """Train a byte-level BPE on the corpus; every digit is a separate token, which helps to learn sums."""
    tokenizer = train_bpe(_plain_texts(seed, documents), vocabulary, SPECIAL_TOKENS)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {vocabulary}")
    return tokenizer


def train_bpe(texts: Iterator[str], most: int, special_tokens: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE of `most` tokens, or fewer if the texts have fewer words; digits are separate tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=most,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _plain_texts(seed: int, documents: int) -> Iterator[str]:
    """Yield the texts between the special tokens of some documents."""
    for document in itertools.islice(corpus.documents(random.Random(f"tokenizer {seed}")), documents):
        for token in SPECIAL_TOKENS:
            document = document.replace(token, "\0")
        yield from filter(None, document.split("\0"))


def token_weights(tokens: np.ndarray, assistant_header: list[int], equals: int) -> np.ndarray:
    """Return 0 for tokens that the model need not write (the questions), 3 for the result of a sum, 1 for all others.

    Questions have weight 0: their operands are random, so their loss teaches nothing and only adds noise. The result of
    a sum is two tokens in thirty, and the model learns it last.
    """
    size = len(tokens)
    switches = np.full(size + 1, -1, np.int8)
    switches[0] = 1
    starts, turn_ends = np.flatnonzero(tokens == TURN_START_ID), np.flatnonzero(tokens == TURN_END_ID)
    switches[turn_ends + 1] = 0
    switches[np.flatnonzero(tokens == END_OF_TEXT_ID) + 1] = 1
    switches[starts] = 0
    matches = np.ones(max(size - len(assistant_header) + 1, 0), bool)
    for i, token in enumerate(assistant_header):
        matches &= tokens[i : i + len(matches)] == token
    switches[np.flatnonzero(matches) + len(assistant_header)] = 1
    last_switch = np.maximum.accumulate(np.where(switches >= 0, np.arange(size + 1), 0))
    weights = switches[last_switch][:size].astype(np.int32)
    for after in (2, 3, 4):
        results = np.flatnonzero(tokens == equals) + after
        weights[results[results < size]] *= 3
    return weights


def rows(tokenizer: Tokenizer, source: Iterator[str], count: int, length: int) -> Iterator[np.ndarray]:
    """Yield `count` rows [2, length] of tokens and weights; every row begins with the beginning of a document.

    The rest of a document that does not fit is dropped: a row then starts like a prompt, without a token before it.
    """
    header = tokenizer.encode(f"{corpus.TURN_START}assistant\n").ids
    equals = tokenizer.encode("1 = 1").ids[1]
    made, row = 0, []
    while made < count:
        for encoding in tokenizer.encode_batch(list(itertools.islice(source, 1000))):
            row += encoding.ids
            if len(row) < length:
                continue
            tokens = np.array(row[:length], np.int32)
            yield np.stack([tokens, token_weights(tokens, header, equals)])
            made, row = made + 1, []
            if made == count:
                return
