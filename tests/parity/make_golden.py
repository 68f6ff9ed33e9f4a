"""Makes tests/golden/: for each case a random two-layer model of `transformers`, and its outputs.

A case is a folder with a config.json; its windows are shorter than the prompt. Needs torch (`pip install -e
".[parity]"`), then `python -m tests.parity.make_golden [case ...]`. Weights are drawn by numpy, so that a case is
reproducible on any machine, at a scale that spreads the logits and avoids ties.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.paths import GOLDEN

PROMPT_TOKENS = 40
STEPS = 32
SEED = 2
STORY_PROMPT = [1, 403, 407]  # "<s> Once upon" in the model's vocabulary
STORY_STEPS = 64

CASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.name != "stories260K")
_WRITTEN = ("architectures", "dtype", "transformers_version")  # added by transformers on saving


def make_model(case: str, seed: int) -> Any:
    """Build a case's model with weights drawn from `seed`."""
    import torch
    import transformers

    settings = json.loads((GOLDEN / case / "config.json").read_text())
    config = transformers.AutoConfig.for_model(**{key: settings[key] for key in settings if key not in _WRITTEN})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    rng = np.random.default_rng([zlib.crc32(case.encode()), seed])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = rng.standard_normal(tuple(parameter.shape), np.float32) * 0.25
            if parameter is model.get_output_embeddings().weight and model.config.tie_word_embeddings:
                value *= 0.4  # else each token would predict itself
            is_norm = name.endswith("weight") and (parameter.ndim == 1 or "_norm" in name)
            if is_norm and not config.model_type.startswith("gemma"):  # Gemma's norms store the difference from one
                value += 1.0
            parameter.copy_(torch.from_numpy(value))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.from_numpy(rng.standard_normal(tuple(buffer.shape), np.float32) * 0.1))
    return model.eval()


def save(model: Any, folder: Path) -> None:
    """Write a model in its published form."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if model.config.model_type == "internlm3":  # published with custom code and that code's names
        path = folder / "config.json"
        config = json.loads(path.read_text()) | {"architectures": ["InternLM3ForCausalLM"]}
        config["qkv_bias"], config["bias"] = config.pop("attention_bias"), config.pop("mlp_bias")
        config["rope_scaling"] = config.pop("rope_parameters")
        config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
        path.write_text(json.dumps(config, indent=2) + "\n")


def record(model: Any, prompt: list[int], steps: int) -> dict[str, np.ndarray]:
    """Decode greedily without a cache, each step over the whole sequence."""
    import torch

    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
            tokens.append(int(logits[-1].argmax()))
    assert np.isfinite(logits).all()
    return {
        "prompt": np.asarray(prompt, np.int32),
        "tokens": np.asarray(tokens[len(prompt) :], np.int32),
        "logits": logits,  # [prompt + steps - 1, V]
    }


def make_prompt(case: str, vocab_size: int, seed: int) -> list[int]:
    """Draw the prompt of a case."""
    rng = np.random.default_rng([zlib.crc32(case.encode()), seed, 1])
    return rng.integers(0, vocab_size, PROMPT_TOKENS).tolist()


def load(folder: Path) -> Any:
    """Load a stored model with transformers."""
    import torch
    import transformers

    options = {"attn_implementation": "eager", "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def main(cases: list[str]) -> None:
    """Write the golden files of the given cases, or of all."""
    if not cases:
        folder = GOLDEN / "stories260K"
        np.savez(folder / "golden.npz", **record(load(folder), STORY_PROMPT, STORY_STEPS))
    for case in cases or CASES:
        folder = GOLDEN / case
        model = make_model(case, seed=SEED)
        golden = record(model, make_prompt(case, model.config.vocab_size, seed=SEED), STEPS)
        save(model, folder)
        (folder / "model.safetensors").chmod(0o644)
        np.savez(folder / "golden.npz", **golden)
        best = np.sort(golden["logits"][PROMPT_TOKENS - 1 :], axis=-1)
        size = sum(file.stat().st_size for file in folder.iterdir()) // 1024
        variety = len(set(golden["tokens"].tolist()))
        print(
            f"{case:14} {size:4} KiB  logits' deviation {golden['logits'].std():.2f}  "
            f"least lead {np.min(best[:, -1] - best[:, -2]):.4f}  different tokens {variety}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
