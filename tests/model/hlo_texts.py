"""Write the lowered text of every program of the small models in the family table.

`python -m tests.model.hlo_texts FOLDER [FAMILY …]` writes the files. A refactoring must not change them: with
`--against COMMIT` for the folder, it lists the programs that differ from that commit's and exits with status 1 if any
do. Nothing is compiled or loaded.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.metrics import Metrics
from jaxllm.runner.model_runner import Runner
from jaxllm.setup.model_setup import prepare
from tests.support.paths import GOLDEN, ROOT

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "two_devices": {"tensor_parallel_size": 2},
    "int8": {"quantization": "int8"},
    "deterministic": {"deterministic": True},
}


class _Uncompiled:
    """A program that uses no memory and does nothing."""

    def memory_analysis(self) -> Any:
        return SimpleNamespace(temp_size_in_bytes=0, output_size_in_bytes=0, alias_size_in_bytes=0)

    def __call__(self, *_: Any) -> tuple[()]:
        return ()


def texts_of(folder: Path, **settings: Any) -> dict[str, str]:
    """Trace all programs of an engine with a model; return their texts by name, or the UserError's text."""
    texts: dict[str, str] = {}

    def record(lowered: Any, *_: Any, **__: Any) -> Any:
        text = lowered.as_text()
        name = text.split("module @", 1)[1].split()[0]
        texts[name] = text
        return _Uncompiled()

    config = EngineConfig(
        model=str(folder),
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_kv_blocks=16,
        precompile="all",
        **{"dtype": "float32"} | settings,
    )
    compile_ = jax.stages.Lowered.compile
    jax.stages.Lowered.compile = record
    try:
        Runner(config, prepare(config, needs_weights=False), Metrics(), needs_weights=False).close()
    finally:
        jax.stages.Lowered.compile = compile_
    return texts


def main(out: Path, families: Sequence[str]) -> None:
    """Write the texts, one file each, and print a digest of each model's. No families: all."""
    for path in sorted(GOLDEN.glob("*/config.json")):
        if families and path.parent.name not in families:
            continue
        for name, settings in SETTINGS.items():
            folder = out / path.parent.name / name
            try:
                texts = texts_of(path.parent, **settings)
            except UserError as error:
                print(f"{folder.relative_to(out)}: {error}")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            for program, text in texts.items():
                (folder / f"{program}.mlir").write_text(text)
            digest = hashlib.sha256("".join(texts[key] for key in sorted(texts)).encode()).hexdigest()[:12]
            print(f"{folder.relative_to(out)}: {len(texts)} programs, {digest}")


def compare(commit: str, families: Sequence[str]) -> int:
    """List the programs that differ from those of a commit; return the exit status."""
    with tempfile.TemporaryDirectory() as place:
        before, tree = Path(place) / "before", Path(place) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            paths = os.pathsep.join((str(tree), str(tree / "server")))
            command = [sys.executable, __file__, str(before), *families]  # this file with the other commit's packages
            subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": paths}, check=True, stdout=sys.stderr)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
        after = Path(place) / "after"
        main(after, families)
        both = ({path.relative_to(root): path.read_text() for path in root.rglob("*.mlir")} for root in (before, after))
        old, new = both
        changed = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
        print(f"{len(changed)} of {len(new)} programs differ from {commit}.", *changed, sep="\n")
        return 1 if changed else 0


if __name__ == "__main__":
    if sys.argv[1] == "--against":
        sys.exit(compare(sys.argv[2], sys.argv[3:]))
    main(Path(sys.argv[1]), sys.argv[2:])
