"""GRPO against a server: token ids and log-probabilities in, a trainer's weights out, as folders of safetensors.

    mkdir -p weights && jaxllm serve --enable-sleep-mode --weights-root weights
    python -m examples.grpo --weights weights --steps 20

The model is the one that jaxllm includes; the reward is the share of words that begin with "b". The notebook
07_grpo.ipynb has the same loop with engine and trainer in one process, where arrays take the place of folders.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.flax import save_file

from jaxllm.embedded import MODEL_DIR
from jaxllm.text.tokenizer import load_tokenizer
from training.export import read_weights
from training.network import Llama, Shape, hugging_face_weights

PROMPTS = ("Once upon a time", "One day, a little girl", "There was a", "Tom and his dog")
GROUP_SIZE, LENGTH = 16, 24
Batch = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # tokens, log-probabilities, mask, rewards


def reward(text: str) -> float:
    words = text.lower().split()
    return sum(word.startswith("b") for word in words) / max(len(words), 1)


def rollout(server: httpx.Client, version: str, seed: int) -> Batch:
    """Sample a group for each prompt; every token must be of the weights `version`."""
    tokenizer, rows = load_tokenizer(MODEL_DIR), []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        params = {
            "n": GROUP_SIZE,
            "max_tokens": LENGTH,
            "temperature": 1,
            "seed": seed,
            "ignore_eos": True,
            "logprobs": 0,
        }
        answer = server.post("/inference/v1/generate", json={"token_ids": ids, "sampling_params": params})
        for choice in answer.raise_for_status().json()["choices"]:
            if choice["weight_versions"] != [{"version": version, "num_tokens": LENGTH}]:
                raise RuntimeError(f"expected tokens of the weights {version}, got {choice['weight_versions']}")
            rows.append((ids, choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]))
    tokens = np.zeros((len(rows), max(len(ids) for ids, _, _ in rows) + LENGTH), np.int32)
    sampled, mask = (np.zeros((len(rows), tokens.shape[1] - 1), np.float32) for _ in range(2))
    for row, (ids, output, logprobs) in enumerate(rows):
        own = slice(len(ids) - 1, len(ids) - 1 + LENGTH)
        tokens[row, : len(ids) + LENGTH], sampled[row, own], mask[row, own] = [*ids, *output], logprobs, 1
    return tokens, sampled, mask, np.array([reward(tokenizer.decode(output)) for _, output, _ in rows], np.float32)


@nnx.jit
def update(model: Llama, optimizer: nnx.Optimizer[Llama], batch: Batch) -> None:
    """Raise the probability of outputs with more reward than their group, within a clipped ratio."""
    tokens, sampled, mask, rewards = batch
    groups = jnp.asarray(rewards).reshape(-1, GROUP_SIZE)
    gains = ((groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-3)).reshape(-1, 1)

    def loss(model: Llama) -> jax.Array:
        logits, _ = model(jnp.asarray(tokens[:, :-1]), jnp.arange(tokens.shape[1] - 1))
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
        ratio = jnp.exp(logprobs - sampled)
        return -jnp.sum(jnp.minimum(ratio * gains, jnp.clip(ratio, 0.8, 1.2) * gains) * mask) / mask.sum()

    optimizer.update(model, nnx.grad(loss)(model))


def train(url: str, root: Path, steps: int, rate: float = 1e-3) -> list[float]:
    """Return the mean reward of each step; `root` is the server's --weights-root."""
    model = Llama(Shape(), nnx.Rngs(0))
    read_weights(model, MODEL_DIR)
    optimizer, rewards = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param), []
    with httpx.Client(base_url=url, timeout=600.0) as server:
        version = server.get("/weight_info").raise_for_status().json()["weight_version"]
        for step in range(steps):
            batch = rollout(server, version, seed=step)
            update(model, optimizer, batch)
            folder, version = root / f"step-{step % 2}", f"step {step}"
            folder.mkdir(exist_ok=True)
            shutil.copy(MODEL_DIR / "config.json", folder)
            save_file(hugging_face_weights(model), folder / "model.safetensors")
            info = {"path": folder.name, "weight_version": version}
            server.post("/update_weights", json={"update_info": info}).raise_for_status()
            rewards.append(float(batch[3].mean()))
            print(f"{version}: reward {rewards[-1]:.3f}", flush=True)
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    train(given.url, given.weights, given.steps)
