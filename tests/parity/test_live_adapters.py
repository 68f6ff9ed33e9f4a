"""Adapters written by PEFT change each weight as PEFT's merge does. Needs torch and peft: `make parity`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.checkpoints.lora_files import read_adapter
from jaxllm.checkpoints.weights import read_config
from jaxllm.embedded import ADAPTERS, MODEL_DIR
from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from tests.parity import make_golden, make_images, make_sounds
from tests.parity.media_peer import MediaPeer, check_outputs
from tests.support.layouts import layout_of
from tests.support.lora_deltas import assert_merged
from tests.support.sizes import SLOTS
from tests.support.sound_models import KINDS, write_sound_model
from tests.support.sound_models import prompts as sound_prompts
from tests.support.vision_models import ANY_SIZE, write_model
from tests.support.vision_models import prompts as image_prompts

pytestmark = pytest.mark.parity

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
MODULES = {
    "llama": ATTENTION + MLP,
    "qwen2": ATTENTION + MLP,
    "gemma2": ATTENTION + MLP,
    "gpt2": ("attn.c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h"),
    "mixtral": ATTENTION,
}
RANKS = (1, 8, 64)


def _settings(case: str) -> list[dict[str, Any]]:
    """Return arguments of PEFT's LoraConfig, with every option at least once."""
    modules = MODULES[case]
    first, last = modules[0], modules[-1]
    ends = "|".join(module.replace(".", r"\.") for module in modules)
    chosen: list[dict[str, Any]] = [{"target_modules": list(each)} for each in itertools.combinations(modules, 1)]
    chosen += [{"target_modules": list(each)} for each in itertools.pairwise(modules)]
    chosen += [
        {"target_modules": rf".*\.1\..*({ends})"},
        {"target_modules": rf"^(?!.*\.0\.)[\w.]+?\.(?:{ends})$", "use_rslora": True, "lora_alpha": 3},
        {"target_modules": list(modules), "layers_to_transform": [1]},
        {"target_modules": list(modules), "layers_to_transform": 0, "layers_pattern": ["h", "layers"]},
        {
            "target_modules": list(modules),
            "exclude_modules": [first],
            "rank_pattern": {rf".*\.0\..*{last}": 5, last: 3},  # the first match is used; PEFT writes them sorted
            "alpha_pattern": {r"1\.[a-z_]+\." + modules[1].split(".")[-1]: 40, last: 2},
        },
        {
            "target_modules": list(modules),
            "exclude_modules": r".*\.0\..*",
            "use_rslora": True,
            "rank_pattern": {last: 2},
        },
    ]
    if case != "mixtral":  # its experts would get some, too
        chosen.append({"target_modules": "all-linear"})
    return chosen


@pytest.fixture(scope="module", params=MODULES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_golden.make_model(request.param, 5)
    make_golden.save(model, folder)
    return request.param, model, folder


def test_what_is_read_is_what_peft_merges(base, tmp_path):
    import peft
    import torch

    case, _, folder = base
    spec, family = read_spec(read_config(folder))
    for number, settings in enumerate(_settings(case)):
        torch.manual_seed(number)
        rank, own = RANKS[number % len(RANKS)], tmp_path / str(number)
        # Random B too, with deltas as large as the weights.
        given = {"r": rank, "lora_alpha": 8, "init_lora_weights": False, "fan_in_fan_out": case == "gpt2"} | settings
        model = peft.get_peft_model(make_golden.load(folder), peft.LoraConfig(task_type="CAUSAL_LM", **given))
        model.save_pretrained(own)
        make_golden.save(model.merge_and_unload(), tmp_path / f"merged-{number}")
        for shards in (1, 2):
            read = read_adapter(own, spec, family, layout_of(shards), 64, "float32")
            assert read.rank == max([rank, *given.get("rank_pattern", {}).values()])
            assert_merged(read, folder, tmp_path / f"merged-{number}", shards)


def _write_media(folder: Path, kind: str) -> Path:
    return write_sound_model(folder, kind) if kind in KINDS else write_model(folder, kind)


def _trained(folder: Path, base: Path, kind: str, number: int, **settings: Any) -> MediaPeer:
    """Write a random adapter, and return the model with it."""
    import peft
    import torch

    torch.manual_seed(number)
    peer = make_sounds.Peer(base, kind) if kind in KINDS else make_images.Peer(base)
    given = {"r": 8, "lora_alpha": 4, "init_lora_weights": False, **settings}
    peer.model = peft.get_peft_model(peer.model, peft.LoraConfig(task_type="CAUSAL_LM", **given))
    peer.model.save_pretrained(folder)
    return peer


TOWER = ".*(tower|visual|projector).*"
MEDIA_SETTINGS: tuple[dict[str, Any], ...] = (
    {"target_modules": [*ATTENTION, *MLP], "exclude_modules": TOWER, "rank_pattern": {"up_proj": 3}},
    {"target_modules": r".*language_model.*\.1\.(self_attn|mlp)\..*_proj"},
)


@pytest.mark.parametrize("kind", ("clip", "gemma3", *ANY_SIZE, *KINDS))
def test_adapters_of_models_that_read_images_or_sound_are_those_of_peft(kind, tmp_path):
    """Test the merged weights, and the refusal of a tower's tensors."""
    base = _write_media(tmp_path / "base", kind)
    spec, family = read_spec(read_config(base))
    for number, settings in enumerate(MEDIA_SETTINGS):
        own, merged = tmp_path / f"a{number}", tmp_path / f"merged-{number}"
        _trained(own, base, kind, number, **settings).model.merge_and_unload().save_pretrained(merged)
        for shards in (1, 2):
            assert_merged(read_adapter(own, spec, family, layout_of(shards), 8, "float32"), base, merged, shards)
    _trained(tmp_path / "all", base, kind, 2, target_modules="all-linear")
    with pytest.raises(UserError, match=rf"adapts model\.{TOWER}, which reads images or sound"):
        read_adapter(tmp_path / "all", spec, family, layout_of(1), 8, "float32")


@pytest.mark.parametrize(
    "kind",
    ("qwen2_5_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("clip", "gemma3", "qwen3_vl", *KINDS))),
)
def test_adapters_with_images_or_sound_in_one_batch_equal_transformers(kind, tmp_path):
    """Test each prompt with two adapters and without one."""
    base = _write_media(tmp_path / "base", kind)
    peers = [make_sounds.Peer(base, kind) if kind in KINDS else make_images.Peer(base)]
    requests: list[LoRARequest | None] = [None]
    for number, settings in enumerate(MEDIA_SETTINGS, 1):
        peer = _trained(tmp_path / f"a{number}", base, kind, number, **settings)
        peer.model = peer.model.merge_and_unload().eval()
        peers.append(peer)
        requests.append(LoRARequest(f"a{number}", number, str(tmp_path / f"a{number}")))
    prompts = sound_prompts(kind) if kind in KINDS else image_prompts(kind)
    chosen = [(row + row // len(prompts)) % 3 for row in range(3 * len(prompts))]
    cases = [(peers[own], prompt) for own, prompt in zip(chosen, prompts * 3, strict=True)]
    limits = {"limit_mm_per_prompt": {"audio": 3} if kind in KINDS else {"image": 4}}
    with LLM(str(base), enable_lora=True, max_loras=2, max_logprobs=-1, **limits, **SLOTS) as llm:
        check_outputs(llm, cases, [requests[own] for own in chosen])


@pytest.mark.parametrize("case", ("llama", "qwen2", "gemma2", "gpt2", "phi3"))
def test_rows_of_one_batch_are_those_of_merged_models(case, tmp_path):
    """Eight adapters of three ranks and plain rows run together; each log-probability is the merged model's."""
    import peft
    import torch

    base = make_golden.make_model(case, 3)
    make_golden.save(base, tmp_path / "base")
    merged, requests = [base.eval()], [None]
    for number in range(1, 9):
        torch.manual_seed(number)
        targets = "all-linear" if number % 3 == 0 else list(MODULES[case][number % 4 :])
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=RANKS[number % 3],
            lora_alpha=2,
            init_lora_weights=False,
            target_modules=targets,
            fan_in_fan_out=case == "gpt2",
        )
        model = peft.get_peft_model(make_golden.load(tmp_path / "base"), config)
        model.save_pretrained(tmp_path / f"a{number}")
        merged.append(model.merge_and_unload().eval())
        requests.append(LoRARequest(f"a{number}", number, str(tmp_path / f"a{number}")))
    prompts = [[5 + row, 9, 7 + row, 6] * (1 + row % 4) for row in range(18)]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=-1, ignore_eos=True)
    settings = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 64, "max_logprobs": -1, "block_size": 4}
    small = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "skip_tokenizer_init": True, "precompile": "covering"}
    with LLM(str(tmp_path / "base"), **settings, **small) as llm:
        own = [requests[row % 9] for row in range(18)]
        outputs = llm.generate(prompts, params, lora_request=own, use_tqdm=False)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = merged[row % 9](torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        due = torch.log_softmax(logits.double(), -1).numpy()
        tables = output.outputs[0].logprobs or []
        found = np.array([[table[token].logprob for token in range(due.shape[1])] for table in tables])
        np.testing.assert_allclose(found, due, rtol=0, atol=1e-4)
        assert tokens == due.argmax(-1).tolist()


def test_the_adapter_that_ships_is_what_peft_reads(tmp_path):
    import peft

    spec, family = read_spec(read_config(MODEL_DIR))
    model = peft.PeftModel.from_pretrained(make_golden.load(MODEL_DIR), str(ADAPTERS["pirate"]))
    make_golden.save(model.merge_and_unload(), tmp_path)
    assert_merged(read_adapter(ADAPTERS["pirate"], spec, family, layout_of(2), 8, "float32"), MODEL_DIR, tmp_path, 2)
