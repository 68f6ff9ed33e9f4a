"""Copy a safetensors model to a folder with an Orbax checkpoint."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from tqdm import tqdm

from jaxllm.checkpoints import orbax_checkpoint, weights
from jaxllm.checkpoints.checkpoint import INDEX
from jaxllm.checkpoints.described import describe
from jaxllm.checkpoints.files import inside
from jaxllm.errors import UserError

_KEPT = (
    *("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja", "LICENSE*", "README*"),
    "[0-9]_*/config.json",  # of sentence-transformers
)


def convert(source: str, target: Path, revision: str | None = None, progress: bool = False) -> Path:
    """Write the model `source` (folder, hub id or included name) to the folder `target`; return its path.

    `target` must be missing or empty, and is renamed into place. Raises `UserError`, before writing if possible.
    """
    target = target.expanduser().absolute()
    _check_target(target)
    folder = weights.resolve(source, revision)
    if orbax_checkpoint.is_here(folder):
        raise UserError(f"{folder} holds an Orbax checkpoint already; copy the folder.", "model")
    described = describe(folder)
    parts = weights.stored_parts(folder, described.spec, described.family, described.head)
    num_bytes = sum(part.values.nbytes for part in parts.values())
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise UserError(
            f"{target.parent} has {free / 2**30:.1f} GiB free, the checkpoint takes {num_bytes / 2**30:.1f} GiB.",
            "model",
        )
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    bar = tqdm(total=num_bytes, unit="B", unit_scale=True, unit_divisor=1024, desc="weights", disable=not progress)

    def count(name: orbax_checkpoint.Name) -> None:
        parts[name].release()
        bar.update(parts[name].values.nbytes)

    try:
        with bar:
            unfinished.mkdir()
            _copy_files(folder, unfinished)
            orbax_checkpoint.write(unfinished, {name: part.values for name, part in parts.items()}, count)
        if target.is_dir():
            target.rmdir()  # Windows does not rename onto it
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _check_target(target: Path) -> None:
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"{target} exists and is not empty; name a new folder.", "target")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; name a new folder.", "target")


def _copy_files(source: Path, target: Path) -> None:
    for pattern in _KEPT:
        for path in source.glob(pattern):
            if path.is_file() and not path.name.endswith(INDEX.removeprefix("model")):
                copy = target / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                # Not the links and modes of a hub's cache.
                shutil.copyfile(inside(source, path.relative_to(source).as_posix()), copy)
