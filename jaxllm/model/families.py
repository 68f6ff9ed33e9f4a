"""The table of model families: how each one's config.json becomes a Spec, and what its tensors are called.

The only file that knows family names. Reading a key is understanding it: a key that no reader looked at, and that is
not known to be without effect on the computation, is an error that names it. Both spellings of the rotary settings are
read, `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxllm.errors import UserError
from jaxllm.model.spec import Activation, BandScaling, Experts, Latent, LinearScaling, Spec, YarnScaling

Value = TypeVar("Value", int, float, bool, str)

_REQUIRED: Any = object()

# Keys about training, bookkeeping, or things the engine reads elsewhere (token ids): no effect on the forward pass.
_WITHOUT_EFFECT = frozenset(
    """
    architectures model_type torch_dtype dtype transformers_version use_cache _name_or_path _commit_hash tokenizer_class
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id prefix
    initializer_range init_std attention_dropout hidden_dropout activation_dropout dropout layerdrop embd_pdrop
    attn_pdrop resid_pdrop classifier_dropout pretraining_tp gradient_checkpointing cache_implementation
    attn_implementation _attn_implementation_autoset output_attentions output_hidden_states return_dict torchscript
    use_bfloat16 chunk_size_feed_forward is_decoder problem_type id2label label2id num_labels
    task_specific_params finetuning_task summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout unsloth_version unsloth_fixed is_llama_config
    output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size
    """.split()
)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# What each part of a weight (see decoder.declare) is called, after the family's prefix; {} is the layer's number,
# a second one the expert's.
_LLAMA_TENSORS = {
    "embed": "embed_tokens.weight",
    "final_norm": "norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "layers.{}.input_layernorm.weight",
    "q": "layers.{}.self_attn.q_proj.weight",
    "k": "layers.{}.self_attn.k_proj.weight",
    "v": "layers.{}.self_attn.v_proj.weight",
    "out": "layers.{}.self_attn.o_proj.weight",
    "q_bias": "layers.{}.self_attn.q_proj.bias",
    "k_bias": "layers.{}.self_attn.k_proj.bias",
    "v_bias": "layers.{}.self_attn.v_proj.bias",
    "out_bias": "layers.{}.self_attn.o_proj.bias",
    "q_norm": "layers.{}.self_attn.q_norm.weight",
    "k_norm": "layers.{}.self_attn.k_norm.weight",
    "mlp_norm": "layers.{}.post_attention_layernorm.weight",
    "gate": "layers.{}.mlp.gate_proj.weight",
    "up": "layers.{}.mlp.up_proj.weight",
    "down": "layers.{}.mlp.down_proj.weight",
    "gate_bias": "layers.{}.mlp.gate_proj.bias",
    "up_bias": "layers.{}.mlp.up_proj.bias",
    "down_bias": "layers.{}.mlp.down_proj.bias",
    "router": "layers.{}.mlp.gate.weight",
    "expert_gate": "layers.{}.mlp.experts.{}.gate_proj.weight",
    "expert_up": "layers.{}.mlp.experts.{}.up_proj.weight",
    "expert_down": "layers.{}.mlp.experts.{}.down_proj.weight",
    "shared_gate": "layers.{}.mlp.shared_expert.gate_proj.weight",
    "shared_up": "layers.{}.mlp.shared_expert.up_proj.weight",
    "shared_down": "layers.{}.mlp.shared_expert.down_proj.weight",
    "shared_weight": "layers.{}.mlp.shared_expert_gate.weight",
}


class Fields:
    """A config.json while it is read: checks each value and remembers which keys were looked at."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._config = config
        self._where = where
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Say whether the key is there and not null."""
        return self._config.get(key) is not None

    def raw(self, key: str) -> Any:
        """Take a value of any kind; None where the key is absent."""
        self._read.add(key)
        return self._config.get(key)

    def take(self, key: str, kind: type[Value], default: Value = _REQUIRED) -> Value:
        """Take a value of one kind; absent or null means the default, without which that is an error."""
        value = self.raw(key)
        if value is None:
            if default is _REQUIRED:
                raise UserError(f"{self._where} has no {key}; this model cannot be read without it.", key)
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"{self._where}: {key} must be of type {kind.__name__}, got {value!r}.", key)
        return value

    def size(self, key: str, default: int = _REQUIRED) -> int:
        """Take a count: an integer of at least one."""
        value = self.take(key, int, default)
        if value < 1:
            raise UserError(f"{self._where}: {key} must be at least 1, got {value}.", key)
        return value

    def optional(self, key: str, kind: type[Value], absent: Value | None = None) -> Value | None:
        """Take a value that null turns off; `absent` stands for a missing key, as in transformers."""
        if key in self._config and self._config[key] is None:
            self._read.add(key)
            return None
        return absent if key not in self._config else self.take(key, kind)

    def only(self, key: str, *values: Any) -> None:
        """Refuse any value but these (and an absent or null one): what else it could say is not built."""
        value = self.raw(key)
        if value is not None and value not in values:
            shown = " or ".join(repr(one) for one in values)
            raise UserError(f"{self._where}: {key} = {value!r} is not supported, only {shown}.", key)

    def activation(self, key: str, default: str) -> Activation:
        """Take the name of the feed-forward's nonlinearity."""
        name = self.take(key, str, default)
        if name not in _ACTIVATIONS:
            raise UserError(f"{self._where}: {key} = {name!r} is not one of {', '.join(_ACTIVATIONS)}.", key)
        return _ACTIVATIONS[name]

    def finish(self, without_effect: frozenset[str] = frozenset()) -> None:
        """Refuse the keys that nobody looked at, unless they say nothing (null) or are known to have no effect."""
        for key, value in self._config.items():
            if key not in self._read and key not in without_effect and value is not None:
                raise UserError(
                    f"{self._where}: the key {key} (= {value!r:.80}) is not understood for this model, so its "
                    "output could be wrong; remove the key if it has no effect.",
                    key,
                )


@dataclass(frozen=True)
class Family:
    """One row of the table. `prefix` is what tensor names may start with; they are compared without it.

    Parts that name the same tensor lie in it one after the other, `alternating` ones row by row. Those named in
    `transposed` are stored [in, out]. A part of an expert whose name has no second {} is a tensor of all experts.
    `ignored` are endings of tensor names that hold no weights; `has_layers_behind`: nor do layers behind the last.
    """

    architectures: tuple[str, ...]
    read: Callable[[Fields], Spec]
    tensors: Mapping[str, str] = field(default_factory=lambda: _LLAMA_TENSORS)
    prefix: str = "model."
    transposed: frozenset[str] = frozenset()
    alternating: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    has_layers_behind: bool = False


def read_spec(config: Mapping[str, Any]) -> tuple[Spec, Family]:
    """Read a Hugging Face config: the decoder it describes and its row of the table.

    An unknown architecture, a key that is not understood, a missing or an impossible value is a UserError naming it.
    """
    names = config.get("architectures") or []
    known = {name: family for family in FAMILIES for name in family.architectures}
    family = next((known[name] for name in names if name in known), None)
    if family is None:
        said = ", ".join(map(str, names)) or "none"
        raise UserError(f"config.json: architecture {said} is not supported; supported: {', '.join(known)}.", said)
    if config.get("quantization_config") is not None:
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise UserError(
            f"config.json: quantization_config ({method}) is not supported; use an unquantised checkpoint.",
            "quantization_config",
        )
    fields = Fields(config)
    spec = family.read(fields)
    fields.only("is_encoder_decoder", False)
    fields.only("add_cross_attention", False)
    fields.finish(_WITHOUT_EFFECT)
    if spec.num_heads % spec.num_kv_heads != 0:
        raise UserError(
            f"config.json: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads evenly.",
            "num_key_value_heads",
        )
    if spec.position == "rope" and spec.head_size % 2 != 0:
        raise UserError(f"config.json: a head size of {spec.head_size} is odd and cannot be rotated.", "head_dim")
    return spec, family


def _llama_like(
    fields: Fields, *, tied: bool = False, activation: str = "hidden_act", theta: float = 10000.0, **overrides: Any
) -> Spec:
    """Read what nearly all families share; `overrides` are fields of Spec that the caller read itself."""
    width, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_layers = fields.size("num_hidden_layers")
    head_size = overrides.pop("head_size", None)
    if head_size is None:
        if not fields.has("head_dim") and width % num_heads != 0:
            raise UserError(f"config.json: hidden_size {width} is not a multiple of {num_heads} heads.", "hidden_size")
        head_size = fields.size("head_dim", width // num_heads)
    theta, scaling = _rope(fields, theta)
    positions = fields.size("max_position_embeddings")
    if isinstance(scaling, LinearScaling):
        positions = int(positions * scaling.factor)
    elif isinstance(scaling, YarnScaling):  # some checkpoints say the stretched number, some the original one
        positions = max(positions, int(scaling.original_max_position * scaling.factor))
    shared: dict[str, Any] = {
        "num_layers": num_layers,
        "width": width,
        "num_heads": num_heads,
        "num_kv_heads": fields.size("num_key_value_heads", num_heads),
        "head_size": head_size,
        "ffn_width": fields.size("intermediate_size"),
        "vocab_size": fields.size("vocab_size"),
        "max_position": positions,
        "windows": (None,) * num_layers,
        "attention_scale": head_size**-0.5,
        "norm_eps": fields.take("rms_norm_eps", float, 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "activation": fields.activation(activation, "silu"),
        "tie_embeddings": fields.take("tie_word_embeddings", bool, tied),
    }
    return Spec(**(shared | overrides))


def _rope(fields: Fields, default: float) -> tuple[float, LinearScaling | BandScaling | YarnScaling | None]:
    theta = fields.take("rope_theta", float, default)
    chosen = _rotary_settings(fields)
    if chosen is None:
        return theta, None
    rope = Fields(chosen, "config.json, rotary settings")
    theta = rope.take("rope_theta", float, theta)
    rope.only("partial_rotary_factor", 1.0)
    older, kind = rope.take("type", str, "default"), rope.raw("rope_type")  # "type" until transformers 4.43
    kind = older if kind is None else kind
    scaling: LinearScaling | BandScaling | YarnScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(rope.take("factor", float))
    elif kind == "llama3":
        scaling = BandScaling(
            rope.take("factor", float),
            rope.take("low_freq_factor", float),
            rope.take("high_freq_factor", float),
            rope.size("original_max_position_embeddings"),
        )
    elif kind == "yarn":
        scaling = _yarn(rope)
    elif kind != "default":
        raise UserError(
            f"config.json: rope_type {kind!r} is not supported, only default, linear, llama3, yarn.", "rope_type"
        )
    if scaling is not None and scaling.factor < 1.0:
        raise UserError(f"config.json: the rotary factor must be at least 1, got {scaling.factor}.", "factor")
    rope.finish()
    return theta, scaling


def _yarn(rope: Fields) -> YarnScaling:
    factor = rope.take("factor", float)
    part, whole = rope.take("mscale", float, 0.0), rope.take("mscale_all_dim", float, 0.0)
    amplitude = _magnitude(factor, part) / _magnitude(factor, whole) if part and whole else _magnitude(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position=rope.size("original_max_position_embeddings"),
        fast=rope.take("beta_fast", float, 32.0),
        slow=rope.take("beta_slow", float, 1.0),
        amplitude=rope.take("attention_factor", float, amplitude),
        is_truncated=rope.take("truncate", bool, True),
    )


def _magnitude(factor: float, weight: float) -> float:
    """How much more the scores of a context stretched by `factor` need (Peng et al. 2023, "YaRN", §3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0


def _rotary_settings(fields: Fields) -> Mapping[str, Any] | None:
    settings = fields.raw("rope_scaling"), fields.raw("rope_parameters")
    if settings[0] is not None and settings[1] is not None and settings[0] != settings[1]:
        raise UserError("config.json: rope_scaling and rope_parameters contradict each other.", "rope_scaling")
    chosen = settings[1] if settings[1] is not None else settings[0]
    if chosen is not None and not isinstance(chosen, Mapping):
        raise UserError(f"config.json: the rotary settings must be an object, got {chosen!r}.", "rope_scaling")
    return chosen


def _windows(fields: Fields, window: int | None, default: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Give each layer its window: `layer_types` says which layers slide, else `default` does."""
    kinds = fields.raw("layer_types")
    slides = default
    if kinds is not None:
        if not isinstance(kinds, list) or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise UserError(f"config.json: layer_types {kinds!r:.80} has a kind of layer not built yet.", "layer_types")
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    if len(slides) != len(default):
        raise UserError(f"config.json: layer_types names {len(slides)} of {len(default)} layers.", "layer_types")
    if window is not None and window < 1:
        raise UserError(f"config.json: sliding_window must be at least 1, got {window}.", "sliding_window")
    return tuple(window if is_sliding else None for is_sliding in slides)


def _llama(fields: Fields) -> Spec:
    fields.only("rope_interleaved", False)
    bias = fields.take("attention_bias", bool, False)
    return _llama_like(fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.take("mlp_bias", bool, False))


def _mistral(fields: Fields) -> Spec:
    window = fields.optional("sliding_window", int, 4096)
    layers = fields.size("num_hidden_layers")
    return _llama_like(fields, windows=_windows(fields, window, (True,) * layers))


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    layers, first = fields.size("num_hidden_layers"), fields.take("max_window_layers", int, 28)
    window = fields.optional("sliding_window", int, 4096)
    if not fields.take("use_sliding_window", bool, False):
        window = None
    return _windows(fields, window, tuple(window is not None and layer >= first for layer in range(layers)))


def _qwen2(fields: Fields) -> Spec:
    fields.only("use_mrope", False)
    return _llama_like(fields, qkv_bias=True, windows=_qwen_windows(fields))


def _qwen3(fields: Fields) -> Spec:
    bias = fields.take("attention_bias", bool, False)
    head_size = fields.size("head_dim", 128)
    return _llama_like(
        fields, head_size=head_size, qk_norm=True, qkv_bias=bias, out_bias=bias, windows=_qwen_windows(fields)
    )


def _gemma2(fields: Fields) -> Spec:
    layers, bias = fields.size("num_hidden_layers"), fields.take("attention_bias", bool, False)
    window = fields.optional("sliding_window", int, 4096)
    fields.only("sliding_window_size", window)
    fields.only("use_bidirectional_attention", False)
    fields.only("hidden_act", "gelu", "gelu_pytorch_tanh")  # an old key that transformers reads no more
    return _llama_like(
        fields,
        tied=True,
        activation="hidden_activation",
        head_size=fields.size("head_dim", 256),
        windows=_windows(fields, window, tuple(layer % 2 == 0 for layer in range(layers))),
        attention_scale=fields.take("query_pre_attn_scalar", float, 256.0) ** -0.5,
        attention_softcap=fields.optional("attn_logit_softcapping", float, 50.0),
        logit_softcap=fields.optional("final_logit_softcapping", float, 30.0),
        norm="rms+1",
        norm_place="sandwich",
        embed_scale=fields.size("hidden_size") ** 0.5,
        qkv_bias=bias,
        out_bias=bias,
    )


def _learned(fields: Fields, *, width: int, num_heads: int, num_layers: int, **own: Any) -> Spec:
    """Read what the older families share: learned positions, layer norms, biases, one key head per query head."""
    if width % num_heads != 0:
        raise UserError(f"config.json: the width {width} is not a multiple of {num_heads} heads.")
    return Spec(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=width // num_heads,
        vocab_size=fields.size("vocab_size"),
        windows=(None,) * num_layers,
        attention_scale=(width // num_heads) ** -0.5,
        norm="layer",
        position="learned",
        mlp_gated=False,
        tie_embeddings=fields.take("tie_word_embeddings", bool, True),
        **own,
    )


def _gpt2(fields: Fields) -> Spec:
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("reorder_and_upcast_attn", False, True)  # scores are float32 here in any case
    width, positions = fields.size("n_embd"), fields.size("n_positions", 1024)
    fields.only("n_ctx", positions)
    return _learned(
        fields,
        width=width,
        num_heads=fields.size("n_head"),
        num_layers=fields.size("n_layer"),
        ffn_width=fields.size("n_inner", 4 * width),
        max_position=positions,
        norm_eps=fields.take("layer_norm_epsilon", float, 1e-5),
        activation=fields.activation("activation_function", "gelu_new"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def _opt(fields: Fields) -> Spec:
    width, bias = fields.size("hidden_size"), fields.take("enable_bias", bool, True)
    fields.only("do_layer_norm_before", True)
    fields.only("_remove_final_layer_norm", False)
    fields.only("layer_norm_elementwise_affine", True)
    fields.only("word_embed_proj_dim", width)
    return _learned(
        fields,
        width=width,
        num_heads=fields.size("num_attention_heads"),
        num_layers=fields.size("num_hidden_layers"),
        ffn_width=fields.size("ffn_dim"),
        max_position=fields.size("max_position_embeddings"),
        position_offset=2,  # rows 0 and 1 of the table were kept for padding (fairseq)
        norm_eps=1e-5,
        activation=fields.activation("activation_function", "relu"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )


def _all_layers(fields: Fields) -> tuple[bool, ...]:
    return (True,) * fields.size("num_hidden_layers")


def _sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Say which layers have experts: every so manyth, those aside that have the plain feed-forward."""
    stride, plain = fields.size("decoder_sparse_step", 1), fields.raw("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        raise UserError(f"config.json: mlp_only_layers must be a list of layers, got {plain!r:.80}.", "mlp_only_layers")
    layers = fields.size("num_hidden_layers")
    return tuple(layer not in plain and (layer + 1) % stride == 0 for layer in range(layers))


def _experts(fields: Fields, width: str, layers: tuple[bool, ...], **own: Any) -> Experts:
    """Read how many experts there are and how many of them each token uses; `own` are further fields of Experts."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")  # the last is transformers 5's for all of them
    count = next((name for name in names if fields.has(name)), names[-1])
    experts, chosen = fields.size(count), fields.size("num_experts_per_tok")
    groups, best = own.get("groups", 1), own.get("groups_per_token", 1)
    if experts % groups != 0 or best > groups or chosen > experts // groups * best:
        raise UserError(
            f"config.json: {chosen} of {experts} experts cannot be chosen from {best} of {groups} groups.", count
        )
    return Experts(layers=layers, count=experts, per_token=chosen, ffn_width=fields.size(width), **own)


def _mixtral(fields: Fields) -> Spec:
    layers = fields.size("num_hidden_layers")
    experts = _experts(fields, "intermediate_size", _all_layers(fields), is_normalised=True)
    window = fields.optional("sliding_window", int)
    return _llama_like(fields, theta=1e6, experts=experts, windows=_windows(fields, window, (True,) * layers))


def _qwen2_moe(fields: Fields) -> Spec:
    layers, until = fields.size("num_hidden_layers"), fields.take("max_window_layers", int, 28)
    is_windowed = fields.take("use_sliding_window", bool, False)
    fields.raw("sliding_window")  # means nothing without the key above
    window = fields.optional("sliding_window", int, 4096) if is_windowed else None
    return _llama_like(
        fields,
        qkv_bias=fields.take("qkv_bias", bool, True),
        windows=_windows(fields, window, tuple(layer % 2 == 0 and layer < until for layer in range(layers))),
        experts=_experts(
            fields,
            "moe_intermediate_size",
            _sparse_layers(fields),
            is_normalised=fields.take("norm_topk_prob", bool, False),
            shared_width=fields.size("shared_expert_intermediate_size"),
            shared_gate=True,
        ),
    )


def _qwen3_moe(fields: Fields) -> Spec:
    fields.only("use_sliding_window", False)
    for key in ("sliding_window", "max_window_layers"):
        fields.raw(key)  # mean nothing without the key above
    bias = fields.take("attention_bias", bool, False)
    return _llama_like(
        fields,
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        experts=_experts(
            fields,
            "moe_intermediate_size",
            _sparse_layers(fields),
            is_normalised=fields.take("norm_topk_prob", bool, False),
        ),
    )


def _gpt_oss(fields: Fields) -> Spec:
    layers, bias = fields.size("num_hidden_layers"), fields.take("attention_bias", bool, True)
    chosen = fields.size("num_experts_per_tok")
    fields.only("experts_per_token", chosen)
    fields.raw("initial_context_length")  # of the rotary settings, said there too
    fields.only("hidden_act", "silu")  # what the experts compute instead is said by the two keys below
    return _llama_like(
        fields,
        theta=150000.0,
        head_size=fields.size("head_dim", 64),
        windows=_windows(
            fields, fields.optional("sliding_window", int, 128), tuple(layer % 2 == 0 for layer in range(layers))
        ),
        norm_eps=fields.take("rms_norm_eps", float, 1e-5),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        experts=_experts(
            fields,
            "intermediate_size",
            _all_layers(fields),
            is_normalised=True,
            router_bias=True,
            bias=True,
            clamp=fields.take("swiglu_limit", float, 7.0),
            clamp_slope=fields.take("swiglu_alpha", float, 1.702),
        ),
    )


def _deepseek(fields: Fields, **routing: Any) -> Spec:
    """Read what the second and the third version share: latent attention, dense layers before those with experts."""
    layers = fields.size("num_hidden_layers")
    latent = Latent(
        rank=fields.size("kv_lora_rank"),
        q_rank=fields.optional("q_lora_rank", int, 1536),
        plain_size=fields.size("qk_nope_head_dim"),
        rope_size=fields.size("qk_rope_head_dim"),
        value_size=fields.size("v_head_dim"),
    )
    if latent.rope_size % 2 != 0:
        raise UserError(f"config.json: {latent.rope_size} coordinates cannot be rotated.", "qk_rope_head_dim")
    for key, value in (
        ("num_key_value_heads", fields.size("num_attention_heads")),
        ("head_dim", latent.rope_size),  # as transformers writes it
        ("qk_head_dim", latent.plain_size + latent.rope_size),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("moe_layer_freq", 1),
    ):
        fields.only(key, value)
    settings = _rotary_settings(fields) or {}
    scale = (latent.plain_size + latent.rope_size) ** -0.5
    if settings.get("rope_type", settings.get("type", "default")) != "default":
        stretched = Fields(settings, "config.json, rotary settings")
        whole = stretched.take("mscale_all_dim", float, 0.0)
        scale *= _magnitude(stretched.take("factor", float), whole) ** 2
    first = fields.take("first_k_dense_replace", int)
    width = fields.size("moe_intermediate_size")
    experts = _experts(
        fields,
        "moe_intermediate_size",
        tuple(layer >= first for layer in range(layers)),
        scale=fields.take("routed_scaling_factor", float),
        shared_width=fields.size("n_shared_experts") * width,
        **routing,
    )
    return _llama_like(
        fields,
        head_size=latent.rank + latent.rope_size,
        num_kv_heads=1,
        attention_scale=scale,
        latent=latent,
        experts=experts,
    )


def _deepseek2(fields: Fields) -> Spec:
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)  # transformers reads it no more
    fields.only("topk_method", "greedy", "group_limited_greedy")
    groups = {"groups": fields.size("n_group", 1), "groups_per_token": fields.size("topk_group", 1)}
    is_grouped = fields.raw("topk_method") == "group_limited_greedy"
    spec = _deepseek(fields, **(groups if is_grouped else {}))
    return dataclasses.replace(spec, rope_interleaved=True)


def _deepseek3(fields: Fields) -> Spec:
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        fields.raw(key)  # of the layers behind the last, which guess further tokens ahead
    spec = _deepseek(
        fields,
        scores="sigmoid",
        choice_bias=True,
        is_normalised=fields.take("norm_topk_prob", bool, True),
        groups=fields.size("n_group", 8),
        groups_per_token=fields.size("topk_group", 4),
        group_best=2,
    )
    return dataclasses.replace(spec, rope_interleaved=fields.take("rope_interleave", bool, True))


_GEMMA2_TENSORS = _LLAMA_TENSORS | {
    "attn_post_norm": "layers.{}.post_attention_layernorm.weight",
    "mlp_norm": "layers.{}.pre_feedforward_layernorm.weight",
    "mlp_post_norm": "layers.{}.post_feedforward_layernorm.weight",
}
_GPT2_TENSORS = {
    "embed": "wte.weight",
    "positions": "wpe.weight",
    "final_norm": "ln_f.weight",
    "final_norm_bias": "ln_f.bias",
    "head": "lm_head.weight",
    "attn_norm": "h.{}.ln_1.weight",
    "attn_norm_bias": "h.{}.ln_1.bias",
    **{part: "h.{}.attn.c_attn.weight" for part in ("q", "k", "v")},
    **{part: "h.{}.attn.c_attn.bias" for part in ("q_bias", "k_bias", "v_bias")},
    "out": "h.{}.attn.c_proj.weight",
    "out_bias": "h.{}.attn.c_proj.bias",
    "mlp_norm": "h.{}.ln_2.weight",
    "mlp_norm_bias": "h.{}.ln_2.bias",
    "up": "h.{}.mlp.c_fc.weight",
    "up_bias": "h.{}.mlp.c_fc.bias",
    "down": "h.{}.mlp.c_proj.weight",
    "down_bias": "h.{}.mlp.c_proj.bias",
}
_OPT_TENSORS = _LLAMA_TENSORS | {
    "embed": "decoder.embed_tokens.weight",
    "positions": "decoder.embed_positions.weight",
    "final_norm": "decoder.final_layer_norm.weight",
    "final_norm_bias": "decoder.final_layer_norm.bias",
    "attn_norm": "decoder.layers.{}.self_attn_layer_norm.weight",
    "attn_norm_bias": "decoder.layers.{}.self_attn_layer_norm.bias",
    **{part: f"decoder.layers.{{}}.self_attn.{part}_proj.weight" for part in ("q", "k", "v", "out")},
    **{f"{part}_bias": f"decoder.layers.{{}}.self_attn.{part}_proj.bias" for part in ("q", "k", "v", "out")},
    "mlp_norm": "decoder.layers.{}.final_layer_norm.weight",
    "mlp_norm_bias": "decoder.layers.{}.final_layer_norm.bias",
    "up": "decoder.layers.{}.fc1.weight",
    "up_bias": "decoder.layers.{}.fc1.bias",
    "down": "decoder.layers.{}.fc2.weight",
    "down_bias": "decoder.layers.{}.fc2.bias",
}

_MIXTRAL_TENSORS = _LLAMA_TENSORS | {
    "router": "layers.{}.block_sparse_moe.gate.weight",
    "expert_gate": "layers.{}.block_sparse_moe.experts.{}.w1.weight",
    "expert_up": "layers.{}.block_sparse_moe.experts.{}.w3.weight",
    "expert_down": "layers.{}.block_sparse_moe.experts.{}.w2.weight",
}
_GPT_OSS_TENSORS = _LLAMA_TENSORS | {
    "sinks": "layers.{}.self_attn.sinks",
    "router": "layers.{}.mlp.router.weight",
    "router_bias": "layers.{}.mlp.router.bias",
    **{part: "layers.{}.mlp.experts.gate_up_proj" for part in ("expert_gate", "expert_up")},
    **{part: "layers.{}.mlp.experts.gate_up_proj_bias" for part in ("expert_gate_bias", "expert_up_bias")},
    "expert_down": "layers.{}.mlp.experts.down_proj",
    "expert_down_bias": "layers.{}.mlp.experts.down_proj_bias",
}
_DEEPSEEK_TENSORS = _LLAMA_TENSORS | {
    "q_latent": "layers.{}.self_attn.q_a_proj.weight",
    "q_norm": "layers.{}.self_attn.q_a_layernorm.weight",
    "q_up": "layers.{}.self_attn.q_b_proj.weight",
    "latent": "layers.{}.self_attn.kv_a_proj_with_mqa.weight",
    "latent_norm": "layers.{}.self_attn.kv_a_layernorm.weight",
    **{part: "layers.{}.self_attn.kv_b_proj.weight" for part in ("key", "value")},
    "choice_bias": "layers.{}.mlp.gate.e_score_correction_bias",
    **{f"shared_{part}": f"layers.{{}}.mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")},
}

FAMILIES: tuple[Family, ...] = (
    Family(("LlamaForCausalLM",), _llama),
    Family(("MistralForCausalLM",), _mistral),
    Family(("Qwen2ForCausalLM",), _qwen2),
    Family(("Qwen3ForCausalLM",), _qwen3),
    Family(("Gemma2ForCausalLM",), _gemma2, _GEMMA2_TENSORS),
    Family(
        ("GPT2LMHeadModel",),
        _gpt2,
        _GPT2_TENSORS,
        "transformer.",
        transposed=frozenset({"q", "k", "v", "out", "up", "down"}),
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    Family(("OPTForCausalLM",), _opt, _OPT_TENSORS),
    Family(("MixtralForCausalLM",), _mixtral, _MIXTRAL_TENSORS),
    Family(("Qwen2MoeForCausalLM",), _qwen2_moe),
    Family(("Qwen3MoeForCausalLM",), _qwen3_moe),
    Family(
        ("GptOssForCausalLM",),
        _gpt_oss,
        _GPT_OSS_TENSORS,
        transposed=frozenset({"expert_gate", "expert_up", "expert_down"}),
        alternating=frozenset({"expert_gate", "expert_up", "expert_gate_bias", "expert_up_bias"}),
    ),
    Family(("DeepseekV2ForCausalLM",), _deepseek2, _DEEPSEEK_TENSORS),
    Family(("DeepseekV3ForCausalLM",), _deepseek3, _DEEPSEEK_TENSORS, has_layers_behind=True),
)
