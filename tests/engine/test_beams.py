"""Beam search through the whole engine, compared with a naive search that requests one token at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import LLM, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams, UserError
from jaxllm.engine.features.beams.rules import Beam, Ended, Rules, Search, choose, num_needed
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.scheduler.recorded import RecordedScheduler
from tests.support.adapters import write_adapter
from tests.support.paths import GOLDEN

ENDS = (17, 90)  # tokens that end an output
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 48}
SHARED: dict[str, Any] = {"precompile": "covering", "skip_tokenizer_init": True, "max_logprobs": -1} | SIZES
PROMPTS = [np.random.default_rng(length).integers(1, 128, length).tolist() for length in (1, 6, 8, 13, 20)]
ORDINARY = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
Rows = dict[tuple[Any, ...], dict[int, float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a small model with two end-of-sequence tokens."""
    made = tmp_path_factory.mktemp("beams") / "model"
    shutil.copytree(GOLDEN / "llama", made)
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SHARED) as llm:
        yield llm


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Cache the log-probabilities of the token after each sequence that `naive` queried."""
    return {}


def naive(
    llm: LLM, rows: Rows, prompt: list[int], params: BeamSearchParams, adapter: LoRARequest | None = None
) -> list[tuple[list[int], float]]:
    """Search like transformers, over the whole vocabulary for each beam; return outputs and scores."""
    ends = () if params.ignore_eos else ENDS
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True, skip_reading_prefix_cache=True)
    running: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    most = min(params.max_tokens, SIZES["max_model_len"] - len(prompt))
    for length in range(1, most + 1):
        keys = [(adapter is None, *prompt, *tokens) for tokens, _ in running]
        missing = [key for key in keys if key not in rows]
        asked = [{"prompt_token_ids": list(key[1:])} for key in missing]
        for key, output in zip(missing, llm.generate(asked, one, use_tqdm=False, lora_request=adapter), strict=True):
            assert output.outputs[0].logprobs is not None
            rows[key] = {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}
        candidates = [
            ([*tokens, token], total + own)
            for (tokens, total), key in zip(running, keys, strict=True)
            for token, own in rows[key].items()
        ]
        candidates.sort(key=lambda each: -each[1])
        candidates = candidates[: max(2, 1 + len(ends)) * params.beam_width]
        is_end = [length == most or tokens[-1] in ends for tokens, _ in candidates]
        ended += [
            (tokens, total / length**params.length_penalty)
            for (tokens, total), ends_now in zip(candidates[: params.beam_width], is_end, strict=False)
            if ends_now
        ]
        ended = sorted(ended, key=lambda each: -each[1])[: params.beam_width]
        going = [each for each, ends_now in zip(candidates, is_end, strict=True) if not ends_now]
        running = going[: params.beam_width]
        if len(ended) == params.beam_width and running:
            reached = most if params.early_stopping == "never" and params.length_penalty > 0 else length
            best = running[0][1] / reached**params.length_penalty
            if params.early_stopping is True or best <= ended[-1][1]:
                break
    return ended


def check(output: RequestOutput, due: list[tuple[list[int], float]]) -> None:
    found = [list(each.token_ids) for each in output.outputs]
    assert found == [tokens for tokens, _ in due]
    scores: Any = [each.score for each in output.outputs]
    np.testing.assert_allclose(scores, [score for _, score in due], rtol=0, atol=1e-4)
    for each in output.outputs:
        is_stopped = each.token_ids[-1] in ENDS and each.finish_reason == "stop"
        assert is_stopped or each.finish_reason == "length"


def run(engine: LLMEngine, requests: dict[str, tuple[list[int], Any]], **options: Any) -> dict[str, RequestOutput]:
    for name, (prompt, params) in requests.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params, **options)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    state = engine.scheduler.state
    assert state.pool.num_available == state.pool.num_blocks and not engine.scheduler.requests
    return done


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[CompletionOutput]:
    """Return the outputs of ordinary requests without beam searches in the batch."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], ORDINARY, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("width", [1, 2, pytest.param(5, marks=pytest.mark.ci)])
def test_beams_are_those_of_a_naive_search_and_change_nothing_beside_them(
    width: int, llm: LLM, rows: Rows, alone: list[CompletionOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = {"copies": 0, "children": 0, "forks": 0}
    plan, fork = RecordedScheduler.plan, RecordedScheduler.fork

    def planned(core: RecordedScheduler, now: float) -> Any:
        made = plan(core, now)
        counted["copies"] += len(made.moves)
        return made

    def forked(core: RecordedScheduler, moves: Any) -> None:
        counted["children"] += sum(move.source != move.target for move in moves)
        counted["forks"] += 1
        fork(core, moves)

    monkeypatch.setattr(RecordedScheduler, "plan", planned)
    monkeypatch.setattr(RecordedScheduler, "fork", forked)
    for penalty, stopping in product((0.0, 1.0, 2.0), (True, False, "never")):
        params = BeamSearchParams(width, 9, length_penalty=penalty, early_stopping=stopping)
        requests: dict[str, tuple[list[int], Any]] = {
            f"{kind}{number}": (prompt, own)
            for number, prompt in enumerate(PROMPTS)
            for kind, own in (("beams", params), ("one", ORDINARY))
        }
        done = run(llm.engine, requests)
        for number, prompt in enumerate(PROMPTS):
            check(done[f"beams{number}"], naive(llm, rows, prompt, params))
            assert done[f"one{number}"].outputs[0].token_ids == alone[number].token_ids
    assert counted["copies"] <= counted["children"] and counted["forks"] > 50
    assert (width == 1) == (counted["copies"] == 0)


@pytest.mark.parametrize(
    "setting",
    [
        {"num_kv_blocks": 20},
        pytest.param({"async_scheduling": False, "enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 8, "num_kv_blocks": 20}, marks=pytest.mark.ci),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.ci),
        pytest.param({"deterministic": True, "max_num_batched_tokens": 16}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_settings_and_preemption_change_no_beam(
    setting: dict[str, Any], folder: Path, llm: LLM, rows: Rows, alone: list[CompletionOutput]
) -> None:
    params = BeamSearchParams(3, 12, length_penalty=0.5, early_stopping="never")
    prompts = [prompt for prompt in PROMPTS if len(prompt) <= 13]
    with LLM(str(folder), **SHARED | setting) as other:
        for _ in range(2):  # the second run uses the prefix cache
            requests: dict[str, tuple[list[int], Any]] = {
                f"{number}": (prompt, params) for number, prompt in enumerate(prompts)
            }
            requests |= {f"one{number}": (prompt, ORDINARY) for number, prompt in enumerate(prompts)}
            done = run(other.engine, requests)
            for number, prompt in enumerate(prompts):
                check(done[f"{number}"], naive(llm, rows, prompt, params))
                assert done[f"one{number}"].outputs[0].token_ids == alone[number].token_ids
        assert (other.engine.metrics.preemptions > 0) == ("num_kv_blocks" in setting)


def test_a_step_that_fails_changes_no_beam(llm: LLM, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    params = BeamSearchParams(3, 9, ignore_eos=True)
    due = naive(llm, rows, PROMPTS[3], params)
    dispatch, calls = llm.engine.runner.dispatch, iter(range(1000))

    def failing(*arguments: Any) -> Any:
        if next(calls) in (0, 2, 5):
            raise RuntimeError("the device said no")
        return dispatch(*arguments)

    monkeypatch.setattr(llm.engine.runner, "dispatch", failing)
    recoveries = llm.engine.metrics.recoveries
    check(run(llm.engine, {"a": (PROMPTS[3], params)})["a"], due)
    assert llm.engine.metrics.recoveries == recoveries + 3


def test_a_search_is_aborted_as_a_whole(llm: LLM) -> None:
    engine = llm.engine
    for num_steps in range(8):
        engine.add_request("a", {"prompt_token_ids": PROMPTS[4]}, BeamSearchParams(4, 9, ignore_eos=True))
        for _ in range(num_steps):
            engine.step()
        output = engine.abort_request("a")
        assert output is not None and [each.finish_reason for each in output.outputs] == ["abort"] * 4
        lengths = {len(each.token_ids) for each in output.outputs}
        assert len(lengths) == 1, "they keep in step"
        assert not engine.has_unfinished_requests() and not engine.step() and not engine.scheduler.requests
        assert engine.scheduler.state.pool.num_available == engine.scheduler.state.pool.num_blocks


@pytest.mark.ci
def test_a_search_has_one_adapter(folder: Path, tmp_path: Path, rows: Rows) -> None:
    adapter = LoRARequest("a", 1, str(write_adapter(tmp_path / "a", folder, 8, seed=1)))
    params = BeamSearchParams(3, 8)
    with LLM(str(folder), enable_lora=True, **SHARED) as llm:
        due = naive(llm, rows, PROMPTS[2], params, adapter)
        assert due != naive(llm, rows, PROMPTS[2], params), "the adapter counts"
        (own, plain) = llm.beam_search([{"prompt_token_ids": PROMPTS[2]}] * 2, params, lora_request=[adapter, None])
        shown = [[*PROMPTS[2], *(tokens[:-1] if tokens[-1] in ENDS else tokens)] for tokens, _ in due]
        assert [each.tokens for each in own.sequences] == shown
        assert [each.tokens for each in plain.sequences] != shown


def test_outputs_of_llm_are_those_of_vllm(llm: LLM) -> None:
    """Outputs contain the prompt, are sorted by score, and include the ending token only on request."""
    for shows in (False, True):
        params = BeamSearchParams(4, 10, length_penalty=0.0, include_stop_str_in_output=shows)
        found = llm.beam_search([PROMPTS[1], PROMPTS[2]], params)
        assert len(found) == 2
        for prompt, output in zip((PROMPTS[1], PROMPTS[2]), found, strict=True):
            assert [each.score for each in output.sequences] == sorted(
                (e.score for e in output.sequences), reverse=True
            )
            for each in output.sequences:
                assert each.tokens[: len(prompt)] == prompt and each.score == each.cum_logprob and each.text == ""
                assert (each.tokens[-1] in ENDS) == (shows and each.finish_reason == "stop")
    with pytest.raises(UserError, match="a BeamSearchParams, not SamplingParams"):
        llm.beam_search(PROMPTS[1], SamplingParams())  # pyright: ignore[reportArgumentType]


@pytest.mark.ci
async def test_a_search_through_the_queue(folder: Path, llm: LLM, rows: Rows) -> None:
    params = BeamSearchParams(3, 9)
    async with AsyncLLM(str(folder), **SHARED) as engine:
        outputs = [output async for output in engine.generate({"prompt_token_ids": PROMPTS[3]}, params)]
    assert len(outputs) == 1, "nothing is known before the end"
    check(outputs[0], naive(llm, rows, PROMPTS[3], params))


def test_text_ends_before_the_token_that_ended_it() -> None:
    params = BeamSearchParams(3, 12, early_stopping=True)
    with LLM(precompile="covering", max_num_seqs=4, max_num_batched_tokens=64) as llm:
        (output,) = llm.beam_search("Once upon a time", params)
        tokenizer = llm.get_tokenizer()
        for each in output.sequences:
            assert each.text.startswith("Once upon a time") and each.text == tokenizer.decode(each.tokens, False)


@pytest.mark.parametrize(
    ("given", "message", "parameter"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1", "beam_width"),
        ({"beam_width": 1.5}, "beam_width must be an integer", "beam_width"),
        ({"max_tokens": 0}, "max_tokens must be at least 1", "max_tokens"),
        ({"temperature": 0.5}, "temperature must be 0", "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number", "length_penalty"),
        ({"length_penalty": 11}, r"length_penalty must be in \[-10, 10\]", "length_penalty"),
        ({"early_stopping": 1}, "early_stopping must be True, False or 'never'", "early_stopping"),
        ({"early_stopping": "ever"}, "early_stopping must be True, False or 'never'", "early_stopping"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False", "ignore_eos"),
    ],
)
def test_wrong_parameters_are_refused_by_name(given: dict[str, Any], message: str, parameter: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | given)
    assert caught.value.parameter == parameter


def test_what_does_not_fit_is_refused_with_what_would(llm: LLM, folder: Path) -> None:
    with pytest.raises(UserError, match=r"beam_width may be at most 8 here, got 9: .* 8 slots") as caught:
        llm.beam_search(PROMPTS[0], BeamSearchParams(9, 4))
    assert caught.value.parameter == "beam_width"
    sizes = SHARED | {"max_logprobs": 5, "num_kv_blocks": 12}
    with LLM(str(folder), **sizes) as small:
        with pytest.raises(UserError, match=r"at most 3 here, got 4: a step reports 5 tokens .* of which 2"):
            small.beam_search(PROMPTS[0], BeamSearchParams(4, 4))
        assert len(small.beam_search(PROMPTS[0], BeamSearchParams(5, 4, ignore_eos=True))[0].sequences) == 5
        with pytest.raises(UserError, match="whole pool has 12"):
            small.beam_search(PROMPTS[4], BeamSearchParams(3, 20))


LOGPROBS = st.lists(st.floats(-30, 0, width=32), min_size=12, max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    width=st.integers(1, 4),
    table=st.lists(LOGPROBS, min_size=4, max_size=4),
    totals=st.lists(st.floats(-20, 0), min_size=4, max_size=4),
    stop_ids=st.sets(st.integers(0, 11), max_size=2),
    num_ended=st.integers(0, 3),
)
def test_the_likeliest_few_of_each_beam_are_enough(
    width: int, table: list[list[float]], totals: list[float], stop_ids: set[int], num_ended: int
) -> None:
    """The `num_needed` likeliest tokens of each beam select the same beams as the whole vocabulary."""
    rules = Rules(width, 9, stop_ids, 1.0, False)
    ended = tuple(Ended((0,), -1.0 - at, -1.0 - at, True) for at in range(min(num_ended, width)))
    running = sorted(totals[:width], reverse=True)
    search = Search(tuple(Beam(member, total) for member, total in enumerate(running)), ended)
    ordered = {
        member: sorted(enumerate(table[member]), key=lambda pair: (-pair[1], pair[0])) for member in range(width)
    }
    found = []
    for count in (12, num_needed(width, len(stop_ids))):
        likeliest = {
            member: ([token for token, _ in own[:count]], [logprob for _, logprob in own[:count]])
            for member, own in ordered.items()
        }
        found.append(choose(search, rules, [[5]] * width, likeliest))
    assert found[0] == found[1]
    if not found[0][0].is_over:
        assert sorted(child.member for child in found[0][1]) == list(range(width))
