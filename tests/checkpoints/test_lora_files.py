"""Adapters in PEFT's format: the tensors that are read equal a merged checkpoint less its base; others are refused.

Merges by the formula; tests/parity/test_live_adapters.py uses PEFT.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints.lora_files import LoraFiles, read_adapter
from jaxllm.checkpoints.weights import read_config
from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from tests.support import adapters
from tests.support.adapters import STEMS, tail
from tests.support.checkpoints import write_checkpoint
from tests.support.layouts import layout_of
from tests.support.lora_deltas import assert_merged
from tests.support.paths import GOLDEN
from tests.support.sound_models import KINDS, write_sound_model
from tests.support.vision_models import write_model

MEDIA = ("clip", "qwen2_5_vl", "qwen3_vl", "gemma3", *KINDS)  # read images or sound
CASES = [*MEDIA, "grouped", "llama", "qwen2", "gemma2", "gpt2", "phi3", "gpt_neox", "opt", "mixtral", "qwen2-moe"]
OTHERS = ("experts", "gate.", "router", "norm", "shared_expert", "embed")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def modules_of(base: Path, stem: str | None = None) -> dict[str, tuple[int, int]]:
    """Return a checkpoint's adaptable modules, each with its outputs and inputs."""
    found = adapters.modules(base, stem)
    return {name: shape for name, shape in found.items() if not any(other in f"{name}." for other in OTHERS)}


def write_base(folder: Path, case: str) -> Path:
    """Write the checkpoint of a case that is not in the repository."""
    if case == "grouped":
        return write_checkpoint(folder)  # 2 key-value heads, copied on four shards
    return write_sound_model(folder, case) if case in KINDS else write_model(folder, case)


def write(folder: Path, modules: dict[str, tuple[int, int]], fields: dict[str, Any], rank_of: Any = None) -> Path:
    """Write random tensors for modules, and the fields of a config, which need not match."""
    draws = np.random.default_rng(len(modules))
    tensors = {}
    for name, (rows, columns) in modules.items():
        rank = fields.get("r", 8) if rank_of is None else rank_of(name)
        tensors[f"base_model.model.{name}.lora_A.weight"] = draws.standard_normal((rank, columns), np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = draws.standard_normal((rows, rank), np.float32)
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", **fields}))
    save_file(tensors, folder / WEIGHTS)
    return folder


def merge(folder: Path, base: Path, adapter: Path, scale_of: Callable[[str], float]) -> Path:
    tensors = load_file(base / "model.safetensors")
    own = {tail(name): values for name, values in load_file(adapter / WEIGHTS).items()}
    for name in modules_of(base):
        a, b = (own.get(f"{tail(name)}.lora_{which}.weight") for which in "AB")
        if a is not None and b is not None:
            delta = scale_of(name) * (b.astype(np.float64) @ a)
            tensors[f"{name}.weight"] = (tensors[f"{name}.weight"] + (delta.T if ".c_" in name else delta)).astype("f4")
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def read(
    folder: Path, base: Path = GOLDEN / "llama", shards: int = 1, max_rank: int = 16, dtype: Any = "float32"
) -> LoraFiles:
    spec, family = read_spec(read_config(base))
    return read_adapter(folder, spec, family, layout_of(shards), max_rank, dtype)


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_what_a_merged_checkpoint_has_more_than_its_base(case: str, tmp_path: Path) -> None:
    chance, base = random.Random(case), GOLDEN / case
    if case in (*MEDIA, "grouped"):
        base = write_base(tmp_path / "base", case)
    kinds = sorted({name.split(".")[-1] for name in modules_of(base)})
    for number, shards in enumerate((1, 2, 2, 4 if case in ("grouped", "gpt2") else 1)):
        modules = modules_of(base, STEMS[number] if case in MEDIA else None)
        own, other = chance.sample(kinds, chance.randint(1, len(kinds))), chance.choice(kinds)
        layer, rank, alpha = chance.randrange(2), chance.randint(1, 9), chance.choice([1, 8, 20.5])
        fields = {"r": rank, "lora_alpha": alpha, "use_rslora": chance.random() < 0.5, "target_modules": own}
        fields |= {"rank_pattern": {other: 3}, "alpha_pattern": {rf".*\.{layer}\.(?!x)\w+(\.\w+)?": 7}, "bias": "none"}

        def rank_of(name: str, rank: int = rank, other: str = other) -> int:
            return 3 if name.endswith(f".{other}") else rank

        def scale_of(name: str, fields: dict[str, Any] = fields, layer: int = layer) -> float:
            divisor = rank_of(name) ** (0.5 if fields["use_rslora"] else 1.0)
            return (7 if f".{layer}." in name else fields["lora_alpha"]) / divisor

        chosen = {name: shape for name, shape in modules.items() if name.split(".")[-1] in own}
        folder = write(tmp_path / str(number), chosen, fields, rank_of)
        merged = merge(tmp_path / f"merged-{number}", base, folder, scale_of)
        files = read(folder, base, shards)
        assert files.rank == max(map(rank_of, chosen))
        assert_merged(files, base, merged, shards)


NAMES = [f"model.layers.{layer}.{end}" for layer in range(2) for end in ("self_attn.q_proj", "mlp.up_proj")]
TARGETS: list[tuple[dict[str, Any], list[int]]] = [
    ({"target_modules": ["q_proj", "up_proj"]}, [0, 1, 2, 3]),
    ({"target_modules": ["attn.q_proj", "_proj", "model"]}, []),
    ({"target_modules": ["self_attn.q_proj", NAMES[3]]}, [0, 2, 3]),
    ({"target_modules": "ALL-linear", "exclude_modules": r".*(mlp|[kvo]_proj)"}, []),
    ({"target_modules": r".*\.q_proj|.*1\.mlp\.up_proj"}, [0, 2, 3]),
    ({"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["up_proj", "layers.0"]}, [0, 2]),
    ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 7]}, [2, 3]),
    ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 0, "layers_pattern": "layers"}, [0, 1]),
    ({"target_modules": ["q_proj", NAMES[1]], "layers_to_transform": 1}, [1, 2]),
    ({"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": ["h", "blocks"]}, []),
]


@pytest.mark.parametrize(("fields", "wanted"), TARGETS)
def test_the_config_says_which_tensors_there_must_be(fields: dict[str, Any], wanted: list[int], tmp_path) -> None:
    """As in PEFT 0.21: the folder is read with exactly the expected modules, not with one more or less."""
    shapes = modules_of(GOLDEN / "llama")
    for number, changed in enumerate([None, *range(4)]):
        chosen = set(wanted) ^ ({changed} - {None})
        folder = write(tmp_path / str(number), {NAMES[each]: shapes[NAMES[each]] for each in chosen}, fields)
        if changed is None and wanted:
            read(folder)
        else:
            with pytest.raises(UserError, match=r"adapter_config.json|lora_[AB]"):
                read(folder)


TOWERS = {
    "clip": ("vision_tower.encoder.layers.0.self_attn.q_proj", "multi_modal_projector.linear_1"),
    "gemma3": ("vision_tower.vision_model.encoder.layers.1.mlp.fc1",),
    "qwen2_5_vl": ("visual.blocks.0.attn.qkv", "visual.merger.mlp.0"),
    "qwen3_vl": ("visual.deepstack_merger_list.0.linear_fc1",),
    "qwen2_audio": ("audio_tower.layers.0.fc1", "multi_modal_projector.linear"),
    "voxtral": ("audio_tower.layers.1.self_attn.out_proj",),
}


@pytest.mark.parametrize("case", MEDIA)
def test_modules_that_read_images_or_sound_are_refused_by_name(case: str, tmp_path: Path) -> None:
    """Test configs that target a tower's modules, which count only if the file has their tensors."""
    base = write_base(tmp_path / "base", case)
    for number, stem in enumerate(STEMS):
        modules = {name: shape for name, shape in modules_of(base, stem).items() if name.endswith("q_proj")}
        begin = re.escape(stem + "layers.")
        fields = {"target_modules": rf"{begin}\d\.self_attn\.q_proj|.*(tower|visual|projector).*", "r": 2}
        plain = write(tmp_path / f"plain {number}", modules, {"target_modules": ["q_proj"], "r": 2})
        assert read(write(tmp_path / f"{number}", modules, fields), base).digest == read(plain, base).digest
        for tower in TOWERS[case]:
            module = ("model." if stem == STEMS[0] else "") + tower
            folder = write(tmp_path / f"{number} {tower}", modules | {module: (4, 4)}, fields)
            with pytest.raises(UserError, match=f"adapts {re.escape(module)}, which reads images or sound"):
                read(folder, base)


def test_types_and_the_digest(tmp_path: Path) -> None:
    shapes = {name: modules_of(GOLDEN / "llama")[name] for name in NAMES}
    fields = {"target_modules": ["q_proj", "up_proj"], "r": 4}
    first = read(write(tmp_path / "first", shapes, fields))
    rounded = read(tmp_path / "first", dtype=ml_dtypes.bfloat16, max_rank=32)
    pair, narrow = first.weights[0]["qkv"], rounded.weights[0]["qkv"]
    assert narrow.b[0].dtype == ml_dtypes.bfloat16 and narrow.a.shape == (3 * 32, 48)
    np.testing.assert_array_equal(narrow.b[0][:, :4], pair.b[0][:, :4].astype(ml_dtypes.bfloat16))
    assert rounded.digest == first.digest
    # Equivalent adapters have the same digest, others have different ones.
    same = {"target_modules": r".*(q|up)_proj", "lora_alpha": 8, "lora_dropout": 0.5, "r": 4, "use_dora": False}
    assert read(write(tmp_path / "same", shapes, same)).digest == first.digest
    assert read(write(tmp_path / "scaled", shapes, fields | {"lora_alpha": 9})).digest != first.digest
    tensors = load_file(tmp_path / "first" / WEIGHTS)
    tensors[next(iter(tensors))][0, 0] += 1
    save_file(tensors, tmp_path / "same" / WEIGHTS)
    assert read(tmp_path / "same").digest != first.digest
    bare = {name.replace("model.layers", "layers"): value for name, value in tensors.items()}
    save_file(
        {name.replace("base_model.", "base_model.model.", 1): value for name, value in bare.items()},
        tmp_path / "same" / WEIGHTS,
    )
    assert read(tmp_path / "same").weights[0].keys() == first.weights[0].keys()  # an adapter of the bare model


def changed_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        old = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(old | fields))

    return change


def changed_tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change_file(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return change_file


def changed_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def linked(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / f"elsewhere-{name}")
        (folder / name).symlink_to(folder.parent / f"elsewhere-{name}")

    return change


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


A, B = (f"base_model.model.{NAMES[0]}.lora_{which}.weight" for which in "AB")
REFUSED_FIELDS: dict[str, Any] = {
    **{"peft_type": "LOHA", "bias": "all", "modules_to_save": ["lm_head"], "use_dora": True, "lora_bias": True},
    **{"use_qalora": True, "trainable_token_indices": [1], "target_parameters": ["x"], "layer_replication": [[0, 2]]},
    **{"alora_invocation_tokens": [5], "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 2}, "new_key": 1},
    **{"kasa_config": {"a": 1}, "velora_config": {"a": 1}, "monteclora_config": {"a": 1}, "megatron_config": {"a": 1}},
    **{"ensure_weight_tying": True, "init_lora_weights": "pissa_niter_4", "r": 0, "lora_alpha": "8", "use_rslora": 3},
    **{"target_modules": None, "exclude_modules": 5, "layers_pattern": ["layers"], "layers_to_transform": "all"},
    **{"rank_pattern": {"q_proj": 2.5}, "alpha_pattern": {"q_proj": float("nan")}},
}
DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    *((name, changed_config(**{name: value})) for name, value in REFUSED_FIELDS.items()),
    *(("init_lora_weights", changed_config(init_lora_weights=name)) for name in ("olora", "corda", "loftq", "lora_ga")),
    ("no expression", changed_config(rank_pattern={"(": 3})),
    ("no expression", changed_config(target_modules="(" * 3000 + ")" * 3000)),
    ("max_lora_rank=17", changed_config(r=17)),
    ("max_lora_rank=9999999", changed_config(rank_pattern={"q_proj": 9999999})),
    (CONFIG, lambda folder: (folder / CONFIG).unlink()),
    (WEIGHTS, lambda folder: (folder / WEIGHTS).unlink()),
    ("JSON", changed_bytes(CONFIG, lambda raw: raw[:-1])),
    ("object", changed_bytes(CONFIG, lambda raw: b"[1]")),
    ("UTF-8", changed_bytes(CONFIG, lambda raw: b"\xff")),
    ("twice", changed_bytes(CONFIG, lambda raw: raw[:-1] + b', "r": 4, "r": 5}')),
    ("truncated", changed_bytes(WEIGHTS, lambda raw: raw[:-1])),
    ("truncated", changed_bytes(WEIGHTS, lambda raw: raw[:100])),
    ("belong to no tensor", changed_bytes(WEIGHTS, lambda raw: raw + b"x")),
    ("header", changed_bytes(WEIGHTS, lambda raw: b"\x80\x04\x95" + raw)),
    ("safetensors first", pickled),
    ("link", linked(CONFIG)),
    ("link", linked(WEIGHTS)),
    ("is missing", changed_tensors(lambda tensors: tensors.pop(A))),
    ("is missing", changed_tensors(lambda tensors: tensors.pop(B))),
    *(
        ("lora_", changed_tensors(lambda tensors, name=name: tensors.update({name: tensors[A]})))
        for name in (
            *(A.replace("lora_A", part) for part in ("lora_magnitude_vector", "lora_C", "lora_A.default", "../lora_A")),
            *(A.replace("layers.0", layer) for layer in ("layers.2", "layers.00", "layers.-1", "layers")),
            A.replace("model.model.layers", "model.layers.layers"),
            *(A.replace("self_attn.q_proj", module) for module in ("self_attn", "input_layernorm", "../q_proj", "\n")),
            "base_model.model.lm_head.lora_A.weight",
            "base_model.model.model.embed_tokens.lora_embedding_A",
            "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight",
            A.removeprefix("base_model."),
        )
    ),
    ("names", changed_tensors(lambda tensors: tensors.update({A.replace("model.model.", "model."): tensors[A]}))),
    ("k_proj", changed_tensors(lambda tensors: tensors.update({A.replace("q_proj", "k_proj"): tensors[A]}))),
    *(
        (text, changed_tensors(lambda tensors, make=make: tensors.update({A: make(tensors[A])})))
        for text, make in (
            ("shape", lambda value: value[:-1]),
            ("shape", lambda value: value[:, :-1]),
            ("shape", lambda value: np.ascontiguousarray(value.T)),
            ("shape", lambda value: value[None]),
            ("shape", lambda value: value[0]),
            ("shape", lambda value: value[:0]),
            ("type I8", lambda value: value.astype(np.int8)),
            ("type I64", lambda value: value.astype(np.int64)),
            ("type BOOL", lambda value: value > 0),
            ("finite", lambda value: np.where(value == value.max(), np.nan, value)),
            ("finite", lambda value: np.where(value == value.max(), -np.inf, value)),
            ("finite", lambda value: value.astype(np.float64) * 1e200),
        )
    ),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_what_is_damaged_is_refused_in_one_line(number: int, tmp_path: Path) -> None:
    shapes = {name: modules_of(GOLDEN / "llama")[name] for name in NAMES}
    said, damage = DAMAGES[number]
    folder = write(tmp_path / "adapter", shapes, {"target_modules": ["q_proj", "up_proj"], "r": 4})
    read(folder)
    damage(folder)
    with pytest.raises(UserError) as caught:
        read(folder)
    message = str(caught.value)
    assert said in message and message.isprintable() and len(message) < 400, message
    assert caught.value.parameter == "lora_request"


def test_models_with_latent_attention_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="latent attention") as caught:
        read(tmp_path, GOLDEN / "deepseek-v2")
    assert caught.value.parameter == "enable_lora"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        folder = write(tmp_path / name, {}, {"target_modules": ["q_proj"]})
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UserError):
            read(folder)
