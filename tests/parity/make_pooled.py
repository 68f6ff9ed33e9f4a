"""Random small models of `transformers` that embed or classify, and what they compute; some are kept as golden files.

Needs torch (`pip install -e ".[parity]"`): `python -m tests.parity.make_pooled [case ...]` writes tests/golden_pooled.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.make_golden import _SIZES as DECODER
from tests.parity.make_golden import SEED
from tests.support.paths import GOLDEN_POOLED

LENGTHS = (1, 2, 17, 40)
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


# The architecture and transformers' arguments of its configuration.
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
STORED = (
    "bert-labels",
    "xlm-roberta-labels",
    "distilbert",
    "mpnet",
    "modernbert-labels",
    "nomic",
    "gemma3",
    "qwen3-labels",
)


def make_model(case: str, seed: int) -> Any:
    """Build a case's model with weights drawn from `seed`."""
    import torch
    import transformers

    name, sizes = CASES[case]
    if name == "Qwen2ForRewardModel":  # which has code of its own on the hub
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
            if is_norm and not case.startswith("gemma"):  # whose norms store the distance from one
                value += 1.0
            parameter.copy_(torch.from_numpy(value))
    return model.eval()


def make_inputs(case: str, seed: int) -> list[dict[str, list[int]]]:
    """Draw prompts, with types of tokens where the model has several; none holds a token of padding."""
    rng = np.random.default_rng([zlib.crc32(case.encode()), seed, 1])
    inputs = [{"input_ids": rng.integers(3, 128, length).tolist()} for length in LENGTHS]
    if CASES[case][0].startswith(("Bert", "NomicBert")):
        inputs = [one | {"token_type_ids": rng.integers(0, 2, len(one["input_ids"])).tolist()} for one in inputs]
    return inputs


def record(model: Any, inputs: list[dict[str, list[int]]]) -> dict[str, np.ndarray]:
    """Compute the hidden states of each prompt, and a classifier's numbers."""
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
    """Write a model as it would be published."""
    architectures = model.config.architectures
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if architectures == ["Qwen2ForRewardModel"]:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": architectures}))


def main(cases: list[str]) -> None:
    """Write the golden files of the cases, or of those that are kept."""
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
