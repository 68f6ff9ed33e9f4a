"""Trains the embedded model on the CPU in under an hour: `python -m training.train --out DIR --seed 0`.

The text is generated during the training, so no row is repeated, and one seed gives one model on one machine. The
folder is written at every check, so that a run that is stopped early leaves a model that loads.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from tokenizers import Tokenizer
from tqdm import tqdm

from training import corpus, packing
from training.export import parameter_count, read_weights, round_to_bfloat16, write_folder, write_json
from training.network import Llama, Shape, greedy
from training.questions import Question, Score, held_out_questions, score, small_questions


class Phase(NamedTuple):
    """A phase: steps, rows per step, row length, turns per chat, and shares of pages of sums and of small sums."""

    name: str
    steps: int
    rows: int
    length: int
    turns: int
    sums_share: float
    asked_share: float = 0.0


# Short rows with many sums first, where a token costs least; at the end rows as long as the promised context, with long
# chats in them. The rate is constant in the first phase and falls to zero over the others: at the constant rate 91 % of
# the sums and 85 % of the facts were right after 900 steps, and 98 % and 96 % when it had fallen. The last phase
# has the same kinds of text at a lower rate, with more small sums: in the first three phases a sum of two numbers below
# ten is as rare as any other, and 8 of those 100 were wrong after them.
PHASES: tuple[Phase, ...] = (
    Phase("short", 1050, 24, 128, 3, 0.35),
    Phase("settle", 420, 12, 256, 5, 0.2),
    Phase("long", 60, 6, 512, 12, 0.2),
    Phase("asked", 450, 16, 128, 4, 0.15, 0.4),
)
PEAK_RATE = 3e-3
WARM_UP = 60
LAST_RATE = 6e-4
CHECK_EVERY = 150
MOST_NEW_TOKENS = 200


def loss_of(model: Llama, batch: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the weighted tokens of a batch [rows, 2, length + 1]."""
    tokens, weights = batch[:, 0], batch[:, 1, 1:]
    logits, _ = model(tokens[:, :-1], jnp.arange(tokens.shape[1] - 1))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1)


@nnx.jit
def train_step(model: Llama, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    """Make one step of the optimizer and return the loss before it."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


def falling_rate(peak: float, constant: int, falling: int) -> optax.Schedule:
    """Return a rate that rises for `WARM_UP` steps, is constant up to the step `constant`, then falls linearly."""
    fall = optax.linear_schedule(peak, peak / 50, falling, max(constant - WARM_UP, 0))
    return optax.join_schedules([optax.linear_schedule(0.0, peak, WARM_UP), fall], [WARM_UP])


def make_rate(phases: tuple[Phase, ...]) -> optax.Schedule:
    """Return the rate: constant in the first phase, then falling, and in the last phase falling from a lower peak."""
    *before, last = (phase.steps for phase in phases)
    rate = falling_rate(LAST_RATE, WARM_UP, last - WARM_UP)
    if not before:
        return rate
    return optax.join_schedules([falling_rate(PEAK_RATE, before[0], sum(before[1:])), rate], [sum(before)])


def make_optimizer(model: nnx.Module, rate: optax.Schedule) -> nnx.Optimizer:
    """Return Muon for the matrices and AdamW for the rest, with clipped gradients."""

    def kinds(parameters: nnx.State) -> nnx.State:
        """Label the matrices, except the embedding, since its rows are looked up rather than multiplied."""
        return jax.tree.map_with_path(
            lambda path, leaf: "matrix" if leaf.ndim == 2 and "embed" not in jax.tree_util.keystr(path) else "other",
            parameters,
        )

    # consistent_rms scales Muon's steps like AdamW's, so that both use the same rate.
    muon = optax.contrib.muon(rate, consistent_rms=0.2, weight_decay=0.02)
    adam = optax.adamw(rate, b1=0.9, b2=0.98, weight_decay=0.0)
    chosen = optax.partition({"matrix": muon, "other": adam}, kinds)
    return nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), chosen), wrt=nnx.Param)


def ask(model: Llama, tokenizer: Tokenizer, questions: list[Question], batch: int = 250) -> Score:
    """Answer the questions greedily with the network, without the engine; return their score."""
    answers: list[str] = []
    reasons: list[str] = []
    for _, group in groupby(questions, key=lambda question: question.kind):
        asked = list(group)
        prompts = [corpus.render_chat(question.messages) + f"{corpus.TURN_START}assistant\n" for question in asked]
        ids = [encoding.ids for encoding in tokenizer.encode_batch(prompts)]
        for start in range(0, len(ids), batch):
            ends = (packing.TURN_END_ID, packing.END_OF_TEXT_ID)
            for tokens in greedy(model, ids[start : start + batch], ends, MOST_NEW_TOKENS):
                answers.append(tokenizer.decode(tokens))
                reasons.append("stop" if tokens[-1] in ends else "length")
    return score(questions, answers, reasons)


def save_state(model: nnx.Module, optimizer: nnx.Optimizer, step: int, seconds: float, path: Path) -> None:
    """Write the state for resuming after `step` (to a second file first, so that a kill leaves the old one)."""
    leaves = jax.tree.leaves(nnx.state((model, optimizer)))
    new = path.with_suffix(".new.npz")
    arrays = {"step": np.asarray(step), "seconds": np.asarray(seconds)}
    arrays |= {str(number): np.asarray(leaf) for number, leaf in enumerate(leaves)}
    with new.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType] - it takes any names
    new.replace(path)


def load_state(model: nnx.Module, optimizer: nnx.Optimizer, path: Path) -> tuple[int, float]:
    """Read a file of `save_state` into the model and the optimizer; return the step and the seconds so far."""
    state = nnx.state((model, optimizer))
    with np.load(path) as saved:
        leaves = [jnp.asarray(saved[str(i)]) for i in range(len(jax.tree.leaves(state)))]
        step, seconds = int(saved["step"]), float(saved["seconds"])
    nnx.update((model, optimizer), jax.tree.unflatten(jax.tree.structure(state), leaves))
    return step, seconds


def batches(tokenizer: Tokenizer, phases: tuple[Phase, ...], seed: int, skipped: int) -> Iterator[np.ndarray]:
    """Yield the batches [rows, 2, length + 1] of all phases in order, without the first `skipped`."""
    for phase in phases:
        texts = corpus.documents(
            random.Random(f"{phase.name} {seed}"), phase.turns, phase.sums_share, phase.asked_share
        )
        source = packing.rows(tokenizer, texts, phase.steps * phase.rows, phase.length + 1)
        for _ in range(phase.steps):
            batch = np.stack([next(source) for _ in range(phase.rows)])
            if skipped:
                skipped -= 1
            else:
                yield batch


def train(
    model: Llama,
    tokenizer: Tokenizer,
    phases: tuple[Phase, ...],
    seed: int,
    state: Path | None,
    check: Callable[[int], None],
) -> float:
    """Train through all phases and return the seconds; every `CHECK_EVERY` steps save the state and call `check`."""
    optimizer = make_optimizer(model, make_rate(phases))
    done, seconds = load_state(model, optimizer, state) if state and state.exists() else (0, 0.0)
    started = time.monotonic() - seconds
    with tqdm(total=sum(phase.steps for phase in phases), initial=done, unit="step", mininterval=5) as bar:
        for batch in batches(tokenizer, phases, seed, done):
            loss = train_step(model, optimizer, jnp.asarray(batch))
            done += 1
            bar.update()
            if done % 10 == 0:
                bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
            if done % CHECK_EVERY == 0:
                if state:
                    save_state(model, optimizer, done, time.monotonic() - started, state)
                check(done)
    jax.block_until_ready(nnx.state(model))
    return time.monotonic() - started


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description="Train the embedded model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--begin", type=Path, help="folder of a model to give the last phase to, not one drawn anew")
    parser.add_argument("--state", type=Path, help="file that keeps the state, to go on after an interruption")
    return parser.parse_args()


def main() -> None:
    """Train, round, score and write the model."""
    options = arguments()
    shape = Shape()
    model, phases = Llama(shape, nnx.Rngs(options.seed)), PHASES[-1:] if options.begin else PHASES
    if options.begin:
        tokenizer = Tokenizer.from_file(str(options.begin / "tokenizer.json"))
        read_weights(model, options.begin)
    else:
        tokenizer = packing.train_tokenizer(options.seed, shape.vocabulary)
    tokens = sum(phase.steps * phase.rows * phase.length for phase in phases)
    questions = held_out_questions(options.seed) + small_questions()
    print(f"{parameter_count(model)} parameters, {tokens} tokens", flush=True)

    def check(step: int) -> None:
        """Write the folder and print the score of a part of the questions."""
        write_folder(model, tokenizer, options.out)
        rates = ask(model, tokenizer, questions[::8])
        tqdm.write(f"step {step}: " + ", ".join(f"{kind} {value['rate']:.3f}" for kind, value in rates.items()))

    seconds = train(model, tokenizer, phases, options.seed, options.state, check)
    round_to_bfloat16(model)
    write_folder(model, tokenizer, options.out)
    report: dict[str, Any] = {
        "answered_by": "train.py",
        "seed": options.seed,
        "parameters": parameter_count(model),
        "steps": sum(phase.steps for phase in phases),
        "tokens": tokens,
        "seconds": round(seconds),
        "jax": jax.__version__,
        "scores": ask(model, tokenizer, questions),
    }
    write_json(options.out / "score.json", report)
    print(report)


if __name__ == "__main__":
    main()
