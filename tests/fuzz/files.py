"""Hostile files in a model's folder: each target reads one as the start of an engine does.

Any content is read or refused with a `UserError` of one line; sizes that a file only claims are never allocated.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from jaxllm.checkpoints import weights
from jaxllm.checkpoints.checkpoint import open_tensors
from jaxllm.checkpoints.lora_files import read_adapter
from jaxllm.checkpoints.pooler_files import read_pooler
from jaxllm.embedded import MODEL_DIR
from jaxllm.families.families import read_spec
from jaxllm.model import decoder
from jaxllm.model.decoder import declare
from jaxllm.model.sharding import UNDIVIDED
from jaxllm.replay.replay import Replay
from jaxllm.sampling_params import default_sampling_params
from jaxllm.text.tokenizer import load_tokenizer
from tests.support.layouts import layout_of
from tests.support.paths import GOLDEN, GOLDEN_POOLED

TEXT = "Once upon a time, naïve 日本語 🎉 <|im_end|>\n"


@functools.cache
def folder() -> Path:
    """Return a new temporary folder, in memory if possible."""
    shared = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="jaxllm-fuzz-", dir=shared if shared.is_dir() else None))
    import atexit

    atexit.register(shutil.rmtree, made, True)
    return made


def of_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return the target that writes its bytes into a folder's file and reads the folder."""

    def check(data: bytes) -> object:
        place = folder() / name.replace("/", "-")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (place / name).write_bytes(data)
        return read(place)

    return check


def read_safetensors(place: Path) -> None:
    """Check that files accepted here are accepted by the format's library, and each tensor is within the file."""
    path = place / "model.safetensors"
    tensors = open_tensors(place)
    size = path.stat().st_size
    for tensor in tensors.values():
        if not 0 <= tensor.start <= tensor.start + tensor.num_bytes <= size:
            raise AssertionError(f"{tensor.name} lies outside of the file")
        if tensor.dtype in ("F16", "BF16", "F32", "F64") and tensor.values().nbytes != tensor.num_bytes:
            raise AssertionError(f"{tensor.name} has other bytes than its shape")
    with safetensors.safe_open(path, "numpy") as theirs:
        if set(theirs.keys()) != set(tensors):
            raise AssertionError("the format's own library finds other tensors")


def read_index(place: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (place / name).write_bytes(_small_file(name[0]))
    open_tensors(place)


def read_model(place: Path) -> None:
    """Read a config.json as `jaxllm serve` does before reading weights."""
    config = weights.read_config(place)
    for length in (None, 4096):
        spec, family = read_spec(config, length)
        decoder.check_shards(spec, UNDIVIDED)
        declare(spec, head=read_pooler(place, config, spec, family, "pooling"))


def read_modules(place: Path) -> None:
    """Read sentence-transformers' list of modules."""
    for path, settings in (("1_Pooling", {"pooling_mode": "mean"}), ("2_Dense", {"out_features": 8})):
        (place / path).mkdir(exist_ok=True)
        (place / path / "config.json").write_text(json.dumps(settings))
    config = json.loads((GOLDEN_POOLED / "mpnet" / "config.json").read_text())
    read_pooler(place, config, *read_spec(config))


def read_adapter_folder(place: Path) -> None:
    """Read an adapter of a small model; of its two files one is hostile and one valid."""
    for name, make in (("adapter_config.json", adapter_configs), ("adapter_model.safetensors", adapter_files)):
        if not (place / name).exists():
            (place / name).write_bytes(make()[0])
    spec, family = read_spec(weights.read_config(GOLDEN / "llama"))
    read = read_adapter(place, spec, family, layout_of(2), 8, np.float32)
    if not 1 <= read.rank <= 8 or any(
        not np.isfinite(pair.b).all() for layer in read.weights for pair in layer.values()
    ):
        raise AssertionError("an adapter that cannot be computed with")


def read_generation(place: Path) -> None:
    from types import SimpleNamespace
    from typing import Any

    from jaxllm.engine.loader import eos_ids_of

    settings = weights.read_generation_config(place)
    default_sampling_params(settings)
    nameless: Any = SimpleNamespace(eos_token_id=None)
    eos_ids_of(nameless, settings, 1536)


def read_tokenizer(place: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (place / name).exists():
            shutil.copy(MODEL_DIR / name, place / name)
    tokenizer = load_tokenizer(place)
    ids = tokenizer.encode(TEXT)
    tokenizer.decode(ids)
    for token in ids[:8]:
        tokenizer.token_text(token)
    if tokenizer.has_chat_template:
        tokenizer.encode_chat([{"role": "user", "content": TEXT}])


def read_recording(place: Path) -> None:
    for _ in Replay(place / "recording").moments():
        pass


def recordings() -> list[bytes]:
    """Return recordings of a few requests, whole and redacted."""
    from tests.replay.test_recording import Driver

    made = []
    for is_redacted in (False, True):
        path = folder() / f"made-{is_redacted}"
        path.unlink(missing_ok=True)
        driver = Driver(path, 1, is_redacted=is_redacted)
        driver.run(35)
        driver.recorder.close()
        made.append(path.read_bytes())
    return made


def configs() -> list[bytes]:
    return [path.read_bytes() for root in (GOLDEN, GOLDEN_POOLED) for path in sorted(root.glob("*/config.json"))]


def modules() -> list[bytes]:
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize")
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    return [json.dumps(listed[:count]).encode() for count in (2, 3, 4)]


def adapter_configs() -> list[bytes]:
    """Return configs that all name the modules of `adapter_files`."""
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    patterns = {
        "rank_pattern": {"_proj": 3, r"(.*\.\d\..*|up_proj)": 2},
        "alpha_pattern": {"^model.*(down|up)_proj$": 3},
        "r": 8,
    }
    neutral = {"use_dora": False, "modules_to_save": None, "use_rslora": True, "init_lora_weights": "gaussian"}
    chosen = {"target_modules": r".*\.[01]\.(\w+)\.(?:q|down)_proj", "exclude_modules": r"(?!model).*|.*\.norm"}
    layers = {"target_modules": ["self_attn.q_proj", "down_proj"], "layers_to_transform": [0, 1, 2]}
    layers |= {"layers_pattern": ["layers"], "exclude_modules": ["k_proj"]}
    changes = ({}, patterns, neutral, chosen, layers)
    return [json.dumps(plain | change).encode() for change in changes]


def adapter_files() -> list[bytes]:
    tensors = {}
    for layer in range(2):
        for module, (rows, columns) in {"self_attn.q_proj": (48, 48), "mlp.down_proj": (48, 64)}.items():
            stem = f"base_model.model.model.layers.{layer}.{module}.lora_"
            tensors |= {f"{stem}A.weight": np.ones((2, columns), np.float32)}
            tensors |= {f"{stem}B.weight": np.ones((rows, 2), np.float16)}
    return [safetensors.numpy.save(tensors)]


def generation_configs() -> list[bytes]:
    return [
        (MODEL_DIR / "generation_config.json").read_bytes(),
        json.dumps(
            {"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 9}
        ).encode(),
    ]


def tokenizers() -> list[bytes]:
    from tests.support.tokenizer_kinds import KINDS, build

    return [build(kind).to_str().encode() for kind in KINDS]


def tokenizer_configs() -> list[bytes]:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    own = {
        "added_tokens_decoder": {"9999": {"content": "<late>", **plain}, "300": {"content": "<early>", **plain}},
        "additional_special_tokens": ["<extra>"],
        "eos_token": "<|im_end|>",
        "bos_token": {"content": "<s>", **plain},
        "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
        "split_special_tokens": False,
    }
    return [(MODEL_DIR / "tokenizer_config.json").read_bytes(), json.dumps(own).encode()]


def safetensors_files() -> list[bytes]:
    several = {"w": np.ones((2, 3), np.float32), "v": np.zeros((0, 4), np.float16), "s": np.ones((), np.float64)}
    return [_small_file("a"), safetensors.numpy.save(several, {"format": "pt"}), safetensors.numpy.save({})]


def indexes() -> list[bytes]:
    return [
        json.dumps(
            {"metadata": {"total_size": 24}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
        ).encode()
    ]


def _small_file(tensor: str) -> bytes:
    return safetensors.numpy.save({tensor: np.ones(3, np.float32)})
