"""Programs of models with images, compiled for an H200: `make gpu-aot`. Nothing runs."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")
pytest.importorskip("jax_cuda13_plugin")

from benchmarks.shapes import WITH_IMAGES
from jaxllm.families.families import read_images, read_spec
from jaxllm.runner import device_state
from jaxllm.runner.media import ImageEncoder
from jaxllm.sampling.sampler import Extras
from jaxllm.setup.draft_setup import Drafting
from jaxllm.setup.kv_cache import Geometry
from jaxllm.setup.model_setup import MEDIA_UNIT
from tests.gpu import aot

MIB = 1 << 20
QWEN, LLAVA = WITH_IMAGES["qwen2.5-vl-7b"], WITH_IMAGES["llava-1.5-7b"]
ROWS = 8192  # of embeddings in the state


def compile_towers(config: dict[str, Any], most_tokens: int) -> dict[int, aot.Program]:
    """Compile the programs of a tower for images of up to `most_tokens`, by the number of tokens."""
    spec, family = read_spec(config)
    images = read_images(config, spec, family)
    assert images is not None
    dtype, layout, width = jnp.dtype(jnp.bfloat16), aot.layout(), images.spec.row_width
    setup: Any = SimpleNamespace(
        images=images,
        processor=SimpleNamespace(most_tokens=most_tokens, kind="image"),
        media_units=ROWS // MEDIA_UNIT,
        whole_image=0,
        max_num_batched_tokens=ROWS,
        layout=layout,
        dtype=dtype,
    )
    geometry = Geometry(num_slots=64, num_blocks=8192, block_size=16, max_model_len=4096)
    state = device_state.abstract(spec, geometry, 64, Extras(spec.vocab_size), layout, dtype, media=(ROWS, width))
    made: dict[int, aot.Program] = {}

    def make(_name: str, function: Any, donated: tuple[int, ...], *shapes: Any) -> None:
        lowered = jax.jit(function, donate_argnums=donated).lower(*shapes)
        made[shapes[2].shape[0]] = aot.read(lowered, ROWS * width * dtype.itemsize, (ROWS, width))

    ImageEncoder(setup).compile(make, state)
    return made


@pytest.mark.parametrize(
    ("config", "most_tokens", "most_mib"), [(LLAVA, 576, 50), (QWEN, 128, 60)], ids=["llava", "qwen2.5-vl"]
)
def test_a_tower_is_one_graph(config: dict[str, Any], most_tokens: int, most_mib: int) -> None:
    for size, program in compile_towers(config, most_tokens).items():
        print(f"{size} tokens: {program.outside}, {program.kernels} kernels, {program.temporary_bytes / MIB:.1f} MiB")
        assert not program.violations(True, most_mib * MIB)


@pytest.mark.parametrize("config", [LLAVA, QWEN], ids=["llava", "qwen2.5-vl"])
def test_steps_of_models_with_images(config: dict[str, Any]) -> None:
    """Decode and verifying steps are one graph; a step with prompts reads the rows of images without copying them."""
    decode = aot.compile_step(config, rows=16)
    print(f"{decode.outside}, {decode.kernels} kernels, {decode.temporary_bytes / MIB:.1f} MiB")
    assert not decode.violations(True, 20 * MIB)
    verifying = aot.compile_step(config, rows=4, drafting=Drafting(4, 2, 5))
    print(f"{verifying.outside}, {verifying.kernels} kernels, {verifying.temporary_bytes / MIB:.1f} MiB")
    assert not verifying.violations(True, 40 * MIB)
    ragged = aot.compile_step(config, tokens=512, media=ROWS)
    print(f"{ragged.outside}, {ragged.temporary_bytes / MIB:.1f} MiB")
    assert not ragged.violations(False, 260 * MIB)
    assert not re.findall(rf"= \w+\[{ROWS},\d+\]\S* (?:copy|copy-start)\(", ragged.text)
