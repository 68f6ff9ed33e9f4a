"""The layout of steps that verify drafts: random plans against loops over their rows and tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxllm.runner import batch
from jaxllm.runner.batch import Shape
from jaxllm.scheduler.state import Plan

SLOTS, DRAFTS, FIELDS, WORDS = 9, 3, 5, 4


def random_plan(random: np.random.Generator, drafts: int, most_chunk: int) -> Plan:
    """Make a plan of decode rows, with up to `drafts` drafts each, and of chunks if `most_chunk` is not 0."""
    num_decodes = int(random.integers(0 if most_chunk else 1, SLOTS - 2))
    num_chunks = int(random.integers(num_decodes == 0, 3)) if most_chunk else 0
    num_rows = num_decodes + num_chunks
    lengths = np.ones(num_rows, np.int32)
    lengths[:num_decodes] += random.integers(0, drafts + 1, num_decodes, dtype=np.int32)
    lengths[num_decodes:] = random.integers(1, most_chunk + 1, num_chunks)
    samples = np.ones(num_rows, np.bool_)
    samples[num_decodes:] = random.random(num_chunks) < 0.5
    table = random.integers(0, SLOTS, (int(random.integers(0, 4)), 3), dtype=np.int32)
    return Plan(
        now=0.0,
        num_decodes=num_decodes,
        slots=random.permutation(SLOTS)[:num_rows],
        epochs=np.ones(SLOTS, np.int64),
        starts=random.integers(0, 100, num_rows, dtype=np.int32),
        lengths=lengths,
        samples=samples,
        sample_numbers=np.ones(num_rows, np.int32),
        table=table,
        num_drafts=int(lengths[:num_decodes].sum()) - num_decodes,
        proposes=not num_chunks,
        capacity=random.integers(100, 200, num_rows, dtype=np.int32),
    )


def plans(drafts: int, most_chunk: int) -> Iterator[Plan]:
    random = np.random.default_rng([drafts, most_chunk])
    return (random_plan(random, drafts, most_chunk) for _ in range(60))


def naive_places(plan: Plan, of_tokens: bool) -> list[tuple[int, ...]]:
    """Return (slot, position, samples, offset, drafts) of each place; offset -1 for places that do not sample."""
    found: list[tuple[int, ...]] = []
    for row, slot in enumerate(plan.slots.tolist()):
        start, length, samples = int(plan.starts[row]), int(plan.lengths[row]), int(plan.samples[row])
        for offset in range(length):
            is_last, is_decode = offset == length - 1, row < plan.num_decodes
            if of_tokens and is_decode:
                found.append((slot, start + offset, 1, offset, length - 1))
            elif of_tokens:
                found.append((slot, start + offset, samples * is_last, 0 if is_last else -1, 0))
            elif is_last:
                found.append((slot, start + offset, samples))
    return found


# A program for decode rows, and the one of deterministic mode; each with drafts in its rows or without.
CASES = [(DRAFTS, 0), (0, 0), (0, 7)]


@pytest.mark.parametrize("of_tokens", [True, False])
@pytest.mark.parametrize(("drafts", "most_chunk"), CASES)
def test_places_are_those_behind_which_a_step_samples(drafts: int, most_chunk: int, of_tokens: bool) -> None:
    for plan in plans(drafts if of_tokens else 0, most_chunk):
        at = batch.places(plan, of_tokens)
        columns = [column for column in at if column is not None]
        assert list(zip(*(map(int, column) for column in columns), strict=True)) == naive_places(plan, of_tokens)


@pytest.mark.parametrize(("drafts", "most_chunk"), [*CASES, (DRAFTS, -1)])
def test_a_packed_plan_has_a_token_for_each_draft(drafts: int, most_chunk: int) -> None:
    """-1: decode rows with drafts in the program of deterministic mode."""
    random, is_decode = np.random.default_rng(1), most_chunk == 0
    shape = Shape(40, 8, 0, 6, 0 if is_decode else FIELDS, drafts=DRAFTS)
    for plan in plans(drafts, max(0, most_chunk)):
        sampling = random.integers(0, 99, (SLOTS, FIELDS), dtype=np.int32)
        chunks = [random.integers(1, 99, length).astype(np.int32) for length in plan.lengths[plan.num_decodes :]]
        buffer = batch.pack(plan, shape, SLOTS, chunks, sampling)
        field = {name: value.tolist() for name, value in batch.views(buffer, batch.fields(shape)).items()}
        due = naive_places(plan, True)
        rest = shape.tokens - len(due)
        assert field["row_slot"] == [place[0] for place in due] + [SLOTS] * rest
        for name, at in (("row_position", 1), ("row_offset", 3), ("row_drafts", 4)):
            assert field[name][: len(due)] == [place[at] for place in due]
        assert field["row_capacity"][: len(due)] == np.repeat(plan.capacity, plan.lengths).tolist()
        assert field["table"] == plan.table.tolist() + [[SLOTS, 0, 0]] * (6 - len(plan.table))
        if is_decode:
            continue
        num_on_device = sum(plan.lengths[: plan.num_decodes].tolist())
        assert field["num_decodes"] == [num_on_device]
        assert field["tokens"][num_on_device : len(due)] == [token for chunk in chunks for token in chunk.tolist()]
        assert field["token_slot"] == field["row_slot"]
        assert field["token_position"][: len(due)] == field["row_position"][: len(due)]
        assert field["row_last"][: len(due)] == list(range(len(due)))
        assert field["row_samples"] == [place[2] for place in due] + [0] * rest
        assert field["sampling"][: len(due)] == [sampling[place[0]].tolist() for place in due]


@pytest.mark.parametrize("of_tokens", [True, False])
def test_the_mask_of_a_row_lies_at_its_last_place(of_tokens: bool) -> None:
    random = np.random.default_rng(2)
    for plan in plans(0, 7):
        masks = random.integers(0, 99, (len(plan.slots), WORDS), dtype=np.int32)
        is_masked = random.random(len(plan.slots)) < 0.5
        buffer = batch.pack_masks(plan, 40, SLOTS, masks, is_masked, of_tokens)
        due, place = naive_places(plan, of_tokens), 0
        for row, length in enumerate(plan.lengths.tolist()):
            for at in range(length if of_tokens else 1):
                is_last = at == length - 1 or not of_tokens
                mask = masks[row].tolist() if is_last else [0] * WORDS
                assert buffer[place].tolist() == [*due[place][:3], int(is_last and is_masked[row]), *mask]
                place += 1
        assert place == len(due) and (buffer[place:, 0] == SLOTS).all()


def test_a_plan_runs_in_a_program_that_drafts_if_it_does() -> None:
    shapes = batch.verifying_shapes(40, 8, DRAFTS)
    for plan in plans(DRAFTS, 0):
        size = batch.extent(plan)
        assert any(batch.fits(size, shape) for shape in shapes)
        assert not any(batch.fits(size, shape) for shape in batch.decode_shapes(8))
        assert not any(batch.fits(size._replace(proposes=False), shape) for shape in shapes)
        smallest = min((shape.tokens, shape.rows) for shape in shapes if batch.fits(size, shape))
        assert smallest[0] <= 4 * plan.num_tokens and smallest[1] <= 2 * len(plan.slots)
