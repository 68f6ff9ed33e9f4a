"""Trains the recogniser on the CPU: `python -m training.train_speech --out DIR --seed 0`.

The windows are spoken by espeak-ng before the training. Besides the tokens, the training has the word that is spoken at
each position of the encoder, and where the decoder should attend.
"""

import argparse
import itertools
import random
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer
from tqdm import tqdm

from training import dictation
from training.dictation import Batch, Ids, Pool, batch_of, draw_pool
from training.export import round_to_bfloat16, write_recogniser
from training.phrases import word_errors
from training.recogniser import HEADS, READ_HEAD, WRITTEN_HEAD, Recogniser, Shape, greedy, hugging_face_weights
from training.spoken import Espeak, Speaker, held_out_windows
from training.train import falling_rate, load_state, make_optimizer, save_state

WINDOWS = 24_000
STEPS = 2200
CONSTANT = 700  # steps before the rate falls
ROWS = 32
PEAK_RATE = 3e-3
SAVE_SECONDS = 60
CHECK_EVERY = 200


def loss_of(model: Recogniser, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the losses, and each: of the tokens, the named words, their indices, and the attention."""
    encoded = model.encoder(batch.bands)
    logits, weights = model.decoder(batch.inputs, encoded)
    entropy = optax.softmax_cross_entropy_with_integer_labels
    is_target = batch.targets >= 0
    of_tokens = jnp.sum(entropy(logits, jnp.maximum(batch.targets, 0)) * is_target) / jnp.sum(is_target)
    named = model.heads(encoded).reshape(*batch.labels.shape[::2], -1)
    words, indices = (batch.labels[:, part].astype(jnp.int32) for part in range(2))
    of_words = jnp.mean(entropy(named[..., : HEADS[0]], words))
    of_indices = jnp.sum(entropy(named[..., HEADS[0] :], indices) * (words > 0)) / jnp.maximum(jnp.sum(words > 0), 1)
    read = jnp.pad(batch.spans[:, :-1], ((0, 0), (1, 0), (0, 0)))
    of_places = placing_loss(weights[:, WRITTEN_HEAD], batch.spans) + placing_loss(weights[:, READ_HEAD], read)
    losses = jnp.stack([of_tokens, of_words, of_indices, of_places])
    return losses @ jnp.array([1.0, 0.5, 0.2, 0.1]), losses


def placing_loss(weights: jax.Array, spans: jax.Array) -> jax.Array:
    """Return minus the mean logarithm of a head's weights [N, T, positions] within spans [N, T, 2]."""
    first, last, places = spans[..., :1], spans[..., 1:], jnp.arange(weights.shape[-1])
    attended = jnp.sum(weights * ((places >= first) & (places < last)), axis=-1)
    has_span = spans[..., 1] > spans[..., 0]
    return -jnp.sum(jnp.log(attended + 1e-4) * has_span) / jnp.maximum(jnp.sum(has_span), 1)


@nnx.jit
def train_step(model: Recogniser, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Make one step of the optimizer and return the losses before it."""
    (_, losses), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model, batch)
    optimizer.update(model, gradients)
    return losses


def spoken_pool(seed: int, count: int, ids: Ids, length: int, kept: Path | None) -> Pool:
    """Return the windows of the training; with the file `kept`, keep them there."""
    if kept and kept.exists():
        with np.load(kept) as saved:
            return Pool(*(saved[name] for name in Pool._fields))
    windows = itertools.islice(Speaker(Espeak()).windows(seed), count)
    pool = draw_pool(ids, list(tqdm(windows, total=count, unit="window", mininterval=5)), length)
    if kept:
        np.savez(kept, **pool._asdict())
    return pool


def check(model: Recogniser, tokenizer: Tokenizer, seed: int, count: int = 120) -> str:
    """Return a line with the rates of wrong words in held-out windows, without the engine's rules."""
    ids, own = Ids(tokenizer), held_out_windows(seed + 1, count)
    bands = jnp.asarray(np.stack([window.bands for window in own]).astype(np.float32))
    due = [" ".join(word.text for word in window.words) for window in own]
    rates = []
    for timed in (False, True):
        tokens = greedy(model, bands, ids.prompt(timed), ids.end)
        texts = [tokenizer.decode([token for token in row if token < ids.end]) for row in tokens]
        errors = sum(word_errors(a, b) for a, b in zip(due, texts, strict=True))
        rates.append(f"{errors / sum(len(text.split()) for text in due):.4f}")
    return f"wrong words {rates[0]}, with times {rates[1]}"


def train(model: Recogniser, tokenizer: Tokenizer, pool: Pool, seed: int, state: Path | None) -> None:
    """Train the network; with the file `state`, keep the state there and go on from it."""
    optimizer = make_optimizer(model, falling_rate(PEAK_RATE, CONSTANT, STEPS - CONSTANT))
    done, _ = load_state(model, optimizer, state) if state and state.exists() else (0, 0.0)
    saved = time.monotonic()
    with tqdm(total=STEPS, initial=done, unit="step", mininterval=5) as bar:
        for step in range(done, STEPS):
            losses = train_step(model, optimizer, batch_of(pool, random.Random(f"speech {seed} {step}"), ROWS))
            bar.update()
            is_last = step + 1 == STEPS
            if step % 10 == 0:
                bar.set_postfix(loss=" ".join(f"{loss:.3f}" for loss in losses.tolist()), refresh=False)
            if state and (is_last or time.monotonic() > saved + SAVE_SECONDS):
                save_state(model, optimizer, step + 1, 0.0, state)
                saved = time.monotonic()
            if (step + 1) % CHECK_EVERY == 0:
                tqdm.write(f"step {step + 1}, losses {losses.round(3).tolist()}: {check(model, tokenizer, seed)}")


def main() -> None:
    """Train, round and write the model."""
    parser = argparse.ArgumentParser(prog="python -m training.train_speech", description="Train the recogniser.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="folder that keeps the state, to go on after an interruption")
    options = parser.parse_args()
    tokenizer = dictation.train_tokenizer()
    shape = Shape(tokenizer.get_vocab_size())
    model = Recogniser(shape, nnx.Rngs(options.seed))
    count = sum(value.size for value in hugging_face_weights(model).values())
    print(f"{count} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    started, spent = time.monotonic(), time.process_time()
    if state := options.state:
        state.mkdir(parents=True, exist_ok=True)
    pool = spoken_pool(options.seed, WINDOWS, Ids(tokenizer), shape.tokens, state and state / "windows.npz")
    print(f"{len(pool.bands)} windows, {time.monotonic() - started:.0f} s", flush=True)
    train(model, tokenizer, pool, options.seed, state and state / "state.npz")
    round_to_bfloat16(model)
    write_recogniser(model, tokenizer, options.out)
    print(f"{time.monotonic() - started:.0f} s, {time.process_time() - spent:.0f} s of processor time", flush=True)


if __name__ == "__main__":
    main()
