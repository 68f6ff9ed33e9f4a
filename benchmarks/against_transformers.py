"""jaxllm against transformers on the same cores: `python -m benchmarks.against_transformers`.

The shape of Qwen2.5-0.5B with random weights, one file for both; eager transformers (SDPA attention) in an environment
with torch (`make parity` makes .venv-parity). Rounds alternate; medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from benchmarks import shapes
from benchmarks.aims import require
from benchmarks.sides import ROOT, Side

TORCH = ROOT / ".venv-parity" / "bin" / "python"
# Least speed relative to transformers, by measurement; for memory, the most.
AIMS = {
    dtype: {"decode, 1 row": one_row, "decode, 16 rows": 1.5, "16 requests": 1.5, "prefill of 512": 1.0, "memory": 0.9}
    for dtype, one_row in (("float32", 2.0), ("bfloat16", 1.4))
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=AIMS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not TORCH.exists():
        raise SystemExit(f"{TORCH} does not exist; run `make {TORCH.parents[1].name}/.parity`")
    behind = []
    for dtype in options.dtype or AIMS:
        reached = compare(shapes.folder_of("qwen2.5-0.5b", dtype), dtype, str(TORCH), options.rounds)
        for name, aim in AIMS[dtype].items():
            if reached[name] > aim if name == "memory" else reached[name] < aim:
                behind.append(f"{dtype}, {name}")
    require(not behind, f"behind the aims: {'; '.join(behind)}")


def compare(folder: Path, dtype: str, python: str, rounds: int) -> dict[str, float]:
    """Print each side's results; return the ratios by name of aim."""
    reached = {}
    with Side("jaxllm", folder, dtype) as ours, Side("transformers", folder, dtype, python) as theirs:
        taken: dict[str, dict[str, list[float]]] = {side.name: {} for side in (ours, theirs)}
        for side in (ours, theirs):
            for rows in (1, 16):
                side.run(rows, 32, 4)  # warms up
        for _ in range(rounds):
            for side in (ours, theirs):
                found = {
                    "decode, 1 row": side.decode(1, 32, 33),
                    "prefill of 512": side.run(1, 512, 1),
                    "decode, 16 rows": side.decode(16, 32, 33),
                    "16 requests": side.run(16, 128, 32),
                }
                for name, seconds in found.items():
                    taken[side.name].setdefault(name, []).append(seconds)
                print(".", end="", file=sys.stderr, flush=True)
        print(f"\n{folder.name}: {'jaxllm':>12} {'transformers':>14} {'times':>7} {'aim':>6}")
        for name in taken[ours.name]:
            one, other = (statistics.median(taken[side.name][name]) for side in (ours, theirs))
            reached[name] = other / one
            print(f"  {name:16} {one * 1e3:9.0f} ms {other * 1e3:11.0f} ms {other / one:7.2f} {AIMS[dtype][name]:6.2f}")
        one, other = ours.peak_mib(), theirs.peak_mib()
        reached["memory"] = one / other
        print(f"  {'peak memory':16} {one:8.0f} MiB {other:10.0f} MiB {one / other:7.2f} {AIMS[dtype]['memory']:6.2f}")
    return reached


if __name__ == "__main__":
    main()
