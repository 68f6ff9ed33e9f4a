"""The cost of images, and the speed that text streams lose to them: `python -m benchmarks.images`.

A model with two layers of Qwen2.5-VL-3B's decoder and two of its tower, random weights, one engine. Text streams alone,
then while prompts of text arrive, then while as many prompts of equal length with one image each arrive: tokens per
second of the streams, and the shares of that time for preprocessing on the host and for the tower. An image's
preprocessing is timed alone; its tower's time is that of a request with an image without the preprocessing and the time
of a text request of equal length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.aims import require
from benchmarks.shapes import WITH_IMAGES
from jaxllm import AsyncLLM, SamplingParams
from tests.support import vision_models

STREAMS, IMAGES, REPEATS = 8, 16, 5
SIDE = 448  # pixels: 256 tokens
PLACEHOLDER = vision_models.PLACEHOLDER
LOSS = 0.1


def write(folder: Path) -> str:
    """Write the model's folder, without weights."""
    qwen = WITH_IMAGES["qwen2.5-vl-7b"]
    vision_models.write_tokenizer(folder)
    sizes = {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2}
    tower = qwen["vision_config"] | {"depth": 2, "fullatt_block_indexes": [1], "out_hidden_size": 2048}
    config = qwen | sizes | {"num_hidden_layers": 2, "vision_config": tower, "image_token_id": PLACEHOLDER}
    config |= {"video_token_id": vision_models.VIDEO, "tie_word_embeddings": True, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    settings |= {"temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 1 << 18}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return str(folder)


async def text_speed(llm: AsyncLLM, tokens: int, beside: Any = None) -> tuple[float, float]:
    """Return the tokens per second of text streams, and the seconds until all have ended."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    random = np.random.default_rng(0)

    async def stream(number: int) -> None:
        prompt = {"prompt_token_ids": random.integers(5, 1000, 32).tolist()}
        async for _ in llm.generate(prompt, params, f"text {number} {time.monotonic_ns()}"):
            pass

    began = time.perf_counter()
    others = asyncio.create_task(beside) if beside is not None else None
    await asyncio.gather(*(stream(number) for number in range(STREAMS)))
    took = time.perf_counter() - began
    if others is not None:
        await others
    return STREAMS * tokens / took, took


async def complete(llm: AsyncLLM, prompt: dict[str, Any], name: str) -> float:
    """Return the seconds of a request with one new token."""
    began = time.perf_counter()
    async for _ in llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), f"{name} {began}"):
        pass
    return time.perf_counter() - began


async def send(llm: AsyncLLM, prompts: list[dict[str, Any]], seconds: float) -> None:
    """Send a request for each prompt, evenly over `seconds`."""

    async def request(number: int, prompt: dict[str, Any]) -> None:
        await asyncio.sleep(number * seconds / len(prompts))
        await complete(llm, prompt, "prompt")

    await asyncio.gather(*(request(number, prompt) for number, prompt in enumerate(prompts)))


def prompt_of(image: Image.Image) -> dict[str, Any]:
    return {"prompt_token_ids": [5, PLACEHOLDER, 6], "multi_modal_data": {"image": image}}


async def measure(folder: str, tokens: int) -> dict[str, float]:
    """Return the figures of one engine."""
    sizes: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 4096, "max_num_batched_tokens": 512}
    random = np.random.default_rng(1)
    images = [Image.fromarray(random.integers(0, 256, (SIDE, SIDE, 3), np.uint8)) for _ in range(IMAGES + REPEATS + 1)]
    async with AsyncLLM(folder, load_format="dummy", precompile="all", **sizes) as llm:
        processor = llm.model.processor
        assert processor is not None
        began = time.perf_counter()
        (prepared,) = processor.prepare(images[:1])
        preprocessing = time.perf_counter() - began
        await text_speed(llm, 8)
        with_image = [await complete(llm, prompt_of(image), "image") for image in images[IMAGES:]][1:]
        count = prepared.num_tokens + 2
        texts = [{"prompt_token_ids": random.integers(5, 1000, count).tolist()} for _ in range(IMAGES + REPEATS + 1)]
        of_text = [await complete(llm, text, "text") for text in texts[IMAGES:]][1:]
        tower = statistics.median(with_image) - statistics.median(of_text) - preprocessing
        alone, took = await text_speed(llm, tokens)
        beside_texts, took = await text_speed(llm, tokens, send(llm, texts[:IMAGES], 0.8 * took))
        with_images = [prompt_of(image) for image in images[:IMAGES]]
        beside, took = await text_speed(llm, tokens, send(llm, with_images, 0.8 * took))
        late = llm.metrics.compilations_after_ready
    return {
        "text tokens/s alone": alone,
        "text tokens/s beside texts": beside_texts,
        "text tokens/s beside images": beside,
        "seconds of an image's preprocessing": preprocessing,
        "seconds of an image's tower": tower,
        "share of preprocessing": IMAGES * preprocessing / took,
        "share of towers": IMAGES * tower / took,
        "programs compiled after ready": late,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=500, help="of each text stream (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(write(Path(folder)), options.tokens))
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=2))
    alone, beside_texts, beside = (
        figures[f"text tokens/s {name}"] for name in ("alone", "beside texts", "beside images")
    )
    print(f"text streams lose {1 - beside_texts / alone:.1%} beside {IMAGES} prompts of text")
    print(f"and {1 - beside / alone:.1%} beside {IMAGES} prompts with an image")
    # A prompt's share of the device depends on how often prompts arrive; an image may add little to it.
    require(1 - beside / beside_texts <= LOSS, "images cost text streams much more than text of equal length")
    require(not figures["programs compiled after ready"], "programs were compiled after ready")


if __name__ == "__main__":
    main()
