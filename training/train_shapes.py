"""Trains the model of coloured shapes on the CPU: `python -m training.train_shapes --out DIR --seed 0`.

First the tower learns to name the shape at each patch, then all parts learn to answer. A picture is read once for all
chats about it, which do not see each other. Pictures and chats are generated during the training.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from training.captioner import Captioner, Shape, Tower, hugging_face_weights
from training.export import write_captioner
from training.scenes import LARGE
from training.talks import Batch
from training.train import falling_rate, load_state, make_optimizer, save_state

TOWER = Shape()
DECODER = network.Shape(width=128, layers=3, heads=4, key_heads=2, head_width=32, inner=256)
PEAK_RATE = 3e-3
SAVE_EVERY = 50
CHECK_EVERY = 200


class Phase(NamedTuple):
    """A phase: steps, pictures per step, chats about each, tokens of a chat, share of pictures with a large shape."""

    name: str
    steps: int
    pictures: int
    chats: int
    length: int
    large: float


class Part(NamedTuple):
    """Phases of one optimizer, whose rate is constant and then falls to zero in a number of steps, made or not.

    Without chats the tower is trained alone.
    """

    phases: tuple[Phase, ...]
    constant: int
    falling: int


# A step for the tower alone takes a third of the time, and kinds of shapes take the longest to learn.
PARTS: tuple[Part, ...] = (
    Part((Phase("look", 400, 48, 0, 0, 0.0),), 200, 200),
    Part((Phase("answer", 350, 24, 5, 64, 0.0), Phase("talk", 100, 12, 2, 188, 0.0)), 375, 375),
    Part((Phase("look longer", 2000, 48, 0, 0, LARGE),), 1000, 1000),
    Part((Phase("talk longer", 60, 12, 2, 188, LARGE), Phase("settle", 300, 24, 5, 64, LARGE)), 120, 240),
    Part((Phase("place", 200, 24, 5, 64, LARGE),), 100, 100),
)


def tower_loss(model: Tower, pixels: jax.Array, classes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of the shapes at patches, where centers have more weight, and the states."""
    states = model(pixels)
    losses = optax.softmax_cross_entropy_with_integer_labels(model.classes(states), classes)
    return jnp.mean(losses * jnp.where(classes > 0, jnp.array([1.0, 5.0]), 1.0)), states


def loss_of(model: Captioner, batch: Batch, prefix: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the answers' tokens, and a part of the tower's own loss."""
    own, states = tower_loss(model.tower, batch.pixels, batch.classes)
    length = batch.chats.shape[2] - 1
    repeats = len(batch.chats) // len(batch.pixels)
    cache = model.read(prefix, states, repeats, length)
    start = len(prefix) + TOWER.patches
    seeing, _ = model.decoder(batch.chats[:, 0, :-1], start + jnp.arange(length), cache)
    blind, _ = model.decoder(batch.blind[:, 0, :-1], jnp.arange(length))
    rows = jnp.concatenate([batch.chats, batch.blind])
    logits = jnp.concatenate([seeing, blind])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 0, 1:]) * rows[:, 1, 1:]
    return jnp.sum(losses) / jnp.maximum(jnp.sum(rows[:, 1, 1:]), 1) + 0.2 * own


@nnx.jit
def look_step(model: Tower, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Make a step of the optimizer for the tower alone and return the loss before it."""
    (loss, _), gradients = nnx.value_and_grad(tower_loss, has_aux=True)(model, batch.pixels, batch.classes)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def answer_step(model: Captioner, optimizer: nnx.Optimizer, batch: Batch, prefix: jax.Array) -> jax.Array:
    """Make a step of the optimizer and return the loss before it."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch, prefix)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def name_patches(model: Tower, pixels: jax.Array) -> jax.Array:
    """Return the likeliest classes [pictures, patches, 2]."""
    return jnp.argmax(model.classes(model(pixels)), -1)


@nnx.jit
def are_right(model: Captioner, pixels: jax.Array, rows: jax.Array, prefix: jax.Array) -> jax.Array:
    """Return for each picture and its row of one turn whether all tokens of the answer are the likeliest."""
    cache = model.read(prefix, model.tower(pixels), 1, rows.shape[2] - 1)
    start = len(prefix) + TOWER.patches
    logits, _ = model.decoder(rows[:, 0, :-1], start + jnp.arange(rows.shape[2] - 1), cache)
    return jnp.all((jnp.argmax(logits, -1) == rows[:, 0, 1:]) | (rows[:, 1, 1:] == 0), axis=-1)


def check(model: Captioner, tokenizer: Tokenizer, prefix: jax.Array, seed: int, pictures: int = 64) -> str:
    """Return a line with the rate of right answers by kind, without the engine."""
    processor = talks.make_processor(TOWER)
    questions = [each for each in picture_questions.held_out_questions(seed, pictures) if each.kind == each.turn.kind]
    pixels = np.stack([processor.pixels(each.image) for each in questions if each.image is not None])
    rows = np.stack([talks.encode(tokenizer, iter([each.turn]), 96) for each in questions])
    found = np.asarray(are_right(model, jnp.asarray(pixels), jnp.asarray(rows), prefix))
    kinds = np.array([each.kind for each in questions])
    return ", ".join(f"{kind} {found[kinds == kind].mean():.3f}" for kind in picture_questions.ASKED)


def train_phases(
    model: nnx.Module,
    step: Callable[..., jax.Array],
    phases: Sequence[Phase],
    source: Callable[[Phase, int], Iterator[Batch]],
    rate: optax.Schedule,
    state: Path | None,
    report: Callable[[], str],
) -> None:
    """Train through phases with `step`; with the file `state`, keep the state there and go on from it.

    `source` yields a phase's batches after a number of steps.
    """
    optimizer = make_optimizer(model, rate)
    done, _ = load_state(model, optimizer, state) if state and state.exists() else (0, 0.0)
    with tqdm(total=sum(phase.steps for phase in phases), initial=done, unit="step", mininterval=5) as bar:
        before = 0
        for phase in phases:
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


def train(model: Captioner, tokenizer: Tokenizer, parts: Sequence[Part], seed: int, state: Path | None) -> None:
    """Train through all parts; `state` is a folder of their states."""
    prefix = jnp.array(tokenizer.encode(talks.USER).ids)
    phases = [phase for part in parts for phase in part.phases]
    starts = dict(zip(phases, itertools.accumulate((p.steps * p.pictures for p in phases), initial=0), strict=False))
    if state:
        state.mkdir(parents=True, exist_ok=True)

    def source(phase: Phase, skipped: int) -> Iterator[Batch]:
        first = starts[phase] + skipped * phase.pictures
        shares = picture_questions.LATER_SHARES if phase.name == "place" else picture_questions.SHARES
        sizes = phase.pictures, phase.chats, phase.length, phase.large
        return talks.batches(tokenizer, TOWER, seed, first, *sizes, shares)

    def report_tower() -> str:
        batch = next(talks.batches(tokenizer, TOWER, seed + 1, 0, 256, 0, 0, LARGE))
        found, known = name_patches(model.tower, batch.pixels), batch.classes > 0
        rates = ((found == batch.classes) & known).sum((0, 1)) / known.sum((0, 1))
        return "right patches {:.3f}, right centers {:.3f}".format(*rates)

    for number, part in enumerate(parts):
        rate, path = falling_rate(PEAK_RATE, part.constant, part.falling), state and state / f"{number}.npz"
        if part.phases[0].chats:
            step = partial(answer_step, prefix=prefix)
            train_phases(
                model, step, part.phases, source, rate, path, lambda: check(model, tokenizer, prefix, seed)
            )  # fmt: skip
        else:
            train_phases(model.tower, look_step, part.phases, source, rate, path, report_tower)
    jax.block_until_ready(nnx.state(model))


def main() -> None:
    """Train, round and write the model."""
    parser = argparse.ArgumentParser(prog="python -m training.train_shapes", description="Train the model of shapes.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="folder that keeps the state, to go on after an interruption")
    options = parser.parse_args()
    tokenizer = talks.train_tokenizer(options.seed)
    model = Captioner(TOWER, DECODER._replace(vocabulary=tokenizer.get_vocab_size()), nnx.Rngs(options.seed))
    count = sum(value.size for value in hugging_face_weights(model).values())
    pictures = sum(phase.steps * phase.pictures for part in PARTS for phase in part.phases)
    print(f"{count} parameters, {tokenizer.get_vocab_size()} tokens, {pictures} pictures", flush=True)
    started, spent = time.monotonic(), time.process_time()
    train(model, tokenizer, PARTS, options.seed, options.state)
    write_captioner(model, tokenizer, options.out)
    print(f"{time.monotonic() - started:.0f} s, {time.process_time() - spent:.0f} s of processor time", flush=True)


if __name__ == "__main__":
    main()
