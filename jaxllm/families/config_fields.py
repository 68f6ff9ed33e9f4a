"""Config.json fields common to model families.

Rotary settings are `rope_theta` with `rope_scaling` (transformers 4), or `rope_parameters` (5).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from jaxllm.errors import UserError
from jaxllm.model.spec import Activation, BandScaling, LinearScaling, PairScaling, Rope, Spec, YarnScaling

Value = TypeVar("Value", int, float, bool, str)

_REQUIRED: Any = object()
LARGEST = 2**31 - 1  # shapes are 32-bit on devices
MOST_LAYERS = 4096  # thirty times the deepest published model

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class Fields:
    """A config.json reader that validates values and tracks accessed keys. `max_model_len` is the requested length."""

    def __init__(self, config: Mapping[str, Any], max_model_len: int | None = None, where: str = "config.json") -> None:
        self.max_model_len = max_model_len
        self._config = config
        self._where = where
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        return self._config.get(key) is not None

    def raw(self, key: str) -> Any:
        self._read.add(key)
        return self._config.get(key)

    def others(self, keys: Collection[str]) -> dict[str, Any]:
        """Return all values but those of `keys`, as read."""
        found = {key: value for key, value in self._config.items() if key not in keys}
        self._read |= found.keys()
        return found

    def take(self, key: str, kind: type[Value], default: Value = _REQUIRED) -> Value:
        """Return a finite value of a type; `default` replaces a missing or null value, otherwise an error."""
        value = self.raw(key)
        if value is None:
            if default is _REQUIRED:
                raise UserError(f"{self._where} has no {key}; this model cannot be read without it.", key)
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = _float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"{self._where}: {key} must be of type {kind.__name__}, got {value!r:.80}.", key)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{self._where}: {key} must be a finite number, got {value}.", key)
        return value

    def size(self, key: str, default: int = _REQUIRED, most: int = LARGEST) -> int:
        value = self.take(key, int, default)
        if not 1 <= value <= most:
            raise UserError(f"{self._where}: {key} must be from 1 to {most}, got {value!r:.80}.", key)
        return value

    def layers(self, key: str = "num_hidden_layers") -> int:
        """Return the number of layers, bounded since memory is allocated for each."""
        return self.size(key, most=MOST_LAYERS)

    def positive(self, key: str, default: float = _REQUIRED) -> float:
        value = self.take(key, float, default)
        if value <= 0.0:
            raise UserError(f"{self._where}: {key} must be above zero, got {value}.", key)
        return value

    def optional(self, key: str, kind: type[Value], absent: Value | None = None) -> Value | None:
        """Return a value that may be null; `absent` replaces a missing key, as in transformers."""
        if key in self._config and self._config[key] is None:
            self._read.add(key)
            return None
        return absent if key not in self._config else self.take(key, kind)

    def inner(self, key: str) -> Fields:
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"{self._where}: {key} must be an object, got {value!r:.80}.", key)
        return Fields(value or {}, self.max_model_len, f"{self._where}, {key}")

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self.raw(key)
        if not isinstance(value, list) or len(value) != count or not all(type(one) in (int, float) for one in value):
            raise UserError(f"{self._where}: {key} must be a list of {count} numbers, got {value!r:.80}.", key)
        numbers = tuple(map(_float, value))
        if not all(map(math.isfinite, numbers)):
            raise UserError(f"{self._where}: {key} must be finite numbers.", key)
        return numbers

    def only(self, key: str, *values: Any) -> None:
        """Refuse values other than these, missing or null."""
        value = self.raw(key)
        if value is not None and value not in values:
            shown = " or ".join(repr(one) for one in values) or "null"
            raise UserError(f"{self._where}: {key} = {value!r} is not supported, only {shown}.", key)

    def activation(self, key: str, default: str) -> Activation:
        name = self.take(key, str, default)
        if name not in _ACTIVATIONS:
            raise UserError(f"{self._where}: {key} = {name!r} is not one of {', '.join(_ACTIVATIONS)}.", key)
        return _ACTIVATIONS[name]

    def attention_biases(self, default: bool = False) -> dict[str, Any]:
        bias = self.take("attention_bias", bool, default)
        return {"qkv_bias": bias, "out_bias": bias}

    def finish(self, without_effect: frozenset[str] = frozenset()) -> None:
        """Refuse keys that were not read, unless null or without effect."""
        for key, value in self._config.items():
            if key not in self._read and key not in without_effect and value is not None:
                raise UserError(
                    f"{self._where}: the key {key} (= {value!r:.80}) is not understood for this model, so its "
                    "output could be wrong; remove the key if it has no effect.",
                    key,
                )


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def stretched(max_position: int, factor: float) -> int:
    length = max_position * factor
    if not 1 <= length <= LARGEST:
        raise UserError(f"config.json: a context of {max_position} × {factor} positions makes no sense.", "factor")
    return int(length)


def read_rope(
    fields: Fields,
    head_size: int,
    max_position: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
) -> tuple[Rope, int]:
    """Return the rope, and `max_position` as scaled by it.

    `theta` and `partial`, the rotated share of a head, are defaults; without `partial`, partial rotation is refused.
    """
    theta = fields.positive("rope_theta", theta)
    if partial is not None:
        partial = fields.take("partial_rotary_factor", float, partial)
    settings = rotary_settings(fields)
    # At top level in some checkpoints; transformers prefers it.
    original = (
        fields.size("original_max_position_embeddings") if fields.has("original_max_position_embeddings") else None
    )
    return parse_rope(settings, head_size, max_position, original, theta, partial, interleaved)


def rotary_settings(fields: Fields) -> Fields:
    older, newer = fields.raw("rope_scaling"), fields.raw("rope_parameters")
    if older is not None and newer is not None and older != newer:
        raise UserError("config.json: rope_scaling and rope_parameters contradict each other.", "rope_scaling")
    return fields.inner("rope_scaling" if newer is None else "rope_parameters")


def parse_rope(
    settings: Fields,
    head_size: int,
    max_position: int,
    original: int | None,
    theta: float,
    partial: float | None = None,
    interleaved: bool = False,
) -> tuple[Rope, int]:
    theta = settings.positive("rope_theta", theta)
    if partial is None:
        settings.only("partial_rotary_factor", 1.0)
    size = int(head_size * (1.0 if partial is None else settings.take("partial_rotary_factor", float, partial)))
    if size < 2 or size > head_size or size % 2 != 0:
        raise UserError(f"config.json: {size} coordinates of a head of {head_size} cannot be rotated.", "head_dim")
    older, kind = settings.take("type", str, "default"), settings.raw("rope_type")  # "type" before transformers 4.43
    kind = older if kind is None else kind
    scaling: LinearScaling | BandScaling | YarnScaling | PairScaling | None = None
    amplitude, factor = 1.0, 1.0
    if kind in ("linear", "llama3", "yarn", "dynamic"):
        factor = settings.take("factor", float)
        if factor < 1.0:
            raise UserError(f"config.json: the rotary factor must be at least 1, got {factor}.", "factor")
    if kind in ("llama3", "yarn", "longrope", "su"):
        stated = settings.size("original_max_position_embeddings", max_position)
        original = stated if original is None else original
    match kind:
        case "default":
            pass
        case "linear":
            scaling, max_position = LinearScaling(factor), stretched(max_position, factor)
        case "llama3":
            low, high = settings.take("low_freq_factor", float), settings.take("high_freq_factor", float)
            scaling = BandScaling(factor, low, high, original or max_position)
        case "yarn":
            original = original or max_position
            scaling, amplitude = _yarn(settings, factor, original), _yarn_amplitude(settings, factor)
            max_position = max(
                max_position, stretched(original, factor)
            )  # max_position_embeddings may or may not include the factor
        case "dynamic":
            # transformers scales theta with the sequence, vLLM for the longest possible one; here for the requested
            # length, if beyond the model's.
            length = min(settings.max_model_len or max_position, stretched(max_position, factor))
            if length > max_position:
                theta *= (factor * length / max_position - (factor - 1.0)) ** (size / (size - 2))
                max_position = length
        case "longrope" | "su":
            original = original or max_position
            factor = settings.take("factor", float, max_position / original)
            lists = [settings.numbers(f"{name}_factor", size // 2) for name in ("short", "long")]
            # As vLLM, for all sequences if any may exceed the original context. transformers switches within a
            # sequence.
            scaling = PairScaling(lists[min(settings.max_model_len or max_position, max_position) > original])
            amplitude = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
            amplitude = settings.take("attention_factor", float, amplitude)
        case _:
            known = "default, linear, llama3, yarn, dynamic, longrope"
            raise UserError(f"config.json: rope_type {kind!r} is not supported, only {known}.", "rope_type")
    settings.finish()
    return Rope(size, theta, scaling, amplitude, interleaved), max_position


def _yarn(settings: Fields, factor: float, original: int) -> YarnScaling:
    settings.raw("finetuned")  # training history
    return YarnScaling(
        factor,
        original,
        settings.take("beta_fast", float, 32.0),
        settings.take("beta_slow", float, 1.0),
        settings.take("truncate", bool, True),
    )


def _yarn_amplitude(settings: Fields, factor: float) -> float:
    above, below = settings.take("mscale", float, 0.0), settings.take("mscale_all_dim", float, 0.0)
    inferred = magnitude(factor, above) / magnitude(factor, below) if above and below else magnitude(factor, 1.0)
    # DeepSeek's Qwen3 cancels the amplification in vLLM's spelling, which transformers ignores.
    inferred *= settings.take("attn_factor", float, 1.0)
    return settings.take("attention_factor", float, inferred)


def magnitude(factor: float, weight: float) -> float:
    """Return YaRN's attention scaling for a context stretched by `factor` (Peng et al. 2023, §3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0


def read_windows(fields: Fields, window: int | None, default: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return each layer's sliding window, None for full attention, by `layer_types`, otherwise by `default`."""
    kinds = fields.raw("layer_types")
    slides = default
    if kinds is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or not all(kind in known for kind in kinds):
            raise UserError(f"config.json: layer_types {kinds!r:.80} has a kind of layer not built yet.", "layer_types")
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    if len(slides) != len(default):
        raise UserError(f"config.json: layer_types names {len(slides)} of {len(default)} layers.", "layer_types")
    if window is not None and window < 1:
        raise UserError(f"config.json: sliding_window must be at least 1, got {window}.", "sliding_window")
    return tuple(window if is_sliding else None for is_sliding in slides)


def read_decoder(
    fields: Fields,
    *,
    tied: bool = False,
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    turned_size: int | None = None,
    rotates: tuple[bool, ...] | None = None,
    **further: Any,
) -> Spec:
    """Read the fields that decoders like Llama share.

    `eps` is the norm's key and default; `theta` and `partial` are as in read_rope; `turned_size` replaces the head size
    for rotation; `further` are other fields of Spec.
    """
    width, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_layers = fields.layers()
    head_size = further.get("head_size")
    if head_size is None:
        if not fields.has("head_dim") and width % num_heads != 0:
            raise UserError(f"config.json: hidden_size {width} is not a multiple of {num_heads} heads.", "hidden_size")
        head_size = fields.size("head_dim", width // num_heads)
    max_position = fields.size("max_position_embeddings")
    if "ropes" not in further:
        options: dict[str, Any] = {"theta": theta, "partial": partial, "interleaved": interleaved}
        rope, max_position = read_rope(fields, turned_size or head_size, max_position, **options)
        further["ropes"] = tuple(rope if turned else None for turned in rotates or (True,) * num_layers)
    if "is_causal" not in further:
        further["is_causal"] = fields.take("is_causal", bool, True)
        if not further["is_causal"] and "windows" in further:  # to both sides, including the token itself
            further["windows"] = tuple(window and window + 1 for window in further["windows"])
    if "activation" not in further:
        further["activation"] = fields.activation("hidden_act", "silu")
    shared: dict[str, Any] = {
        "num_layers": num_layers,
        "width": width,
        "num_heads": num_heads,
        "num_kv_heads": fields.size("num_key_value_heads", num_heads),
        "head_size": head_size,
        "ffn_width": fields.size("intermediate_size"),
        "vocab_size": fields.size("vocab_size"),
        "max_position": max_position,
        "windows": (None,) * num_layers,
        "attention_scale": head_size**-0.5,
        "norm_eps": fields.positive(eps[0], eps[1]),
        "tie_embeddings": fields.take("tie_word_embeddings", bool, tied),
    }
    return Spec(**(shared | further))


def read_multipliers(fields: Fields) -> dict[str, Any]:
    return {
        "embed_scale": fields.take("embedding_multiplier", float, 1.0),
        "attention_scale": fields.take("attention_multiplier", float, 1.0),
        "residual_scale": fields.take("residual_multiplier", float, 1.0),
        "logit_scale": 1.0 / fields.positive("logits_scaling", 1.0),
    }


def slides(fields: Fields, pattern: int | None = None) -> tuple[bool, ...]:
    layers = range(fields.layers())
    return tuple(pattern is None or (layer + 1) % pattern != 0 for layer in layers)


def read_learned(fields: Fields, *, width: int, num_heads: int, num_layers: int, **further: Any) -> Spec:
    """Read fields of older families: learned positions, layer norms, biases, multi-head attention."""
    if width % num_heads != 0:
        raise UserError(f"config.json: the width {width} is not a multiple of {num_heads} heads.")
    shared: dict[str, Any] = {
        "num_layers": num_layers,
        "width": width,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": width // num_heads,
        "vocab_size": fields.size("vocab_size"),
        "windows": (None,) * num_layers,
        "ropes": (None,) * num_layers,
        "attention_scale": (width // num_heads) ** -0.5,
        "norm": "layer",
        "norm_bias": True,
        "learned_positions": True,
        "mlp_gated": False,
        "tie_embeddings": fields.take("tie_word_embeddings", bool, True),
    }
    return Spec(**(shared | further))


def read_two_ropes(
    fields: Fields, windows: tuple[int | None, ...], head_size: int, max_position: int, thetas: tuple[float, float]
) -> tuple[Rope, ...]:
    """Return each layer's rope; `thetas` are the defaults of layers without and with a window.

    The older "rope_scaling" applies to layers without one. `max_position` is already scaled.
    """
    newer = fields.inner("rope_parameters")
    settings = (
        newer.inner("full_attention") if newer.has("full_attention") else fields.inner("rope_scaling"),
        newer.inner("sliding_attention"),
    )
    newer.finish()
    whole, local = (
        parse_rope(one, head_size, max_position, None, theta)[0] for one, theta in zip(settings, thetas, strict=True)
    )
    return tuple(local if window else whole for window in windows)
