"""Embeddings against sentence-transformers on the same cores: `python -m benchmarks.embedding`.

A random model of MiniLM's shape (6 layers, 384 wide, mean pooling), float32, one folder for both; the other side runs
in an environment with torch (`make parity` makes .venv-parity). Rounds alternate; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.against_transformers import TORCH
from benchmarks.aims import require
from tests.support.paths import ROOT

AIM = 1.5  # times the texts per second
TEXTS = {"64 texts of 32 tokens": [30] * 64, "16 texts of 512 tokens": [510] * 16}  # plus two special tokens each
MIXED = "64 texts of 4 to 250 tokens"
CLOSE = 1e-5


def texts_of(lengths: list[int]) -> list[str]:
    """Return texts of the given numbers of words, one token each."""
    random = np.random.default_rng(len(lengths))
    return [" ".join(chr(97 + letter) for letter in random.integers(0, 26, length)) for length in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--other", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.other is not None:
        return run_other(options.other)
    if not TORCH.exists():
        raise SystemExit(f"{TORCH} does not exist; run `make {TORCH.parents[1].name}/.parity`")
    mixed = np.random.default_rng(0).integers(2, 249, 64).tolist()
    with tempfile.TemporaryDirectory() as folder:
        behind = compare(Path(folder) / "model", TEXTS | {MIXED: mixed}, options.rounds)
    require(not behind, f"behind the aim: {'; '.join(behind)}")


def compare(folder: Path, sets: dict[str, list[int]], rounds: int) -> list[str]:
    """Print each side's results; return the missed aims."""
    from jaxllm import LLM

    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'server'}"}
    command = [TORCH, "-m", "benchmarks.embedding", "--other", folder]
    other = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    assert other.stdin is not None and other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    behind = []
    with LLM(str(folder)) as llm:
        for name, lengths in sets.items():
            texts = texts_of(lengths)
            ours, theirs = [], []
            for number in range(rounds + 1):
                began = time.perf_counter()
                made = llm.embed(texts, use_tqdm=False)
                ours.append(time.perf_counter() - began)
                other.stdin.write(json.dumps(texts) + "\n")
                other.stdin.flush()
                answer = json.loads(other.stdout.readline())
                theirs.append(answer["seconds"])
                if not number:
                    found = np.array([each.outputs.embedding for each in made])
                    worst = float(np.abs(found - np.array(answer["embeddings"])).max())
                    require(worst < CLOSE, f"{name}: embeddings differ by {worst}")
                    while llm.engine.runner.programs.num_compiling:  # queued by the first round
                        time.sleep(0.1)
            one, two = (statistics.median(taken[1:]) for taken in (ours, theirs))
            print(
                f"{name}: {len(texts) / one:.0f} texts/s, sentence-transformers {len(texts) / two:.0f}: "
                f"{two / one:.2f} times (aim {AIM}); differ by {worst:.0e} at most",
                flush=True,
            )
            if two / one < AIM:
                behind.append(f"{name} {two / one:.2f}")
    other.kill()
    return behind


def run_other(folder: Path) -> None:
    """Make the model with torch, then answer each line of texts with embeddings and the seconds that they took."""
    import torch
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123))]
    words += [f"word{number}" for number in range(30_522 - len(words))]
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
    bare = folder.with_name("bare")
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(bare)
    vocabulary = {word: number for number, word in enumerate(words)}
    BertTokenizerFast(vocab=vocabulary, model_max_length=512).save_pretrained(bare)
    parts = [models.Transformer(str(bare)), models.Pooling(384, pooling_mode="mean"), models.Normalize()]
    model = SentenceTransformer(modules=parts, device="cpu")
    model.save(str(folder))
    print("ready", flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        began = time.perf_counter()
        made = model.encode(texts, show_progress_bar=False)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "embeddings": made.tolist()}), flush=True)


if __name__ == "__main__":
    main()
