"""Determine a model's pooling: a classifier head, or sentence-transformers modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxllm.checkpoints.files import read_object, read_objects
from jaxllm.errors import UserError
from jaxllm.families.config_fields import Fields
from jaxllm.families.family import Family
from jaxllm.families.pooled_heads import OF_DECODERS
from jaxllm.model.pooler import Activation, Dense, Pooler, Pooling
from jaxllm.model.spec import Spec

MODULES = "modules.json"
GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_CLASSIFYING = tuple(OF_DECODERS)
_POOLINGS: dict[str, Pooling] = {"cls": "cls", "lasttoken": "last", "mean": "mean"}
_OLDER_POOLINGS = {  # before sentence-transformers 5
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: dict[str, Activation | None] = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_OF_LABELS = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_OF_PROBLEMS = {"regression": "none", "single_label_classification": "softmax", "multi_label_classification": "sigmoid"}


def read_pooler(
    folder: Path,
    config: Mapping[str, Any],
    spec: Spec,
    family: Family,
    runner: str = "auto",
    overrides: Mapping[str, Any] | None = None,
) -> Pooler | None:
    """Return how a model pools, None if it generates text.

    `runner` "auto" decides by architecture; generative models pool if the folder has sentence-transformers modules.
    `overrides` may set "pooling_type" and "normalize".
    """
    architecture = next(name for name in config["architectures"] if name in family.architectures)
    modules = _modules(folder)
    generates = architecture.endswith(GENERATING) and spec.is_causal
    if runner == "generate" and not generates:
        what = "classifies" if architecture.endswith(_CLASSIFYING) else "embeds"
        raise UserError(f"{architecture} does not generate text, it {what}: leave runner out.", "runner")
    if generates and (runner == "generate" or (runner == "auto" and modules is None)):
        if overrides:
            raise UserError(f"{architecture} generates text: leave pooler_config out, or set runner.", "pooler_config")
        return None
    if architecture.endswith(_CLASSIFYING):
        pooler = _classifier(folder, config, spec, family, architecture)
    elif modules is None:
        pooler = Pooler("last" if family.architectures[0].endswith(GENERATING) else "cls")
    else:
        pooler = _by_modules(folder, modules, spec.width)
    if not pooler.labels:
        pooler = replace(pooler, dimensions=_dimensions(config, pooler.size(spec.width)))
    pooler = _overridden(pooler, overrides or {})
    if pooler.pooling == "cls" and spec.is_causal:
        raise UserError(
            f"The first token of {architecture} sees nothing but itself: pool the last one, or the mean.",
            "pooler_config",
        )
    return pooler


def most_tokens(folder: Path) -> int | None:
    """Return the length to which sentence-transformers truncates texts; None if not stated."""
    if not (folder / MODULES).is_file():
        return None
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        fields = Fields(read_object(folder, name) or {}, where=name)
        if fields.has(key):
            return int(min(fields.positive(key), 2**31))  # transformers writes 1e30 for unlimited
    return None


def _classifier(folder: Path, config: Mapping[str, Any], spec: Spec, family: Family, architecture: str) -> Pooler:
    fields = Fields(config)
    labels = _labels(fields)
    if architecture.endswith("ForRewardModel"):  # one raw number, regardless of labels
        labels, activation = labels[:1], "none"
    else:
        activation = _activation_of_labels(folder, fields, len(labels))
    read = family.head or next(read for ending, read in OF_DECODERS.items() if architecture.endswith(ending))
    head = read(fields, spec.width, len(labels))
    assert isinstance(head, Pooler)
    return replace(head, labels=labels, activation=activation, normalize=False)


def _labels(fields: Fields) -> tuple[str, ...]:
    named = fields.raw("id2label")
    if named is None:
        return tuple(f"LABEL_{number}" for number in range(fields.size("num_labels", 2, most=2**20)))
    try:
        ordered = [named[str(number)] for number in range(len(named))]
    except (KeyError, TypeError):
        raise UserError("config.json: id2label must name a label for each number from 0 on.", "id2label") from None
    if not ordered or not all(isinstance(label, str) and label.isprintable() for label in ordered):
        raise UserError("config.json: id2label must have texts of printable characters, one at least.", "id2label")
    return tuple(ordered)


def _activation_of_labels(folder: Path, fields: Fields, labels: int) -> Any:
    saved = Fields(read_object(folder, "config_sentence_transformers.json") or {})
    for where, key in (
        (saved, "activation_fn"),
        (fields.inner("sentence_transformers"), "activation_fn"),
        (fields, "sbert_ce_default_activation_function"),
    ):
        if where.has(key):
            found = _named(where.take(key, str), _OF_LABELS, key)
            break
    else:
        problem = fields.take("problem_type", str, "")
        if problem and problem not in _OF_PROBLEMS:
            known = ", ".join(_OF_PROBLEMS)
            raise UserError(f"config.json: problem_type {problem!r:.80} is none of {known}.", "problem_type")
        found = _OF_PROBLEMS.get(problem, "softmax")
    return "sigmoid" if labels == 1 and found == "softmax" else found  # softmax of one number is 1


def _named(path: str, known: Mapping[str, Any], key: str) -> Any:
    """Look up a torch class by path without importing it."""
    name = path.rpartition(".")[2]
    if not path.startswith("torch.nn.") or name not in known:
        raise UserError(f"{key} {path!r:.80} is not supported, only torch's {', '.join(known)}.", key)
    return known[name]


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    listed = read_objects(folder, MODULES)
    if listed is None:
        return None
    fields = [Fields(one, where=MODULES) for one in listed]
    return [(one.take("type", str), one.take("path", str, "")) for one in fields]


def _by_modules(folder: Path, modules: list[tuple[str, str]], width: int) -> Pooler:
    kinds = [kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind for kind, _ in modules]
    for (kind, path), name in zip(modules, kinds, strict=True):
        if name not in ("Transformer", "Pooling", "Dense", "Normalize"):
            raise UserError(f"{MODULES}: the module {kind!r:.80} is not supported.", "model")
        if path and not re.fullmatch(r"\w[\w.-]*", path, re.ASCII):
            raise UserError(f"{MODULES}: {path!a:.80} is not the name of a folder within the model's.", "model")
        if name == "Transformer" and path:
            raise UserError(f"{MODULES}: the model must lie in the folder itself, not in {path}.", "model")
    dense = kinds[2:-1] if kinds[-1:] == ["Normalize"] else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(dense) - {"Dense"}:
        raise UserError(
            f"{MODULES}: only Transformer, Pooling, any number of Dense and perhaps Normalize, in this order, are "
            f"supported, not {', '.join(kinds)}.",
            "model",
        )
    layers: list[Dense] = []
    pooling = _pooling(_config_of(folder, modules[1][1]), width)
    for _, path in modules[2 : 2 + len(dense)]:
        layers.append(_dense(_config_of(folder, path), path, layers[-1].size if layers else width))
    return Pooler(pooling, tuple(layers), normalize=kinds[-1] == "Normalize")


def _config_of(folder: Path, path: str) -> Fields:
    name = f"{path}/config.json"
    read = read_object(folder, name)
    if read is None:
        raise UserError(f"{folder} has no {name}, though {MODULES} says so.", "model")
    return Fields(read, where=name)


def _pooling(fields: Fields, width: int) -> Pooling:
    for key in ("embedding_dimension", "word_embedding_dimension"):
        fields.only(key, width)
    fields.raw("include_prompt")  # prepended by sentence-transformers
    older = [mode for key, mode in _OLDER_POOLINGS.items() if fields.take(key, bool, False)]
    mode = fields.raw("pooling_mode") or (older[0] if len(older) == 1 else older or "mean")
    fields.finish()
    if not isinstance(mode, str) or mode not in _POOLINGS:
        raise UserError(f"pooling_mode {mode!r:.80} is not supported, only {', '.join(_POOLINGS)}.", "pooling_mode")
    return _POOLINGS[mode]


def _dense(fields: Fields, path: str, width: int) -> Dense:
    fields.only("in_features", width)
    fields.only("use_residual", False)
    for key in ("module_input_name", "module_output_name"):
        fields.only(key, "sentence_embedding")
    key = "activation_function"
    dense = Dense(
        fields.size("out_features"),
        fields.take("bias", bool, True),
        _named(fields.take(key, str, "torch.nn.Tanh"), _ACTIVATIONS, key),
        stem=f"{path}/linear",
    )
    fields.finish()
    return dense


def _dimensions(config: Mapping[str, Any], size: int) -> tuple[int, ...] | None:
    """Return the lengths to which a config, by vLLM's keys, allows embeddings to be cut: (): any; None: not."""
    listed = config.get("matryoshka_dimensions")
    if listed is None:
        return () if Fields(config).take("is_matryoshka", bool, False) else None
    if not isinstance(listed, list) or not all(type(one) is int and 1 <= one <= size for one in listed):
        raise UserError(
            f"config.json: matryoshka_dimensions must be numbers from 1 to {size}.", "matryoshka_dimensions"
        )
    return tuple(sorted(listed))


def _overridden(pooler: Pooler, overrides: Mapping[str, Any]) -> Pooler:
    kind, normalize, is_matryoshka = map(overrides.get, ("pooling_type", "normalize", "is_matryoshka"))
    pooler = pooler if kind is None else replace(pooler, pooling=kind.lower())
    pooler = pooler if is_matryoshka is None else replace(pooler, dimensions=() if is_matryoshka else None)
    return pooler if normalize is None else replace(pooler, normalize=normalize)
