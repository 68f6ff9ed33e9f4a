"""Random small models of `transformers` that embed or classify, and their outputs; some are golden files.

Needs torch (`pip install -e ".[parity]"`): `python -m tests.parity.make_pooled [case ...]` writes tests/golden_pooled.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.make_golden import SEED
from tests.support.paths import GOLDEN_POOLED

LENGTHS = (1, 2, 17, 40)
DECODER: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128},
}
_PLAIN = {"vocab_size": 128, "max_position_embeddings": 64, "hidden_size": 48, "intermediate_size": 64}
_ENCODER: dict[str, Any] = _PLAIN | {"num_hidden_layers": 2, "num_attention_heads": 6}
_DISTILBERT = {
    **{"vocab_size": 128, "dim": 48, "hidden_dim": 64, "n_layers": 2, "n_heads": 6},
    "max_position_embeddings": 64,
}
_MODERNBERT = _ENCODER | {
    **{"num_hidden_layers": 4, "local_attention": 10, "global_attn_every_n_layers": 3, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
}
_GEMMA3 = DECODER | {
    **{"head_dim": 12, "sliding_window": 10, "sliding_window_pattern": 2, "query_pre_attn_scalar": 3},
    "use_bidirectional_attention": True,
}
_PADDED = DECODER | {"pad_token_id": 0}


# The architecture, and arguments of its transformers configuration.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", _ENCODER),
    "bert-labels": ("BertForSequenceClassification", _ENCODER | {"num_labels": 3}),
    "bert-masked": ("BertForMaskedLM", _ENCODER | {"hidden_act": "gelu_new"}),
    "bert-pretraining": ("BertForPreTraining", _ENCODER | {"hidden_act": "relu"}),
    "roberta": ("RobertaModel", _ENCODER | {"type_vocab_size": 1}),
    "roberta-labels": ("RobertaForSequenceClassification", _ENCODER | {"num_labels": 1}),
    "roberta-masked": ("RobertaForMaskedLM", _ENCODER),
    "xlm-roberta": ("XLMRobertaModel", _ENCODER | {"type_vocab_size": 1}),
    "xlm-roberta-labels": ("XLMRobertaForSequenceClassification", _ENCODER | {"num_labels": 1}),
    "xlm-roberta-masked": ("XLMRobertaForMaskedLM", _ENCODER),
    "distilbert": ("DistilBertModel", _DISTILBERT),
    "distilbert-labels": ("DistilBertForSequenceClassification", _DISTILBERT),
    "distilbert-masked": ("DistilBertForMaskedLM", _DISTILBERT),
    "mpnet": ("MPNetModel", _ENCODER),
    "mpnet-labels": ("MPNetForSequenceClassification", _ENCODER | {"num_labels": 4}),
    "mpnet-masked": ("MPNetForMaskedLM", _ENCODER),
    "modernbert": ("ModernBertModel", _MODERNBERT),
    "modernbert-labels": ("ModernBertForSequenceClassification", _MODERNBERT | {"classifier_pooling": "mean"}),
    "modernbert-masked": ("ModernBertForMaskedLM", _MODERNBERT | {"attention_bias": True, "mlp_bias": True}),
    "nomic": ("NomicBertModel", _ENCODER),
    "llama": ("LlamaModel", DECODER),
    "llama-labels": ("LlamaForSequenceClassification", _PADDED | {"num_labels": 3}),
    "mistral": ("MistralModel", DECODER | {"sliding_window": 11}),
    "mistral-both-sides": ("MistralModel", DECODER | {"sliding_window": 5, "is_causal": False}),
    "mistral-labels": ("MistralForSequenceClassification", _PADDED | {"sliding_window": 11}),
    "qwen2": ("Qwen2Model", DECODER),
    "qwen2-labels": ("Qwen2ForSequenceClassification", _PADDED),
    "qwen2-reward": ("Qwen2ForRewardModel", DECODER),
    "qwen3": ("Qwen3Model", DECODER | {"head_dim": 16}),
    "qwen3-labels": ("Qwen3ForSequenceClassification", _PADDED | {"head_dim": 16, "num_labels": 1}),
    "gemma": ("GemmaModel", DECODER | {"head_dim": 16}),
    "gemma-labels": ("GemmaForSequenceClassification", DECODER | {"head_dim": 16}),
    "gemma2": ("Gemma2Model", DECODER | {"head_dim": 12, "sliding_window": 10}),
    "gemma2-labels": ("Gemma2ForSequenceClassification", DECODER | {"head_dim": 12, "sliding_window": 10}),
    "gemma3": ("Gemma3TextModel", _GEMMA3),
    "gemma3-labels": ("Gemma3TextForSequenceClassification", _GEMMA3 | {"use_bidirectional_attention": False}),
    "phi3": ("Phi3Model", _PADDED),
    "phi3-labels": ("Phi3ForSequenceClassification", _PADDED),
}
STORED = """
    bert-labels xlm-roberta-labels distilbert mpnet modernbert-labels nomic gemma3 qwen3-labels
""".split()


def make_model(case: str, seed: int) -> Any:
    """Build a case's model with weights drawn from `seed`."""
    import torch
    import transformers

    name, sizes = CASES[case]
    if name == "Qwen2ForRewardModel":  # custom code on the hub
        model = transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**sizes, pad_token_id=0))
        width = sizes["hidden_size"]
        model.score = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
        model.config.architectures = [name]
    else:
        architecture = getattr(transformers, name)
        model = architecture._from_config(architecture.config_class(**sizes), attn_implementation="eager")
    rng = np.random.default_rng([zlib.crc32(case.encode()), seed])
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            value = rng.standard_normal(tuple(parameter.shape), np.float32) * 0.15
            is_norm = parameter_name.endswith("weight") and parameter.ndim == 1
            if is_norm and not case.startswith("gemma"):  # Gemma's norms store the difference from one
                value += 1.0
            parameter.copy_(torch.from_numpy(value))
    return model.eval()


def make_inputs(case: str, seed: int) -> list[dict[str, list[int]]]:
    """Draw prompts without padding tokens, with token types if the model has several."""
    rng = np.random.default_rng([zlib.crc32(case.encode()), seed, 1])
    inputs = [{"input_ids": rng.integers(3, 128, length).tolist()} for length in LENGTHS]
    if CASES[case][0].startswith(("Bert", "NomicBert")):
        inputs = [one | {"token_type_ids": rng.integers(0, 2, len(one["input_ids"])).tolist()} for one in inputs]
    return inputs


def record(model: Any, inputs: list[dict[str, list[int]]]) -> dict[str, np.ndarray]:
    """Return the hidden states of each prompt, and a classifier's outputs."""
    import torch

    recorded = {}
    with torch.no_grad():
        for number, one in enumerate(inputs):
            tensors = {name: torch.tensor([values]) for name, values in one.items()}
            recorded[f"hidden_{number}"] = model.base_model(**tensors).last_hidden_state[0].numpy()
            if hasattr(model, "score") or hasattr(model, "classifier"):
                recorded[f"logits_{number}"] = model(**tensors).logits[0].numpy()
    return recorded


def save(model: Any, folder: Path) -> None:
    """Write a model in its published form."""
    architectures = model.config.architectures
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if architectures == ["Qwen2ForRewardModel"]:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": architectures}))


TEXTS = ("w1", "", "w2 w3 unknown w4", " ".join(f"w{number % 120}" for number in range(100)), "w9 w8 w7 w6 w5")
# Modules after the model, and the base case: pooling, then widths and activations of products, then normalization.
MODULES: dict[str, tuple[str, str, tuple[tuple[int, str, bool], ...], bool]] = {
    "minilm": ("bert", "mean", (), True),
    "mpnet": ("mpnet", "mean", ((24, "Tanh", True),), False),
    "bge": ("xlm-roberta", "cls", (), True),
    "distiluse": ("distilbert", "mean", ((20, "Tanh", True),), False),
    "modern": ("modernbert", "cls", (), True),
    "nomic": ("nomic", "mean", (), True),
    "qwen3-embedding": ("qwen3", "lasttoken", (), True),
    "embeddinggemma": ("gemma3", "mean", ((96, "Identity", False), (48, "Identity", False)), True),
}
CROSS_ENCODERS = """
    bert-labels roberta-labels distilbert-labels modernbert-labels mpnet-labels qwen3-labels
""".split()


def save_tokenizer(folder: Path, has_types: bool = False) -> None:
    """Write a tokenizer of words into a model's folder; with `has_types` it distinguishes the texts of a pair."""
    import tokenizers
    import transformers

    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *(f"w{number}" for number in range(124))]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 0), ("[SEP]", 2)]
    )
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if has_types else [])]
    options = {"tokenizer_object": backend, "model_input_names": names, **named}
    transformers.PreTrainedTokenizerFast(**options).save_pretrained(folder)


def save_modules(name: str, folder: Path, seed: int, is_older: bool) -> Any:
    """Write a model of sentence-transformers, with the older or the newer names of its pooling; return it."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    case, pooling, products, is_normal = MODULES[name]
    plain = folder / "plain"
    save(make_model(case, seed), plain)
    save_tokenizer(plain)
    modules: list[Any] = [Transformer(str(plain), max_seq_length=32)]
    width = modules[0].get_embedding_dimension()
    modules.append(Pooling(width, pooling))
    for size, activation, bias in products:
        modules.append(Dense(width, size, bias, getattr(torch.nn, activation)()))
        width = size
    model = SentenceTransformer(modules=[*modules, *([Normalize()] if is_normal else [])], device="cpu")
    model.save(str(folder / "model"))
    if is_older:
        kinds = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
        older = {f"pooling_mode_{kind}": kind.split("_")[0] == pooling for kind in kinds[:3] + kinds[5:]}
        older |= {"word_embedding_dimension": modules[1].embedding_dimension, "include_prompt": True}
        (folder / "model/1_Pooling/config.json").write_text(json.dumps(older))
        listed = json.loads((folder / "model/modules.json").read_text())
        listed = [one | {"type": f"sentence_transformers.models.{one['type'].rpartition('.')[2]}"} for one in listed]
        (folder / "model/modules.json").write_text(json.dumps(listed))
        (folder / "model/sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
        model.max_seq_length = 20
    return model


def main(cases: list[str]) -> None:
    """Write the golden files of the given cases, or of the stored ones."""
    for case in cases or STORED:
        folder = GOLDEN_POOLED / case
        model, inputs = make_model(case, SEED), make_inputs(case, SEED)
        save(model, folder)
        (folder / "model.safetensors").chmod(0o644)
        (folder / "inputs.json").write_text(json.dumps(inputs) + "\n")
        np.savez(folder / "golden.npz", **record(model, inputs))
        print(f"{case:20} {sum(file.stat().st_size for file in folder.iterdir()) // 1024:4} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
