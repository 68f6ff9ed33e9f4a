"""The EAGLE-3 head of the embedded model: its passes over texts, its files, its statistics, its acceptance rate."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tokenizers import Tokenizer

from jaxllm.checkpoints import eagle_files, weights
from jaxllm.embedded import HEADS, MODEL_DIR
from jaxllm.families.families import read_spec
from jaxllm.model import eagle, sharding
from jaxllm.model.decoder import Context
from training import drafting, evaluate_eagle, train_eagle
from training.questions import held_out_questions

SPEC, FAMILY = read_spec(weights.read_config(MODEL_DIR))


def on_one_device(function: Any) -> Any:
    return jax.jit(function)


@pytest.fixture(scope="module")
def begun() -> tuple[eagle.Head, Any, Any, np.ndarray]:
    """An untrained head, the target model, and the head's vocabulary."""
    target = weights.load(MODEL_DIR, SPEC, FAMILY, sharding.make_layout(jax.devices(), 1), "float32")
    head, named = train_eagle.head_of(SPEC), np.sort(np.random.default_rng(1).permutation(1536)[: train_eagle.NAMED])
    return head, train_eagle.begin(head, target, named, 0), target, named


@pytest.mark.ci
def test_passes_over_a_text_are_the_drafts_that_begin_at_each_of_its_tokens(begun) -> None:
    """Training passes equal single drafts, each computed from the entries before it."""
    head, params, target, named = begun
    tokens, passes = np.random.default_rng(0).integers(3, 1536, (2, 9)), 3

    def all_at_once(params, target, tokens):
        _, fused = drafting.read(SPEC, head, params, target, tokens)
        choose = lambda scores: jnp.asarray(named)[jnp.argmax(scores, axis=-1)]  # noqa: E731
        return fused[:, :-1], drafting.drafts(head, params, target, fused[:, :-1], tokens[:, 1:], passes, choose)

    def entries(params, target, hidden, tokens, last):
        context = Context(jnp.arange(len(tokens)), drafting.attend_apart(head.spec, 1))
        embedded = eagle.embed(head, params, target, tokens, context)
        out, scored = eagle.forward(head, params, embedded, hidden, context)
        return out[last], scored[last] @ params.top["head"].T

    fused, found = on_one_device(all_at_once)(params, target, tokens)
    run = on_one_device(entries)
    for row, begin in ((0, 0), (0, 4), (1, 5)):
        hidden, read = np.zeros((8, SPEC.width), np.float32), np.zeros(8, np.int32)  # the pass cannot see later entries
        hidden[: begin + 1], read[: begin + 1] = fused[row, : begin + 1], tokens[row, 1 : begin + 2]
        for number in range(passes):
            out, scores = run(params, target, hidden, read, begin + number)
            np.testing.assert_allclose(found[number][row, begin + number], scores, atol=1e-4)
            if number < passes - 1:
                hidden[begin + number + 1], read[begin + number + 1] = out, named[np.argmax(scores)]


def test_what_is_written_is_read(begun, tmp_path: Path) -> None:
    head, params, _, named = begun
    train_eagle.write(head, params, named, tmp_path)
    assert eagle_files.read(tmp_path, SPEC) == head
    loaded = eagle_files.load(tmp_path, head, sharding.make_layout(jax.devices(), 1), "float32")
    numbers = loaded.top.pop("draft_ids")
    np.testing.assert_array_equal(np.flatnonzero(numbers < len(named)), named)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2**-8), params, loaded)


@pytest.mark.slow
def test_the_loss_teaches_every_pass(begun, monkeypatch: pytest.MonkeyPatch) -> None:
    head, params, target, named = begun
    for name, value in (("ROWS", 2), ("LENGTH", 48), ("PASSES", 2)):
        monkeypatch.setattr(train_eagle, name, value)
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    batch = jnp.asarray(next(train_eagle.batches(tokenizer, 0, 1)))
    loss, optimizer = on_one_device(partial(train_eagle.loss_of, SPEC, head)), optax.adam(3e-3)

    @jax.jit
    def step(params, state):
        values, gradients = jax.value_and_grad(loss, has_aux=True)(params, target, jnp.asarray(named), batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, values

    state, values = optimizer.init(params), []
    for _ in range(40):
        params, state, value = step(params, state)
        values.append(value)
    assert float(values[-1][0]) < 0.5 * float(values[0][0])
    assert np.all(values[-1][1] > values[0][1] + 0.3)


def test_a_draft_is_accepted_up_to_its_first_wrong_token() -> None:
    text = [5, 6, 7, 8, 9, 10, 11, 12]
    right = np.array([[text[min(t + 1 + place, 7)] for place in range(4)] for t in range(8)])
    assert evaluate_eagle.accepted(text, 2, right, 4) == [4]  # the fifth is the last
    assert evaluate_eagle.accepted(text, 2, right, 2) == [2, 2]
    assert evaluate_eagle.accepted(text, 0, np.full((8, 4), -1), 4) == [0] * 7
    wrong = right.copy()
    wrong[2, 1] = wrong[4, 0] = -1
    assert evaluate_eagle.accepted(text, 2, wrong, 3) == [1, 0, 2]
    measured = evaluate_eagle.measure([(text[:2], text[2:])], [wrong])
    assert measured["tokens per step, 3"] == round(5 / 3, 3) and measured["steps"] == 3
    assert measured["accepted by place"] == [round(2 / 3, 4), round(1 / 3, 4), 0.0, 0.0]
    guesses = np.arange(20).reshape(4, 5)  # of four passes over five entries
    np.testing.assert_array_equal(evaluate_eagle.diagonals(guesses, 3)[1:], [[0, 6, 12, 18], [1, 7, 13, 19]])


@pytest.mark.ci
def test_the_head_in_the_package_drafts_what_the_model_writes() -> None:
    questions = held_out_questions(0)[::60]
    answers = evaluate_eagle.answered(questions)
    drafts = evaluate_eagle.drafted(HEADS["jaxllm-eagle"], [prompt + answer for prompt, answer in answers])
    measured = evaluate_eagle.measure(answers, drafts)
    assert measured["tokens per step, 1"] > 1.5 and measured["tokens per step, 4"] > 2.2
