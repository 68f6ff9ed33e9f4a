"""Deterministic mode: a request returns the same bits whatever else is in its batch.

Copies of a few requests run among random neighbours that start, end and are aborted at random: in batches of any size,
cut into chunks wherever other prompts leave room, preempted, with the prefix cache or without, streamed token by token
or returned at the end. All outputs of the copies must be equal, log-probabilities bit by bit. They differ without
`deterministic`, and also when one of the two rules behind the mode is removed.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, Logprob, RequestOutput, RequestOutputKind, SamplingParams, UserError
from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.runner import batch, model_runner
from jaxllm.runner.compiled_programs import VARIANTS, Programs, halves
from jaxllm.scheduler.state import Plan
from jaxllm.setup import model_setup
from pallas_kernels import choice
from tests.support.paths import GOLDEN

FAMILIES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.name != "stories260K")
WINDOWS = GOLDEN / "gemma3"  # random weights; a layer with a window of 10 tokens, three query heads for each key head
LENGTH = 10  # tokens of an output
# Tokens of the prompt, and the parameters.
PROBES = {
    "everything": (38, SamplingParams(temperature=0.9, seed=1, prompt_logprobs=1, logprobs=2)),
    "greedy": (45, SamplingParams(temperature=0.0, logprobs=5)),
    "unseeded": (21, SamplingParams(temperature=1.0, logprobs=0)),
    "filtered": (33, SamplingParams(temperature=0.8, seed=-5, top_k=30, top_p=0.95, min_p=0.01, n=2, logprobs=2)),
    "penalized": (17, SamplingParams(temperature=1.1, seed=3, repetition_penalty=1.2, logit_bias={5: 2.0}, logprobs=1)),
    "whole": (9, SamplingParams(temperature=0.0, logprobs=30)),  # more than a step returns
}
SLOTS = 8


def bits(output: RequestOutput) -> bytes:
    """Return all outputs of a request as bytes, floats unrounded."""

    def entries(told: Sequence[Mapping[int, Logprob] | None] | None) -> bytes:
        parts = []
        for entry in told or ():
            parts += [struct.pack("<iid", token, one.rank or 0, one.logprob) for token, one in (entry or {}).items()]
            parts.append(b"|")
        return b"".join(parts)

    parts = [entries(output.prompt_logprobs)]
    for part in output.outputs:
        said = (list(part.token_ids), part.text, part.finish_reason, part.stop_reason, part.cumulative_logprob)
        parts += [repr(said).encode(), entries(part.logprobs)]
    return b"#".join(parts)


class Load:
    """Run copies of requests among random others in one engine."""

    def __init__(self, llm: LLM, seed: int = 1) -> None:
        self.engine = llm.engine
        self.random = np.random.default_rng(seed)
        self.text = self.own_tokens(0, 64)
        self.num_neighbours = 0
        # Statistics of the copies.
        self.rows: Counter[int] = Counter()  # steps by their number of rows
        self.cuts: set[int] = set()  # where chunks began
        self.num_preempted = 0
        make_plan = self.engine.scheduler.plan

        def noting(now: float) -> Plan:
            plan = make_plan(now)
            self.rows[len(plan.slots)] += 1
            self.cuts.update(plan.starts[plan.num_decodes :].tolist())
            samples = (self.engine.outputs.sequences.get(name) for name in plan.preempted)
            self.num_preempted += sum(bool(one) and not _is_neighbour(one.group.request_id) for one in samples)
            return plan

        self.engine.scheduler.plan = noting

    def own_tokens(self, seed: int, count: int) -> list[int]:
        return np.random.default_rng(seed).integers(3, self.engine.model.vocab_size, count).tolist()

    def prompt(self, length: int) -> dict[str, list[int]]:
        """Return a prompt that starts like all others, so that blocks are shared, and continues like no other."""
        return {"prompt_token_ids": [*self.text[: length // 2], *self.own_tokens(length, length - length // 2)]}

    def add_copy(self, name: str, number: int) -> None:
        length, params = PROBES[name]
        kinds = RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
        params = replace(
            params,
            max_tokens=LENGTH,
            ignore_eos=True,
            # Neither of these changes a bit.
            skip_reading_prefix_cache=bool(self.random.integers(2)),
            output_kind=kinds[self.random.integers(2)],
        )
        self.engine.add_request(f"{name}/{number}", self.prompt(length), params)

    def add_neighbour(self) -> str:
        random = self.random
        self.num_neighbours += 1
        params = SamplingParams(
            temperature=float(random.choice([0.0, 1.0])),
            max_tokens=int(random.integers(1, 30)),
            logprobs=[None, 3][random.integers(2)],
            frequency_penalty=float(random.choice([0.0, 0.5])),
            ignore_eos=True,
        )
        name = f"neighbour/{self.num_neighbours}"
        self.engine.add_request(name, self.prompt(int(random.integers(1, 60))), params)
        return name

    def run(self, copies: Mapping[str, int]) -> dict[str, Counter[bytes]]:
        """Run `copies[name]` copies of each request; return how often each result occurred, by name and bits."""
        engine, random = self.engine, self.random
        waiting = [(name, number) for name, count in copies.items() for number in range(count)]
        random.shuffle(waiting)
        found: dict[str, Counter[bytes]] = defaultdict(Counter)
        neighbours: list[str] = []
        busy = 1.0
        while waiting or engine.has_unfinished_requests():
            if random.random() < 0.05:
                busy = float(random.choice([0.0, 0.5, 1.0, 2.0]))  # neighbours of a copy, from zero to many
            load = engine.load()
            while waiting and load.running + load.waiting < 1 + SLOTS * busy and random.random() < 0.8:
                self.add_copy(*waiting.pop())
                neighbours += [self.add_neighbour() for _ in range(random.poisson(busy))]
                load = engine.load()
            if neighbours and random.random() < 0.1:
                engine.abort_request(neighbours.pop(random.integers(len(neighbours))))
            for output in engine.step():
                if output.finished and not _is_neighbour(output.request_id):
                    found[output.request_id.partition("/")[0]][bits(output)] += 1
        return found


def _is_neighbour(name: str) -> bool:
    return name.startswith("neighbour")


def make(model: Path, **settings: Any) -> LLM:
    """Start an engine with a pool that is too small for all of its slots."""
    sizes = {"max_num_seqs": SLOTS, "max_num_batched_tokens": 32, "block_size": 4, "num_kv_blocks": 60}
    fixed = {"deterministic": True, "max_model_len": 64, "max_logprobs": -1, "precompile": "covering"}
    tokenizer = None if model == MODEL_DIR else str(GOLDEN / "stories260K")  # another model's, to make text
    return LLM(str(model), tokenizer=tokenizer, **sizes | fixed | settings)


def distinct(model: Path, copies: Mapping[str, int], **settings: Any) -> dict[str, int]:
    """Return the number of different results of each request."""
    with make(model, **settings) as llm:
        found = Load(llm).run(copies)
    assert {name: bits.total() for name, bits in found.items()} == copies, "not every copy has ended"
    return {name: len(bits) for name, bits in found.items()}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(MODEL_DIR, id="embedded", marks=pytest.mark.ci),
        pytest.param(WINDOWS, id="windows", marks=pytest.mark.slow),
    ],
)
def test_two_hundred_copies_under_random_load_have_the_same_bits(model: Path) -> None:
    copies = dict.fromkeys(PROBES, 3) | {"everything": 200}
    with make(model) as llm:
        load = Load(llm)
        found = load.run(copies)
        assert llm.engine.metrics.cached_tokens > 0 and len(llm.engine.runner.programs) == 2
    assert {name: bits.total() for name, bits in found.items()} == copies
    assert {name: len(bits) for name, bits in found.items()} == dict.fromkeys(PROBES, 1)
    assert load.num_preempted > 3 and len(load.cuts) > 30 and {1, SLOTS} <= load.rows.keys()


@pytest.mark.slow
def test_without_it_the_same_load_finds_other_bits() -> None:
    found = distinct(WINDOWS, dict.fromkeys(PROBES, 5), deterministic=False)
    assert min(found.values()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("model", [MODEL_DIR, WINDOWS], ids=["embedded", "windows"])
@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 13},
        {"block_size": 1, "num_kv_blocks": 240},
        {"block_size": 16, "num_kv_blocks": 14},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "quantization": "int8"},
    ],
    ids=str,
)
def test_two_hundred_copies_with_other_settings(model: Path, settings: dict[str, Any]) -> None:
    copies = dict.fromkeys(PROBES, 10) | {"everything": 200}
    assert distinct(model, copies, **settings) == dict.fromkeys(PROBES, 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_bits(family: str) -> None:
    assert distinct(GOLDEN / family, dict.fromkeys(PROBES, 8)) == dict.fromkeys(PROBES, 1)


@pytest.mark.slow
def test_engines_that_differ_in_what_changes_no_program_agree() -> None:
    """Engines that run the same programs agree: they differ in prefix cache, steps in flight, load and streaming."""
    found: list[dict[str, Counter[bytes]]] = []
    for seed, settings in enumerate(({}, {"enable_prefix_caching": False}, {"async_scheduling": False})):
        with make(MODEL_DIR, **settings) as llm:
            found.append(Load(llm, seed).run(dict.fromkeys(PROBES, 20)))
    assert all(len(set().union(*(one[name] for one in found))) == 1 for name in PROBES)


@pytest.mark.slow
@pytest.mark.parametrize("model", [MODEL_DIR, WINDOWS], ids=["embedded", "windows"])
def test_tokens_that_attend_together_have_other_bits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the first rule the load finds different bits, except in C++, where the sums never differ."""
    monkeypatch.setitem(choice.PREFERRED, "cpu", {"paged_decode": ("xla_lanes",)})
    uniform = batch.uniform_shape
    monkeypatch.setattr(batch, "uniform_shape", lambda *sizes: replace(uniform(*sizes), tiles=sizes[0]))
    assert max(distinct(model, dict.fromkeys(PROBES, 40)).values()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("model", [MODEL_DIR, WINDOWS], ids=["embedded", "windows"])
def test_steps_of_two_sizes_have_other_bits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the second rule, small plans run in another program and return different bits."""

    class OfTwo(Programs):
        def __init__(self, decode: Any, ragged: Any, *given: Any, **further: Any) -> None:
            small = replace(ragged[0], tokens=4, rows=4, entries=8)
            super().__init__(decode, [small, *ragged], *given, **further)
            self.covering = [key for shape in (small, *ragged) for key in halves(shape, VARIANTS[-1])]

    monkeypatch.setattr(model_runner, "Programs", OfTwo)
    monkeypatch.setitem(choice.PREFERRED, "cpu", {"paged_decode": ("xla_lanes",)})
    assert max(distinct(model, dict.fromkeys(PROBES, 40)).values()) > 1


def test_what_cannot_be_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="paged_prefill does nothing in deterministic mode") as refused:
        make(MODEL_DIR, kernels=["paged_prefill=xla"])
    assert refused.value.parameter == "kernels"
    with pytest.raises(UserError, match="deterministic must be true or false"):
        make(MODEL_DIR, deterministic="yes")
    monkeypatch.setattr(model_setup, "choose_devices", lambda config: (SimpleNamespace(platform="gpu"),) * 4)
    with pytest.raises(UserError, match="not supported with tensor_parallel_size above 2 on GPUs") as refused:
        model_setup.prepare(EngineConfig(model=str(MODEL_DIR), deterministic=True, tensor_parallel_size=4))
    assert refused.value.parameter == "deterministic"


def test_a_step_has_room_for_few_tokens() -> None:
    """A step computes all of its places, used or not, so it has few."""

    def sizes(is_cpu: bool, recorded: dict[str, Any] | None = None, **settings: int) -> tuple[int, int]:
        config = EngineConfig(model=str(MODEL_DIR), deterministic=True, **settings)
        return model_setup.step_sizes(config, recorded or {}, is_cpu)

    assert sizes(True) == (16, 32) and sizes(False) == (128, 256)
    assert sizes(True, max_num_seqs=20) == (20, 40) and sizes(True, max_num_batched_tokens=8) == (8, 8)
    compiled = {"max_num_seqs": 3, "max_num_batched_tokens": 9}
    assert sizes(True, compiled) == (16, 32), "what was compiled for other steps is not taken"
    assert sizes(True, compiled | {"deterministic": True}) == (3, 9)


@pytest.mark.ci
def test_doctor_and_the_start_say_that_it_is_on(
    run_jaxllm: Callable[..., tuple[int, str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    code, said, _ = run_jaxllm("doctor", "--deterministic")
    assert code == 0 and "deterministic: True (asked for)" in said
    assert "max_num_batched_tokens: 32 (" in said
    with caplog.at_level("INFO", logger="jaxllm.runner.model_runner"), make(MODEL_DIR):
        pass
    assert "deterministic: every step computes 32 tokens" in caplog.text
