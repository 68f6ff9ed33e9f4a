"""EAGLE-3 heads against the same arithmetic in float64 numpy, on one and more devices; damaged and unfit folders."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoints import eagle_files, weights
from jaxllm.errors import UserError
from jaxllm.families.families import read_spec
from jaxllm.model import decoder, eagle, sharding
from jaxllm.model.decoder import Context
from jaxllm.model.spec import Spec
from tests.support.checkpoints import CONFIG, write_checkpoint
from tests.support.heads import apart
from tests.support.layouts import layout_of

TARGET, _ = read_spec(CONFIG | {"num_hidden_layers": 8})
WIDTH, VOCABULARY = TARGET.width, TARGET.vocab_size
HEAD: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLMEagle3"], "hidden_act": "silu", "hidden_size": WIDTH, "num_hidden_layers": 1},
    **{"intermediate_size": 48, "max_position_embeddings": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 6, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-3, "model_type": "llama"},
}
# Each case's changes of HEAD, and its tensors that do not follow from them.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "mapped": ({"draft_vocab_size": 40, "norm_before_residual": True}, ("d2t", "t2d")),
    "first": ({"draft_vocab_size": 41, "logit_scale": 0.5, "architectures": ["LlamaForCausalLM"]}, ()),
    "permuted": ({"attention_bias": True, "mlp_bias": True}, ("d2t",)),
    "wide": ({"hidden_size": 40, "target_hidden_size": WIDTH, "head_dim": 10}, ("embed_tokens",)),
    "whole": ({"eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [8, 0]}}, ()),
    "each": ({"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [4, 1, 2, 5]}, ()),
    "turned": ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 0, 2]}, "target_model_type": "qwen2_5_vl"}, ()),
    "sliding": ({"layer_types": ["sliding_attention"], "sliding_window": 3, "rope_theta": 50.0}, ()),
}
AUX = {"whole": (0, 8), "each": (1, 2, 4, 5)}
DEFAULT_AUX = (2, 4, 5)


def tensors_of(config: dict[str, Any], own: tuple[str, ...], layer: str) -> dict[str, np.ndarray]:
    """Draw the tensors for a config, under vLLM's names."""
    draws = np.random.default_rng(len(config))
    width, head, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    vocabulary, target = config["vocab_size"], config.get("target_hidden_size", width)
    size = config.get("draft_vocab_size", vocabulary)
    listed = config.get("eagle_config", config).get("eagle_aux_hidden_state_layer_ids", [0] * 3)
    rows = {f"self_attn.{name}_proj": (size, 2 * width) for name, size in (("q", queries), ("k", keys), ("v", keys))}
    rows |= {"self_attn.o_proj": (width, queries), "mlp.down_proj": (width, inner)}
    rows |= {f"mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
    shapes: dict[str, tuple[int, ...]] = {f"{layer}{name}.weight": shape for name, shape in rows.items()}
    for name, (outputs, _) in rows.items():
        if config.get("attention_bias" if "attn" in name else "mlp_bias"):
            shapes[f"{layer}{name}.bias"] = (outputs,)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes |= {f"{layer}{name}.weight": (width,) for name in norms}
    shapes |= {"norm.weight": (width,), "lm_head.weight": (size, width), "fc.weight": (width, len(listed) * target)}
    if "norm_before_fc" in config.get("eagle_config", {}):
        shapes["input_norm.weight"] = (len(listed) * target,)
    if "fc_norm" in config:
        shapes |= {f"fc_norm.{number}.weight": (target,) for number in range(len(listed))}
    if "embed_tokens" in own:
        shapes["embed_tokens.weight"] = (vocabulary, width)
    tensors = {name: (0.4 * draws.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    for name in tensors:
        tensors[name] += 1.0 if "norm" in name else 0.0
    if "d2t" in own:
        tensors["d2t"] = draws.permutation(vocabulary)[:size] - np.arange(size)
    if "t2d" in own:
        tensors["t2d"] = np.isin(np.arange(vocabulary), tensors["d2t"] + np.arange(size))
    return tensors


def write(folder: Path, case: str, layer: str = "midlayer.") -> Path:
    changes, own = CASES[case]
    return write_checkpoint(folder, HEAD | changes, tensors_of(HEAD | changes, own, layer))


class Naive:
    """A head's passes over one sequence, in float64, from its files alone."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.own = {name.replace("midlayer.", "layers.0."): value.astype(np.float64) for name, value in stored.items()}

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.own[f"{name}.weight"].T + self.own.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        power = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(power + self.config["rms_norm_eps"]) * self.own[f"{name}.weight"]

    def fuse(self, aux: list[np.ndarray]) -> np.ndarray:
        if self.config.get("fc_norm"):
            aux = [self.norm(f"fc_norm.{number}", x) for number, x in enumerate(aux)]
        x = np.concatenate(aux, axis=1)
        return self.linear("fc", self.norm("input_norm", x) if "input_norm.weight" in self.own else x)

    def forward(self, embedded: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        stem = "layers.0."
        normed = self.norm(f"{stem}hidden_norm", hidden)
        both = np.concatenate([self.norm(f"{stem}input_layernorm", embedded), normed], axis=1)
        x = normed if self.config.get("norm_before_residual") else hidden
        x = x + self.attend(f"{stem}self_attn.", both)
        inner = self.norm(f"{stem}post_attention_layernorm", x)
        gate, up = (self.linear(f"{stem}mlp.{name}_proj", inner) for name in ("gate", "up"))
        x = x + self.linear(f"{stem}mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        return (self.norm("norm", x) if self.config.get("norm_output") else x), self.norm("norm", x)

    def attend(self, stem: str, x: np.ndarray) -> np.ndarray:
        size = self.config["head_dim"]
        q, k, v = (self.linear(f"{stem}{name}_proj", x).reshape(len(x), -1, size) for name in "qkv")
        angles = np.arange(len(x))[:, None] * self.config.get("rope_theta", 1e4) ** (-np.arange(size // 2) * 2 / size)
        turn = np.exp(1j * angles)[:, None]

        def turned(heads: np.ndarray) -> np.ndarray:
            pairs = (heads[..., : size // 2] + 1j * heads[..., size // 2 :]) * turn
            return np.concatenate([pairs.real, pairs.imag], axis=-1)

        q, k = turned(q), turned(k)
        k, v = (np.repeat(each, q.shape[1] // each.shape[1], axis=1) for each in (k, v))
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        seen = (distance >= 0) & (distance < self.config.get("sliding_window", len(x)))
        scores = np.where(seen, np.einsum("qhc,khc->hqk", q, k) * size**-0.5, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return self.linear(f"{stem}o_proj", np.einsum("hqk,khc->qhc", shares, v).reshape(len(x), -1))

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        scores = self.linear("lm_head", hidden) * self.config.get("logit_scale", 1.0)
        named = np.arange(scores.shape[1]) + self.own.get("d2t", 0.0)
        out = np.full((len(hidden), VOCABULARY), -1e30)
        out[:, named.astype(int)] = scores
        return out


def attend_within(spec: Spec, shards: int) -> decoder.Attend:
    """Attend within one sequence, without a cache."""

    def attend(layer: int, heads: decoder.Heads, window: int | None, sinks: Any) -> jax.Array:
        assert layer == 0 and sinks is None
        q, k, v = apart(heads, spec.num_heads // shards)
        k, v = (jnp.repeat(each, q.shape[1] // each.shape[1], axis=1) for each in (k, v))
        places = jnp.arange(len(q))
        distance = places[:, None] - places
        seen = (distance >= 0) & (distance < (window or len(q)))
        scores = jnp.where(seen, jnp.einsum("qhc,khc->hqk", q, k) * spec.attention_scale, -jnp.inf)
        return jnp.einsum("hqk,khc->qhc", jax.nn.softmax(scores, axis=-1), v)

    return attend


@pytest.mark.parametrize(
    ("case", "shards"),
    [
        *(("each", 1), ("wide", 2), ("first", 4)),
        *(pytest.param(case, 1, marks=pytest.mark.ci) for case in CASES if case != "each"),
        *(pytest.param(*one, marks=pytest.mark.ci) for one in (("mapped", 2), ("permuted", 4))),
    ],
)
def test_two_passes_are_those_of_plain_arithmetic(case: str, shards: int, tmp_path: Path) -> None:
    folder = write(tmp_path, case, ("midlayer.", "layers.0.")[shards % 2])
    head = eagle_files.read(folder, TARGET)
    assert head.aux_layers == AUX.get(case, DEFAULT_AUX)
    assert head.spec.has_axes == (case == "turned")
    draws, naive, layout = np.random.default_rng(7), Naive(folder), sharding.make_layout(jax.devices(), shards)
    aux = [3 * draws.standard_normal((9, WIDTH)) for _ in head.aux_layers]
    tokens = draws.integers(VOCABULARY, size=(2, 9))
    table = draws.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    target = weights.load_random(TARGET, layout, "float32")
    padded = np.pad(table, ((0, -VOCABULARY % shards), (0, 0)))
    target.top["embed"] = jax.device_put(padded, target.top["embed"].sharding)

    def on_shard(params, target, tokens, aux):
        context = Context(jnp.arange(tokens.shape[1]), attend_within(head.spec, shards), layout=layout)
        hidden = eagle.fuse(head, params, aux)
        embedded = [eagle.embed(head, params, target, each, context) for each in tokens]
        first, _ = eagle.forward(head, params, embedded[0], hidden, context)
        last, scored = eagle.forward(head, params, embedded[1], first, context)
        return last, eagle.logits(head, params, scored, layout)

    params = eagle_files.load(folder, head, layout, "float32")
    places = jax.tree.map(lambda leaf: leaf.sharding.spec, (params, target))
    run = layout.shard_map(
        on_shard, (*places, layout.spec(), layout.spec()), (layout.spec(), layout.spec(None, "vocab"))
    )
    last, logits = jax.jit(run)(params, target, tokens, tuple(jnp.asarray(each, jnp.float32) for each in aux))

    embedding = naive.own.get("embed_tokens.weight", table.astype(np.float64))
    first, _ = naive.forward(embedding[tokens[0]], naive.fuse(aux))
    wanted, scored = naive.forward(embedding[tokens[1]], first)
    np.testing.assert_allclose(last, wanted, rtol=2e-4, atol=2e-4)
    found, expected = np.asarray(logits)[:, :VOCABULARY], naive.logits(scored)
    assert np.ptp(np.where(expected > -1e29, expected, 0)) > 1
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("case", "shards"), [*((case, 1) for case in CASES), ("mapped", 4), ("wide", 2)])
def test_what_is_described_is_what_is_loaded_and_what_is_drawn(case: str, shards: int, tmp_path: Path) -> None:
    folder, layout = write(tmp_path, case), sharding.make_layout(jax.devices(), shards)
    head = eagle_files.read(folder, TARGET)
    eagle_files.check(folder, head, layout)
    described = eagle.abstract(head, layout, "bfloat16")
    for params in (
        eagle_files.load(folder, head, layout, "bfloat16"),
        eagle_files.load_random(head, layout, "bfloat16"),
    ):
        assert jax.tree.structure(params) == jax.tree.structure(described)
        for leaf, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(described), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)
        if head.is_mapped:
            numbers = np.asarray(params.top["draft_ids"])
            known = numbers[numbers < head.draft_vocab_size]
            assert sorted(known) == list(range(head.draft_vocab_size))


def test_a_config_alone_says_all_but_what_only_tensors_say(tmp_path: Path) -> None:
    """A config without weights gives the same Spec, for runs without weights or with random ones."""
    for case in ("plain", "mapped", "wide"):
        folder = write(tmp_path / case, case)
        head = eagle_files.read(folder, TARGET)
        (folder / "model.safetensors").unlink()
        bare = eagle_files.read(folder, TARGET)
        assert (bare.spec, bare.has_embedding, bare.is_mapped) == (head.spec, head.has_embedding, head.is_mapped)


@pytest.mark.parametrize(("is_interleaved", "axes"), [(False, (0, 2, 2)), (True, (0, 0, 2))])
def test_a_heads_positions_are_of_its_sections(is_interleaved: bool, axes: tuple[int, ...], tmp_path: Path) -> None:
    scaling = {"rope_type": "default", "mrope_section": [1, 0, 2], "mrope_interleaved": is_interleaved}
    write_checkpoint(tmp_path, HEAD | {"rope_scaling": scaling}, tensors_of(HEAD, (), "midlayer."))
    (rope,) = eagle_files.read(tmp_path, TARGET).spec.ropes
    assert rope is not None and rope.axes == axes


@pytest.mark.parametrize("aux_layers", [(0, 1, 2), (1,), (0, 2)])
def test_states_on_the_way_are_those_that_layers_get(aux_layers: tuple[int, ...], tmp_path: Path) -> None:
    spec, _ = read_spec(CONFIG)
    layout = sharding.make_layout(jax.devices(), 1)
    params = weights.load_random(spec, layout, "float32")
    tokens = jnp.arange(5, 12)

    def on_shard(params, tokens):
        context = Context(jnp.arange(len(tokens)), lambda _, *rest: attend_within(spec, 1)(0, *rest))
        x = decoder.embed(spec, params, tokens, context)
        wanted = tuple(decoder.run_layers(spec, params, x, context, 0, layer) for layer in aux_layers)
        found = decoder.forward_with_aux(spec, params, tokens, context, aux_layers)
        return found, (decoder.forward(spec, params, tokens, context), wanted)

    found, wanted = jax.jit(layout.shard_map(on_shard, layout.spec(), layout.spec()))(params, tokens)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert len(found[1]) == len(aux_layers) and found[0].std() > 0.1


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("plain", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "is no EAGLE-3 head; supported: LlamaFor"),
    ("plain", {"architectures": "LlamaForCausalLMEagle3"}, "is no EAGLE-3 head"),
    ("plain", {"num_hidden_layers": 2}, "head of 2 layers"),
    ("plain", {"hidden_size": 40}, "for a model of width 40, and the model's is 32"),
    ("plain", {"target_hidden_size": 31}, "for a model of width 31"),
    ("plain", {"vocab_size": 96}, "vocabulary of 96 tokens, and the model's has 97"),
    ("plain", {"draft_vocab_size": 98}, "draft_vocab_size .98. is greater"),
    ("plain", {"draft_vocab_size": 0}, "draft_vocab_size must be from 1"),
    ("plain", {"draft_vocab_size": 50}, "lm_head.weight has shape"),
    ("mapped", {"draft_vocab_size": 41}, "d2t has shape .40., config.json says .41."),
    ("plain", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "different layers of the model, from 0 to 8"),
    ("plain", {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}, "different layers"),
    ("plain", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight has shape .32, 96., config.json says .32, 64."),
    ("plain", {"eagle_aux_hidden_state_layer_ids": [True, 2]}, "must be a list of 1 to 16 layers"),
    ("plain", {"eagle_aux_hidden_state_layer_ids": 5}, "must be a list"),
    ("plain", {"num_aux_hidden_states": 4}, "num_aux_hidden_states = 4 is not supported"),
    ("plain", {"norm_before_fc": True}, "no tensor input_norm.weight"),
    ("whole", {"fc_norm": True}, "exclude each other"),
    ("each", {"fc_norm": False}, "tensor fc_norm.0.weight is not part"),
    ("plain", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False is not supported"),
    ("plain", {"eagle_config": {"gated": True}}, "eagle_config: the key gated .* is not understood"),
    ("plain", {"eagle_config": 3}, "eagle_config must be an object"),
    ("plain", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config .fp8."),
    ("plain", {"is_causal": False}, "is_causal = False is not supported"),
    ("plain", {"transformer_layer_config": {}}, "the key transformer_layer_config"),
    ("plain", {"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ("plain", {"attention_bias": True}, "no tensor layers.0.self_attn.q_proj.bias"),
    ("plain", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "must be 3 numbers with the sum 3"),
    ("plain", {"rope_scaling": {"type": "mrope"}}, "rope_type 'mrope' is not supported"),
    ("turned", {"rope_scaling": {"mrope_interleaved": 1, "mrope_section": [1, 1, 1]}}, "must be true or false, got 1"),
    ("wide", {"hidden_size": None}, "has no hidden_size"),
    ("sliding", {"sliding_window": 0}, "sliding_window must be at least 1"),
    ("sliding", {"layer_types": ["full_attention"] * 2}, "layer_types names 2 of 1"),
]


@pytest.mark.parametrize(("case", "changes", "message"), UNFIT)
def test_what_does_not_fit_is_refused_in_one_line(case: str, changes: dict, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, case)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))
    with pytest.raises(UserError, match=message) as caught:
        eagle_files.check(folder, eagle_files.read(folder, TARGET), sharding.UNDIVIDED)
    assert str(caught.value).startswith("EAGLE-3 head: ") and caught.value.parameter == "speculative_config"


HOSTILE = (None, True, -1, 0, 2**40, 10**400, 1.5, float("nan"), "x", [], {}, [1, "a"], ["layers"] * 3, {"type": "x"})
KEYS = ("draft_vocab_size", "target_hidden_size", "eagle_config", "fc_norm", "norm_output", "norm_before_residual")


def test_no_value_of_a_config_is_anything_but_read_or_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "plain")
    others = (*KEYS, "eagle_aux_hidden_state_layer_ids", "logit_scale", "layer_types", "sliding_window", "rope_scaling")
    refused = 0
    for key, value in itertools.product((*HEAD, *others), HOSTILE):
        (folder / "config.json").write_text(json.dumps(HEAD | {key: value}))
        try:
            eagle_files.check(folder, eagle_files.read(folder, TARGET), sharding.UNDIVIDED)
        except UserError as error:
            refused += 1
            assert str(error).startswith("EAGLE-3 head: ") and "\n" not in str(error)
    assert refused > 150


def test_every_tensor_is_needed_in_its_shape(tmp_path: Path) -> None:
    for case, kind in itertools.product(("mapped", "each"), ("missing", "longer", "unknown", "twice")):
        whole = tensors_of(HEAD | CASES[case][0], CASES[case][1], "midlayer.")
        head = eagle_files.read(write(tmp_path / f"{case}-{kind}", case), TARGET)
        for name, value in whole.items():
            tensors = dict(whole)
            if kind == "missing":
                del tensors[name]
            elif kind == "longer":
                tensors[name] = np.concatenate([value, value[:1]])
            else:
                tensors[f"more.{name}" if kind == "unknown" else f"model.{name}"] = value
            save_file(tensors, tmp_path / f"{case}-{kind}" / "model.safetensors")
            if (name == "t2d" and kind != "unknown") or (name, kind) == ("d2t", "missing"):
                # `d2t` has all that `t2d` has; without `d2t` the head's tokens are the vocabulary's first.
                eagle_files.check(tmp_path / f"{case}-{kind}", head, sharding.UNDIVIDED)
                continue
            with pytest.raises(UserError, match=name.replace("midlayer.", r"(midlayer|layers\.0)\.")):
                eagle_files.check(tmp_path / f"{case}-{kind}", head, sharding.UNDIVIDED)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (np.full(40, -1), "another of the model's 97"),
        (np.arange(40) * 2, "another of the model's 97"),
        (-np.arange(40), "another of the model's 97"),
        (np.zeros(40, np.float32), "has type F32, not one of I64, I32"),
        (np.arange(40).astype(np.int32), None),
        (np.full(40, 2**62), "another of the model's 97"),
    ],
)
def test_the_map_gives_every_token_another(offsets: np.ndarray, message: str | None, tmp_path: Path) -> None:
    folder = write(tmp_path, "mapped")
    head = eagle_files.read(folder, TARGET)
    save_file(load_file(folder / "model.safetensors") | {"d2t": offsets}, folder / "model.safetensors")
    if message is None:
        eagle_files.check(folder, head, sharding.UNDIVIDED)
        return
    with pytest.raises(UserError, match=message):
        eagle_files.check(folder, head, sharding.UNDIVIDED)


def test_devices_that_do_not_divide_a_head_are_refused(tmp_path: Path) -> None:
    head = eagle_files.read(write(tmp_path, "plain"), TARGET)
    with pytest.raises(UserError, match="tensor_parallel_size 3 does not divide the model's 4 attention heads"):
        eagle_files.check(tmp_path, head, layout_of(3))


def test_a_folder_with_files_that_are_never_read_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path, "plain")
    head = eagle_files.read(folder, TARGET)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"EAGLE-3 head: .*pytorch_model\.bin is never read"):
        eagle_files.check(folder, head, sharding.UNDIVIDED)
