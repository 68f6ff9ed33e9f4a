"""Each pair in the table of refused combinations is refused by name, and all other pairs work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import combinations as pairs_of
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, BeamSearchParams, LLMEngine, LoRARequest, SamplingParams, UserError, combinations
from jaxllm.combinations import REFUSED
from jaxllm.config import EngineConfig
from jaxllm.engine.features.table import FEATURES
from jaxllm.fleet.fleet_llm import FleetLLM
from jaxllm.fleet.offline import FleetEngine
from jaxllm.outputs import CompletionOutput
from jaxllm.setup.model_setup import prepare
from jaxllm_server.launch import new_server
from jaxllm_server.shared.options import ServerOptions
from tests.support.adapters import write_adapter
from tests.support.paths import GOLDEN, GOLDEN_POOLED, ROOT, STORIES

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 64, "precompile": "covering"}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2}
# The engine arguments for each setting and each property in the table.
PRODUCER = {"kv_role": "kv_producer"}
SETTINGS: dict[str, dict[str, Any]] = {
    "speculative_config": {"speculative_config": DRAFTS},
    "enable_lora": {"enable_lora": True},
    "deterministic": {"deterministic": True},
    "kv_transfer_config": {"kv_transfer_config": PRODUCER},
    "enable_expert_parallel": {"enable_expert_parallel": True, "tensor_parallel_size": 2},
    "kv_cache_dtype": {"kv_cache_dtype": "int8"},
    "quantization": {"quantization": "int8"},
}
MODELS: dict[str, Path] = {
    combinations.POOLS: GOLDEN_POOLED / "qwen3-labels",
    combinations.WHOLE_PROMPTS: GOLDEN_POOLED / "bert-labels",
    combinations.LATENT: GOLDEN / "deepseek-v2",
    combinations.EXPERTS: GOLDEN / "mixtral",
    combinations.NO_EXPERTS: STORIES,
}
IMPLIED = {
    combinations.POOLS: [combinations.NO_EXPERTS],
    combinations.WHOLE_PROMPTS: [combinations.POOLS, combinations.NO_EXPERTS],
    combinations.LATENT: [combinations.EXPERTS],
}


def refused(asked: str, *properties: str) -> bool:
    return any(one.asked == asked and one.other in properties for one in REFUSED)


@pytest.mark.parametrize("other", MODELS)
@pytest.mark.parametrize("asked", SETTINGS)
def test_a_setting_is_refused_with_the_models_of_the_table_and_no_others(asked: str, other: str) -> None:
    config = EngineConfig(model=str(MODELS[other]), **SETTINGS[asked])
    if not refused(asked, other, *IMPLIED.get(other, [])):
        prepare(config)
        return
    with pytest.raises(UserError, match=f"^{asked} is not supported with ") as error:
        prepare(config)
    assert error.value.parameter == asked and "\n" not in str(error.value)


def _record() -> object:
    return new_server(EngineConfig(model=str(STORIES), data_parallel_size=2), ServerOptions(record="f"))


def _ask_adapter() -> object:
    engine: Any = object.__new__(FleetEngine)
    return engine.model_of(LoRARequest("a", 1, "a"))


@pytest.mark.parametrize(
    ("asked", "ask"),
    [
        ("enable_lora", lambda: FleetLLM(str(STORIES), data_parallel_size=2, enable_lora=True)),
        ("enable_kv_cache_events", lambda: FleetLLM(str(STORIES), data_parallel_size=2, enable_kv_cache_events=True)),
        ("enable_sleep_mode", lambda: FleetLLM(str(STORIES), data_parallel_size=2, enable_sleep_mode=True)),
        ("record", _record),
        ("kv_transfer_config", lambda: FleetLLM(str(STORIES), data_parallel_size=2, kv_transfer_config=PRODUCER)),
        ("lora_request", _ask_adapter),
    ],
)
def test_a_fleet_refuses_what_the_table_has(asked: str, ask: Callable[[], object]) -> None:
    assert refused(asked, combinations.FLEET)
    with pytest.raises(UserError, match=re.escape(str(combinations.refusal(asked, combinations.FLEET)))):
        ask()


# Requests that use a feature, and whether their outputs show it.
REGEX = "[a-z]{4}"
USES: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "grammars": ({"structured_outputs": {"regex": REGEX}}, lambda out: bool(re.fullmatch(REGEX, out.outputs[0].text))),
    "scoring": ({"prompt_logprobs": 1}, lambda out: len(out.prompt_logprobs) == len(out.prompt_token_ids)),
    "adapters": ({}, lambda out: out.outputs[0].finish_reason in ("stop", "length")),
    "drafts": ({}, lambda out: out.outputs[0].finish_reason in ("stop", "length")),
    "transfer": ({}, lambda out: out.kv_transfer_params["do_remote_prefill"]),
    "beams": ({}, lambda out: len(out.outputs) == 2 and out.outputs[0].score >= out.outputs[1].score),
    "weights": ({}, lambda out: all(_is_of_two_versions(own) for own in out.outputs)),
}


def _is_of_two_versions(own: CompletionOutput) -> bool:
    runs = own.weight_versions or []
    return len(runs) == 2 and sum(count for _, count in runs) == len(own.token_ids)


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool, bool], LLM]]:
    """Provide engines with adapters, with and without drafts, that transfer blocks or change weights."""
    write_adapter(tmp_path_factory.getbasetemp() / "pairs", STORIES)
    with ExitStack() as stack:

        @cache
        def start(drafts: bool, transfers: bool) -> LLM:
            return stack.enter_context(
                LLM(
                    str(STORIES),
                    enable_lora=True,
                    speculative_config=DRAFTS if drafts else None,
                    **{"kv_transfer_config": PRODUCER} if transfers else {"enable_sleep_mode": True},
                    **SIZES,
                )
            )

        yield start


def test_the_pairs_are_those_of_all_features() -> None:
    others = {"pooling", "media", "sources", "speech"}  # of other models, which have tests of their own
    assert USES.keys() | others == {*FEATURES}


def _marks(pair: tuple[str, str]) -> list[pytest.MarkDecorator]:
    """Leave pairs that need a second, third and fourth engine to CI."""
    return [pytest.mark.ci] if {*pair} & {"drafts", "transfer"} else []


@pytest.mark.parametrize(
    ("one", "other"), [pytest.param(*pair, marks=_marks(pair), id="-".join(pair)) for pair in pairs_of(USES, 2)]
)
def test_a_pair_of_features_works_or_is_refused(
    one: str, other: str, llms: Callable[[bool, bool], LLM], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pair = {one, other}
    if pair == {"weights", "transfer"}:
        message = str(combinations.refusal("enable_sleep_mode", "kv_transfer_config"))
        with pytest.raises(UserError, match=re.escape(message)):
            LLM(str(STORIES), enable_sleep_mode=True, kv_transfer_config=PRODUCER, **SIZES)
        return
    engine = llms("drafts" in pair, "transfer" in pair).engine
    adapter = LoRARequest("pairs", 1, str(tmp_path_factory.getbasetemp() / "pairs")) if "adapters" in pair else None
    params: Any = SamplingParams(temperature=0.0, max_tokens=8, **USES[one][0], **USES[other][0])
    if "beams" in pair:
        params = BeamSearchParams(2, 8)
        if pair & {"grammars", "scoring"}:
            with pytest.raises(TypeError, match="unexpected keyword"):
                BeamSearchParams(2, 8, **USES[one][0], **USES[other][0])
            return
    if pair == {"beams", "drafts"}:
        with pytest.raises(UserError, match=re.escape(str(combinations.refusal("beam_width", "speculative_config")))):
            engine.add_request("1", "Once upon", params)
        return
    transfer = {"do_remote_decode": True} if "transfer" in pair else None
    if pair == {"beams", "transfer"}:
        with pytest.raises(UserError, match="needs a request with SamplingParams"):
            engine.add_request("1", "Once upon", params, kv_transfer_params=transfer)
        return
    text = "Once upon a time" * (1 if transfer is None else 12)  # a transfer is of full blocks
    before = engine.metrics.generated_tokens
    engine.add_request("1", text, params, lora_request=adapter, kv_transfer_params=transfer)
    outputs = []
    if "weights" in pair:
        assert isinstance(engine, LLMEngine)
        for _ in range(8):  # a few tokens, if not all are forced
            outputs += [] if engine.metrics.generated_tokens - before > 2 else engine.step()
        engine.sleep(1, mode="keep")
        engine.update_weights(STORIES)
        engine.wake_up()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert all(shows(outputs[-1]) for shows in (USES[one][1], USES[other][1]))


def test_the_documents_have_the_table() -> None:
    assert combinations.as_markdown() in (ROOT / "docs" / "limits.md").read_text()
    assert len({(one.asked, one.other) for one in REFUSED}) == len(REFUSED)
