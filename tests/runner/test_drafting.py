"""Drafts on the device: lookup, acceptance, and the same distribution of accepted tokens as without drafts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.runner.drafting import NO_DRAFT, Drafted, SamplePositions, count, look_up, take_in
from jaxllm.sampling.sampler import Sampled, SamplingRows, Variant, pack_row, sample, unpack_rows
from jaxllm.sampling.vocab_parallel import Vocabulary
from jaxllm.sampling_params import SamplingParams
from jaxllm.setup.draft_setup import Drafting

SIZE = 24  # tokens per slot


def naive_look_up(tokens: list[int], drafting: Drafting) -> list[int]:
    """Find the last occurrence of the longest suffix and take its next token, repeatedly."""
    best = (drafting.min_match, -1)
    for place in range(len(tokens) - 1):
        matched = 0
        while matched < min(drafting.max_match, place + 1) and tokens[place - matched] == tokens[-1 - matched]:
            matched += 1
        best = max(best, (matched, place))
    _, place = best
    if place < 0:
        return [NO_DRAFT] * drafting.most
    following = tokens[place + 1 :]
    return (following * drafting.most)[: drafting.most]


@pytest.mark.parametrize("most", [1, 4, 16])
@pytest.mark.parametrize(("least", "longest"), [(1, 1), (1, 4), (2, 3), (5, 5), (3, 16)])
def test_what_is_looked_up_is_what_followed_the_longest_and_latest_match(most: int, least: int, longest: int) -> None:
    random = np.random.default_rng([most, least, longest])
    drafting = Drafting(most, least, longest)
    tokens = random.integers(0, random.integers(1, 4, (400, 1)) + 1, (400, SIZE)).astype(np.int32)  # few distinct ones
    lengths = random.integers(1, SIZE + 1, 400).astype(np.int32)
    found = jax.jit(look_up, static_argnums=2)(tokens, lengths, drafting)
    due = [naive_look_up(row[:length].tolist(), drafting) for row, length in zip(tokens, lengths, strict=True)]
    assert np.asarray(found).tolist() == due
    has_match = sum(row[0] != NO_DRAFT for row in due)
    assert 20 < has_match < 400, "both happen"


def naive_count(drafts: list[int], sampled: list[int], is_finite: list[bool]) -> int:
    kept = 0
    while kept < len(drafts) and drafts[kept] == sampled[kept] and is_finite[kept + 1]:
        kept += 1
    return 1 + kept


@pytest.mark.parametrize("most", [1, 3])
def test_drafts_are_kept_up_to_the_first_that_was_not_sampled(most: int) -> None:
    """Rows of any number of drafts, in sequence, some of them NO_DRAFT; and padding."""
    random = np.random.default_rng(most)
    num_slots, num_places = 12, 50
    for _ in range(40):
        rows = random.permutation(num_slots)[: random.integers(1, num_slots)].tolist()
        numbers = random.integers(0, most + 1, len(rows)).tolist()
        own = random.integers(NO_DRAFT, 2, (num_slots, most)).astype(np.int32)
        known = random.integers(4, 9, num_slots).astype(np.int32)
        before = random.integers(100, 200, (num_slots, SIZE)).astype(np.int32)
        places = [(slot, int(known[slot]) - 1 + at, 1, at, d) for slot, d in zip(rows, numbers, strict=True)
                  for at in range(d + 1)]  # fmt: skip
        used = len(places)
        slots, positions, samples, offsets, drafts = np.array(
            places + [(num_slots, 0, 0, 0, 0)] * (num_places - used)
        ).T
        at = SamplePositions(*map(jnp.asarray, (slots, positions, samples > 0, offsets, drafts)))
        tokens, is_finite = random.integers(0, 2, num_places).astype(np.int32), random.random(num_places) < 0.9
        state = Drafted(lengths=jnp.asarray(known), tokens=jnp.asarray(own))
        sampled = Sampled(jnp.asarray(tokens), jnp.asarray(is_finite))
        counts, had = count(state, at, sampled)
        after, following = take_in(state, jnp.asarray(before), at, sampled, counts)
        place, due, lengths = 0, before.copy(), known.copy()
        for slot, number in zip(rows, numbers, strict=True):
            here = slice(place, place + number + 1)
            kept = naive_count(own[slot, :number].tolist(), tokens[here].tolist(), is_finite[here].tolist())
            assert (int(counts[place]), int(had[place])) == (kept, int((own[slot, :number] != NO_DRAFT).sum()))
            due[slot, known[slot] : known[slot] + kept] = tokens[here][:kept]
            lengths[slot] += kept
            place = here.stop
        assert np.asarray(after).tolist() == due.tolist() and following.lengths.tolist() == lengths.tolist()


V, REQUESTS, LENGTH, DRAFTS = 6, 20_000, 5, 3  # REQUESTS * LENGTH draws


@partial(jax.jit, static_argnames="drafts")
def verify(head: jax.Array, rows: SamplingRows, tokens: jax.Array, drafted: Drafted[jax.Array], drafts: int) -> tuple:
    """Sample after the last token of each of R slots and after its drafts; `head`, f32[V, V], reads one token."""
    num_slots = len(tokens)
    slots, offsets = jnp.repeat(jnp.arange(num_slots), drafts + 1), jnp.tile(jnp.arange(drafts + 1), num_slots)
    positions = drafted.lengths[slots] - 1 + offsets
    guessed = jnp.concatenate([jnp.zeros((num_slots, 1), jnp.int32), drafted.tokens[:, :drafts]], axis=1)
    last = jnp.where(offsets > 0, guessed[slots, offsets], tokens[slots, positions])
    here = jax.tree.map(lambda column: column[slots], rows)
    sampled = sample(head[last], here, positions + 1, None, None, Variant.RANDOM, 0, Vocabulary(V))
    at = SamplePositions(slots, positions, jnp.ones(len(slots), bool), offsets, jnp.full(len(slots), drafts))
    counts, _ = count(drafted, at, sampled)
    return take_in(drafted, tokens, at, sampled, counts)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_that_are_kept_follow_the_softmax(temperature: float) -> None:
    """100,000 draws, verified against drafts that are the likeliest tokens or random ones: chi-square of pairs."""
    random = np.random.default_rng(int(10 * temperature))
    head = random.normal(0.0, 1.0, (V, V)).astype(np.float32)
    params = SamplingParams(temperature=temperature)
    rows = unpack_rows(jnp.asarray(np.stack([pack_row(params, seed, 1, (), V) for seed in range(REQUESTS)])))
    first = random.integers(0, V, REQUESTS)
    found, steps = [], []
    for drafts in (DRAFTS, 0):
        tokens = jnp.zeros((REQUESTS, LENGTH + DRAFTS + 2), jnp.int32).at[:, 0].set(first)
        state = Drafted(lengths=jnp.ones(REQUESTS, jnp.int32), tokens=jnp.zeros((REQUESTS, DRAFTS), jnp.int32))
        steps.append(0)
        while int(state.lengths.min()) <= LENGTH:
            last = np.asarray(tokens)[np.arange(REQUESTS), np.asarray(state.lengths) - 1]
            likeliest = [last]
            for _ in range(DRAFTS):
                likeliest.append(head.argmax(axis=1)[likeliest[-1]])
            guesses = np.where(
                np.arange(REQUESTS)[:, None] % 2, np.stack(likeliest[1:], 1), random.integers(0, V, (REQUESTS, DRAFTS))
            )
            # Finished slots wait, which leaves room for the others' tokens.
            is_through = state.lengths > LENGTH
            grown, following = verify(head, rows, tokens, state.replace(tokens=jnp.asarray(guesses, jnp.int32)), drafts)
            tokens = jnp.where(is_through[:, None], tokens, grown)
            state = following.replace(lengths=jnp.where(is_through, state.lengths, following.lengths))
            steps[-1] += int((~is_through).sum())
        found.append(np.asarray(tokens)[:, : LENGTH + 1])
    assert np.array_equal(*found), "the same tokens as without drafts"
    assert steps[1] == REQUESTS * LENGTH and steps[0] < 0.8 * steps[1], "in fewer steps"
    pairs = np.bincount((found[0][:, :-1] * V + found[0][:, 1:]).ravel(), minlength=V * V).reshape(V, V)
    scaled = np.exp(head.astype(np.float64) / temperature)
    due = pairs.sum(axis=1, keepdims=True) * scaled / scaled.sum(axis=1, keepdims=True)
    statistic, freedom = float(((pairs - due) ** 2 / due).sum()), V * (V - 1)
    # Wilson and Hilferty 1931: the cube root of a chi-square variable is nearly normal; 3.72 is its 0.9999 quantile
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 3.72 * spread**0.5) ** 3
