"""Trains the embedded model's EAGLE-3 head on the CPU: `python -m training.train_eagle --out DIR --seed 0`.

The head learns the target's distributions on the target's training text, from its hidden states of the passes before
(`drafting.py`). The forward pass and the file format are the engine's.
"""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import Array
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tqdm import tqdm

from jaxllm.checkpoints import weights
from jaxllm.embedded import MODEL_DIR
from jaxllm.families.families import read_spec
from jaxllm.families.family import LLAMA_TENSORS
from jaxllm.model import eagle
from jaxllm.model.decoder import Params
from jaxllm.model.eagle import Head
from jaxllm.model.sharding import make_layout
from jaxllm.model.spec import Spec
from training import command, corpus, drafting, packing
from training.export import write_json

INNER, NAMED, AUX_LAYERS = 384, 896, (1, 2, 3)
PASSES, DECAY = 4, 0.8  # weight of each pass relative to the one before
STEPS, ROWS, LENGTH, TURNS, SUMS_SHARE = 600, 12, 192, 4, 0.15
PEAK_RATE, WARM_UP = 5e-3, 40


def head_of(target: Spec, inner: int = INNER, aux_layers: tuple[int, ...] = AUX_LAYERS) -> Head:
    """Describe the head: one of the target's layers, with a smaller feed-forward."""
    changes: dict[str, Any] = {"num_layers": 1, "ffn_width": inner, "tie_embeddings": False}
    layer = {name: getattr(target, name)[:1] for name in ("windows", "ropes")}
    spec = Spec(**(vars(target) | changes | layer))
    return Head(spec, target.width, target.vocab_size, NAMED, aux_layers, has_names=True)


def named_tokens(tokenizer: Tokenizer, seed: int, count: int) -> np.ndarray:
    """Return the ids, ascending, of the `count` most frequent tokens."""
    texts = corpus.documents(random.Random(f"names {seed}"), TURNS, SUMS_SHARE)
    seen = np.zeros(tokenizer.get_vocab_size(), np.int64)
    for tokens, token_weights in packing.rows(tokenizer, texts, 3000, LENGTH):
        seen += np.bincount(tokens, token_weights > 0, len(seen)).astype(np.int64)
    return np.sort(np.argsort(-seen, kind="stable")[:count])


def begin(head: Head, target: Params[Array], named: np.ndarray, seed: int) -> Params[Array]:
    """Draw the head's weights; its embedding and last norm start as the target's."""
    draws = np.random.default_rng(seed)
    declared = eagle.declare(head)

    def drawn(weight: Any) -> Array:
        if len(weight.shape) == 1:
            return jnp.ones(weight.shape)
        return jnp.asarray(draws.standard_normal(weight.shape, np.float32) * 0.5 * weight.shape[1] ** -0.5)

    params = jax.tree.map(drawn, declared)
    params.top["head"], params.top["final_norm"] = target.top["embed"][named], target.top["final_norm"]
    return params


def loss_of(
    spec: Spec, head: Head, params: Params[Array], target: Params[Array], named: Array, batch: Array
) -> tuple[Array, Array]:
    """Return the loss of a batch [rows, 2, length + 1], and how often each pass's likeliest token is the target's."""
    tokens, written = batch[:, 0], jnp.minimum(batch[:, 1], 1)
    logits, fused = drafting.read(spec, head, params, target, tokens[:, :-1])
    wanted, is_right, losses = logits[:, 1:], [], []
    best, shares = jnp.argmax(wanted, axis=-1), jax.nn.softmax(wanted[..., named], axis=-1)
    for number, scores in enumerate(drafting.drafts(head, params, target, fused[:, :-1], tokens[:, 1:-1], PASSES)):
        counts = written[:, 2:] * (jnp.arange(scores.shape[1]) >= number)
        total = jnp.maximum(jnp.sum(counts), 1)
        losses.append(DECAY**number * jnp.sum(counts * optax.softmax_cross_entropy(scores, shares)) / total)
        is_right.append(jnp.sum(counts * (named[jnp.argmax(scores, axis=-1)] == best)) / total)
    return jnp.sum(jnp.stack(losses)), jnp.stack(is_right)


def batches(tokenizer: Tokenizer, seed: int, steps: int) -> Iterator[np.ndarray]:
    """Yield the batches [rows, 2, length + 1] of the training."""
    texts = corpus.documents(random.Random(f"eagle {seed}"), TURNS, SUMS_SHARE)
    source = packing.rows(tokenizer, texts, steps * ROWS, LENGTH + 1)
    for _ in range(steps):
        yield np.stack([next(source) for _ in range(ROWS)])


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """Return Muon for the matrices between vectors and Adam for the rest, with a rate that falls to zero."""
    rate = optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, WARM_UP, steps)

    def kinds(params: Any) -> Any:
        return jax.tree.map_with_path(
            lambda path, leaf: "matrix" if leaf.ndim == 2 and "head" not in jax.tree_util.keystr(path) else "other",
            params,
        )

    muon = optax.contrib.muon(rate, consistent_rms=0.2)
    chosen = optax.partition({"matrix": muon, "other": optax.adam(rate, b2=0.98)}, kinds)
    return optax.chain(optax.clip_by_global_norm(1.0), chosen)


def train(seed: int, steps: int = STEPS) -> tuple[Head, Params[Array], np.ndarray]:
    """Train a head of the embedded model; return its description, its weights, and the token ids of its vocabulary."""
    spec, family = read_spec(weights.read_config(MODEL_DIR))
    layout = make_layout(jax.devices("cpu"), 1)
    target = weights.load(MODEL_DIR, spec, family, layout, "float32")
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    head, named = head_of(spec), named_tokens(tokenizer, seed, NAMED)
    optimizer = make_optimizer(steps)

    @jax.jit
    def step(params: Params[Array], state: optax.OptState, batch: Array) -> tuple[Any, optax.OptState, Array, Array]:
        differentiated = jax.value_and_grad(partial(loss_of, spec, head), has_aux=True)
        values, gradients = differentiated(params, target, jnp.asarray(named), batch)
        updates, state = optimizer.update(gradients, state, params)  # pyright: ignore[reportArgumentType]
        return optax.apply_updates(params, updates), state, *values  # pyright: ignore[reportArgumentType]

    params = jax.device_put(begin(head, target, named, seed), layout.sharding())
    state = optimizer.init(params)  # pyright: ignore[reportArgumentType]
    with tqdm(total=steps, unit="step", mininterval=5) as bar:
        for batch in batches(tokenizer, seed, steps):
            params, state, loss, is_right = step(params, state, jnp.asarray(batch))
            bar.update()
            if bar.n % 20 == 0:
                bar.set_postfix(loss=f"{float(loss):.3f}", right=np.round(is_right, 3), refresh=False)
    return head, jax.block_until_ready(params), named


def write(head: Head, params: Params[Array], named: np.ndarray, folder: Path) -> None:
    """Write a head in vLLM's format, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    names = LLAMA_TENSORS | {"fc": "fc.weight", "hidden_norm": "layers.{}.hidden_norm.weight"}
    declared, tensors = eagle.declare(head), {}
    for layer, own, described in ((None, params.top, declared.top), (0, params.layers[0], declared.layers[0])):
        for name, weight in described.items():
            ends = np.cumsum([part.rows for part in weight.parts])[:-1]
            for part, rows in zip(weight.parts, np.split(np.asarray(own[name]), ends), strict=True):
                stored = names[part.name].format(layer).replace("layers.0.", "midlayer.")
                tensors[stored] = np.ascontiguousarray(rows.astype(jnp.bfloat16))
    tensors["d2t"] = named - np.arange(len(named))
    tensors["t2d"] = np.isin(np.arange(head.vocab_size), named)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    spec, base = head.spec, weights.read_config(MODEL_DIR)
    kept = ("model_type", "head_dim", "hidden_act", "max_position_embeddings", "rope_theta", "attention_bias")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **{name: base[name] for name in (*kept, "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id")},
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "hidden_size": spec.width,
        "target_hidden_size": head.width,
        "intermediate_size": spec.ffn_width,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": False,
        "norm_before_residual": head.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(head.aux_layers),
        "torch_dtype": "bfloat16",
    }
    write_json(folder / "config.json", config)


def main() -> None:
    """Train and write the head."""
    command.run("training.train_eagle", "EAGLE-3 head", train, write, STEPS * ROWS * LENGTH)


if __name__ == "__main__":
    main()
