"""Pooling files of a model folder: sentence-transformers' modules and classification heads; refusals by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm.checkpoints import weights
from jaxllm.checkpoints.pooler_files import most_tokens, read_pooler
from jaxllm.commands.conversion import convert
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.model.pooler import Dense, Pooler
from jaxllm.model.sharding import UNDIVIDED
from tests.parity.pooled_driver import PooledDriver
from tests.support.checkpoints import CONFIG, random_tensors, write_checkpoint

BERT: dict[str, Any] = {
    **{"architectures": ["BertModel"], "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "max_position_embeddings": 32, "vocab_size": 97},
}
POOLING: dict[str, Any] = {"embedding_dimension": 24, "pooling_mode": "mean", "include_prompt": True}
DENSE: dict[str, Any] = {
    "in_features": 24,
    "out_features": 6,
    "activation_function": "torch.nn.modules.activation.Tanh",
}
OLDER = {"word_embedding_dimension": 24, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
KINDS = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.models.Dense",
    "Normalize": "sentence_transformers.models.Normalize",
}


def _write(folder: Path, *modules: tuple[str, dict[str, Any] | None]) -> Path:
    """Write modules.json, with a Transformer first, and each module's folder."""
    folder.mkdir(exist_ok=True)
    listed = [("Transformer", None), *modules]
    paths = [f"{at}_{name.rpartition('.')[2]}" if at else "" for at, (name, _) in enumerate(listed)]
    (folder / "modules.json").write_text(
        json.dumps([
            {"idx": at, "name": str(at), "path": paths[at], "type": KINDS.get(name, name)}
            for at, (name, _) in enumerate(listed)
        ])
    )  # fmt: skip
    for path, (_, settings) in zip(paths, listed, strict=True):
        if settings is not None:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(settings))
    return folder


def _read(folder: Path, config: dict[str, Any] = BERT, runner: str = "auto", **overrides: Any) -> Pooler | None:
    return read_pooler(folder, config, *read_spec(config), runner, overrides)


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        (POOLING, "mean"),
        (POOLING | {"pooling_mode": "lasttoken"}, "last"),
        (POOLING | {"pooling_mode": "cls"}, "cls"),
        ({"embedding_dimension": 24}, "mean"),
        (OLDER, "mean"),
        (OLDER | {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        (OLDER | {"pooling_mode": "cls"}, "cls"),
    ],
)
def test_pooling_in_both_spellings(settings, pooling, tmp_path):
    folder = _write(tmp_path, ("Pooling", settings), ("Normalize", None))
    assert _read(folder) == Pooler(pooling)


def test_products_behind_the_pooling(tmp_path):
    second = {"in_features": 6, "out_features": 3, "bias": False, "activation_function": "torch.nn.Identity"}
    folder = _write(tmp_path, ("Pooling", POOLING), ("Dense", DENSE), ("Dense", second))
    layers = Dense(6, activation="tanh", stem="2_Dense/linear"), Dense(3, bias=False, stem="3_Dense/linear")
    assert _read(folder) == Pooler("mean", layers, normalize=False)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ([("Pooling", POOLING), ("sentence_transformers.models.LayerNorm", {})], "LayerNorm"),
        ([("Pooling", POOLING), ("owner.custom.Dense", DENSE)], "owner.custom.Dense"),
        ([("Pooling", POOLING), ("Normalize", None), ("Dense", DENSE)], "Transformer, Pooling, Normalize, Dense"),
        ([("Dense", DENSE)], "Transformer, Dense"),
        ([], "not Transformer"),
        ([("Pooling", None)], "1_Pooling/config.json"),
        ([("Pooling", POOLING | {"pooling_mode": "max"})], "'max'"),
        ([("Pooling", POOLING | {"pooling_mode": ["cls", "mean"]})], "['cls', 'mean']"),
        ([("Pooling", OLDER | {"pooling_mode_max_tokens": True})], "['max', 'mean']"),
        ([("Pooling", POOLING | {"embedding_dimension": 48})], "embedding_dimension"),
        ([("Pooling", POOLING | {"some_day": 1})], "some_day"),
        ([("Pooling", POOLING), ("Dense", DENSE | {"in_features": 12})], "in_features"),
        ([("Pooling", POOLING), ("Dense", DENSE | {"use_residual": True})], "use_residual"),
        ([("Pooling", POOLING), ("Dense", DENSE | {"activation_function": "os.system"})], "os.system"),
        ([("Pooling", POOLING), ("Dense", DENSE | {"activation_function": "torch.nn.Mish"})], "torch.nn.Mish"),
    ],
)
def test_modules_that_are_not_built_are_refused_by_name(modules, named, tmp_path):
    with pytest.raises(UserError, match=re.escape(named)) as refusal:
        _read(_write(tmp_path, *modules))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "[1]", "[", '[{"path": ""}]'),
        *(
            f'[{{"type": "sentence_transformers.models.Transformer", "path": "{path}"}}]'
            for path in ("0_X", "..", "\\u0000")
        ),
    ],
)
def test_senseless_modules_are_refused(text, tmp_path):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(UserError, match=r"modules\.json"):
        _read(tmp_path)


def test_who_pools(tmp_path):
    plain, modules = (
        tmp_path / "plain",
        _write(tmp_path / "modules", ("Pooling", POOLING | {"embedding_dimension": 32})),
    )
    bare, labels = (
        CONFIG | {"architectures": ["LlamaModel"]},
        CONFIG | {"architectures": ["LlamaForSequenceClassification"]},
    )
    plain.mkdir()
    pools = {
        (name, config["architectures"][0], runner): _read(folder, config, runner) is not None
        for name, folder in (("plain", plain), ("modules", modules))
        for config in (CONFIG, bare, labels)
        for runner in ("auto", "pooling", "generate")
        if config is CONFIG or runner != "generate"
    }
    generating = {("plain", "auto"), ("plain", "generate"), ("modules", "generate")}
    assert {(name, runner) for (name, _, runner), does in pools.items() if not does} == generating
    for config, what in ((BERT, "BertModel does not generate text, it embeds"), (labels, "it classifies")):
        with pytest.raises(UserError, match=what) as refusal:
            _read(plain, config, "generate")
        assert refusal.value.parameter == "runner"


def test_what_the_engine_is_told_comes_before_the_folder(tmp_path):
    folder = _write(tmp_path, ("Pooling", POOLING), ("Normalize", None))
    assert _read(folder, pooling_type="CLS", normalize=False) == Pooler("cls", normalize=False)
    assert _read(folder, pooling_type="LAST", is_matryoshka=True) == Pooler("last", dimensions=())
    for wrong in ({"pooling_type": "STEP"}, {"normalize": "yes"}, {"steps": 1}, "MEAN"):
        with pytest.raises(UserError, match=r"^pooler_config"):
            EngineConfig(model="m", pooler_config=wrong)


def test_what_would_say_nothing_is_refused_or_replaced(tmp_path):
    llama = CONFIG | {"architectures": ["LlamaModel"]}
    with pytest.raises(UserError, match=r"^The first token of LlamaModel sees nothing but itself"):
        _read(tmp_path, llama, pooling_type="CLS")
    with pytest.raises(UserError, match="generates text: leave pooler_config out"):
        _read(tmp_path, CONFIG | {"architectures": ["LlamaForCausalLM"]}, normalize=True)
    score = BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "good"}}
    one = _read(tmp_path, score | {"problem_type": "single_label_classification"})
    assert one is not None and one.activation == "sigmoid"
    with pytest.raises(UserError, match="problem_type 'other' is none of"):
        _read(tmp_path, score | {"problem_type": "other"})


@pytest.mark.parametrize(
    ("keys", "dimensions"),
    [
        ({}, None),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": True}, ()),
        ({"is_matryoshka": True, "matryoshka_dimensions": [24, 8]}, (8, 24)),
        ({"matryoshka_dimensions": [25]}, UserError),
        ({"matryoshka_dimensions": 8}, UserError),
        ({"is_matryoshka": "yes"}, UserError),
    ],
)
def test_lengths_that_an_embedding_may_be_cut_to(keys, dimensions, tmp_path):
    if dimensions is UserError:
        with pytest.raises(UserError, match=next(iter(keys))):
            _read(tmp_path, BERT | keys)
    else:
        assert _read(tmp_path, BERT | keys) == Pooler("cls", dimensions=dimensions)


@pytest.mark.parametrize("labels", [[], {}, {"1": "a"}, {"0": 1}, {"0": "\ud800"}, 3])
def test_senseless_labels_are_refused(labels, tmp_path):
    with pytest.raises(UserError, match="id2label"):
        _read(tmp_path, BERT | {"architectures": ["BertForSequenceClassification"], "id2label": labels})


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, None),
        (
            {"sentence_bert_config.json": {"max_seq_length": 256}, "tokenizer_config.json": {"model_max_length": 512}},
            256,
        ),
        ({"sentence_bert_config.json": {}, "tokenizer_config.json": {"model_max_length": 512}}, 512),
        ({"sentence_bert_config.json": {"max_seq_length": None}}, None),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, 2**31),
    ],
)
def test_where_sentence_transformers_cuts_texts(files, most, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert most_tokens(tmp_path) is None
    assert most_tokens(_write(tmp_path, ("Pooling", POOLING))) == most


def test_products_are_computed_from_their_own_files_and_converted(tmp_path):
    """The folder consists of symlinks, as in the hub's cache."""
    folder = write_checkpoint(tmp_path / "snapshots" / "0123", BERT)
    _write(folder, ("Pooling", POOLING), ("Dense", DENSE))
    rng = np.random.default_rng(3)
    product = {
        "linear.weight": rng.standard_normal((6, 24), np.float32),
        "linear.bias": rng.standard_normal(6, np.float32),
    }
    save_file(product, folder / "2_Dense/model.safetensors")
    blob = tmp_path / "blobs" / "4567"
    blob.parent.mkdir()
    (folder / "2_Dense/model.safetensors").rename(blob)
    (folder / "2_Dense/model.safetensors").symlink_to(blob)
    tokens = [3, 14, 15, 92]
    hidden, result = PooledDriver(folder).run(tokens)
    expected = np.tanh(product["linear.weight"] @ hidden.mean(0) + product["linear.bias"])
    np.testing.assert_allclose(result, expected, atol=1e-5)
    target = convert(str(folder), tmp_path / "converted")
    np.testing.assert_array_equal(PooledDriver(target).run(tokens)[1], result)
    save_file({"linear.weight": product["linear.weight"]}, blob)
    with pytest.raises(UserError, match=r"2_Dense/linear\.bias"):
        PooledDriver(folder)
    (folder / "2_Dense/model.safetensors").unlink()
    (folder / "2_Dense/pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"2_Dense holds neither .*\(pytorch_model\.bin is never read"):
        PooledDriver(folder)


def test_a_checkpoint_of_a_model_that_generates_pools_without_its_head(tmp_path):
    folder = write_checkpoint(tmp_path / "model", CONFIG)
    bare = {name.removeprefix("model."): value for name, value in random_tensors(CONFIG).items()}
    del bare["lm_head.weight"]
    other = write_checkpoint(tmp_path / "bare", CONFIG | {"architectures": ["LlamaModel"]}, bare)
    results = [PooledDriver(one, runner="pooling").run([5, 6, 7])[1] for one in (folder, other)]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"surely.unknown": np.zeros(3, np.float32)}, "surely.unknown"),
        ({"embeddings.LayerNorm.gamma": np.zeros(3, np.float32)}, "has shape"),
    ],
)
def test_tensors_of_heads_and_buffers_are_ignored_and_others_refused(change, named, tmp_path):
    tensors = random_tensors(BERT)
    for part in ("weight", "bias"):  # as in the oldest checkpoints
        old = "gamma" if part == "weight" else "beta"
        tensors[f"bert.embeddings.LayerNorm.{old}"] = tensors.pop(f"bert.embeddings.LayerNorm.{part}")
    extra = {"bert.embeddings.position_ids": np.arange(32), "cls.predictions.bias": np.zeros(97, np.float32)}
    extra["bert.pooler.dense.weight"] = np.zeros((24, 24), np.float32)
    folder = write_checkpoint(tmp_path, BERT, tensors | extra)
    spec, family = read_spec(BERT)
    weights.check(folder, spec, family, UNDIVIDED, Pooler("cls"))
    write_checkpoint(tmp_path, BERT, tensors | {f"bert.{name}": value for name, value in change.items()})
    with pytest.raises(UserError, match=named):
        weights.check(folder, spec, family, UNDIVIDED, Pooler("cls"))
