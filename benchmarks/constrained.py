"""The cost and savings of constraints: 32 rows of stories42M's shape, with a JSON schema and without.

`python -m benchmarks.constrained`. Random weights, temperature 1. Rounds alternate between the kinds, so that
other load affects all alike; medians of ratios are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import shapes
from benchmarks.aims import require
from jaxllm import LLM, SamplingParams

ROWS, NEW = 32, 96
LEAST, LEAST_BESIDE = 0.85, 0.95  # of unconstrained tokens per second: constrained rows, and other rows of their steps
PERSON = {"name": {"type": "string"}, "age": {"type": "integer"}}
ITEM = {"colour": {"enum": ["red", "green", "blue"]}, "is_large": {"type": "boolean"}, "number_of_pieces": {"const": 7}}


def write_model(folder: Path) -> None:
    """Write the shape with a tokenizer that can write any text and has an end token, trained on Python's library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    shape = shapes.SHAPES["stories42M"]
    trainer = trainers.BpeTrainer(
        vocab_size=shape["vocab_size"],
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py"))
    tokenizer.train_from_iterator((file.read_text(errors="replace") for file in files), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps(shape))


def endless(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a list that is longer than all outputs here."""
    item = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 500}


KINDS: dict[str, dict[str, Any]] = {
    "strings and numbers": {"json": endless(PERSON)},
    "compact, few choices": {"json": endless(ITEM), "disable_any_whitespace": True},
}


def generate(llm: LLM, constrained: int, logprobs: int | None = None, **asked: Any) -> tuple[float, float, float, int]:
    """Return tokens per second of all rows and of the unconstrained ones, characters per second, and forced tokens."""
    plain = {"temperature": 1.0, "max_tokens": NEW, "ignore_eos": True}
    params = [
        SamplingParams(seed=row, structured_outputs=asked, logprobs=logprobs, **plain)
        if row < constrained
        else SamplingParams(seed=row, **plain)
        for row in range(ROWS)
    ]
    forced, began = llm.engine.metrics.forced_tokens, time.perf_counter()
    outputs = [
        output.outputs[0] for output in llm.generate([[5, 6, 7 + row] for row in range(ROWS)], params, use_tqdm=False)
    ]
    seconds = time.perf_counter() - began
    counts = [len(output.token_ids) for output in outputs]
    characters = sum(len(output.text) for output in outputs)
    forced = llm.engine.metrics.forced_tokens - forced
    return sum(counts) / seconds, sum(counts[constrained:]) / seconds, characters / seconds, forced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as target:
        write_model(Path(target))
        sizes = {"max_num_seqs": ROWS, "max_model_len": 512, "num_kv_blocks": 1200}
        measure(LLM(target, load_format="dummy", dtype="float32", **sizes), options.rounds)


def measure(llm: LLM, rounds: int) -> None:
    """Measure, print and check the aims; closes the engine."""
    ratios = defaultdict(list)
    for number in range(-2, rounds):  # two rounds for programs to compile in the background
        if number < 0:
            time.sleep(10)
        plain = generate(llm, 0)[0]
        for kind, asked in KINDS.items():
            speed, _, characters, forced = generate(llm, ROWS, **asked)
            one_by_one = generate(llm, ROWS, logprobs=0, **asked)[2]
            if number >= 0:
                ratios[kind].append((speed / plain, characters / one_by_one, forced / (ROWS * NEW)))
        beside = generate(llm, ROWS // 2, **KINDS["strings and numbers"])[1]
        if number >= 0:
            ratios["beside"].append((2 * beside / plain,))
    llm.close()
    found = {kind: [statistics.median(column) for column in zip(*rows, strict=True)] for kind, rows in ratios.items()}
    for kind in KINDS:
        speed, gain, forced = found[kind]
        print(
            f"{ROWS} rows, {kind}: {speed:.2f} of the unconstrained tokens a second (aim {LEAST}); "
            f"{forced:.0%} forced, {gain:.2f} times the characters a second of tokens that are sampled one by one"
        )
    (beside,) = found["beside"]
    print(f"{ROWS // 2} rows beside as many constrained ones: {beside:.2f} of their speed (aim {LEAST_BESIDE})")
    require(
        all(found[kind][0] >= LEAST for kind in KINDS) and beside >= LEAST_BESIDE,
        "constrained rows stay behind what is promised",
    )


if __name__ == "__main__":
    main()
