"""Trains the adapter "pirate" of the embedded model on the CPU: `python -m training.train_adapter --out DIR --seed 0`.

The forward pass is the engine's decoder over frozen weights, with the product of `lora_linear` for the adapter. The
text is the model's training text with rewritten answers. A `Recipe` has the text and the sizes; train_tools.py has
another one.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tqdm import tqdm

from jaxllm.checkpoints import weights
from jaxllm.embedded import MODEL_DIR
from jaxllm.families.families import read_spec
from jaxllm.families.family import LLAMA_TENSORS
from jaxllm.model import decoder, lora
from jaxllm.model.decoder import Params
from jaxllm.model.lora import Adapter, Pair
from jaxllm.model.lora_linear import adapted_linear
from jaxllm.model.sharding import UNDIVIDED, make_layout
from jaxllm.model.spec import Spec
from pallas_kernels import rotate
from training import command, packing, pirate
from training.export import write_json

PEAK_RATE, WARM_UP = 3e-3, 30
TURNS = 4


class Recipe(NamedTuple):
    """The training of an adapter: text, rank, steps, rows per step, tokens per row, optional chat template."""

    documents: Callable[[random.Random, int], Iterator[str]]
    rank: int
    steps: int
    rows: int
    length: int
    chat_template: str | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens in the whole training."""
        return self.steps * self.rows * self.length


PIRATE = Recipe(pirate.documents, 8, 900, 12, 192)


def begin(spec: Spec, rank: int, seed: int) -> Adapter[Array]:
    """Draw the A of every product; B is zero, so that the adapter changes nothing."""
    draws = np.random.default_rng(seed)
    return tuple(
        {
            name: Pair(
                jnp.asarray(draws.standard_normal(pair.a.shape, np.float32) * pair.a.shape[1] ** -0.5),
                tuple(jnp.zeros(b.shape) for b in pair.b),
            )
            for name, pair in layer.items()
        }
        for layer in lora.declare(spec, UNDIVIDED, rank)
    )


def tensor_names(spec: Spec) -> Iterator[tuple[int, str, list[str]]]:
    """Yield every layer and product with PEFT's names of its parts, up to "A.weight" or "B.weight"."""
    for layer, declared in enumerate(decoder.declare(spec).layers):
        for name in lora.declare(spec, UNDIVIDED, 1)[layer]:
            modules = [LLAMA_TENSORS[part.name].format(layer).removesuffix(".weight") for part in declared[name].parts]
            yield layer, name, [f"base_model.model.model.{module}.lora_" for module in modules]


def read(spec: Spec, folder: Path) -> Adapter[Array]:
    """Read an adapter that `write` wrote."""
    layers: list[dict[str, Pair[Array]]] = [{} for _ in range(spec.num_layers)]
    with safe_open(folder / "adapter_model.safetensors", "flax") as file:
        for layer, name, stems in tensor_names(spec):
            a, b = ([file.get_tensor(f"{stem}{kind}.weight").astype(jnp.float32) for stem in stems] for kind in "AB")
            layers[layer][name] = Pair(jnp.concatenate(a), tuple(b))
    return tuple(layers)


def loss_of(spec: Spec, adapter: Adapter[Array], params: Params[Array], batch: Array) -> Array:
    """Return the mean cross-entropy of the weighted tokens of a batch [rows, 2, length + 1], on one device."""
    tokens, token_weights = batch[:, 0], batch[:, 1, 1:]
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    positions = jnp.tile(jnp.arange(length), rows)

    def attend(layer: int, heads: decoder.Heads, window: int | None, sinks: Array | None) -> Array:
        q, k, v = jnp.split(heads.qkv, (spec.num_heads, spec.num_heads + spec.num_kv_heads), axis=1)
        if heads.turn is not None:
            q, k = (rotate(each, *heads.turn, heads.is_interleaved) for each in (q, k))
        q, k, v = (each.reshape(rows, length, *each.shape[1:]) for each in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, scale=spec.attention_scale, is_causal=True)
        return mixed.reshape(rows * length, spec.num_heads, spec.head_size)

    mine = jnp.zeros(rows * length, jnp.int32)  # all tokens use the same adapter
    linear = adapted_linear([adapter], mine, joins=False)
    context = decoder.Context(positions, attend, linear)
    logits = decoder.head(spec, params, decoder.forward(spec, params, tokens[:, :-1].reshape(-1), context))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].reshape(-1))
    return jnp.sum(losses * token_weights.reshape(-1)) / jnp.maximum(jnp.sum(token_weights), 1)


def batches(tokenizer: Tokenizer, recipe: Recipe, seed: int | str) -> Iterator[np.ndarray]:
    """Yield the batches [rows, 2, length + 1] of the training."""
    texts = recipe.documents(random.Random(f"adapter {seed}"), TURNS)
    source = packing.rows(tokenizer, texts, recipe.steps * recipe.rows, recipe.length + 1)
    for _ in range(recipe.steps):
        yield np.stack([next(source) for _ in range(recipe.rows)])


def train(recipe: Recipe, seed: int, folder: Path | None) -> tuple[Spec, Adapter[Array]]:
    """Train an adapter of the embedded model; from one in `folder`, a quarter of the steps at a third of the rate."""
    spec, family = read_spec(weights.read_config(MODEL_DIR))
    layout = make_layout(jax.devices("cpu"), 1)
    params = weights.load(MODEL_DIR, spec, family, layout, "float32")
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    peak = PEAK_RATE
    if folder:
        recipe, peak = recipe._replace(steps=recipe.steps // 4), PEAK_RATE / 3
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, WARM_UP, recipe.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.98))

    @jax.jit
    def step(
        adapter: Adapter[Array], state: optax.OptState, batch: Array
    ) -> tuple[Adapter[Array], optax.OptState, Array]:
        loss, gradients = jax.value_and_grad(partial(loss_of, spec))(adapter, params, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(adapter, updates), state, loss  # pyright: ignore[reportReturnType]

    begun = read(spec, folder) if folder else begin(spec, recipe.rank, seed)
    adapter = jax.device_put(begun, layout.sharding())
    state = optimizer.init(adapter)  # pyright: ignore[reportArgumentType]
    with tqdm(total=recipe.steps, unit="step", mininterval=5) as bar:
        for batch in batches(tokenizer, recipe, f"{seed} longer" if folder else seed):
            adapter, state, loss = step(adapter, state, jnp.asarray(batch))
            bar.update()
            if bar.n % 20 == 0:
                bar.set_postfix(loss=f"{float(loss):.4f}", refresh=False)
    return spec, jax.block_until_ready(adapter)


def write(recipe: Recipe, spec: Spec, adapter: Adapter[Array], folder: Path) -> None:
    """Write an adapter in PEFT's format, in bfloat16. B includes the scale, so alpha equals the rank."""
    rank = recipe.rank
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer, name, stems in tensor_names(spec):
        pair = adapter[layer][name]
        for number, (stem, b) in enumerate(zip(stems, pair.b, strict=True)):
            tensors[f"{stem}A.weight"] = pair.a[number * rank : (number + 1) * rank]
            tensors[f"{stem}B.weight"] = b
    stored = {name: np.ascontiguousarray(value.astype(jnp.bfloat16)) for name, value in tensors.items()}
    save_file(stored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "jaxllm-embedded",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    write_json(folder / "adapter_config.json", config)
    if recipe.chat_template is not None:
        (folder / "chat_template.jinja").write_text(recipe.chat_template, encoding="utf-8")


def run(module: str, recipe: Recipe) -> None:
    """Train and write an adapter, with the command line of a module."""
    command.run(module, "adapter", partial(train, recipe), partial(write, recipe), recipe.tokens, can_begin=True)


def main() -> None:
    """Train and write the adapter "pirate"."""
    run("training.train_adapter", PIRATE)


if __name__ == "__main__":
    main()
