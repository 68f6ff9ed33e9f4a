"""Trains the model of coloured shapes on the CPU: `python -m training.train_shapes --out DIR --seed 0`.

First the tower and the projector learn to name the shape at each patch, then the decoder learns to answer. A picture is
read once for all chats about it, which do not see each other. Chats are generated during the training.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer
from tqdm import tqdm

from training import network, picture_questions, talks
from training.captioner import Captioner, Shape, Vision, hugging_face_weights, read_pictures
from training.export import round_to_bfloat16, write_captioner
from training.network import Llama
from training.scenes import held_out_picture
from training.talks import Batch, Pool
from training.train import falling_rate, load_state, make_optimizer, save_state

TOWER = Shape()
DECODER = network.Shape(width=128, layers=4, heads=4, key_heads=2, head_width=32, inner=256)
PICTURES = 60_000
PEAK_RATE = 3e-3
SAVE_EVERY = 100
CHECK_EVERY = 200


class Phase(NamedTuple):
    """A phase: steps, pictures per step, chats about each, tokens of a chat."""

    name: str
    steps: int
    pictures: int
    chats: int = 0
    length: int = 0
    shares: Mapping[str, float] = picture_questions.SHARES


class Part(NamedTuple):
    """Phases of one optimizer; its rate is constant for a number of steps, then falls linearly."""

    phases: tuple[Phase, ...]
    constant: int
    falling: int


LOOK = Part((Phase("look", 1400, 128),), 1100, 300)
ANSWER = Part(
    (
        Phase("answer", 1000, 12, 4, 96, picture_questions.FIRST_SHARES),
        Phase("explain", 500, 12, 4, 96),
        Phase("compare", 600, 12, 4, 96, picture_questions.COMPARING_SHARES),
        Phase("settle", 500, 12, 4, 96),
        Phase("talk", 200, 8, 3, 192),
        Phase("end", 500, 12, 4, 96),
    ),
    2100,
    1200,
)


def naming_loss(model: Vision, embeddings: jax.Array, patches: jax.Array) -> jax.Array:
    """Return the loss of the heads; `patches` [pictures, patches, 5] are those of `talks.at_patches`."""
    kinds, colours, places, centers = model.named(embeddings)
    numbers = patches[..., :3].astype(jnp.int32)
    is_shape = numbers[..., 0] > 0
    entropy = optax.softmax_cross_entropy_with_integer_labels
    of_shapes = entropy(colours, numbers[..., 1]) + entropy(places, numbers[..., 2])
    of_shapes += 4 * jnp.sum(jnp.square(centers - patches[..., 3:]), -1)
    of_kinds = jnp.mean(entropy(kinds, numbers[..., 0]) * jnp.where(is_shape, 4.0, 1.0))
    return of_kinds + 0.3 * jnp.sum(of_shapes * is_shape) / jnp.maximum(jnp.sum(is_shape), 1)


def normalised(pixels: jax.Array) -> jax.Array:
    """Return the tower's input of integers."""
    return pixels.astype(jnp.float32) / 127.5 - 1


def looking_loss(model: Vision, batch: Batch) -> jax.Array:
    """Return the loss of the tower and the projector alone."""
    return naming_loss(model, model(normalised(batch.pixels)), batch.patches)


def answering_loss(model: Llama, vision: Vision, batch: Batch, prefix: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the answers' tokens."""
    length = batch.chats.shape[2] - 1
    repeats = len(batch.chats) // len(batch.pixels)
    cache = read_pictures(model, prefix, vision(normalised(batch.pixels)), repeats, length)
    start = len(prefix) + TOWER.patches
    seeing, _ = model(batch.chats[:, 0, :-1], start + jnp.arange(length), cache)
    blind, _ = model(batch.blind[:, 0, :-1], jnp.arange(length))
    rows = jnp.concatenate([batch.chats, batch.blind])
    logits = jnp.concatenate([seeing, blind])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 0, 1:]) * rows[:, 1, 1:]
    return jnp.sum(losses) / jnp.maximum(jnp.sum(rows[:, 1, 1:]), 1)


@nnx.jit
def look_step(model: Vision, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Make a step of the optimizer for the tower and the projector and return the loss before it."""
    loss, gradients = nnx.value_and_grad(looking_loss)(model, batch)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def answer_step(model: Llama, optimizer: nnx.Optimizer, vision: Vision, batch: Batch, prefix: jax.Array) -> jax.Array:
    """Make a step of the optimizer for the decoder and return the loss before it."""
    loss, gradients = nnx.value_and_grad(answering_loss)(model, vision, batch, prefix)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def name_shapes(model: Vision, pixels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the likeliest kinds and colours and the centers at patches."""
    kinds, colours, _, centers = model.named(model(pixels))
    return jnp.argmax(kinds, -1), jnp.argmax(colours, -1), centers


@nnx.jit
def are_right(decoder: Llama, vision: Vision, pixels: jax.Array, rows: jax.Array, prefix: jax.Array) -> jax.Array:
    """Return for each picture and its row of one turn whether all tokens of the answer are the likeliest."""
    cache = read_pictures(decoder, prefix, vision(pixels), 1, rows.shape[2] - 1)
    start = len(prefix) + TOWER.patches
    logits, _ = decoder(rows[:, 0, :-1], start + jnp.arange(rows.shape[2] - 1), cache)
    return jnp.all((jnp.argmax(logits, -1) == rows[:, 0, 1:]) | (rows[:, 1, 1:] == 0), axis=-1)


def check_names(model: Captioner, seed: int, pictures: int = 1000) -> str:
    """Return a line with the rates of right heads in held-out pictures."""
    processor = talks.make_processor(TOWER)
    drawn = [held_out_picture(seed + 1, number) for number in range(pictures)]
    due = np.stack([talks.at_patches(each.items, TOWER) for each in drawn])
    kinds, colours, centers = map(
        np.asarray, name_shapes(model.vision, jnp.asarray(np.stack([processor.pixels(each.image) for each in drawn])))
    )
    is_shape = due[..., 0] > 0
    right_kinds, right_colours = kinds == due[..., 0], colours == due[..., 1]
    whole = (right_kinds & (right_colours | ~is_shape)).all(1).mean()
    return (
        f"kinds {right_kinds[is_shape].mean():.4f}, empty {right_kinds[~is_shape].mean():.4f}, colours "
        f"{right_colours[is_shape].mean():.4f}, centers' errors {np.abs(centers - due[..., 3:])[is_shape].mean():.3f}, "
        f"whole pictures {whole:.3f}"
    )


def check(model: Captioner, tokenizer: Tokenizer, prefix: jax.Array, seed: int, pictures: int = 64) -> str:
    """Return a line with the rate of right answers by kind, without the engine."""
    processor = talks.make_processor(TOWER)
    asked = picture_questions.held_out_questions(seed + 1, pictures)
    questions = [each for each in asked if each.kind == each.turn.kind]
    pixels = np.stack([processor.pixels(each.image) for each in questions if each.image is not None])
    rows = np.stack([talks.encode(tokenizer, iter([each.turn]), 96) for each in questions])
    found = np.asarray(are_right(model.decoder, model.vision, jnp.asarray(pixels), jnp.asarray(rows), prefix))
    kinds = np.array([each.kind for each in questions])
    rates = ", ".join(f"{kind} {found[kinds == kind].mean():.3f}" for kind in picture_questions.ASKED)
    return f"{rates}, all {found.mean():.3f}"


def train_part(
    model: nnx.Module,
    step: Callable[..., jax.Array],
    part: Part,
    source: Callable[[Phase, int], Iterator[Batch]],
    state: Path | None,
    report: Callable[[], str],
) -> None:
    """Train through a part with `step`; with the file `state`, keep the state there and go on from it.

    `source` yields a phase's batches after a number of steps.
    """
    optimizer = make_optimizer(model, falling_rate(PEAK_RATE, part.constant, part.falling))
    done, _ = load_state(model, optimizer, state) if state and state.exists() else (0, 0.0)
    with tqdm(total=sum(phase.steps for phase in part.phases), initial=done, unit="step", mininterval=5) as bar:
        before = 0
        for phase in part.phases:
            skipped = min(max(done - before, 0), phase.steps)
            for batch in itertools.islice(source(phase, skipped), phase.steps - skipped):
                loss = step(model, optimizer, batch)
                done += 1
                bar.update()
                if done % 10 == 0:
                    bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
                if state and done % SAVE_EVERY == 0:
                    save_state(model, optimizer, done, 0.0, state)
                if done % CHECK_EVERY == 0:
                    tqdm.write(f"{phase.name}, step {done}, loss {float(loss):.3f}: {report()}")
            before += phase.steps
    if state:
        save_state(model, optimizer, done, 0.0, state)


def train(model: Captioner, tokenizer: Tokenizer, pool: Pool, seed: int, state: Path | None) -> None:
    """Train the tower and the projector, round them, and train the decoder; `state` is a folder of their states."""
    prefix = jnp.array(tokenizer.encode(talks.USER).ids)
    if state:
        state.mkdir(parents=True, exist_ok=True)

    def source(phase: Phase, first: int) -> Iterator[Batch]:
        for step in itertools.count(first):
            rng = random.Random(f"{phase.name} {seed} {step}")
            yield talks.batch_of(tokenizer, pool, rng, phase.pictures, phase.chats, phase.length, phase.shares)

    train_part(model.vision, look_step, LOOK, source, state and state / "look.npz", lambda: check_names(model, seed))
    round_to_bfloat16(model.vision)

    def step(decoder: Llama, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
        return answer_step(decoder, optimizer, model.vision, batch, prefix)

    def report() -> str:
        return check(model, tokenizer, prefix, seed)

    train_part(model.decoder, step, ANSWER, source, state and state / "answer.npz", report)


def main() -> None:
    """Train, round and write the model."""
    parser = argparse.ArgumentParser(prog="python -m training.train_shapes", description="Train the model of shapes.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="folder that keeps the state, to go on after an interruption")
    options = parser.parse_args()
    tokenizer = talks.train_tokenizer(options.seed)
    rngs, decoder = nnx.Rngs(options.seed), DECODER._replace(vocabulary=tokenizer.get_vocab_size())
    model = Captioner(Vision(TOWER, DECODER.width, rngs), Llama(decoder, rngs))
    count = sum(value.size for value in hugging_face_weights(model).values())
    print(f"{count} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    started, spent = time.monotonic(), time.process_time()
    pool = talks.draw_pool(options.seed, PICTURES, TOWER)
    train(model, tokenizer, pool, options.seed, options.state)
    write_captioner(model, tokenizer, options.out)
    print(f"{time.monotonic() - started:.0f} s, {time.process_time() - spent:.0f} s of processor time", flush=True)


if __name__ == "__main__":
    main()
