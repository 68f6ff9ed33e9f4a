"""Load EAGLE-3 heads in vLLM's format.

`d2t` is each draft token id's offset to the target's; `t2d`, its inverse, is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxllm.checkpoints import weights
from jaxllm.checkpoints.checkpoint import INDEX, SINGLE, Tensor, open_tensors
from jaxllm.checkpoints.sources import Sources, find_sources
from jaxllm.errors import UserError
from jaxllm.families.config_fields import Fields, read_decoder, read_windows
from jaxllm.families.families import read_fields
from jaxllm.families.family import LLAMA_TENSORS, Family
from jaxllm.families.qwen_vl_families import with_axes, without_axes
from jaxllm.model import decoder, eagle
from jaxllm.model.decoder import Params
from jaxllm.model.eagle import Head
from jaxllm.model.parameters import Weight
from jaxllm.model.sharding import Layout
from jaxllm.model.spec import Spec

# vLLM treats the first as the second.
ARCHITECTURES = ("LlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")
# Keys of NVIDIA's trainer, with the only values that vLLM's layer supports.
_NOTED = {
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), True),
    **{"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1},
}
_MOST_AUX = 16  # fused states; published heads have three


def read(folder: Path, target: Spec) -> Head:
    """Read an EAGLE-3 head's config; raise UserError if it does not fit the `target`."""
    with _of_the_head():
        config = weights.read_config(folder)
        names = config.get("architectures")
        if not isinstance(names, list) or not any(name in ARCHITECTURES for name in names):
            known = ", ".join(ARCHITECTURES)
            raise UserError(f"config.json: architectures {names!r:.80} is no EAGLE-3 head; supported: {known}.")
        tensors = _open(folder) if (folder / SINGLE).is_file() or (folder / INDEX).is_file() else {}
        rest, own = without_axes(config)
        has_axes = "mrope_section" in own
        head = _read_head(Fields(rest if has_axes else config), target, tensors)
        _check_fit(head, target)
        return replace(head, spec=_with_axes(head.spec, **own)) if has_axes else head


def check(folder: Path, head: Head, layout: Layout) -> None:
    """Raise UserError if the head's files or id map are incomplete or damaged."""
    with _of_the_head():
        _find(folder, head, layout)


def load(folder: Path, head: Head, layout: Layout, dtype: DTypeLike, progress: bool = False) -> Params[Array]:
    with _of_the_head():
        declared, sources, numbers = _find(folder, head, layout)
        return _with_map(head, weights.read(declared, sources, layout, dtype, progress), numbers, layout)


def load_random(head: Head, layout: Layout, dtype: DTypeLike, seed: int = 0) -> Params[Array]:
    """Draw a head's random weights; draft ids are spread evenly over the vocabulary."""
    decoder.check_shards(head.spec, layout)
    spread = np.arange(head.draft_vocab_size) * head.vocab_size // head.draft_vocab_size
    return _with_map(head, weights.draw(eagle.declare(head, layout), layout, dtype, seed), spread, layout)


@contextmanager
def _of_the_head() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"EAGLE-3 head: {error}", "speculative_config") from None


def _read_head(fields: Fields, target: Spec, tensors: dict[str, Tensor]) -> Head:
    inner = fields.inner("eagle_config")
    for key, value in _NOTED.items():
        inner.only(key, value)
    is_whole = inner.take("norm_before_fc", bool, fields.take("norm_before_fc", bool, False))
    is_each = fields.take("fc_norm", bool, False)
    if is_whole and is_each:
        raise UserError("config.json: norm_before_fc and fc_norm exclude each other.")
    width, draft_size = (
        fields.size(key) if fields.has(key) else None for key in ("target_hidden_size", "draft_vocab_size")
    )
    aux_layers = _read_aux(fields, inner, target)
    norm_before_residual, norm_output = (
        fields.take(key, bool, False) for key in ("norm_before_residual", "norm_output")
    )
    inner.finish()
    spec = read_fields(fields, _read_layer)
    return Head(
        spec=spec,
        width=width or spec.width,
        vocab_size=spec.vocab_size,
        draft_vocab_size=draft_size or spec.vocab_size,
        aux_layers=aux_layers,
        norm_before_residual=norm_before_residual,
        has_embedding="embed_tokens.weight" in tensors if tensors else spec.width != target.width,
        has_names="d2t" in tensors,
        fusion_norm="whole" if is_whole else "each" if is_each else None,
        norm_output=norm_output,
    )


def _with_axes(spec: Spec, mrope_section: Any, mrope_interleaved: Any = False) -> Spec:
    if type(mrope_interleaved) is not bool:
        raise UserError(f"config.json: mrope_interleaved must be true or false, got {mrope_interleaved!r:.80}.")
    return with_axes(spec, mrope_section, mrope_interleaved)


def _read_layer(fields: Fields) -> Spec:
    if fields.layers() != 1:
        raise UserError(f"config.json: a head of {fields.layers()} layers is not supported, only of one.")
    for key in ("qkv_bias", "bias", "rope_interleaved"):
        fields.only(key, False)
    fields.only("is_causal", True)
    for key in ("tie_word_embeddings", "use_sliding_window", "max_window_layers", "target_model_type"):
        fields.raw(key)  # of the trainer's base model
    return read_decoder(
        fields,
        **fields.attention_biases(),
        mlp_bias=fields.take("mlp_bias", bool, False),
        windows=read_windows(fields, fields.optional("sliding_window", int), (False,)),
        logit_scale=fields.take("logit_scale", float, 1.0),
        tie_embeddings=False,
        is_causal=True,
    )


def _read_aux(fields: Fields, inner: Fields, target: Spec) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    stated, within = fields.raw(key), inner.raw(key)
    named = stated or within or [2, target.num_layers // 2, target.num_layers - 3]
    last = target.num_layers
    if not isinstance(named, list) or not 1 <= len(named) <= _MOST_AUX or not all(type(one) is int for one in named):
        raise UserError(f"config.json: {key} must be a list of 1 to {_MOST_AUX} layers, got {named!r:.80}.")
    if not all(0 <= layer <= last for layer in named) or len(set(named)) != len(named):
        default = "" if stated or within else ", which stand for a missing key"
        raise UserError(
            f"config.json: {key} must be different layers of the model, from 0 to {last}, got {named!r:.80}{default}."
        )
    fields.only("num_aux_hidden_states", len(named))
    return tuple(sorted(named))


def _check_fit(head: Head, target: Spec) -> None:
    if head.width != target.width:
        raise UserError(
            f"it is for a model of width {head.width}, and the model's is {target.width}; choose a head of this model."
        )
    if head.vocab_size != target.vocab_size:
        raise UserError(
            f"it is for a vocabulary of {head.vocab_size} tokens, and the model's has {target.vocab_size}; choose a "
            "head of this model."
        )
    if head.draft_vocab_size > head.vocab_size:
        raise UserError(
            f"config.json: draft_vocab_size ({head.draft_vocab_size}) is greater than vocab_size ({head.vocab_size})."
        )
    if not head.has_embedding and head.spec.width != target.width:
        raise UserError(
            f"it has no embed_tokens.weight, and the model's embeddings, of width {target.width}, do not fit its "
            f"{head.spec.width}."
        )


def _open(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in open_tensors(folder).items():
        usual = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        if usual in tensors:
            raise UserError(f"{tensor.file.name}: tensors {tensors[usual].name} and {name} are the same weight.")
        if usual != "t2d":
            tensors[usual] = tensor
    return tensors


def _find(folder: Path, head: Head, layout: Layout) -> tuple[Params[Weight], Sources, np.ndarray]:
    """Return the weights, their tensors, and the target's ids of draft tokens, int64[draft_vocab_size]."""
    decoder.check_shards(head.spec, layout)
    tensors, declared = _open(folder), eagle.declare(head, layout)
    names = LLAMA_TENSORS | {"fc": "fc.weight", "fusion_norm": "input_norm.weight"}
    names |= {"hidden_norm": "layers.{}.hidden_norm.weight"}
    names |= {f"fusion_norm_{number}": f"fc_norm.{number}.weight" for number in range(len(head.aux_layers))}
    numbers = _target_ids(head, tensors.pop("d2t", None))
    family = Family(ARCHITECTURES, _read_layer, names)
    return declared, find_sources(declared, family, tensors), numbers


def _target_ids(head: Head, offsets: Tensor | None) -> np.ndarray:
    draft_ids = np.arange(head.draft_vocab_size)
    if offsets is None:
        return draft_ids
    if offsets.shape != draft_ids.shape:
        raise UserError(
            f"{offsets.file.name}: tensor {offsets.name} has shape {list(offsets.shape)}, config.json says "
            f"{list(draft_ids.shape)}."
        )
    ids = draft_ids + offsets.integers()
    if ids.min() < 0 or ids.max() >= head.vocab_size or len(np.unique(ids)) != len(ids):
        raise UserError(
            f"{offsets.file.name}: tensor {offsets.name} does not give every token another of the model's "
            f"{head.vocab_size}."
        )
    return ids


def _with_map(head: Head, params: Params[Array], ids: np.ndarray, layout: Layout) -> Params[Array]:
    described = eagle.map_shape(head, layout)
    numbers = np.full(described.shape, np.iinfo(np.int32).max, np.int32)  # out of range for all rows
    numbers[ids] = np.arange(len(ids))
    return eagle.with_map(head, params, jax.device_put(jnp.asarray(numbers), described.sharding))
