"""Greedy tokens and their log-probabilities beside transformers, on random models of eight layers from the same files.

Both are held against transformers in float32, which is given the same tokens. In bfloat16 jaxllm may be twice as far
off as transformers is; where two tokens are so close that this much decides, it may choose the other one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import shapes
from tests.gpu_check import models
from tests.gpu_check.check import Check
from tests.gpu_check.sites import full_precision

_SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 4096}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
CONFIGS = {
    "Llama": shapes.SHAPES["llama-3.2-1b"] | _SMALL | _HEADS | {"tie_word_embeddings": False},
    "Qwen2": shapes.SHAPES["qwen2.5-0.5b"] | _SMALL | _HEADS,
}
DTYPES = ("float32", "bfloat16")
LEAST, TIMES = 1e-3, 2.0  # of log-probabilities: what is always allowed; in bfloat16, times what transformers is off
PROMPTS, NEW = (1, 5, 16, 17, 33, 120, 300, 700), 32  # tokens of each; tokens that are generated
DRY_PROMPTS, DRY_NEW = (1, 5, 40), 8
TOP = 5


def run(check: Check) -> None:
    for name, config in CONFIGS.items():
        for dtype in DTYPES:
            if check.left < 5:
                check.fail(f"{name}, {dtype} was not compared in time: give it more minutes")
                continue
            with (
                check.guarded(f"{name}, {dtype}", is_wrong=True),
                full_precision(),
                tempfile.TemporaryDirectory() as folder,
            ):
                compare(check, name, models.tiny(config) if check.is_dry else config, dtype, Path(folder))


def compare(check: Check, name: str, config: dict[str, Any], dtype: str, folder: Path) -> None:
    """Generate on both sides and note the largest difference."""
    models.write_config(config, folder, dtype)
    models.write_weights(config, folder, dtype)
    lengths, new = (DRY_PROMPTS, DRY_NEW) if check.is_dry else (PROMPTS, NEW)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, config["vocab_size"], length).tolist() for length in lengths]
    ours = _ours(folder, dtype, prompts, new)
    worst = theirs = furthest = 0.0
    equal, where = 0, ""
    for number, (prompt, outputs) in enumerate(zip(prompts, ours, strict=True)):
        tokens = [token for token, _ in outputs]
        exact, rounded = (_theirs(folder, kind, prompt, tokens) for kind in ("float32", dtype))  # [new, vocabulary]
        for place, (token, found) in enumerate(outputs):
            worst = max(worst, *(abs(exact[place, one] - value) for one, value in found.items()))
            theirs = max(theirs, *(abs(exact[place, one] - rounded[place, one]) for one in found))
            behind = exact[place].max() - exact[place, token]
            equal += rounded[place].argmax() == token
            if not behind <= furthest:
                furthest, where = behind, f"token {place} of prompt {number}"
    limit = max(LEAST, TIMES * theirs)
    check.measure(
        model=name, dtype=dtype, tokens=len(prompts) * new, equal=int(equal), worst=float(worst),
        transformers=float(theirs), limit=float(limit),
    )  # fmt: skip
    if not worst <= limit:
        check.fail(f"{name}, {dtype}: a log-probability is {worst:.2g} off, more than {limit:.2g}")
    if not furthest <= 2 * limit:  # each of the two may be that far off
        check.fail(f"{name}, {dtype}: {where} is {furthest:.2g} less likely than the best")


def _ours(folder: Path, dtype: str, prompts: list[list[int]], new: int) -> list[list[tuple[int, dict[int, float]]]]:
    """Return of each prompt the tokens that jaxllm generates, with log-probabilities of the likeliest."""
    from jaxllm import LLM, SamplingParams

    sizes: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "num_kv_blocks": 512,
        "max_num_batched_tokens": 512,
    }
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=TOP)
    with LLM(str(folder), dtype=dtype, precompile="covering", **sizes) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None
        rows = [{token: one.logprob for token, one in row.items()} for row in completion.logprobs]
        found.append(list(zip(completion.token_ids, rows, strict=True)))
    return found


_LOADED: dict[tuple[str, str], Any] = {}


def _theirs(folder: Path, dtype: str, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Return transformers' log-probabilities at each of the tokens, all of them given."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    key = (str(folder), dtype)
    if any(loaded != str(folder) for loaded, _ in _LOADED):
        _LOADED.clear()
    if key not in _LOADED:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=getattr(torch, dtype))
        _LOADED[key] = model.eval().to(device)
    with torch.inference_mode():
        ids = torch.tensor([prompt + tokens[:-1]], device=device)
        logits = _LOADED[key](ids, use_cache=False).logits[0, len(prompt) - 1 :]
        return torch.log_softmax(logits.float(), -1).cpu().numpy()
