"""Families that read images of any size: Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any

from jaxllm.errors import UserError
from jaxllm.families.config_fields import Fields
from jaxllm.families.dense_families import DENSE
from jaxllm.families.family import LLAMA_TENSORS, Family, Images, named
from jaxllm.families.vision_families import TOWER_WITHOUT_EFFECT, tower_activation
from jaxllm.media.patches import read_patches
from jaxllm.media.videos import PAIR, read_videos
from jaxllm.model.patch_vision import PatchVisionSpec
from jaxllm.model.spec import Spec

# Not the decoder's keys. Published Qwen2.5-VL files have no text_config, and the decoder's keys here.
_OUTER = frozenset(
    """
    architectures model_type vision_config text_config image_token_id video_token_id vision_start_token_id
    vision_end_token_id vision_token_id transformers_version quantization_config
    """.split()
)
_NORM_EPS = 1e-6  # of towers, in transformers' code


def _text_of(
    fields: Fields, *, architecture: str, section: tuple[int, int, int], interleaved: bool, **defaults: Any
) -> tuple[Fields, Callable[[Fields], Spec]]:
    """Return the fields of a model's decoder, and their reader; `section` is the default of mrope_section."""
    given = fields.raw("text_config")
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f"config.json: text_config must be an object, got {given!r:.80}.", "text_config")
    tied = fields.take("tie_word_embeddings", bool, False)
    if given is None:
        text = fields.others(_OUTER)
    else:
        text = {name: value for name, value in given.items() if name not in _OUTER}
        for name in text:
            fields.raw(name)  # some files repeat it
    text = {name: value for name, value in text.items() if value is not None}
    tied = tied or bool(text.get("tie_word_embeddings"))
    rest, own = without_axes(text)
    sections = own.get("mrope_section", section)
    if own.get("mrope_interleaved", interleaved) is not interleaved:
        shown = str(interleaved).lower()
        raise UserError(f"config.json: mrope_interleaved must be {shown} for {architecture}.", "mrope_interleaved")
    values = defaults | rest | {"tie_word_embeddings": tied}
    read = next(family.read for family in DENSE if architecture in family.architectures)
    assert read is not None

    def read_text(own: Fields) -> Spec:
        return with_axes(read(own), sections, interleaved)

    return Fields(values, fields.max_model_len, "config.json, text_config"), read_text


def without_axes(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a config with rotary settings of one dimension, and its mrope_section and mrope_interleaved, if stated."""
    key = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    settings = config.get(key) or {}
    if not isinstance(settings, Mapping):
        raise UserError(f"config.json: {key} must be an object, got {settings!r:.80}.", key)
    names = ("mrope_section", "mrope_interleaved")
    rest = {name: value for name, value in settings.items() if name not in names}
    for name in ("type", "rope_type"):
        if rest.get(name) == "mrope":
            rest[name] = "default"
    if rest.get("type") == rest.get("rope_type"):
        rest.pop("type", None)
    return {**config, key: rest}, {name: settings[name] for name in names if settings.get(name) is not None}


def with_axes(spec: Spec, sections: Any, interleaved: bool) -> Spec:
    """Return a decoder with rotary positions in three dimensions; raise UserError for an unfit mrope_section."""
    ropes = [rope and replace(rope, axes=_axes(sections, rope.size // 2, interleaved)) for rope in spec.ropes]
    return replace(spec, ropes=tuple(ropes))


def _axes(sections: Any, pairs: int, interleaved: bool) -> tuple[int, ...]:
    """Return the dimension of each pair's positions: 0 time, 1 row, 2 column."""
    is_list = isinstance(sections, list | tuple) and len(sections) == 3
    if not is_list or any(type(size) is not int or size < 0 for size in sections) or sum(sections) != pairs:
        raise UserError(
            f"config.json: mrope_section must be 3 numbers with the sum {pairs}, got {sections!r:.80}.", "mrope_section"
        )
    if not interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return tuple(axis if axis and pair < 3 * sections[axis] else 0 for pair in range(pairs) for axis in [pair % 3])


def _tower_fields(fields: Fields, kinds: tuple[str, ...], width: int) -> Fields:
    own = fields.inner("vision_config")
    own.only("model_type", *kinds)
    own.only("out_hidden_size", width)
    for key in ("in_channels", "in_chans"):
        own.only(key, 3)
    rope = own.inner("rope_parameters")
    rope.only("rope_type", "axial", "default")
    rope.only("rope_theta", 10000.0)
    rope.finish()
    return own


def _images(
    fields: Fields,
    vocab_size: int,
    own: Fields,
    tensors: Mapping[str, str],
    patch: int,
    further: Mapping[str, Any],
    **shared: Any,
) -> Images:
    """Return how a model reads images; `further` are fields of `PatchVisionSpec`."""
    patch, merge = own.size("patch_size", patch), own.size("spatial_merge_size", 2)
    rate = own.positive("tokens_per_second", 4.0)  # of videos
    own.only("spatial_patch_size", patch)
    width, heads = own.size("hidden_size"), own.size("num_heads", 16)
    if width % heads or width // heads % 4:
        message = f"config.json: {heads} heads of a width of {width} cannot be rotated by rows and columns."
        raise UserError(message, "num_heads")
    fields.raw("vision_token_id")
    placeholder, video, first, last = (fields.take(f"{kind}_token_id", int, _TOKENS[kind]) for kind in _TOKENS)
    if not 0 <= placeholder < vocab_size:
        message = f"config.json: image_token_id {placeholder} is beyond the vocabulary of {vocab_size}."
        raise UserError(message, "image_token_id")
    spec = PatchVisionSpec(
        patch=patch,
        frames=own.size("temporal_patch_size", 2),
        merge=merge,
        width=width,
        num_heads=heads,
        num_layers=own.layers("depth"),
        ffn_width=own.size("intermediate_size"),
        norm_eps=_NORM_EPS,
        **shared,
        **further,
    )
    for name in ("full_layers", "deep_layers"):
        if any(layer >= spec.num_layers for layer in getattr(spec, name)):
            message = f"config.json, vision_config: a layer of {getattr(spec, name)} is beyond {spec.num_layers}."
            raise UserError(message, "vision_config")
    own.finish(TOWER_WITHOUT_EFFECT)
    stems = {name: f"{_TOWER}{stem}" for name, stem in (_TENSORS | dict(tensors)).items()}
    row = Family((), None, LLAMA_TENSORS | named(stems) | _POSITIONS, "model.", heads=_TEXT_TENSORS, renamed=_RENAMED)
    processor = partial(read_patches, placeholder=placeholder, video=video, patch=patch, merge=merge)
    videos = partial(
        read_videos,
        placeholder=video,
        around=(first, last),
        is_stamped=not spec.window,
        rate=rate,
        patch=patch,
        merge=merge,
    )
    ids = (video, first, last)
    reads = spec.frames == PAIR and len({placeholder, *ids}) == 4 and all(0 <= token < vocab_size for token in ids)
    return Images(spec, placeholder, row, processor, videos=videos if reads else None)


def _layers_of(own: Fields, key: str, default: list[int]) -> tuple[int, ...]:
    given = own.raw(key)
    given = default if given is None else given
    if not isinstance(given, list) or any(type(layer) is not int or layer < 0 for layer in given):
        raise UserError(f"config.json, vision_config: {key} must be a list of layers, got {given!r:.80}.", key)
    if given != sorted(set(given)):
        raise UserError(f"config.json, vision_config: {key} must be ascending, got {given!r:.80}.", key)
    return tuple(given)


def _windowed(fields: Fields, width: int, vocab_size: int) -> Images:
    own = _tower_fields(fields, ("qwen2_5_vl", "qwen2_5_vl_vision"), width)
    size = own.size("window_size", 112)
    window = size // own.size("spatial_merge_size", 2) // own.size("patch_size", 14)
    if not window:
        raise UserError(f"config.json, vision_config: window_size {size} is smaller than a token.", "window_size")
    further = {
        "norm": "rms",
        "activation": tower_activation(own, "hidden_act", "silu"),
        "is_gated": True,
        "patch_bias": False,
        "window": window,
        "full_layers": _layers_of(own, "fullatt_block_indexes", [7, 15, 23, 31]),
    }
    return _images(fields, vocab_size, own, _GATED_TENSORS, 14, further, out_width=width)


def _deep(fields: Fields, width: int, vocab_size: int) -> Images:
    own = _tower_fields(fields, ("qwen3_vl", "qwen3_vl_vision"), width)
    count = own.size("num_position_embeddings", 2304)
    if isqrt(count) ** 2 != count:
        raise UserError(
            f"config.json, vision_config: num_position_embeddings {count} is not a square.", "num_position_embeddings"
        )
    deep = _layers_of(own, "deepstack_visual_indexes", [8, 16, 24])
    further = {
        "norm": "layer",
        "activation": tower_activation(own, "hidden_act", "gelu_pytorch_tanh"),
        "is_gated": False,
        "patch_bias": True,
        "positions": isqrt(count),
        "deep_layers": deep,
    }
    mergers = {
        f"deep_{number}_{name}": f"deepstack_merger_list.{number}.{stem}"
        for number in range(len(deep))
        for name, stem in (("norm", "norm"), ("up", "linear_fc1"), ("down", "linear_fc2"))
    }
    return _images(fields, vocab_size, own, _PLAIN_TENSORS | mergers, 16, further, out_width=width)


_TOKENS = {"image": 151655, "video": 151656, "vision_start": 151652, "vision_end": 151653}
_TOWER = "visual."
_TENSORS = {
    "patches": "patch_embed.proj",
    "attn_norm": "blocks.{}.norm1",
    "mlp_norm": "blocks.{}.norm2",
    "qkv": "blocks.{}.attn.qkv",
    "out": "blocks.{}.attn.proj",
}
_POSITIONS = {"positions": f"{_TOWER}pos_embed.weight"}
_GATED_TENSORS = {
    **{name: f"blocks.{{}}.mlp.{name}_proj" for name in ("gate", "up", "down")},
    **{"merge_norm": "merger.ln_q", "merge_up": "merger.mlp.0", "merge_down": "merger.mlp.2"},
}
_PLAIN_TENSORS = {
    **{"up": "blocks.{}.mlp.linear_fc1", "down": "blocks.{}.mlp.linear_fc2"},
    **{"merge_norm": "merger.norm", "merge_up": "merger.linear_fc1", "merge_down": "merger.linear_fc2"},
}
_TEXT_TENSORS = ("embed_tokens.", "norm.", "layers.", "lm_head.")
# transformers 5 and published Qwen3-VL files; Qwen2.5-VL files lack the first word.
_RENAMED = (("model.language_model.", ""), ("model.visual.", _TOWER), ("language_model.model.", ""))

OF_ANY_SIZE: tuple[Family, ...] = (
    Family(
        ("Qwen2_5_VLForConditionalGeneration",),
        None,
        heads=(_TOWER,),
        renamed=_RENAMED,
        text_of=partial(
            _text_of,
            architecture="Qwen2ForCausalLM",
            section=(16, 24, 24),
            interleaved=False,
            rope_theta=1000000.0,
            max_position_embeddings=32768,
        ),
        images=_windowed,
    ),
    Family(
        ("Qwen3VLForConditionalGeneration",),
        None,
        heads=(_TOWER,),
        renamed=_RENAMED,
        text_of=partial(
            _text_of,
            architecture="Qwen3ForCausalLM",
            section=(24, 20, 20),
            interleaved=True,
            rope_theta=500000.0,
            max_position_embeddings=128000,
        ),
        images=_deep,
    ),
)
