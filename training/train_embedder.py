"""Trains the embedder on the CPU in under half an hour: `python -m training.train_embedder --out DIR --seed 0`.

A pair is two sentences with the same meaning, or a question and its answer. The other texts of a batch are negatives
(InfoNCE), unless one of the two is true of the other's meaning. The leading 32 and 64 numbers are also trained as
embeddings (Matryoshka), so that an embedding can be truncated.
"""

import argparse
import itertools
import random
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm import tqdm

from training import meanings
from training.encoder import Encoder, Shape
from training.evaluate_embedder import report
from training.export import write_embedder
from training.meanings import Text
from training.train import PEAK_RATE, Phase, falling_rate, make_optimizer

SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]")
SIZES = (32, 64, 128)  # sizes of the trained embeddings
PHASES = (Phase("constant", 450, 512, 0, 0, 0), Phase("falling", 600, 512, 0, 0, 0))
MOST_TOKENS = 40
TEMPERATURE = 0.05


def train_tokenizer(seed: int, vocabulary: int, count: int = 40_000) -> Tokenizer:
    """Train a byte-level BPE of lower-case words without accents; any text can be written with it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pairs = itertools.islice(meanings.pairs(random.Random(f"tokenizer {seed}")), count)
    tokenizer.train_from_iterator((text.text for pair in pairs for text in pair), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in SPECIAL_TOKENS[1:]],
    )
    return tokenizer


def padded(tokenizer: Tokenizer, texts: list[str]) -> jax.Array:
    """Return the tokens of texts, int32[rows, time], padded with zeros; long texts are truncated."""
    ids = [encoding.ids[:MOST_TOKENS] for encoding in tokenizer.encode_batch(texts)]
    length = -(-max(map(len, ids)) // 8) * 8
    return jnp.array([row + [0] * (length - len(row)) for row in ids])


def fitting(texts: list[Text]) -> jax.Array:
    """Return for each pair of texts whether one is true of the other's meaning, bool[rows, rows]."""

    def number(*parts: object) -> int:
        return zlib.crc32(repr(parts).encode())

    said = np.array([[number(t.kind), *(number(p, t.row[p : p + 1]) for p in range(3))] for t in texts])
    left_out = np.array([[False, *(place not in text.named for place in range(3))] for text in texts])
    true = np.all((said[:, None] == said[None]) | left_out[:, None], axis=-1)
    return jnp.asarray(true | true.T)


def loss_of(model: Encoder, tokens: jax.Array, positions: jax.Array, fits: jax.Array) -> jax.Array:
    """Return the cross-entropy of finding a row's partner, row + or - half, among all that do not fit it."""
    rows = len(tokens)
    partners = jnp.roll(jnp.arange(rows), rows // 2)
    hidden = jnp.where(fits & (partners[:, None] != jnp.arange(rows)), -1e9, 0.0)
    embeddings = model(tokens, positions)
    losses = []
    for size in SIZES:
        cut = embeddings[:, :size]
        cut = cut / jnp.linalg.norm(cut, axis=-1, keepdims=True)
        scores = jax.nn.log_softmax(cut @ cut.T / TEMPERATURE + hidden, axis=-1)
        losses.append(-jnp.mean(jnp.take_along_axis(scores, partners[:, None], axis=-1)))
    return jnp.mean(jnp.stack(losses))


@nnx.jit
def train_step(
    model: Encoder, optimizer: nnx.Optimizer, tokens: jax.Array, positions: jax.Array, fits: jax.Array
) -> jax.Array:
    """Make one step of the optimizer and return the loss before it."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, tokens, positions, fits)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def _embed(model: Encoder, tokens: jax.Array) -> jax.Array:
    return model(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))


def embed(model: Encoder, tokenizer: Tokenizer, texts: list[str], rows: int = 512) -> np.ndarray:
    """Return normalized embeddings of texts, computed by the network without the engine."""
    found = []
    for start in range(0, len(texts), rows):
        batch = texts[start : start + rows]
        found.append(np.asarray(_embed(model, padded(tokenizer, batch + [""] * (rows - len(batch)))))[: len(batch)])
    embeddings = np.concatenate(found)
    return embeddings / np.linalg.norm(embeddings, axis=-1, keepdims=True)


def train(model: Encoder, tokenizer: Tokenizer, phases: tuple[Phase, ...], seed: int) -> float:
    """Train through the phases and return the seconds."""
    rate = falling_rate(PEAK_RATE, *(phase.steps for phase in phases))
    optimizer, rng, started = make_optimizer(model, rate), random.Random(f"pairs {seed}"), time.monotonic()
    source, shifts = meanings.pairs(rng), np.random.default_rng(seed)
    with tqdm(total=sum(phase.steps for phase in phases), unit="step", mininterval=5) as bar:
        for phase in phases:
            for _ in range(phase.steps):
                first, second = zip(*itertools.islice(source, phase.rows // 2), strict=True)
                texts = [*first, *second]
                tokens = padded(tokenizer, [text.text for text in texts])
                # One text in four is shifted, so that every position is trained.
                shift = shifts.integers(model.shape.positions - MOST_TOKENS, size=len(texts))
                shift *= shifts.random(len(texts)) < 0.25
                positions = jnp.asarray(np.arange(tokens.shape[1]) + shift[:, None])
                loss = train_step(model, optimizer, tokens, positions, fitting(texts))
                bar.update()
                if bar.n % 10 == 0:
                    bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
                if bar.n % 200 == 0:
                    tqdm.write(f"step {bar.n}, loss {float(loss):.3f}: {report(lambda t: embed(model, tokenizer, t))}")
    jax.block_until_ready(nnx.state(model))
    return time.monotonic() - started


def main() -> None:
    """Train, write and score the embedder."""
    parser = argparse.ArgumentParser(prog="python -m training.train_embedder", description="Train the embedder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="part of the steps to make, for a look at the loss")
    options = parser.parse_args()
    tokenizer = train_tokenizer(options.seed, Shape().vocabulary)
    model = Encoder(Shape(), nnx.Rngs(options.seed))
    phases = tuple(phase._replace(steps=int(phase.steps * options.share)) for phase in PHASES)
    seconds = train(model, tokenizer, phases, options.seed)
    write_embedder(model, tokenizer, SIZES, options.out)
    print(f"{seconds:.0f} s; {report(lambda texts: embed(model, tokenizer, texts))}")


if __name__ == "__main__":
    main()
